"""Lookup and update of pooled stacks in StableHLO: what travels, and what owners do.

On the way there and back run `ragged_all_to_all`s, whose sizes but for those of the ids are known
when the program is made. Owners look up, add up gradients, and add to their tables with the same
SparseCore call (`lowering.local_lookup`). It wants its samples in ascending order, so rows are
sorted before an update, which also brings together what several devices have looked up.

Legend: as in `pooled`; N = G * K ids of a core, D row width.
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
    """Ids that a device's cores have got, (S * N,), core by core, ascending by sample."""

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
            header: s32 (1 + P,), the number of this device, and lines for each core. (A program of
                partitions without shardings may not ask for the number.)
            ids: s32 (lines, words * 128), as `PooledStack.pack_ids` makes them.
        """
        self._device = self._reshaped(self._slice(header, 0, 1))
        sizes = self._slice(header, 1, 1 + stack.num_cores)
        devices, cores = stack.num_devices, stack.cores_per_device
        lines, words = stack.max_lines, stack.words_per_id
        per_device = stack.max_blocks * self.batch_size
        shape = f"tensor<{cores}x{devices}x{lines}x{IDS_PER_LINE}xi32>"
        total, line = cores * devices * lines, words * IDS_PER_LINE
        joined = f"tensor<{cores}x{devices}x{lines}x{line}xi32>"
        parts = ["%row", "%sample", "%zero"][:words]
        (init,) = self._inline(
            f"""
            func.func private @padding() -> tensor<{total}x{line}xi32> {{
              %row = stablehlo.constant dense<{stack.dummy_row}> : {shape}
              %zero = stablehlo.constant dense<0> : {shape}
              %source = stablehlo.iota dim = 1 : {shape}
              %samples = stablehlo.constant dense<{per_device}> : {shape}
              %last = stablehlo.constant dense<{per_device - 1}> : {shape}
              %first = stablehlo.multiply %source, %samples : {shape}
              %sample = stablehlo.add %first, %last : {shape}
              %all = stablehlo.concatenate {", ".join(parts)}, dim = 3
                : ({", ".join([shape] * words)}) -> {joined}
              %flat = stablehlo.reshape %all : ({joined}) -> tensor<{total}x{line}xi32>
              return %flat : tensor<{total}x{line}xi32>
            }}""",
            [],
        )
        core = np.arange(stack.num_cores) % cores
        received = self._ragged(
            stack,
            ids,
            init,
            self._constant(_starts(stack.lines)),
            sizes,
            self._plus_device(core * devices * lines, lines),
            lowering.all_to_all(
                self.mlir, sizes, dim=0, num_devices=devices, channel=next(self.channels)
            ),
        )
        rows, samples, *bits = (
            self._word(received, word, total * IDS_PER_LINE) for word in range(words)
        )
        return Ids(rows=rows, samples=samples, gains=self._gains(stack, rows, bits))

    def lookup(self, stack: PooledStack, ids: Ids, table: Value) -> Value:
        """The blocks of this device, f32 (blocks, B * D), pooled by their owners.

        Args:
            stack: of the table.
            ids: from `receive`.
            table: f32 (S * R, D).
        """
        devices, cores, width = stack.num_devices, stack.cores_per_device, stack.width
        blocks = stack.max_blocks
        activations = lowering.local_lookup(
            self.mlir,
            table,
            ids.rows,
            ids.samples,
            ids.gains,
            self._zeros(cores * stack.samples_per_core(self.batch_size), width),
        )
        block_width = self.batch_size * width
        source, core = np.divmod(np.arange(devices * cores), cores)
        counts = np.array(stack.num_blocks)
        return self._ragged(
            stack,
            self._reshaped(activations, cores * devices * blocks, block_width),
            self._zeros(len(stack.blocks), block_width),
            self._constant((core * devices + source) * blocks),
            self._of_device(counts, cores),
            self._of_device(_starts(counts), cores),
            self._constant(counts),
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
            grad: f32 (blocks, B * D), gradients of the blocks.
            table: f32 (S * R, D).
            slots: in rule order, f32 (S * R, D) or (S * R,).
            operands: in rule order, f32 scalars.
            rule: what updates a row.
            logical_dim: elements that a mean over the row counts.
        """
        devices, cores, width = stack.num_devices, stack.cores_per_device, stack.width
        blocks, num_ids = stack.max_blocks, cores * stack.ids_per_core
        block_width = self.batch_size * width
        counts = np.array(stack.num_blocks)
        core = np.arange(stack.num_cores) % cores
        received = self._ragged(
            stack,
            grad,
            self._zeros(cores * devices * blocks, block_width),
            self._constant(_starts(counts)),
            self._constant(counts),
            self._plus_device(core * devices * blocks, blocks),
            self._of_device(counts, cores),
        )
        of_samples = self._reshaped(
            received, cores * stack.samples_per_core(self.batch_size), width
        )
        rows, samples, gains, first, is_new, place, one = self._merged(stack, ids)
        of_rows = lowering.local_lookup(
            self.mlir, of_samples, samples, first, gains, self._zeros(num_ids, width)
        )  # the sum of all gradients of a row is where the row is first

        def on_core(value: Value) -> Value:
            return value if len(value.type.shape) == 2 else self._reshaped(value, -1, 1)

        stored = [on_core(value) for value in (table, *slots)]
        old = [
            lowering.local_lookup(
                self.mlir,
                value,
                rows,
                place,
                one,
                self._zeros(num_ids, value.type.shape[1]),
            )
            for value in stored
        ]
        changes = self._changes(rule, logical_dim, of_rows, old, operands)
        return [
            self._reshaped(
                lowering.local_lookup(self.mlir, change, first, rows, is_new, value),
                *before.type.shape,
            )
            for change, value, before in zip(changes, stored, (table, *slots), strict=True)
        ]

    def _changes(
        self,
        rule: Rule,
        logical_dim: int,
        grad: Value,
        old: Sequence[Value],
        operands: Sequence[Value],
    ) -> list[Value]:
        """What `rule` adds to rows and slots, (S * N, D) or (S * N, 1)."""
        num_ids, width = grad.type.shape
        dim = width
        if all(slot.width == "row" for slot in rule.slots):  # element by element
            num_ids, dim = num_ids * width // _LANES, _LANES
        function = stablehlo(
            rule, dim=dim, logical_dim=logical_dim if dim == width else None, name="rule"
        )

        def as_rule_wants(value: Value) -> Value:
            shape = (num_ids,) if value.type.shape[1] == 1 else (num_ids, dim)
            return self._reshaped(value, *shape)

        before = [as_rule_wants(value) for value in old]
        after = lowering.apply_rule(
            self.mlir, function, num_ids, [as_rule_wants(grad), *before, *operands]
        )
        return [
            self._reshaped(self.mlir.hlo.subtract(new, was), *value.type.shape)
            for new, was, value in zip(after, before, old, strict=True)
        ]

    def _merged(self, stack: PooledStack, ids: Ids) -> list[Value]:
        """The ids of each core sorted by row and sample, and what brings equal rows together.

        Returns:
            rows, samples, gains; first: where each row is first; is_new: 1 there, else 0, and 0 for
            padding; place: 0, 1, ..; one: 1, 1, ... All (S * N,).
        """
        cores, count = stack.cores_per_device, stack.ids_per_core
        flat, of_cores = f"{cores * count}x", f"{cores}x{count}x"

        def tensor(element: str, shape: str = of_cores) -> str:
            return f"tensor<{shape}{element}>"

        def as_cores(name: str, element: str) -> str:
            types = f"({tensor(element, flat)}) -> {tensor(element)}"
            return f"%{name} = stablehlo.reshape %{name}_in : {types}"

        def as_flat(name: str, value: str, element: str) -> str:
            return (
                f"%{name} = stablehlo.reshape {value} : ({tensor(element)}) -> "
                f"{tensor(element, flat)}"
            )

        i32, f32, i1 = tensor("i32"), tensor("f32"), tensor("i1")
        keep, later = f"{cores}x{count - 1}x", f"0:{cores}, "
        text = f"""
        func.func private @merged(%r_in: {tensor("i32", flat)}, %s_in: {tensor("i32", flat)},
            %g_in: {tensor("f32", flat)}) -> ({tensor("i32", flat)}, {tensor("i32", flat)},
            {tensor("f32", flat)}, {tensor("i32", flat)}, {tensor("f32", flat)},
            {tensor("i32", flat)}, {tensor("f32", flat)}) {{
          {as_cores("r", "i32")}
          {as_cores("s", "i32")}
          {as_cores("g", "f32")}
          %sorted:3 = "stablehlo.sort"(%r, %s, %g) <{{dimension = 1 : i64, is_stable = false}}> ({{
            ^bb0(%a: tensor<i32>, %b: tensor<i32>, %c: tensor<i32>, %d: tensor<i32>,
                 %e: tensor<f32>, %f: tensor<f32>):
              %less = stablehlo.compare LT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
              %same = stablehlo.compare EQ, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
              %then = stablehlo.compare LT, %c, %d : (tensor<i32>, tensor<i32>) -> tensor<i1>
              %both = stablehlo.and %same, %then : tensor<i1>
              %any = stablehlo.or %less, %both : tensor<i1>
              stablehlo.return %any : tensor<i1>
          }}) : ({i32}, {i32}, {f32}) -> ({i32}, {i32}, {f32})
          %none = stablehlo.constant dense<-1> : tensor<{cores}x1xi32>
          %most = stablehlo.slice %sorted#0 [{later}0:{count - 1}]
            : ({i32}) -> {tensor("i32", keep)}
          %before = stablehlo.concatenate %none, %most, dim = 1
            : (tensor<{cores}x1xi32>, {tensor("i32", keep)}) -> {i32}
          %differs = stablehlo.compare NE, %sorted#0, %before : ({i32}, {i32}) -> {i1}
          %place = stablehlo.iota dim = 1 : {i32}
          %zero = stablehlo.constant dense<0> : {i32}
          %begins = stablehlo.select %differs, %place, %zero : {i1}, {i32}
          %start = stablehlo.constant dense<0> : tensor<i32>
          %first = "stablehlo.reduce_window"(%begins, %start) <{{
              window_dimensions = array<i64: 1, {count}>, window_strides = array<i64: 1, 1>,
              padding = dense<[[0, 0], [{count - 1}, 0]]> : tensor<2x2xi64>}}> ({{
            ^bb0(%a: tensor<i32>, %b: tensor<i32>):
              %c = stablehlo.maximum %a, %b : tensor<i32>
              stablehlo.return %c : tensor<i32>
          }}) : ({i32}, tensor<i32>) -> {i32}
          %dummy = stablehlo.constant dense<{stack.dummy_row}> : {i32}
          %is_id = stablehlo.compare NE, %sorted#0, %dummy : ({i32}, {i32}) -> {i1}
          %counts = stablehlo.and %differs, %is_id : {i1}
          %new = stablehlo.convert %counts : ({i1}) -> {f32}
          %ones = stablehlo.constant dense<1.0> : {tensor("f32", flat)}
          {as_flat("o0", "%sorted#0", "i32")}
          {as_flat("o1", "%sorted#1", "i32")}
          {as_flat("o2", "%sorted#2", "f32")}
          {as_flat("o3", "%first", "i32")}
          {as_flat("o4", "%new", "f32")}
          {as_flat("o5", "%place", "i32")}
          return %o0, %o1, %o2, %o3, %o4, %o5, %ones : {tensor("i32", flat)},
            {tensor("i32", flat)}, {tensor("f32", flat)}, {tensor("i32", flat)},
            {tensor("f32", flat)}, {tensor("i32", flat)}, {tensor("f32", flat)}
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
        """f32 (S * N,): what came, or 1 for ids and 0 for padding."""
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
        """s32 (G * S,): the values (P,) of this device's cores, again and again."""
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
