"""Tables whose rows stay with an owner: their ids travel there, pooled vectors travel back.

A slot is a rectangle of a table on one device: all of its rows or some, `width` columns or fewer.
Each of the device's cores has an equal part of the columns, and sees all of the device's ids. Slots
of one width make a stack. On every device a stack is one array (S * R, C), and a core's slots lie
end to end in its part of it; the last row of each core belongs to no table.

For each step a device sends to each device the ids of its own batch that the other's slots hold.
The cores there add up their rows, a block (B, C) for each feature of each slot and each source
device, and send the blocks home. Gradients take the way back, and the cores update their rows.

Legend: G devices, S cores of a device, R rows of a core, C = width / S columns of a core, B samples
of a device, K ids that a device can get from one device, F features of the slots of the device that
has most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore.batch import SparseBatch
from torchrec_tpu.sparsecore.errors import CapacityError, LayoutError
from torchrec_tpu.sparsecore.layout import Combiner, Layout, Table, round_up
from torchrec_tpu.sparsecore.stacking import make_layout

Array = npt.NDArray[Any]

IDS_PER_LINE: Final = 128
"""Ids travel in lines of so many words: what a TPU moves without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSlot:
    """A rectangle of a table; its columns end with the stack's width or the table."""

    table: str
    device: int
    row: int  # first
    num_rows: int
    column: int  # first


class Block(NamedTuple):
    """What a core sends to each device: (B, C), one feature pooled over the rows of a slot."""

    slot: PooledSlot
    feature: str
    core: int  # of the slot's device


