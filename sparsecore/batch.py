"""What the preprocessor makes of one batch: named arrays per stack, and what it observed.

Shape legend: C local source cores, P partitions (cores of all devices), N slots of all local cores,
T tables, F features; "stack order" as in `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

PAD_ID = 2**31 - 1
"""Row and sample of a padding slot; its gain is NaN."""


def pointers_per_core(num_cores: int) -> int:
    """Row pointers of one source core: one a partition, at least 8."""
    return max(num_cores, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackBuffers:
    """One stack's ids, packed for the SparseCore.

    Local core c owns row_pointers [c * max(P, 8), (c + 1) * max(P, 8)) and slots
    [c * N / C, (c + 1) * N / C). Its partition p fills the slots from the last pointer, rounded up
    to 8, to row_pointers[p], relative to the core's first slot; the slots up to the next multiple
    of 8 are padding.
    """

    row_pointers: Int32Array  # (C * max(P, 8),)
    embedding_ids: Int32Array  # (N,) row of the stack on the partition's core
    sample_ids: Int32Array  # (N,) row of the core's stacked samples
    gains: Float32Array  # (N,) factor of the row in the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a batch needed. Maxima are over the local source cores, ids counted after dedup."""

    max_ids: Int32Array  # (num_stacks, P) ids that go to one partition
    max_unique_ids: Int32Array  # (num_stacks, P) distinct rows among them
    required_slots: Int32Array  # (num_stacks, C) slots of a core, partitions rounded up to 8
    table_max_ids: Int32Array  # (T,) stack order; over partitions too
    table_max_unique_ids: Int32Array  # (T,)
    num_invalid: npt.NDArray[np.int64]  # (F,) stack order; ids that were clamped or dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseBatch:
    """One batch, preprocessed. All buffers are views of `block`, so that one copy moves them."""

    stacks: tuple[StackBuffers, ...]
    block: Int32Array
    batch_size: int
    num_samples: tuple[int, ...]  # (F,) stack order: batch_size, or the ids of a sequence feature
    samples_per_core: tuple[int, ...]  # (F,) stack order: rows of a core, with padding
    lengths: npt.NDArray[np.int32] | npt.NDArray[np.int64] | None
    """(F, B) in config order when the layout has sequence features, else None."""
    stats: Stats
    fingerprint: str  # of the layout
