"""The semantics of lookups and fused updates, in plain NumPy: slow, clear, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_tpu.sparsecore.batch import (
    Float32Array,
    StackBuffers,
    TableArray,
)
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, TableGeometry
from torchrec_tpu.sparsecore.layout import round_up
from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.rules import Rule, apply

# Shape suffixes: E entries (ids that buffers hold, padding left out), U distinct rows, D dim.


class _Entries(NamedTuple):
    """The ids of one table in a batch, ordered by source core, then as in the buffers."""

    rows_E: NDArray[np.int64]  # logical
    vectors_E: NDArray[np.int64]  # first float of the sample's vector in the flat output
    gains_E: Float32Array


class ReferenceBackend:
    """NumPy on host memory; same bits as the CPU backend."""

    name = "reference"

    def why_unavailable(self) -> str | None:
        """None: NumPy is always there."""
        return None

    def lookup(
        self,
        buffers: Sequence[StackBuffers],
        tables: Sequence[TableArray],
        geometry: Geometry,
        out: Float32Array,
    ) -> None:
        """See Backend.lookup."""
        _check(tables, out, geometry)
        entries = _unpack(buffers, geometry, need_all=True)
        for table in geometry.tables:
            for feature in _features_of(table, geometry):
                starts = feature.out_offset + np.arange(feature.num_samples) * feature.out_stride
                out[_elements(starts, table.dim)] = 0
        for table, weights, ids in zip(geometry.tables, tables, entries, strict=True):
            terms_ED = ids.gains_E[:, None] * weights[ids.rows_E].astype(np.float32)
            np.add.at(out, _elements(ids.vectors_E, table.dim), terms_ED)

    def update(
        self,
        grad: Float32Array,
        buffers: Sequence[StackBuffers],
        tables: Sequence[TableArray],
        slots: Sequence[Sequence[Float32Array]],
        operands: Float32Array,
        geometry: Geometry,
        rule: str,
        max_gradient: float | None,
    ) -> None:
        """See Backend.update."""
        if rule not in RULES:
            raise NotImplementedError(f"no rule is named {rule!r}; there are {', '.join(RULES)}")
        _check(tables, grad, geometry)
        _check_state(RULES[rule], slots, operands, geometry)
        if max_gradient is not None and not max_gradient > 0:
            raise ValueError(f"max_gradient={max_gradient} must be positive, or None for no limit")
        entries = _unpack(buffers, geometry, need_all=False)
        for t, (table, ids) in enumerate(zip(geometry.tables, entries, strict=True)):
            grad_ED = grad[_elements(ids.vectors_E, table.dim)]
            if max_gradient is not None:
                limit = np.float32(max_gradient)
                grad_ED = np.clip(grad_ED, -limit, limit)
            rows_U, index_E = np.unique(ids.rows_E, return_inverse=True)
            grad_UD = np.zeros((len(rows_U), table.dim), np.float32)
            np.add.at(grad_UD, index_E, ids.gains_E[:, None] * grad_ED)
            arrays: tuple[TableArray, ...] = (tables[t], *slots[t])
            row_UD, *slots_U = (array[rows_U].astype(np.float32) for array in arrays)
            new = apply(RULES[rule], grad_UD, row_UD, slots_U, operands[t])
            for array, new_U in zip(arrays, new, strict=True):
                with np.errstate(over="ignore"):  # what float16 cannot hold becomes infinite
                    array[rows_U] = new_U


def _check(tables: Sequence[TableArray], flat: Float32Array, geometry: Geometry) -> None:
    shapes = [(table.num_embeddings, table.dim) for table in geometry.tables]
    if [table.shape for table in tables] != shapes:
        raise ValueError(f"tables are {[table.shape for table in tables]}, geometry says {shapes}")
    end = max(
        feature.out_offset + (feature.num_samples - 1) * feature.out_stride + table.dim
        for table in geometry.tables
        for feature in _features_of(table, geometry)
    )
    if flat.ndim != 1 or flat.size < end:
        raise ValueError(f"output or gradient has shape {flat.shape}, geometry reaches ({end},)")


def _check_state(
    rule: Rule,
    slots: Sequence[Sequence[Float32Array]],
    operands: Float32Array,
    geometry: Geometry,
) -> None:
    shapes = [
        [slot.shape(table.num_embeddings, table.dim) for slot in rule.slots]
        for table in geometry.tables
    ]
    if [[array.shape for array in arrays] for arrays in slots] != shapes:
        raise ValueError(
            f"slots are {[[array.shape for array in arrays] for arrays in slots]}, rule "
            f"{rule.name!r} wants {shapes}"
        )
    if operands.shape != (len(geometry.tables), len(rule.operands)):
        raise ValueError(
            f"operands have shape {operands.shape}, rule {rule.name!r} wants {rule.operands} for "
            f"each of {len(geometry.tables)} tables"
        )


def _features_of(table: TableGeometry, geometry: Geometry) -> tuple[FeatureGeometry, ...]:
    return geometry.features[table.first_feature : table.first_feature + table.num_features]


def _elements(starts_E: NDArray[np.int64], dim: int) -> NDArray[np.int64]:
    """(E, D) positions of the vectors that start there."""
    return starts_E[:, None] + np.arange(dim)


def _unpack(
    buffers: Sequence[StackBuffers], geometry: Geometry, *, need_all: bool
) -> list[_Entries]:
    """The ids of every table. Stacks without a table in `geometry` are passed over.

    Raises:
        ValueError: a buffer contradicts itself, or names a row or a sample that is not there. Ids
            of no table are refused with `need_all`; an update may leave tables out.
    """
    slots = {
        table.stack: _filled_slots(table.stack, buffers, geometry) for table in geometry.tables
    }
    entries = [
        _entries(t, buffers[table.stack], *slots[table.stack], geometry)
        for t, table in enumerate(geometry.tables)
    ]
    for stack, (filled, *_) in slots.items():
        num_found = sum(
            len(ids.rows_E)
            for table, ids in zip(geometry.tables, entries, strict=True)
            if table.stack == stack
        )
        if need_all and num_found < len(filled):
            raise ValueError(f"stack {stack}: {len(filled) - num_found} ids are in no table")
    return entries


def _filled_slots(
    stack: int, buffers: Sequence[StackBuffers], geometry: Geometry
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(slot, source core, partition) of every id of a stack; padding is passed over."""
    slots_per_core = len(buffers[stack].embedding_ids) // geometry.num_local_cores
    pointers = buffers[stack].row_pointers.reshape(geometry.num_local_cores, -1)
    runs = []
    for core, ends in enumerate(pointers[:, : geometry.num_cores].tolist()):
        start = 0
        for partition, end in enumerate(ends):
            if not start <= end <= slots_per_core:
                raise ValueError(
                    f"stack {stack}, core {core}, partition {partition}: row pointer {end} is "
                    f"outside {start}..{slots_per_core}"
                )
            slots = core * slots_per_core + np.arange(start, end)
            runs.append((slots, np.full_like(slots, core), np.full_like(slots, partition)))
            start = round_up(end, 8)
    slots, cores, partitions = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    return slots, cores, partitions


