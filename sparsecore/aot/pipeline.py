"""How a program is driven over batches, whatever runs it: exact or pipelined, filled and drained.

Host values are NumPy arrays. Those of sharded arguments begin with an axis of devices: (G, *shape).
What runs the program may keep values elsewhere between steps; a `Driver` only hands them on.

Legend: G devices, S cores of a device, P cores in all, R rows of one core, D row width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore.aot.program import ACTIVE, Argument, Kind, Program
from torchrec_tpu.sparsecore.batch import PAD_ID, SparseBatch, StackBuffers
from torchrec_tpu.sparsecore.errors import ProgramError
from torchrec_tpu.sparsecore.layout import Layout, Stack

Array = npt.NDArray[Any]

NUMPY: Final = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "s64": np.int64, "s32": np.int32,
    "s16": np.int16, "s8": np.int8, "u64": np.uint64, "u32": np.uint32, "u8": np.uint8,
    "pred": np.bool_,
}  # fmt: skip
"""NumPy's type by XLA's name."""

STATE: Final[tuple[Kind, ...]] = ("table", "slot", "dense", "dense_slot")
"""Kinds of arguments that live from step to step."""


class Execute(Protocol):
    """Runs one step."""

    def __call__(self, arguments: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Name -> value of every result, from name -> value of every argument.

        Values are host arrays, or what an earlier call returned under the same name. A donated
        argument is not used again by the caller.
        """


class Operands(Protocol):
    """The scalars of a step, such as learning rates."""

    def __call__(self, step: int, /) -> Mapping[str, float]:
        """Name -> value of every "operand" and "dense_operand", for update `step`, from 1.

        Called once a batch, when it comes in: a scheduler that steps after each batch is followed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One batch of all devices, as host values by argument name."""

    buffers: Mapping[str, Array]
    inputs: Mapping[str, Array]


def make_feed(
    batches: Mapping[str, Sequence[SparseBatch]],
    inputs: Mapping[str, Sequence[Array]],
    layouts: Mapping[str, Layout],
    *,
    batch_size: int,
) -> Feed:
    """The feed of one step.

    Args:
        batches: collection -> its batch on each device, preprocessed for the program's layout with
            the static batch size, capacities and sequence sizes of the program.
        inputs: name -> the tensor's value on each device, names as in `Program.arguments` without
            "input/".
        layouts: collection -> layout, for the names of its stacks.
        batch_size: static batch size of a device.
    """
    buffers: dict[str, Array] = {}
    lengths: dict[str, Array] = {}
    for collection, of_devices in batches.items():
        for index, stack in enumerate(layouts[collection].stacks):
            prefix = f"{collection}/{stack.name}".lstrip("/")
            for field in fields(StackBuffers):
                buffers[f"{prefix}/buffer:{field.name}"] = np.stack(
                    [getattr(batch.stacks[index], field.name) for batch in of_devices]
                )
        if of_devices[0].lengths is not None:
            lengths[f"{collection}/lengths".lstrip("/")] = np.stack(
                [_padded(batch.lengths, batch_size) for batch in of_devices]
            )
    return Feed(
        buffers=buffers,
        inputs={f"input/{name}": np.stack(list(value)) for name, value in inputs.items()} | lengths,
    )


def _padded(lengths: Array | None, batch_size: int) -> Array:
    """(F, B) int32 from the lengths of a batch of at most B samples."""
    assert lengths is not None
    padded = np.zeros((len(lengths), batch_size), np.int32)
    padded[:, : lengths.shape[1]] = lengths
    return padded


def zeros(argument: Argument, *, num_devices: int) -> Array:
    """A host value of an argument for a step that has none."""
    shape = (num_devices, *argument.shape) if argument.sharded else argument.shape
    return np.zeros(shape, NUMPY[argument.dtype])


def empty_buffer(argument: Argument, *, num_devices: int) -> Array:
    """A host value of a "buffer" argument without ids: nothing is looked up or updated."""
    value = zeros(argument, num_devices=num_devices)
    if argument.name.endswith(":gains"):
        value[:] = np.nan
    elif not argument.name.endswith(":row_pointers"):
        value[:] = PAD_ID
    return value


def pack_stack(layout: Layout, stack: Stack, arrays: Mapping[str, Array]) -> Array:
    """A stack's table, or one of its slots, on all devices.

    Args:
        layout: of the stack.
        stack: one of `layout.stacks`.
        arrays: table -> logical (V, D) or (V,).

    Returns:
        (G, S * R, D) or (G, S * R).
    """
    parts = [layout.pack_table(t.table.name, arrays[t.table.name]) for t in stack.tables]
    cores = np.concatenate(parts, axis=1)  # (P, R, D)
    return cores.reshape(layout.num_devices, -1, *cores.shape[2:])


def unpack_stack(layout: Layout, stack: Stack, packed: Array) -> dict[str, Array]:
    """Table -> logical array; undoes `pack_stack`."""
    cores = packed.reshape(layout.num_cores, -1, *packed.shape[2:])
    return {
        t.table.name: layout.unpack_table(
            t.table.name, cores[:, t.row_offset : t.row_offset + t.rows_per_core]
        )
        for t in stack.tables
    }


