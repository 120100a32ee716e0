"""The typed face of the C++ extension."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class ThreadPool:
    """Worker threads that keep their scratch between batches."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Partition:
    """What one batch asks of the buffers.

    Legend: F features and T tables in stack order, C local cores, P partitions.

    Attributes:
        samples_per_core: (F) samples of each feature on one core, padded.
        num_samples: (F) samples of each feature on all local cores.
        ids: (num_stacks, C, P) distinct (row, sample) pairs that each core sends to each partition.
        unique_ids: (num_stacks, C, P) distinct rows among them.
        table_max_ids: (T) the largest number of pairs of one table in a partition of a core.
        table_max_unique_ids: (T) the same of its rows.
        num_invalid: (F) ids that were clamped or dropped.
        error: None, or what is wrong with the KJT; everything else is then unspecified:
            ("length", KJT column, sample, position in lengths, length),
            ("offset", KJT column, sample, position in offsets, offset),
            ("total", -1, -1, number of bags, ids that the bags ask for),
            ("id", feature in stack order, sample, position inside the bag, id).
            The first one in KJT order; lengths and offsets are looked at before ids.
    """

    @property
    def samples_per_core(self) -> npt.NDArray[np.int64]: ...
    @property
    def num_samples(self) -> npt.NDArray[np.int64]: ...
    @property
    def ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def unique_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def table_max_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def table_max_unique_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def num_invalid(self) -> npt.NDArray[np.int64]: ...
    @property
    def error(self) -> tuple[str, int, int, int, int] | None: ...

class Partitioner:
    """Sorts, merges and packs KJT batches for one layout; keeps its scratch between them.

    Args:
        tables: (T, 7) stack, num_embeddings, row_offset, rotation, first_feature, num_features,
            block_rows.
        combiners: (F) 0 sum, 1 mean, 2 sqrtn, 3 none (sequence).
        num_stacks, num_cores, num_local_cores: see sparsecore/layout.py.
        pool: shared with whoever likes.
        sequence_samples_per_core: (F) the least samples of a core for each sequence feature; None
            for what a batch needs.

    Raises:
        ValueError: tables that contradict each other, or rows that int32 cannot number.
    """

    def __init__(
        self,
        tables: npt.NDArray[np.int64],
        combiners: npt.NDArray[np.int32],
        num_stacks: int,
        num_cores: int,
        num_local_cores: int,
        pool: ThreadPool,
        sequence_samples_per_core: npt.NDArray[np.int64] | None = None,
    ) -> None: ...
    def partition(
        self,
        values: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int32] | npt.NDArray[np.int64] | None,
        offsets: npt.NDArray[np.int32] | npt.NDArray[np.int64] | None,
        weights: npt.NDArray[np.float32] | None,
        key_of_feature: npt.NDArray[np.int32],
        num_keys: int,
        batch_size: int,
        padded_batch_size: int,
        id_policy: int,
    ) -> Partition:
        """Sorts and merges one batch; nothing of it is borrowed after the return.

        Args:
            values: (N) ids, at most 2^31 - 1.
            lengths: (num_keys * batch_size), or
            offsets: (num_keys * batch_size + 1) from 0 to N.
            weights: (N) or None.
            key_of_feature: (F) KJT column of each feature.
            num_keys: columns of the KJT.
            batch_size: samples in it.
            padded_batch_size: a multiple of the local cores, at least batch_size.
            id_policy: ids outside their table 0 are an error, 1 become row 0, 2 leave their bag (in
                a sequence the position stays, without an entry).

        Raises:
            TypeError, ValueError: arrays of the wrong dtype, shape or size; more than int32 can
                number. What is wrong with the data comes back as Partition.error.
        """

    def pack(
        self,
        row_pointers: list[npt.NDArray[np.int32]],
        embedding_ids: list[npt.NDArray[np.int32]],
        sample_ids: list[npt.NDArray[np.int32]],
        gains: list[npt.NDArray[np.float32]],
    ) -> None:
        """Writes the last partition() into one array of each kind per stack, as often as wanted.

        Core c has pointers [c * max(P, 8), ...) and slots [c * N / C, (c + 1) * N / C); slots after
        its last aligned partition keep what they held.

        Raises:
            TypeError, ValueError: arrays of the wrong dtype or size, too few slots, no partition()
                that succeeded. Nothing is written then.
        """

class RowOps:
    """Lookup and fused update straight from packed buffers."""

    def __init__(self, pool: ThreadPool) -> None: ...
    def lookup(
        self,
        buffers: Sequence[npt.NDArray[Any]],
        tables: Sequence[npt.NDArray[np.float32] | npt.NDArray[np.float16]],
        geometry: Sequence[int],
        out: npt.NDArray[np.float32],
    ) -> None: ...
    def update(
        self,
        grad: npt.NDArray[np.float32],
        buffers: Sequence[npt.NDArray[Any]],
        tables: Sequence[npt.NDArray[np.float32] | npt.NDArray[np.float16]],
        slots: Sequence[Sequence[npt.NDArray[np.float32]]],
        operands: npt.NDArray[np.float32],
        geometry: Sequence[int],
        rule: str,
        max_gradient: float = 0.0,
    ) -> None: ...

def number_samples(
    pool: ThreadPool,
    row_pointers: npt.NDArray[np.int32],
    embedding_ids: npt.NDArray[np.int32],
    sample_ids: npt.NDArray[np.int32],
    table_rows: npt.NDArray[np.int32],
    num_samples: int,
    num_partitions: int,
    numbers: npt.NDArray[np.int32],
    samples: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int64],
) -> None:
    """Numbers the distinct samples of each partition in the order in which its slots name them.

    Args:
        pool: threads.
        row_pointers: (P) or more, of one source core.
        embedding_ids: (N) sorted in each partition.
        sample_ids: (N)
        table_rows: (T) first row of each table, ascending.
        num_samples: all sample_ids are below it.
        num_partitions: P.
        numbers: out (N), the number of each slot's sample.
        samples: out (N), from a partition's first slot on its distinct samples.
        counts: out (P, T), how many of them each table has.

    Raises:
        ValueError: sizes that do not fit each other, or buffers that contradict themselves.
    """

def gather_vectors(
    pool: ThreadPool,
    spread: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    divisor: float,
    packed: npt.NDArray[np.float32],
) -> None:
    """Packed = spread / divisor, vector by vector.

    Run r has counts[r] vectors of widths[r] floats, which follow each other in `packed`; vector i
    starts at float offsets[i] of `spread`.

    Raises:
        ValueError: the runs do not fit the buffers; nothing is written.
    """

def add_vectors(
    pool: ThreadPool,
    packed: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    spread: npt.NDArray[np.float32],
) -> None:
    """Spread += packed, vector by vector, as in `gather_vectors`. No two vectors may overlap.

    Raises:
        ValueError: the runs do not fit the buffers; nothing is written.
    """

def rules() -> list[str]:
    """Names of the optimizer rules that have a fused update."""

def instruction_sets() -> list[str]:
    """What this machine runs, the widest first."""

def instruction_set() -> str:
    """The instruction set in use."""

def set_instruction_set(name: str) -> None:
    """Use one of instruction_sets() from now on, in the whole process."""
