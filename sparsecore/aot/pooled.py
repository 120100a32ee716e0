"""Tables whose rows stay with an owner: their ids travel there, pooled vectors travel back.

A slot is a rectangle of a table, all of its rows or some, `width` columns or fewer, on one core.
Slots of one width make a stack. On every device a stack is one array (S * R, width), and a core's
slots lie end to end in its part of it; the last row of each core belongs to no table.

For each step a device sends to each core the ids of its own batch that the core's slots hold. The
core adds up their rows, one block (B, width) for each feature of each slot and each source device,
and sends the blocks home. Gradients take the way back, and the core updates its rows.

Legend: G devices, S cores of a device, P cores in all, R rows of a core, B samples of a device, K
ids of a device that a core can get, F blocks of the core that has most.
"""

from __future__ import annotations

import itertools
from collections import Counter
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
    """A rectangle of a table on one core; its columns end with the stack's width or the table."""

    table: str
    core: int  # of all devices, device by device
    row: int  # first
    num_rows: int
    column: int  # first


class Block(NamedTuple):
    """What a core sends to each device: (B, width), one feature pooled over the rows of a slot."""

    core: int
    index: int  # among the core's blocks
    slot: PooledSlot
    feature: str


@dataclass(frozen=True, kw_only=True)  # no slots: the properties below are kept
class PooledStack:
    """Slots of one width on the cores of a program's devices.

    Attributes:
        name: unique in its collection, beside those of other stacks.
        tables: that have slots here, in config order.
        slots: in any order.
        width: columns, a multiple of 8.
        num_devices: G.
        cores_per_device: S.
        max_ids: (P,) the most ids of one device's batch that go to each core.
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
        if self.width < 8 or self.width % 8:
            return f"width={self.width} is not a positive multiple of 8"
        if len(self.max_ids) != self.num_cores or min(self.max_ids) < 0:
            return f"max_ids={self.max_ids} must be numbers >= 0, one for each of {self.num_cores}"
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
                0 <= slot.core < self.num_cores
                and slot.num_rows > 0
                and 0 <= slot.row <= table.num_embeddings - slot.num_rows
                and 0 <= slot.column < table.embedding_dim
            ):
                return (
                    f"{slot} is outside its table ({table.num_embeddings}, {table.embedding_dim}) "
                    f"or of the {self.num_cores} cores"
                )
            if not self.max_ids[slot.core]:
                return f"core {slot.core} has slots and max_ids 0"
        return None

    @property
    def num_cores(self) -> int:
        """P."""
        return self.num_devices * self.cores_per_device

    def table(self, name: str) -> Table:
        """The table of that name."""
        return next(table for table in self.tables if table.name == name)

    def columns(self, slot: PooledSlot) -> int:
        """Columns of a slot; the rest of the width is padding."""
        return min(self.width, self.table(slot.table).embedding_dim - slot.column)

    @cached_property
    def of_core(self) -> tuple[tuple[PooledSlot, ...], ...]:
        """(P,) slots of each core, end to end."""
        return tuple(
            tuple(slot for slot in self.slots if slot.core == core)
            for core in range(self.num_cores)
        )

    @cached_property
    def rows_per_core(self) -> int:
        """R: those of the fullest core and one that belongs to no table, a multiple of 8."""
        return round_up(max(sum(s.num_rows for s in slots) for slots in self.of_core) + 1, 8)

    @property
    def dummy_row(self) -> int:
        """The row of a core that padding reads and nothing updates."""
        return self.rows_per_core - 1

    def row_offset(self, slot: PooledSlot) -> int:
        """First row of a slot on its core."""
        slots = self.of_core[slot.core]
        return sum(other.num_rows for other in slots[: slots.index(slot)])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks that a device gets back, in their order."""
        return tuple(block for core in range(self.num_cores) for block in self._blocks_of(core))

    def _blocks_of(self, core: int) -> Iterator[Block]:
        pairs = ((slot, f) for slot in self.of_core[core] for f in self.table(slot.table).features)
        for index, (slot, feature) in enumerate(pairs):
            yield Block(core=core, index=index, slot=slot, feature=feature)

    @cached_property
    def num_blocks(self) -> tuple[int, ...]:
        """(P,) blocks of each core."""
        counts = Counter(block.core for block in self.blocks)
        return tuple(counts[core] for core in range(self.num_cores))

    @property
    def max_blocks(self) -> int:
        """F."""
        return max(self.num_blocks)

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
        """(P,) lines of ids that a device can send to each core."""
        return tuple(-(-ids // IDS_PER_LINE) for ids in self.max_ids)

    @property
    def max_lines(self) -> int:
        """Lines that a core has room for, from each device."""
        return max(self.lines)

    @property
    def ids_per_core(self) -> int:
        """G * K: room of a core for ids."""
        return self.num_devices * self.max_lines * IDS_PER_LINE

    def samples_per_core(self, batch_size: int) -> int:
        """G * F * B: rows of a core's activations."""
        return self.num_devices * self.max_blocks * batch_size

    # ------------------------------------------------------------------------------------- tables

    def pack(self, arrays: Mapping[str, Array], *, dummy: float = 0.0) -> Array:
        """The stack's table, or a slot of its optimizer, on all devices; padding is zero.

        Args:
            arrays: table -> logical (V, D) or (V,).
            dummy: value of the dummy rows: not zero in an optimizer's slots, by whose root a rule
                may divide. What comes of it is thrown away, but must be a number.

        Returns:
            (G, S * R, width) or (G, S * R).
        """
        first = arrays[self.tables[0].name]
        shape = (self.num_cores, self.rows_per_core, self.width)[: first.ndim + 1]
        packed = np.zeros(shape, first.dtype)
        packed[:, self.dummy_row] = dummy
        for _, logical, block in self._pairs(arrays, packed):
            block[:] = logical
        return packed.reshape(self.num_devices, -1, *packed.shape[2:])

    def unpack(self, packed: Array, arrays: Mapping[str, Array]) -> None:
        """Writes what `pack` packed into the logical arrays, in place."""
        cores = packed.reshape(self.num_cores, self.rows_per_core, *packed.shape[2:])
        for _, logical, block in self._pairs(arrays, cores):
            logical[:] = block

    def _pairs(
        self, arrays: Mapping[str, Array], cores: Array
    ) -> Iterator[tuple[PooledSlot, Array, Array]]:
        """Each slot with its part of the logical and of the packed arrays."""
        for slot in self.slots:
            logical = arrays[slot.table][slot.row : slot.row + slot.num_rows]
            start = self.row_offset(slot)
            block = cores[slot.core, start : start + slot.num_rows]
            if logical.ndim == 2:
                count = self.columns(slot)
                logical = logical[:, slot.column : slot.column + count]
                block = block[:, :count]
            yield slot, logical, block

    # ---------------------------------------------------------------------------------------- ids

    def layout(self, *, batch_size: int) -> Layout:
        """The stack's tables on one core, one by one: what a device preprocesses its batch for."""
        return make_layout(
            self.tables, num_devices=1, cores_per_device=1, stacks="none", batch_size=batch_size
        )

    def pack_ids(self, batch: SparseBatch, *, device: int) -> tuple[Array, Array]:
        """What a device sends to the cores.

        Args:
            batch: of the device, preprocessed for `layout` with the static batch size.
            device: its index.

        Returns:
            header: (1 + P,) int32, the number of the device, and lines that go to each core.
            ids: (sum of `lines`, words_per_id * 128) int32. Each core's part begins where its
                `lines` say. A line has 128 rows of the core, 128 samples of the core's activations
                in ascending order, and 128 gains as their bits where there are gains. Padding reads
                the dummy row for the device's last sample, with gain 0.

        Raises:
            CapacityError: more ids for a core than `max_ids`.
        """
        entries = {table.name: _Entries.of(batch, index) for index, table in enumerate(self.tables)}
        (per_feature,) = set(batch.samples_per_core)
        per_device = self.max_blocks * per_feature
        first_sample = device * per_device
        header = np.full(1 + self.num_cores, device, np.int32)
        sizes = header[1:]
        ids = np.zeros((sum(self.lines), self.words_per_id, IDS_PER_LINE), np.int32)
        ids[:, 0] = self.dummy_row
        ids[:, 1] = first_sample + per_device - 1
        at = 0
        for core, (slots, lines, limit) in enumerate(
            zip(self.of_core, self.lines, self.max_ids, strict=True)
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
                    partition=core,
                    kind="ids",
                    observed=count,
                    limit=limit,
                )
            sizes[core] = -(-count // IDS_PER_LINE)
            for word, arrays in enumerate(zip(*parts, strict=True)):
                if word < self.words_per_id and count:
                    _fill(ids[at : at + sizes[core], word], np.concatenate(arrays))
            at += lines
        return header, ids.reshape(len(ids), -1)

    def count_ids(self, batch: SparseBatch) -> Array:
        """(P,) ids of a device's batch that go to each core.

        Args:
            batch: as in `pack_ids`.
        """
        entries = {table.name: _Entries.of(batch, index) for index, table in enumerate(self.tables)}
        return np.array(
            [sum(len(entries[s.table].within(s).rows) for s in slots) for slots in self.of_core]
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

    def moved(self, rows: int, samples: int) -> _Entries:
        return self._replace(rows=self.rows + rows, samples=self.samples + samples)


def _fill(lines: Array, values: Array) -> None:
    """Writes a vector into the first elements of `lines` (n, 128), which may not be contiguous."""
    full, rest = divmod(len(values), IDS_PER_LINE)
    lines[:full] = values[: full * IDS_PER_LINE].reshape(full, IDS_PER_LINE)
    if rest:
        lines[full, :rest] = values[full * IDS_PER_LINE :]
