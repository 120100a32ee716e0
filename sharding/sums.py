"""Sums of gradients row by row, made apart from the update that needs them.

Legend: C source cores, U rows that a batch touched, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrec_tpu.sparsecore import ops
from torchrec_tpu.sparsecore.batch import Int32Array, pointers_per_core
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, TableGeometry
from torchrec_tpu.sparsecore.layout import round_up


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSums:
    """The gradients of one table's rows, over all samples."""

    rows: Int32Array  # (U,) ascending, from the table's first row on
    sums: Tensor  # (U, D) float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedTable:
    """A table of a stack, as the buffers know it."""

    geometry: TableGeometry
    num_rows: int  # that follow row_offset in the stack
    features: tuple[FeatureGeometry, ...]
    max_gradient: float  # limit of each element before gains; 0 for none


def row_sums(
    grad: Tensor,
    stack: Sequence[Tensor],
    cores: Sequence[tuple[int, int]],
    tables: Sequence[SummedTable],
) -> list[RowSums]:
    """Sums of gain * gradient by row: one SGD step of zeros, with learning rate -1.

    Args:
        grad: gradient of the activations, flat or not.
        stack: the four buffers of one stack.
        cores: (first, last) slots of each source core, all of one partition.
        tables: some of the stack's, in its order.
    """
    _, ids, samples, gains = (buffer.numpy() for buffer in stack)
    bounds = [
        (table.geometry.row_offset, table.geometry.row_offset + table.num_rows) for table in tables
    ]
    runs = [
        (begin + np.searchsorted(ids[begin:end], bounds)).tolist() for begin, end in cores
    ]  # (C, tables) (first, last) slots
    num_slots = round_up(max(1, *(sum(last - first for first, last in r) for r in runs)), 8)
    pointers = np.zeros((len(cores), pointers_per_core(1)), np.int32)
    new_ids, new_samples = np.empty((2, len(cores), num_slots), np.int32)
    new_gains = np.empty((len(cores), num_slots), np.float32)
    geometries: list[TableGeometry] = []
    features: list[FeatureGeometry] = []
    rows_of: list[Int32Array] = []
    row_offset = 0
    for index, table in enumerate(tables):
        of_cores = [slice(*run[index]) for run in runs]
        rows = np.unique(np.concatenate([ids[run] for run in of_cores]))
        for core, run in enumerate(of_cores):
            at = int(pointers[core, 0])
            end = at + run.stop - run.start
            new_ids[core, at:end] = np.searchsorted(rows, ids[run]) + row_offset
            new_samples[core, at:end] = samples[run]
            new_gains[core, at:end] = gains[run]
            pointers[core, 0] = end
        size = max(len(rows), 1)
        geometries.append(
            TableGeometry(
                0, size, table.geometry.dim, row_offset, 0, len(features), len(table.features)
            )
        )
        features += table.features
        rows_of.append(rows - np.int32(table.geometry.row_offset))
        row_offset += round_up(size, 8)
    sums = [torch.zeros(table.num_embeddings, table.dim) for table in geometries]
    whole = Geometry(
        num_cores=1,
        num_local_cores=len(cores),
        num_stacks=1,
        tables=tuple(geometries),
        features=tuple(features),
    )
    buffers = [
        torch.from_numpy(array.reshape(-1)) for array in (pointers, new_ids, new_samples, new_gains)
    ]
    for limit in sorted({table.max_gradient for table in tables}):
        chosen = [index for index, table in enumerate(tables) if table.max_gradient == limit]
        ops.sparse_dense_matmul_update_(
            grad,
            buffers,
            [sums[index] for index in chosen],
            [],
            torch.full((len(chosen), 1), -1.0),
            whole.select(chosen).encode(),
            "sgd",
            limit,
        )
    return [
        RowSums(rows=rows, sums=table[: len(rows)])
        for rows, table in zip(rows_of, sums, strict=True)
    ]
