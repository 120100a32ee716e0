"""Lookup and update of pooled stacks in StableHLO: what travels, and what owners do.

On the way there and back run `ragged_all_to_all`s, whose sizes but for those of the ids are known
when the program is made. Owners look up, add up gradients, and add to their tables with the same
SparseCore call (`lowering.local_lookup`). It wants its samples in ascending order, so rows are
sorted before an update, which also brings together what several devices have looked up.

Legend: as in `pooled`; N = G * K ids of a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrec_tpu.sparsecore.aot import lowering
from torchrec_tpu.sparsecore.aot.adapter import Mlir
from torchrec_tpu.sparsecore.aot.lowering import Value
from torchrec_tpu.sparsecore.aot.pooled import IDS_PER_LINE, PooledStack
from torchrec_tpu.sparsecore.rules import Rule, stablehlo

_LANES = 128  # elements of a TPU vector register's row


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """Ids that a device has got, (N,), ascending by sample."""

    rows: Value  # s32
    samples: Value  # s32
    gains: Value  # f32


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Writes the operations of pooled stacks at the insertion point.

    Attributes:
        mlir: bindings, inside their context.
        batch_size: B.
        channels: numbers of channels that no other collective of the program uses.
    """

    mlir: Mlir
    batch_size: int
    channels: Iterator[int]
    _device: Value = field(default=None, init=False)

    def receive(self, stack: PooledStack, header: Value, ids: Value) -> Ids:
        """Sends ids to their owners.

        Args:
            stack: of the ids.
            header: s32 (1 + G,), the number of this device, and lines for each device. (A program
                of partitions without shardings may not ask for the number.)
            ids: s32 (lines, words * 128), as `PooledStack.pack_ids` makes them.
        """
        self._device = self._reshaped(self._slice(header, 0, 1))
        devices, lines, words = stack.num_devices, stack.max_lines, stack.words_per_id
        sizes = self._slice(header, 1, 1 + devices)
        per_device = stack.max_features * self.batch_size
        shape = f"tensor<{devices}x{lines}x{IDS_PER_LINE}xi32>"
        total, line = devices * lines, words * IDS_PER_LINE
        joined = f"tensor<{devices}x{lines}x{line}xi32>"
        parts = ["%row", "%sample", "%zero"][:words]
        (init,) = self._inline(
            f"""
            func.func private @padding() -> tensor<{total}x{line}xi32> {{
              %row = stablehlo.constant dense<{stack.dummy_row}> : {shape}
              %zero = stablehlo.constant dense<0> : {shape}
              %source = stablehlo.iota dim = 0 : {shape}
              %samples = stablehlo.constant dense<{per_device}> : {shape}
              %last = stablehlo.constant dense<{per_device - 1}> : {shape}
              %first = stablehlo.multiply %source, %samples : {shape}
              %sample = stablehlo.add %first, %last : {shape}
              %all = stablehlo.concatenate {", ".join(parts)}, dim = 2
                : ({", ".join([shape] * words)}) -> {joined}
              %flat = stablehlo.reshape %all : ({joined}) -> tensor<{total}x{line}xi32>
              return %flat : tensor<{total}x{line}xi32>
            }}""",
            [],
        )
        received = self._ragged(
            stack,
            ids,
            init,
            self._constant(_starts(stack.lines)),
            sizes,
            self._plus_device(np.zeros(devices), lines),
            lowering.all_to_all(
                self.mlir, sizes, dim=0, num_devices=devices, channel=next(self.channels)
            ),
        )
        rows, samples, *bits = (
            self._word(received, word, total * IDS_PER_LINE) for word in range(words)
        )
        return Ids(rows=rows, samples=samples, gains=self._gains(stack, rows, bits))

    def lookup(self, stack: PooledStack, ids: Ids, table: Value) -> Value:
        """The blocks of this device, f32 (blocks, B * C), pooled by their owners.

        Args:
            stack: of the table.
            ids: from `receive`.
            table: f32 (S * R, C).
        """
        devices, cores, width = stack.num_devices, stack.cores_per_device, stack.core_width
        activations = lowering.local_lookup(
            self.mlir,
            table,
            self._on_cores(stack, ids.rows),
            self._on_cores(stack, ids.samples),
            self._on_cores(stack, ids.gains),
            self._zeros(cores * stack.samples_per_core(self.batch_size), width),
        )
        block_width = self.batch_size * width
        device, core = np.divmod(np.arange(devices * cores), cores)
        return self._ragged(
            stack,
            self._reshaped(activations, -1, block_width),
            self._zeros(len(stack.blocks), block_width),
            self._constant((core * devices + device) * stack.max_features),
            self._of_device(_blocks(stack), cores),
            self._of_device(_starts(_blocks(stack)), cores),
            self._constant(_blocks(stack)),
        )

    def update(
        self,
        stack: PooledStack,
        ids: Ids,
        grad: Value,
        table: Value,
        slots: Sequence[Value],
        operands: Sequence[Value],
        *,
        rule: Rule,
        logical_dim: int,
    ) -> list[Value]:
        """New table and slots: `rule` once on every row that any device looked up.

        Args:
            stack: of the table.
            ids: from `receive`.
            grad: f32 (blocks, B * C), gradients of the blocks.
            table: f32 (S * R, C).
            slots: in rule order, f32 (S * R, C) or (S * R,).
            operands: in rule order, f32 scalars.
            rule: what updates a row.
            logical_dim: elements that a mean over the row counts.
        """
        devices, cores, width = stack.num_devices, stack.cores_per_device, stack.core_width
        num_ids, features = cores * stack.num_ids, stack.max_features
        core = np.tile(np.arange(cores), devices)
        received = self._ragged(
            stack,
            grad,
            self._zeros(cores * devices * features, self.batch_size * width),
            self._constant(_starts(_blocks(stack))),
            self._constant(_blocks(stack)),
            self._plus_device(core * devices * features, features),
            self._of_device(_blocks(stack), cores),
        )
        rows, samples, gains, first, is_new, place, one = (
            self._on_cores(stack, value) for value in self._merged(stack, ids)
        )
        of_rows = lowering.local_lookup(
            self.mlir,
            self._reshaped(received, -1, width),
            samples,
            first,
            gains,
            self._zeros(num_ids, width),
        )  # the sum of all gradients of a row is where the row is first
        stored = [
            value if len(value.type.shape) == 2 else self._reshaped(value, -1, 1)
            for value in (table, *slots)
        ]
        old = [
            lowering.local_lookup(
                self.mlir, value, rows, place, one, self._zeros(num_ids, value.type.shape[1])
            )
            for value in stored
        ]
        changes = self._changes(stack, rule, logical_dim, of_rows, old, operands)
        return [
            self._reshaped(
                lowering.local_lookup(self.mlir, change, first, rows, is_new, value),
                *before.type.shape,
            )
            for change, value, before in zip(changes, stored, (table, *slots), strict=True)
        ]

    def _changes(
        self,
        stack: PooledStack,
        rule: Rule,
        logical_dim: int,
        grad: Value,
        old: Sequence[Value],
        operands: Sequence[Value],
    ) -> list[Value]:
        """What `rule` adds to rows and slots, (S * N, C) or (S * N, 1)."""
        has_mean = any(slot.width == "scalar" for slot in rule.slots)
        count, dim = stack.num_ids, stack.width
        if not has_mean:  # element by element, whatever row it is in
            count, dim = count * dim // _LANES, _LANES
        function = stablehlo(
            rule, dim=dim, logical_dim=logical_dim if has_mean else None, name="rule"
        )

        def as_rule_wants(value: Value) -> Value:
            if not has_mean:
                return self._reshaped(value, count, dim)
            if value.type.shape[1] == 1:  # every core has a copy
                return self._reshaped(self._rows(value, count), count)
            return self._whole_rows(stack, value)

        def as_stored(value: Value) -> Value:
            if not has_mean:
                return self._reshaped(value, -1, stack.core_width)
            if len(value.type.shape) == 1:
                return self._reshaped(self._on_cores(stack, value), -1, 1)
            return self._parts_of_rows(stack, value)

        wanted = [as_rule_wants(value) for value in (grad, *old)]
        if not has_mean:  # else XLA computes in the narrow shape, padded to 128 columns
            wanted = self._fixed(wanted)
        before = wanted[1:]
        after = lowering.apply_rule(self.mlir, function, count, [*wanted, *operands])
        return [
            as_stored(self.mlir.hlo.subtract(new, was))
            for new, was in zip(after, before, strict=True)
        ]

    def _merged(self, stack: PooledStack, ids: Ids) -> list[Value]:
        """The ids sorted by row and sample, and what brings equal rows together.

        Returns:
            rows, samples, gains; first: where each row is first; is_new: 1 there, else 0, and 0 for
            padding; place: 0, 1, ..; one: 1, 1, ... All (N,).
        """
        count = stack.num_ids
        i32, f32, i1 = (f"tensor<{count}x{element}>" for element in ("i32", "f32", "i1"))
        ints, more = "tensor<i32>", ", %g" if stack.has_gains else ""
        types = ", ".join([i32, i32, *([f32] if stack.has_gains else [])])
        gain_arguments = ", %e: tensor<f32>, %f: tensor<f32>" if stack.has_gains else ""
        text = f"""
        func.func private @merged(%r: {i32}, %s: {i32}, %g: {f32}) -> ({i32}, {i32}, {f32}, {i32},
            {f32}, {i32}, {f32}) {{
          %sorted:{2 + stack.has_gains} = "stablehlo.sort"(%r, %s{more}) <{{
              dimension = 0 : i64, is_stable = false}}> ({{
            ^bb0(%a: {ints}, %b: {ints}, %c: {ints}, %d: {ints}{gain_arguments}):
              %less = stablehlo.compare LT, %a, %b : ({ints}, {ints}) -> tensor<i1>
              %same = stablehlo.compare EQ, %a, %b : ({ints}, {ints}) -> tensor<i1>
              %then = stablehlo.compare LT, %c, %d : ({ints}, {ints}) -> tensor<i1>
              %both = stablehlo.and %same, %then : tensor<i1>
              %any = stablehlo.or %less, %both : tensor<i1>
              stablehlo.return %any : tensor<i1>
          }}) : ({types}) -> ({types})
          %none = stablehlo.constant dense<-1> : tensor<1xi32>
          %most = stablehlo.slice %sorted#0 [0:{count - 1}] : ({i32}) -> tensor<{count - 1}xi32>
          %before = stablehlo.concatenate %none, %most, dim = 0
            : (tensor<1xi32>, tensor<{count - 1}xi32>) -> {i32}
          %differs = stablehlo.compare NE, %sorted#0, %before : ({i32}, {i32}) -> {i1}
          %place = stablehlo.iota dim = 0 : {i32}
          %zero = stablehlo.constant dense<0> : {i32}
          %begins = stablehlo.select %differs, %place, %zero : {i1}, {i32}
          %start = stablehlo.constant dense<0> : {ints}
          %first = "stablehlo.reduce_window"(%begins, %start) <{{
              window_dimensions = array<i64: {count}>, window_strides = array<i64: 1>,
              padding = dense<[[{count - 1}, 0]]> : tensor<1x2xi64>}}> ({{
            ^bb0(%a: {ints}, %b: {ints}):
              %c = stablehlo.maximum %a, %b : {ints}
              stablehlo.return %c : {ints}
          }}) : ({i32}, {ints}) -> {i32}
          %dummy = stablehlo.constant dense<{stack.dummy_row}> : {i32}
          %is_id = stablehlo.compare NE, %sorted#0, %dummy : ({i32}, {i32}) -> {i1}
          %counts = stablehlo.and %differs, %is_id : {i1}
          %new = stablehlo.convert %counts : ({i1}) -> {f32}
          %once = stablehlo.convert %is_id : ({i1}) -> {f32}
          %one = stablehlo.constant dense<1.0> : {f32}
          return %sorted#0, %sorted#1, {"%sorted#2" if stack.has_gains else "%once"}, %first, %new,
            %place, %one : {i32}, {i32}, {f32}, {i32}, {f32}, {i32}, {f32}
        }}"""
        return self._inline(text, [ids.rows, ids.samples, ids.gains])

    # --------------------------------------------------------------------------------------- parts

    def _ragged(
        self, stack: PooledStack, value: Value, init: Value, *offsets_and_sizes: Value
    ) -> Value:
        return lowering.ragged_all_to_all(
            self.mlir,
            value,
            init,
            *offsets_and_sizes,
            num_devices=stack.num_devices,
            channel=next(self.channels),
        )

    def _gains(self, stack: PooledStack, rows: Value, bits: Sequence[Value]) -> Value:
        """f32 (N,): what came, or 1 for ids and 0 for padding."""
        ir, hlo = self.mlir.ir, self.mlir.hlo
        type_ = ir.RankedTensorType.get(rows.type.shape, ir.F32Type.get())
        if bits:
            return hlo.bitcast_convert(type_, bits[0])
        dummy = hlo.constant(ir.DenseElementsAttr.get_splat(
            rows.type, ir.IntegerAttr.get(rows.type.element_type, stack.dummy_row)
        ))  # fmt: skip
        is_id = hlo.compare(rows, dummy, hlo.ComparisonDirectionAttr.get("NE"))
        return hlo.convert(type_, is_id)

    def _word(self, lines: Value, word: int, count: int) -> Value:
        """One word of each id, flat."""
        part = self._slice(lines, word * IDS_PER_LINE, (word + 1) * IDS_PER_LINE)
        return self._reshaped(part, count)

    def _slice(self, value: Value, begin: int, end: int) -> Value:
        """A part of the last dimension."""
        array, shape = self.mlir.ir.DenseI64ArrayAttr.get, list(value.type.shape)
        return self.mlir.hlo.slice(
            value,
            array([*[0] * (len(shape) - 1), begin]),
            array([*shape[:-1], end]),
            array([1] * len(shape)),
        )

    def _on_cores(self, stack: PooledStack, value: Value) -> Value:
        """A vector once for each core."""
        cores = stack.cores_per_device
        return value if cores == 1 else self.mlir.hlo.concatenate([value] * cores, 0)

    def _rows(self, value: Value, count: int) -> Value:
        """The first rows."""
        array = self.mlir.ir.DenseI64ArrayAttr.get
        width = value.type.shape[1]
        return self.mlir.hlo.slice(value, array([0, 0]), array([count, width]), array([1, 1]))

    def _whole_rows(self, stack: PooledStack, value: Value) -> Value:
        """(N, width) from the parts of rows (S * N, C) that the cores have."""
        shape = stack.cores_per_device, stack.num_ids, stack.core_width
        return self._reshaped(
            self._swapped(self._reshaped(value, *shape)), stack.num_ids, stack.width
        )

    def _parts_of_rows(self, stack: PooledStack, value: Value) -> Value:
        """Undoes `_whole_rows`."""
        shape = stack.num_ids, stack.cores_per_device, stack.core_width
        return self._reshaped(self._swapped(self._reshaped(value, *shape)), -1, stack.core_width)

    def _fixed(self, values: Sequence[Value]) -> list[Value]:
        """The same values, whose shapes stay as they are."""
        barrier = self.mlir.hlo.OptimizationBarrierOp(list(values))
        return list(barrier.results)

    def _swapped(self, value: Value) -> Value:
        """The first two of three dimensions exchanged."""
        return self.mlir.hlo.transpose(value, self.mlir.ir.DenseI64ArrayAttr.get([1, 0, 2]))

    def _zeros(self, *shape: int) -> Value:
        ir = self.mlir.ir
        zero = self.mlir.hlo.constant(ir.DenseElementsAttr.get(np.float32(0)))
        return self.mlir.hlo.broadcast(zero, ir.DenseI64ArrayAttr.get(list(shape)))

    def _reshaped(self, value: Value, *shape: int) -> Value:
        """`value` itself where it has the shape; one size may be -1."""
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = math.prod(value.type.shape) // -math.prod(sizes)
        if list(value.type.shape) == sizes:
            return value
        type_ = self.mlir.ir.RankedTensorType.get(sizes, value.type.element_type)
        return self.mlir.hlo.reshape(type_, value)

    def _constant(self, values: Any) -> Value:
        (constant,) = lowering.constants(self.mlir, [np.asarray(values, np.int32)])
        return constant

    def _plus_device(self, values: Any, factor: int) -> Value:
        """Constants, and `factor` times the number of this device."""
        base, scale = self._constant(values), self._constant(factor)
        shift = self.mlir.hlo.multiply(self._device, scale)
        empty = self.mlir.ir.DenseI64ArrayAttr.get([])
        return self.mlir.hlo.add(base, self.mlir.hlo.broadcast_in_dim(base.type, shift, empty))

    def _of_device(self, values: Any, cores: int) -> Value:
        """s32 (G * S,): the values (G * S,) of this device's cores, again and again."""
        ir, hlo = self.mlir.ir, self.mlir.hlo
        table = np.asarray(values, np.int32)
        first = hlo.multiply(self._device, self._constant(cores))
        mine = hlo.dynamic_slice(self._constant(table), [first], ir.DenseI64ArrayAttr.get([cores]))
        devices = len(table) // cores
        type_ = ir.RankedTensorType.get([devices, cores], mine.type.element_type)
        repeated = hlo.broadcast_in_dim(type_, mine, ir.DenseI64ArrayAttr.get([1]))
        return self._reshaped(repeated, devices * cores)

    def _inline(self, text: str, values: Sequence[Value]) -> list[Value]:
        module = self.mlir.ir.Module.parse(text)
        return lowering.inline(module.body.operations[0], values)


def _starts(sizes: Sequence[int] | Any) -> Any:
    """Where parts of these sizes begin, end to end."""
    return np.array([0, *itertools.accumulate(sizes)])[:-1]


def _blocks(stack: PooledStack) -> Any:
    """(G * S,) blocks that each core makes for each device."""
    return np.repeat(stack.num_features, stack.cores_per_device)