class Driver:
    """Runs a program over batches, one `step` a batch.

    A pipelined program needs three steps for a batch: its lookup, its dense part, its update. So
    the result of a batch comes one step later, and its update lands two steps later; `drain`
    finishes what is under way. Each batch is computed with the operands that were read when it
    came in.

    Attributes:
        state: name -> newest value of every table, slot, dense parameter and dense slot, as the
            program's runner keeps it.
        num_batches: that came in so far.

    >>> driver = Driver(program, execute, state, operands=operands)  # doctest: +SKIP
    >>> for feed in feeds:  # doctest: +SKIP
    ...     results = driver.step(feed)
    >>> driver.drain(); write(driver.state)  # doctest: +SKIP
    """

    def __init__(
        self,
        program: Program,
        execute: Execute,
        state: Mapping[str, Any],
        *,
        operands: Operands,
        num_batches: int = 0,
    ) -> None:
        """Checks that `state` is complete.

        Args:
            program: what `execute` runs.
            execute: runs one step.
            state: first value of every table, slot, dense parameter and dense slot.
            operands: scalars of every step.
            num_batches: batches that the state has already seen, for the number of the first step.

        Raises:
            ProgramError: `state` lacks something or has too much.
        """
        expected = {a.name for a in program.arguments if a.kind in STATE}
        if state.keys() != expected:
            raise ProgramError(
                f"the program's state lacks {sorted(expected - state.keys())} and has unknown "
                f"{sorted(state.keys() - expected)}"
            )
        self._program = program
        self._execute = execute
        self._operands = operands
        self.state = dict(state)
        self.num_batches = num_batches
        self._arguments = {a.name: a for a in program.arguments}
        self._is_pipelined = program.mode == "pipelined"
        self._carry = {
            a.name: zeros(a, num_devices=program.num_devices)
            for a in program.arguments
            if a.kind == "carry"
        }
        self._in_dense: _Pending | None = None  # looked up in the last step
        self._in_update: _Pending | None = None  # differentiated in the last step

    def step(self, feed: Feed) -> Mapping[str, Any] | None:
        """Takes a batch in.

        Returns:
            Loss and outputs of the batch whose dense part ran: this one; in a pipelined program the
            one before, and None for the first.

        Raises:
            ProgramError: `feed` does not have what the program takes.
        """
        self.num_batches += 1
        pending = _Pending(feed=feed, operands=self._operands(self.num_batches))
        return self._pipelined(pending) if self._is_pipelined else self._exact(pending)

    def drain(self) -> list[Mapping[str, Any]]:
        """Finishes the batches that are under way; `state` is complete then.

        Returns:
            Loss and outputs of those whose dense part had not run: none or one.
        """
        results = []
        while self._in_dense or self._in_update:
            result = self._pipelined(None)
            if result is not None:
                results.append(result)
        return results

    def run(self, feeds: Iterable[Feed]) -> Iterator[Mapping[str, Any]]:
        """Loss and outputs of every batch, in order; drains at the end."""
        for feed in feeds:
            result = self.step(feed)
            if result is not None:
                yield result
        yield from self.drain()

    def _exact(self, batch: _Pending) -> Mapping[str, Any]:
        return self._run({**batch.feed.buffers, **batch.feed.inputs, **batch.scalars(self)})

    def _pipelined(self, batch: _Pending | None) -> Mapping[str, Any] | None:
        """One step: update of the batch before the last, dense part of the last, lookup of this."""
        update, dense = self._in_update, self._in_dense
        values: dict[str, Any] = dict(self._carry)
        for name, argument in self._arguments.items():
            if argument.kind == "buffer":
                is_update = "/update_buffer:" in name
                source = update if is_update else batch
                values[name] = (
                    source.feed.buffers[name.replace("/update_buffer:", "/buffer:")]
                    if source
                    else empty_buffer(argument, num_devices=self._program.num_devices)
                )
            elif argument.kind == "input":
                values[name] = (
                    dense.feed.inputs[name]
                    if dense
                    else zeros(argument, num_devices=self._program.num_devices)
                )
            elif name == ACTIVE:
                values[name] = np.float32(dense is not None)
            elif argument.kind in ("operand", "dense_operand"):
                source = update if argument.kind == "operand" else dense
                values[name] = np.float32(source.operands[name] if source else 0)
        results = self._run(values)
        self._carry = {name: results[name] for name in self._carry}
        self._in_update, self._in_dense = dense, batch
        return results if dense else None

    def _run(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = {**self.state, **values}
        if missing := self._arguments.keys() - arguments.keys():
            raise ProgramError(f"the batch has no {sorted(missing)}, which the program takes")
        for name in values.keys() & self._arguments.keys():
            _check_shape(self._arguments[name], values[name], self._program.num_devices)
        results = self._execute({name: arguments[name] for name in self._arguments})
        self.state.update((n, results[n]) for n in self.state.keys() & results.keys())
        return results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A batch with the operands of its own step."""

    feed: Feed
    operands: Mapping[str, float]

    def scalars(self, driver: Driver) -> dict[str, Any]:
        return {
            name: np.float32(self.operands[name])
            for name, argument in driver._arguments.items()
            if argument.kind in ("operand", "dense_operand")
        }


def _check_shape(argument: Argument, value: Any, num_devices: int) -> None:
    """Refuses a host array of another shape; what a runner returned is its own business."""
    expected = (num_devices, *argument.shape) if argument.sharded else argument.shape
    if isinstance(value, np.ndarray) and value.shape != expected:
        raise ProgramError(
            f"{argument.name!r} has shape {value.shape}, the program takes {expected}; was the "
            "batch preprocessed with the program's batch size, capacity and sequence sizes?"
        )
