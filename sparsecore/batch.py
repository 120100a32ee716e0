"""What the preprocessor makes of one batch: named arrays per stack, and what it observed.

Shape legend: C local source cores, P partitions (cores of all devices), N slots of all local cores,
T tables, F features; "stack order" as in `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
TableArray = npt.NDArray[np.float32] | npt.NDArray[np.float16]
"""Weights of a table."""

PAD_ID = 2**31 - 1
"""Row and sample of a padding slot; its gain is NaN."""


def pointers_per_core(num_cores: int) -> int:
    """Row pointers of one source core: one a partition, at least 8."""
    return max(num_cores, 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackBuffers:
    """One stack's ids, packed for the SparseCore.

    Local core c owns row_pointers [c * max(P, 8), (c + 1) * max(P, 8)) and slots
    [c * N / C, (c + 1) * N / C). Its partition p fills the slots from the last pointer, rounded up
    to 8, to row_pointers[p], relative to the core's first slot; the slots up to the next multiple
    of 8 are padding. What is behind a core's last partition is undefined.
    """

    row_pointers: Int32Array  # (C * max(P, 8),)
    embedding_ids: Int32Array  # (N,) row of the stack on the partition's core
    sample_ids: Int32Array  # (N,) row of the core's stacked samples
    gains: Float32Array  # (N,) factor of the row in the sample


def views_of(block: Int32Array, sizes: Iterable[tuple[int, int]]) -> tuple[StackBuffers, ...]:
    """The buffers of all stacks, one behind the other in `block`.

    `sizes` has the row pointers and the slots (N) of each stack.

    >>> (stack,) = views_of(np.arange(14, dtype=np.int32), [(8, 2)])
    >>> stack.embedding_ids, stack.sample_ids
    (array([8, 9], dtype=int32), array([10, 11], dtype=int32))
    """
    stacks = []
    begin = 0
    for num_pointers, num_slots in sizes:
        ids = begin + num_pointers
        samples = ids + num_slots
        gains = samples + num_slots
        end = gains + num_slots
        stacks.append(
            StackBuffers(
                row_pointers=block[begin:ids],
                embedding_ids=block[ids:samples],
                sample_ids=block[samples:gains],
                gains=block[gains:end].view(np.float32),
            )
        )
        begin = end
    return tuple(stacks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stats:
    """What a batch needed. Maxima are over the local source cores, ids counted after dedup."""

    max_ids: Int32Array  # (num_stacks, P) ids that go to one partition
    max_unique_ids: Int32Array  # (num_stacks, P) distinct rows among them
    required_slots: npt.NDArray[
        np.int64
    ]  # (num_stacks, C) slots of a core, partitions rounded up to 8
    table_max_ids: Int32Array  # (T,) stack order; over partitions too
    table_max_unique_ids: Int32Array  # (T,)
    num_invalid: npt.NDArray[np.int64]  # (F,) stack order; ids that were clamped or dropped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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

    def with_block(self, block: Int32Array) -> SparseBatch:
        """This batch over a copy of its block elsewhere, e.g. in pinned memory."""
        return replace(self, block=block, stacks=views_of(block, self._sizes()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled field by field, every buffer would travel twice and no longer be a view.
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stacks"}
        return _restore, (self._sizes(), rest)

    def _sizes(self) -> list[tuple[int, int]]:
        return [(stack.row_pointers.size, stack.embedding_ids.size) for stack in self.stacks]


def _restore(sizes: list[tuple[int, int]], rest: dict[str, Any]) -> SparseBatch:
    return SparseBatch(stacks=views_of(rest["block"], sizes), **rest)