@dataclass(frozen=True, kw_only=True)  # no slots: the properties below are kept
class PooledStack:
    """Slots of one width on the devices of a program.

    Attributes:
        name: unique in its collection, beside those of other stacks.
        tables: that have slots here, in config order.
        slots: in any order.
        width: columns, a multiple of 8 * S.
        num_devices: G.
        cores_per_device: S.
        max_ids: (G,) the most ids of one device's batch that go to each device.
        is_weighted: whether bags are weighted.

    Raises:
        LayoutError: contradictions, and tables that are looked up id by id.
    """

    name: str
    tables: tuple[Table, ...]
    slots: tuple[PooledSlot, ...]
    width: int
    num_devices: int
    cores_per_device: int
    max_ids: tuple[int, ...]
    is_weighted: bool = False

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise LayoutError(f"pooled stack {self.name!r}: {problem}")

    def _problem(self) -> str | None:
        if self.width < 1 or self.width % (8 * self.cores_per_device):
            return f"width={self.width} is not 8 columns, or a multiple, for each core of a device"
        if len(self.max_ids) != self.num_devices or min(self.max_ids) < 0:
            return f"max_ids={self.max_ids} must be {self.num_devices} numbers >= 0, one a device"
        if not self.slots:
            return "no slots"
        names = {table.name: table for table in self.tables}
        if {slot.table for slot in self.slots} != names.keys():
            return f"its slots are of {sorted({s.table for s in self.slots})}, not of {list(names)}"
        if sequences := [table.name for table in self.tables if table.is_sequence]:
            return f"tables {sequences} are looked up id by id; only bags can be pooled"
        for slot in self.slots:
            table = names[slot.table]
            if not (
                0 <= slot.device < self.num_devices
                and slot.num_rows > 0
                and 0 <= slot.row <= table.num_embeddings - slot.num_rows
                and 0 <= slot.column < table.embedding_dim
            ):
                return (
                    f"{slot} is outside its table ({table.num_embeddings}, {table.embedding_dim}) "
                    f"or of the {self.num_devices} devices"
                )
            if not self.max_ids[slot.device]:
                return f"device {slot.device} has slots and max_ids 0"
        return None

    @property
    def core_width(self) -> int:
        """C."""
        return self.width // self.cores_per_device

    def table(self, name: str) -> Table:
        """The table of that name."""
        return next(table for table in self.tables if table.name == name)

    def columns(self, slot: PooledSlot, core: int | None = None) -> int:
        """Columns of a slot, or of a core's part of it; the rest of the width is padding."""
        rest = self.table(slot.table).embedding_dim - slot.column
        if core is None:
            return min(self.width, rest)
        return max(0, min(self.core_width, rest - core * self.core_width))

    @cached_property
    def of_device(self) -> tuple[tuple[PooledSlot, ...], ...]:
        """(G,) slots of each device, end to end."""
        return tuple(
            tuple(slot for slot in self.slots if slot.device == device)
            for device in range(self.num_devices)
        )

    @cached_property
    def rows_per_core(self) -> int:
        """R: those of the fullest device and one that belongs to no table, a multiple of 8."""
        return round_up(max(sum(s.num_rows for s in slots) for slots in self.of_device) + 1, 8)

    @property
    def dummy_row(self) -> int:
        """The row of a core that padding reads and nothing updates."""
        return self.rows_per_core - 1

    def row_offset(self, slot: PooledSlot) -> int:
        """First row of a slot on its cores."""
        slots = self.of_device[slot.device]
        return sum(other.num_rows for other in slots[: slots.index(slot)])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks that a device gets back, in their order."""
        return tuple(
            Block(slot=slot, feature=feature, core=core)
            for slots in self.of_device
            for core in range(self.cores_per_device)
            for slot in slots
            for feature in self.table(slot.table).features
        )

    @cached_property
    def num_features(self) -> tuple[int, ...]:
        """(G,) features of the slots of each device: blocks of each of its cores."""
        return tuple(
            sum(len(self.table(slot.table).features) for slot in slots) for slots in self.of_device
        )

    @property
    def max_features(self) -> int:
        """F."""
        return max(self.num_features)

    @property
    def has_gains(self) -> bool:
        """Whether ids travel with a factor; without one each counts once."""
        return any(table.combiner is not Combiner.SUM for table in self.tables) or self.is_weighted

    @property
    def words_per_id(self) -> int:
        """32-bit words that travel for an id: row, sample, and gain where there is one."""
        return 3 if self.has_gains else 2

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """(G,) lines of ids that a device can send to each device."""
        return tuple(-(-ids // IDS_PER_LINE) for ids in self.max_ids)

    @property
    def max_lines(self) -> int:
        """Lines that a device has room for, from each device."""
        return max(self.lines)

    @property
    def num_ids(self) -> int:
        """G * K: room of a device for ids."""
        return self.num_devices * self.max_lines * IDS_PER_LINE

    def samples_per_core(self, batch_size: int) -> int:
        """G * F * B: rows of a core's activations."""
        return self.num_devices * self.max_features * batch_size

    # ------------------------------------------------------------------------------------- tables

    def pack(self, arrays: Mapping[str, Array], *, dummy: float = 0.0) -> Array:
        """The stack's table, or a slot of its optimizer, on all devices; padding is zero.

        Args:
            arrays: table -> logical (V, D) or (V,). Of the latter every core has a copy.
            dummy: value of the dummy rows: not zero in an optimizer's slots, by whose root a rule
                may divide. What comes of it is thrown away, but must be a number.

        Returns:
            (G, S * R, C) or (G, S * R).
        """
        first = arrays[self.tables[0].name]
        shape = (self.num_devices, self.cores_per_device, self.rows_per_core, self.core_width)
        packed = np.zeros(shape[: first.ndim + 2], first.dtype)
        packed[:, :, self.dummy_row] = dummy
        for logical, block in self._pairs(arrays, packed):
            block[:] = logical
        return packed.reshape(self.num_devices, -1, *packed.shape[3:])

    def unpack(self, packed: Array, arrays: Mapping[str, Array]) -> None:
        """Writes what `pack` packed into the logical arrays, in place."""
        shape = (self.num_devices, self.cores_per_device, self.rows_per_core, *packed.shape[2:])
        for logical, block in self._pairs(arrays, packed.reshape(shape)):
            logical[:] = block

    def _pairs(self, arrays: Mapping[str, Array], packed: Array) -> Iterator[tuple[Array, Array]]:
        """Each core's part of each slot, as views of the logical and of the packed arrays."""
        for slot in self.slots:
            start = self.row_offset(slot)
            rows = arrays[slot.table][slot.row : slot.row + slot.num_rows]
            for core in range(self.cores_per_device):
                block = packed[slot.device, core, start : start + slot.num_rows]
                if rows.ndim == 1:
                    yield rows, block
                    continue
                count = self.columns(slot, core)
                column = slot.column + core * self.core_width
                yield rows[:, column : column + count], block[:, :count]

    # ---------------------------------------------------------------------------------------- ids

    def layout(self, *, batch_size: int) -> Layout:
        """The stack's tables on one core, one by one: what a device preprocesses its batch for."""
        return make_layout(
            self.tables, num_devices=1, cores_per_device=1, stacks="none", batch_size=batch_size
        )

    def pack_ids(self, batch: SparseBatch, *, device: int) -> tuple[Array, Array]:
        """What a device sends to the owners.

        Args:
            batch: of the device, preprocessed for `layout` with the static batch size.
            device: its index.

        Returns:
            header: (1 + G,) int32, the number of the device, and lines that go to each device.
            ids: (sum of `lines`, words_per_id * 128) int32. Each device's part begins where `lines`
                say. A line has 128 rows of a core, 128 samples of a core's activations in ascending
                order, and 128 gains as their bits where there are gains. Padding reads the dummy
                row for this device's last sample, with gain 0.

        Raises:
            CapacityError: more ids for a device than `max_ids`.
        """
        entries = self._entries(batch)
        (per_feature,) = set(batch.samples_per_core)
        per_device = self.max_features * per_feature
        first_sample = device * per_device
        header = np.full(1 + self.num_devices, device, np.int32)
        sizes = header[1:]
        ids = np.zeros((sum(self.lines), self.words_per_id, IDS_PER_LINE), np.int32)
        ids[:, 0] = self.dummy_row
        ids[:, 1] = first_sample + per_device - 1
        at = 0
        for owner, (slots, lines, limit) in enumerate(
            zip(self.of_device, self.lines, self.max_ids, strict=True)
        ):
            parts, row, sample = [], 0, first_sample
            for slot in slots:
                parts.append(entries[slot.table].within(slot).moved(row - slot.row, sample))
                row += slot.num_rows
                sample += len(self.table(slot.table).features) * per_feature
            count = sum(len(part.rows) for part in parts)
            if count > limit:
                raise CapacityError(
                    stack=self.name,
                    core=device * self.cores_per_device,
                    partition=owner * self.cores_per_device,
                    kind="ids",
                    observed=count,
                    limit=limit,
                )
            sizes[owner] = -(-count // IDS_PER_LINE)
            for word, arrays in enumerate(zip(*parts, strict=True)):
                if word < self.words_per_id and count:
                    _fill(ids[at : at + sizes[owner], word], np.concatenate(arrays))
            at += lines
        return header, ids.reshape(len(ids), -1)

    def _entries(self, batch: SparseBatch) -> dict[str, _Entries]:
        """Table -> ids. One that a bag has n times is one entry of gain n, or n without gains."""
        found = {table.name: _Entries.of(batch, index) for index, table in enumerate(self.tables)}
        if self.has_gains:
            return found
        return {name: entries.repeated() for name, entries in found.items()}

    def count_ids(self, batch: SparseBatch) -> Array:
        """(G,) ids of a device's batch that go to each device.

        Args:
            batch: as in `pack_ids`.
        """
        entries = self._entries(batch)
        return np.array(
            [sum(len(entries[s.table].within(s).rows) for s in slots) for slots in self.of_device]
        )


def check_cover(stacks: Sequence[PooledStack]) -> None:
    """Refuses stacks that do not hold every element of their tables exactly once.

    Raises:
        LayoutError: names the table.
    """
    rectangles: dict[str, list[tuple[int, int, int, int]]] = {}
    tables: dict[str, Table] = {}
    for stack in stacks:
        tables |= {table.name: table for table in stack.tables}
        for slot in stack.slots:
            rectangles.setdefault(slot.table, []).append(
                (slot.row, slot.row + slot.num_rows, slot.column, slot.column + stack.columns(slot))
            )
    for name, table in tables.items():
        parts = rectangles[name]
        area = sum((bottom - top) * (right - left) for top, bottom, left, right in parts)
        overlaps = any(
            max(a[0], b[0]) < min(a[1], b[1]) and max(a[2], b[2]) < min(a[3], b[3])
            for a, b in itertools.combinations(parts, 2)
        )
        if overlaps or area != table.num_embeddings * table.embedding_dim:
            raise LayoutError(
                f"the slots of table {name!r} ({table.num_embeddings}, {table.embedding_dim}) "
                f"{'overlap' if overlaps else 'leave parts of it out'}: (rows, columns) "
                f"{[((t, b), (left, r)) for t, b, left, r in sorted(parts)]}"
            )


class _Entries(NamedTuple):
    """Ids of one table, by sample; gains as their bits."""

    rows: Array
    samples: Array
    gains: Array

    @classmethod
    def of(cls, batch: SparseBatch, stack: int) -> _Entries:
        buffers = batch.stacks[stack]
        count = int(buffers.row_pointers[0])
        order = np.argsort(buffers.sample_ids[:count], kind="stable")
        arrays = buffers.embedding_ids, buffers.sample_ids, buffers.gains.view(np.int32)
        return cls(*(array[order] for array in arrays))

    def within(self, slot: PooledSlot) -> _Entries:
        is_inside = (self.rows >= slot.row) & (self.rows < slot.row + slot.num_rows)
        if is_inside.all():
            return self
        return _Entries(*(array[is_inside] for array in self))

    def repeated(self) -> _Entries:
        """Every id as often as its gain says."""
        times = self.gains.view(np.float32).astype(np.int64)
        return _Entries(*(np.repeat(array, times) for array in self))

    def moved(self, rows: int, samples: int) -> _Entries:
        return self._replace(rows=self.rows + rows, samples=self.samples + samples)


def _fill(lines: Array, values: Array) -> None:
    """Writes a vector into the first elements of `lines` (n, 128), which may not be contiguous."""
    full, rest = divmod(len(values), IDS_PER_LINE)
    lines[:full] = values[: full * IDS_PER_LINE].reshape(full, IDS_PER_LINE)
    if rest:
        lines[full, :rest] = values[full * IDS_PER_LINE :]
