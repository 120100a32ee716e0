"""Where every row of every table lives: tables, stacks of tables, and the map from ids to cores.

Shape legend: V num_embeddings, D embedding_dim, P cores in all, R rows of one table on one core.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore.errors import LayoutError
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, TableGeometry

if TYPE_CHECKING:
    from torchrec_tpu.sparsecore.batch import SparseBatch

MAX_ROWS_PER_CORE = 2**31 - 1
"""Local rows are int32, and 2**31 - 1 marks a padding slot."""

MAX_GEOMETRIES = 16


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`.

    >>> round_up(13, 8)
    16
    """
    return -(-value // multiple) * multiple


class Combiner(StrEnum):
    """How the rows of one bag become one vector."""

    SUM = "sum"
    MEAN = "mean"
    SQRTN = "sqrtn"
    NONE = "none"
    """A sequence: no pooling, every id is a sample of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table as the model sees it.

    Only tables of one `group` may share a stack: put into it what a compiled update has in common
    (the optimizer and its settings). `features` are the KJT keys that look up this table.

    >>> Table(name="t", num_embeddings=100, embedding_dim=12, combiner="sum", features=("f",)).dim
    16
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    combiner: Combiner
    features: tuple[str, ...]
    group: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "combiner", Combiner(self.combiner))
        except ValueError:
            raise LayoutError(
                f"table {self.name!r}: combiner={self.combiner!r} is not one of "
                f"{[c.value for c in Combiner]}"
            ) from None
        object.__setattr__(self, "features", tuple(self.features))
        for field in ("num_embeddings", "embedding_dim"):
            try:
                value = operator.index(getattr(self, field))  # NumPy integers become int
            except TypeError:
                value = 0
            if value < 1:
                raise LayoutError(
                    f"table {self.name!r}: {field}={getattr(self, field)!r} must be an integer >= 1"
                )
            object.__setattr__(self, field, value)
        if not self.features:
            raise LayoutError(f"table {self.name!r}: no feature looks it up; name at least one")
        if len(set(self.features)) != len(self.features):
            raise LayoutError(f"table {self.name!r}: a feature is listed twice: {self.features}")

    @property
    def dim(self) -> int:
        """embedding_dim padded to a multiple of 8, the width of a row on a core."""
        return round_up(self.embedding_dim, 8)

    @property
    def is_sequence(self) -> bool:
        """Whether ids are looked up one by one instead of pooled."""
        return self.combiner is Combiner.NONE

    def rows_per_core(self, num_cores: int) -> int:
        """Rows that each of `num_cores` cores keeps: num_embeddings padded to 8 * num_cores."""
        return round_up(self.num_embeddings, 8 * num_cores) // num_cores


@dataclass(frozen=True, slots=True)
class Block:
    """Contiguous rows of a table: the first `rows` on `first_core`, as many on each core behind it.

    After the last core comes core 0. With all of its rows in one block a table is on one core.
    """

    rows: int
    first_core: int = 0

    def __post_init__(self) -> None:
        for field in ("rows", "first_core"):
            try:
                object.__setattr__(self, field, operator.index(getattr(self, field)))
            except TypeError:
                raise LayoutError(
                    f"Block: {field}={getattr(self, field)!r} must be an integer"
                ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedTable:
    """One table's place in its stack, the same on every core.

    Core p holds every num_cores-th row, from row (p - rotation) mod num_cores on; or, with
    `block_rows`, the block of that many rows with that number.
    """

    table: Table
    row_offset: int  # rows of the stack before this table
    rotation: int  # cores that id 0 is moved along, so that small hot tables do not meet on core 0
    rows_per_core: int  # multiple of 8
    block_rows: int = 0  # 0: every num_cores-th row


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedFeature:
    """One lookup: a KJT key into one table."""

    key: str
    table: str
    output_name: str  # the key, or "key@table" when the key feeds several tables (as in TorchRec)
    combiner: Combiner
    stack: int  # index into Layout.stacks
    config_index: int  # position in the output order


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Tables laid end to end on every core; one SparseCore operation looks all of them up."""

    name: str
    tables: tuple[StackedTable, ...]
    features: tuple[StackedFeature, ...]  # grouped by table, in the order of `tables`
    dim: int  # row width, multiple of 8
    rows_per_core: int


@dataclass(frozen=True, kw_only=True, repr=False)  # no slots: the properties below are kept
class Layout:
    """Every table's place on the cores of all devices. Build it with `make_layout`.

    A device has `cores_per_device` SparseCores; this process feeds `num_local_devices` devices from
    `first_local_device` on. Each core is both a source (it looks up its part of the batch) and a
    partition (it owns every num_cores-th row of each table, or one block of its rows).
    """

    tables: tuple[Table, ...]  # config order
    stacks: tuple[Stack, ...]
    num_devices: int
    cores_per_device: int
    num_local_devices: int
    first_local_device: int

    @property
    def num_cores(self) -> int:
        """Cores of all devices; partitions of every batch."""
        return self.num_devices * self.cores_per_device

    @property
    def num_local_cores(self) -> int:
        """Source cores that this process feeds."""
        return self.num_local_devices * self.cores_per_device

    @property
    def first_local_core(self) -> int:
        """Global index of this process's first core."""
        return self.first_local_device * self.cores_per_device

    @cached_property
    def stack_order_tables(self) -> tuple[StackedTable, ...]:
        """Tables stack by stack: the order of geometry, ops and native code."""
        return tuple(table for stack in self.stacks for table in stack.tables)

    @cached_property
    def stack_order_features(self) -> tuple[StackedFeature, ...]:
        """Features stack by stack, grouped by table: the order of geometry, ops and native code."""
        return tuple(feature for stack in self.stacks for feature in stack.features)

    @cached_property
    def features(self) -> tuple[StackedFeature, ...]:
        """Features in config order, which is the order of outputs."""
        return tuple(sorted(self.stack_order_features, key=lambda feature: feature.config_index))

    @cached_property
    def _stacked_tables(self) -> Mapping[str, StackedTable]:
        return {stacked.table.name: stacked for stacked in self.stack_order_tables}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides a batch's buffers; equal on all processes of a job."""
        facts = {
            "tables": [
                [t.name, t.num_embeddings, t.embedding_dim, t.combiner, t.features]
                for t in self.tables
            ],
            "stacks": [
                [
                    [t.table.name, t.row_offset, t.rotation, t.rows_per_core, t.block_rows]
                    for t in stack.tables
                ]
                for stack in self.stacks
            ],
            "cores": [self.num_devices, self.cores_per_device, self.num_local_devices],
        }
        return hashlib.sha256(json.dumps(facts, default=int).encode()).hexdigest()

    def stacked_table(self, table: str) -> StackedTable:
        """The place of the table of that name.

        Raises:
            LayoutError: no table has that name.
        """
        try:
            return self._stacked_tables[table]
        except KeyError:
            raise LayoutError(
                f"no table is named {table!r}; tables: {[t.name for t in self.tables]}"
            ) from None

    def home_of(self, table: str, row_id: int) -> tuple[int, int]:
        """Where one id lives: (core, row of the stack on that core).

        Raises:
            LayoutError: no table has that name.
            IndexError: the table has no such id.
        """
        stacked = self.stacked_table(table)
        if not 0 <= row_id < stacked.table.num_embeddings:
            raise IndexError(
                f"table {table!r} has ids 0..{stacked.table.num_embeddings - 1}, not {row_id}"
            )
        if stacked.block_rows:
            place, row = divmod(row_id, stacked.block_rows)
        else:
            row, place = divmod(row_id, self.num_cores)
        return (place + stacked.rotation) % self.num_cores, row + stacked.row_offset

    def pack_table(self, table: str, logical: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows that each core keeps of one table; padding is zero.

        Args:
            table: name.
            logical: (V, D) weights, or (V,) for a state of one number per row.

        Returns:
            (P, R, padded D of the stack), or (P, R); on core p the block is rows
            row_offset .. row_offset + R - 1 of the stack.

        Raises:
            LayoutError: `logical` has another shape.
        """
        stacked = self.stacked_table(table)
        spec = stacked.table
        if logical.shape not in ((spec.num_embeddings, spec.embedding_dim), (spec.num_embeddings,)):
            raise LayoutError(
                f"table {table!r}: array has shape {logical.shape}, expected "
                f"{(spec.num_embeddings, spec.embedding_dim)} or {(spec.num_embeddings,)}"
            )
        num_cores, rows = self.num_cores, stacked.rows_per_core
        row_shape = (self._dims[table],) if logical.ndim == 2 else ()
        columns = (slice(spec.embedding_dim),) if logical.ndim == 2 else ()
        if n := stacked.block_rows:
            blocks = np.zeros((num_cores, rows, *row_shape), logical.dtype)
            for place, first in enumerate(range(0, spec.num_embeddings, n)):
                some = logical[first : first + n]
                blocks[(place, slice(len(some)), *columns)] = some
            return np.roll(blocks, stacked.rotation, axis=0)
        padded = np.zeros((rows, num_cores, *row_shape), logical.dtype)
        lines = padded.reshape(rows * num_cores, *row_shape)
        lines[(slice(spec.num_embeddings), *columns)] = logical
        return np.roll(padded.swapaxes(0, 1), stacked.rotation, axis=0)

    def unpack_table(self, table: str, block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The logical (V, D) or (V,) array of one table; undoes `pack_table`.

        Raises:
            LayoutError: `block` has another shape than `pack_table` returns.
        """
        stacked = self.stacked_table(table)
        spec = stacked.table
        shape = (self.num_cores, stacked.rows_per_core, self._dims[table])
        if block.shape not in (shape, shape[:2]):
            raise LayoutError(
                f"table {table!r}: block has shape {block.shape}, expected {shape} or {shape[:2]}"
            )
        lines = np.roll(block, -stacked.rotation, axis=0)
        lines = lines[:, : stacked.block_rows] if stacked.block_rows else lines.swapaxes(0, 1)
        logical = lines.reshape(-1, *block.shape[2:])[: spec.num_embeddings]
        return np.ascontiguousarray(
            logical[:, : spec.embedding_dim] if block.ndim == 3 else logical
        )

    def geometry(self, batch: SparseBatch) -> Geometry:
        """The integers that tell an op where a batch's samples and their outputs are.

        Pooled features share one (B, sum of D) output, columns in config order. Sequence features
        follow it in config order, (N_f, D_f) each, N_f being the feature's number of ids.
        """
        key = batch.batch_size, batch.num_samples, batch.samples_per_core
        if (geometry := self._geometries.get(key)) is None:
            if len(self._geometries) >= MAX_GEOMETRIES:
                self._geometries.clear()
            geometry = self._geometries[key] = self._geometry(*key)
        return geometry

    @cached_property
    def _geometries(self) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], Geometry]:
        """The last ones; nearly all batches of a run have the same."""
        return {}

    def _geometry(
        self, batch_size: int, num_samples: tuple[int, ...], samples_per_core: tuple[int, ...]
    ) -> Geometry:
        width = sum(
            self._stacked_tables[feature.table].table.embedding_dim
            for feature in self.features
            if feature.combiner is not Combiner.NONE
        )
        stack_index = {
            feature.config_index: index for index, feature in enumerate(self.stack_order_features)
        }
        output: dict[int, tuple[int, int]] = {}  # config index -> (out_offset, out_stride)
        column, end = 0, batch_size * width
        for feature in self.features:
            dim = self._stacked_tables[feature.table].table.embedding_dim
            if feature.combiner is Combiner.NONE:
                output[feature.config_index] = end, dim
                end += num_samples[stack_index[feature.config_index]] * dim
            else:
                output[feature.config_index] = column, width
                column += dim

        tables: list[TableGeometry] = []
        features: list[FeatureGeometry] = []
        for index, stack in enumerate(self.stacks):
            sample_offset = 0
            first_feature = len(features)
            for feature in stack.features:
                at = len(features)
                features.append(
                    FeatureGeometry(
                        sample_offset,
                        samples_per_core[at],
                        num_samples[at],
                        *output[feature.config_index],
                    )
                )
                sample_offset += samples_per_core[at]
            for stacked in stack.tables:
                tables.append(
                    TableGeometry(
                        index,
                        stacked.table.num_embeddings,
                        stacked.table.embedding_dim,
                        stacked.row_offset,
                        stacked.rotation,
                        first_feature,
                        len(stacked.table.features),
                        stacked.block_rows,
                    )
                )
                first_feature += len(stacked.table.features)
        return Geometry(
            num_cores=self.num_cores,
            num_local_cores=self.num_local_cores,
            num_stacks=len(self.stacks),
            tables=tuple(tables),
            features=tuple(features),
        )

    @cached_property
    def _dims(self) -> Mapping[str, int]:
        """Row width on a core, by table."""
        return {stacked.table.name: stack.dim for stack in self.stacks for stacked in stack.tables}

    def __repr__(self) -> str:
        last = self.first_local_device + self.num_local_devices - 1
        lines = [
            f"Layout: {len(self.tables)} tables on {self.num_devices} devices x "
            f"{self.cores_per_device} cores, local devices {self.first_local_device}..{last}"
        ]
        for stack in self.stacks:
            lines.append(
                f"  stack {stack.name!r}: {stack.rows_per_core:,} rows x {stack.dim} a core"
            )
            lines += [
                f"    {t.table.name}: ({t.table.num_embeddings:,}, {t.table.embedding_dim}) "
                f"{t.table.combiner}, rows from {t.row_offset:,}, rotation {t.rotation}, "
                + (f"blocks of {t.block_rows:,} rows, " if t.block_rows else "")
                + f"features {', '.join(t.table.features)}"
                for t in stack.tables
            ]
        return "\n".join(lines)