def _entries(
    t: int,
    stack: StackBuffers,
    slots_E: NDArray[np.int64],
    cores_E: NDArray[np.int64],
    partitions_E: NDArray[np.int64],
    geometry: Geometry,
) -> _Entries:
    """Those of a stack's ids that belong to table t, as logical rows and output positions."""
    table, num_cores = geometry.tables[t], geometry.num_cores
    local_E = stack.embedding_ids[slots_E].astype(np.int64) - table.row_offset
    mine = (local_E >= 0) & (local_E < table.rows_per_core(num_cores))
    local_E, slots_E, cores_E, partitions_E = (
        array[mine] for array in (local_E, slots_E, cores_E, partitions_E)
    )
    places_E = (partitions_E - table.rotation) % num_cores
    if n := table.block_rows:
        rows_E = np.where(local_E < n, places_E * n + local_E, table.num_embeddings)
    else:
        rows_E = local_E * num_cores + places_E
    if (rows_E >= table.num_embeddings).any():
        raise ValueError(
            f"stack {table.stack}: id {rows_E.max()} is not in table {t}, whose ids are "
            f"0..{table.num_embeddings - 1}"
        )
    vectors_E = np.full(len(rows_E), -1)
    for feature in _features_of(table, geometry):
        row_E = stack.sample_ids[slots_E] - feature.sample_offset
        sample_E = cores_E * feature.samples_per_core + row_E
        inside = (row_E >= 0) & (row_E < feature.samples_per_core)
        inside &= sample_E < feature.num_samples
        vectors_E[inside] = feature.out_offset + sample_E[inside] * feature.out_stride
    if (vectors_E < 0).any():
        raise ValueError(f"stack {table.stack}: sample_ids of table {t} are outside its features")
    return _Entries(rows_E, vectors_E, stack.gains[slots_E])
