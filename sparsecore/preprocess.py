"""KJT arrays in, packed SparseCore buffers out. The work is native; checks and memory are here.

Shape legend: K keys of the KJT, B samples, F features, C local source cores, P partitions.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore._native import Partitioner, ThreadPool
from torchrec_tpu.sparsecore.batch import (
    PAD_ID,
    Float32Array,
    Int32Array,
    SparseBatch,
    Stats,
    pointers_per_core,
    views_of,
)
from torchrec_tpu.sparsecore.errors import (
    BatchLayoutError,
    BatchSizeError,
    CapacityError,
    DuplicateKeyError,
    IdRangeError,
    KjtError,
    LayoutError,
    MissingKeyError,
    WeightsError,
)
from torchrec_tpu.sparsecore.layout import Combiner, Layout, round_up

if TYPE_CHECKING:
    from torchrec_tpu.sparsecore._native import Partition
    from torchrec_tpu.sparsecore.capacity import Capacity

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
IdPolicy = Literal["error", "clamp", "drop"]

_POLICIES: Mapping[str, int] = {"error": 0, "clamp": 1, "drop": 2}
_COMBINERS: Mapping[Combiner, int] = {
    Combiner.SUM: 0,
    Combiner.MEAN: 1,
    Combiner.SQRTN: 2,
    Combiner.NONE: 3,
}


class Preprocessor:
    """Turns the arrays of a KJT into one SparseBatch.

    Thread-safe; calls take turns. Every error is raised before anything is written, and the next
    call works as if the failed one had not been.

    Args:
        layout: where rows live.
        batch_size: static batch size of this process: smaller batches are padded to it, larger ones
            refused. None: each batch is padded to a multiple of the local cores.
        capacity: limits by stack name (`capacity.Observation.suggest`); the buffers of these stacks
            have a fixed size. Stacks without one get the size that the batch needs.
        num_threads: worker threads; the CPUs of this process when None.
        id_policy: what to do with ids outside their table: "error" raises IdRangeError, "clamp"
            reads row 0 (as FBGEMM does), "drop" leaves them out of their bag, and turns them into
            zeros in a sequence. Clamped and dropped ids are counted in `Stats.num_invalid`.
        is_weighted: whether bags are weighted. Sequences never are.
        sequence_ids: KJT key -> the most ids of this process, for sequence features whose samples
            shall be laid out alike in every batch, as a compiled program needs it.

    Raises:
        LayoutError: `capacity` names a stack that does not exist, or `sequence_ids` a feature that
            is no sequence.
        BatchSizeError: batch_size is not positive, or more than int32 can index.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        batch_size: int | None = None,
        capacity: Mapping[str, Capacity] | None = None,
        num_threads: int | None = None,
        id_policy: IdPolicy = "error",
        is_weighted: bool = False,
        sequence_ids: Mapping[str, int] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise BatchSizeError(f"batch_size={batch_size} must be >= 1, or None for any")
        if id_policy not in _POLICIES:
            raise ValueError(f"id_policy={id_policy!r} is not one of {list(_POLICIES)}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads={num_threads} must be >= 1, or None for all CPUs")
        padded_batch_size = round_up(batch_size or 0, layout.num_local_cores)
        for stack in layout.stacks:
            num_bags = sum(f.combiner is not Combiner.NONE for f in stack.features)
            if padded_batch_size // layout.num_local_cores * num_bags > PAD_ID:
                raise BatchSizeError(
                    f"batch_size={batch_size}: stack {stack.name!r} has more samples on one core "
                    "than int32 can index"
                )
        names = [stack.name for stack in layout.stacks]
        capacity = dict(capacity or {})
        if unknown := [name for name in capacity if name not in names]:
            raise LayoutError(f"capacity is given for unknown stacks {unknown}; stacks: {names}")

        sequence_ids = dict(sequence_ids or {})
        sequences = {f.key for f in layout.features if f.combiner is Combiner.NONE}
        if unknown := sorted(sequence_ids.keys() - sequences):
            raise LayoutError(
                f"sequence_ids are given for {unknown}, the sequence features are "
                f"{sorted(sequences)}"
            )

        self.layout = layout
        self.sequence_ids: Mapping[str, int] = sequence_ids
        self.batch_size = batch_size
        self.capacity: Mapping[str, Capacity] = capacity
        self.id_policy: IdPolicy = id_policy
        self.is_weighted = is_weighted
        self._lock = threading.Lock()
        self._blocks = BlockPool()
        self._columns: tuple[tuple[str, ...], npt.NDArray[np.int32]] | None = None
        self._is_warned = False
        self._has_sequences = any(f.combiner is Combiner.NONE for f in layout.features)
        self._partitioner = Partitioner(
            _native_tables(layout),
            np.array([_COMBINERS[f.combiner] for f in layout.stack_order_features], np.int32),
            len(layout.stacks),
            layout.num_cores,
            layout.num_local_cores,
            ThreadPool(_num_cpus() if num_threads is None else num_threads),
            np.array(
                [
                    -(-sequence_ids.get(f.key, 0) // layout.num_local_cores)
                    for f in layout.stack_order_features
                ],
                np.int64,
            ),
        )

    def __call__(
        self,
        keys: Sequence[str],
        values: IntArray,
        *,
        lengths: IntArray | None = None,
        offsets: IntArray | None = None,
        weights: Float32Array | None = None,
        out: SparseBatch | None = None,
    ) -> SparseBatch:
        """Packs one batch.

        Args:
            keys: (K) KJT keys; those that no table looks up are ignored.
            values: (N) ids, int32 or int64, key by key, sample by sample. Read without a copy.
            lengths: (K * B) ids of each bag.
            offsets: (K * B + 1) first id of each bag, then N. One of lengths and offsets is enough.
            weights: (N) float32, for is_weighted=True.
            out: a batch of this layout whose memory is overwritten; it must be large enough.
                None: memory of an earlier batch that nobody holds any more, or new memory.

        Raises:
            MissingKeyError, DuplicateKeyError: by their names.
            KjtError: arrays of a wrong type or shape, or that contradict each other.
            WeightsError: weights are missing, not float32, or not finite.
            BatchSizeError: more samples than `batch_size`, or ids than `sequence_ids`.
            IdRangeError: an id outside its table, with id_policy="error".
            CapacityError: a stack does not fit its capacity.
            BatchLayoutError: `out` is of another layout or too small.
        """
        if out is not None and out.fingerprint != self.layout.fingerprint:
            raise BatchLayoutError("out= is a batch of another layout; drop it")
        with self._lock:
            batch_size, lengths, partition = self._partition(
                keys, values, lengths, offsets, weights
            )
            stats = _stats(partition)
            sizes = self._sizes(partition, stats)
            num_words = sum(num_pointers + 3 * num_slots for num_pointers, num_slots in sizes)
            if out is None:
                block = self._blocks.take(num_words)
            elif out.block.size >= num_words:
                block = out.block[:num_words]
            else:
                raise BatchLayoutError(
                    f"out= has {out.block.size} words, this batch needs {num_words}; give a "
                    "capacity, which fixes the sizes, or drop out="
                )
            stacks = views_of(block, sizes)
            self._partitioner.pack(
                [stack.row_pointers for stack in stacks],
                [stack.embedding_ids for stack in stacks],
                [stack.sample_ids for stack in stacks],
                [stack.gains for stack in stacks],
            )
            return SparseBatch(
                stacks=stacks,
                block=block,
                batch_size=batch_size,
                num_samples=tuple(partition.num_samples.tolist()),
                samples_per_core=tuple(partition.samples_per_core.tolist()),
                lengths=lengths,
                stats=stats,
                fingerprint=self.layout.fingerprint,
            )

    def measure(
        self,
        keys: Sequence[str],
        values: IntArray,
        *,
        lengths: IntArray | None = None,
        offsets: IntArray | None = None,
        weights: Float32Array | None = None,
    ) -> Stats:
        """What one batch needs; capacities are not enforced and nothing is packed.

        Args and errors are those of a call, but for CapacityError.
        """
        with self._lock:
            return _stats(self._partition(keys, values, lengths, offsets, weights)[2])

    def _partition(
        self,
        keys: Sequence[str],
        values: IntArray,
        lengths: IntArray | None,
        offsets: IntArray | None,
        weights: Float32Array | None,
    ) -> tuple[int, IntArray | None, Partition]:
        """(B, lengths of sequence layouts, the sorted ids). What follows only reads the latter."""
        keys = tuple(keys)
        column_of_feature = self._columns_of(keys)
        values = _ids("values", values)
        lengths = None if lengths is None else _ids("lengths", lengths)
        offsets = None if offsets is None else _ids("offsets", offsets)
        batch_size = _batch_size(len(keys), lengths, offsets)
        if self.batch_size is not None and batch_size > self.batch_size:
            raise BatchSizeError(
                f"batch has {batch_size} samples, the static batch size is {self.batch_size}; "
                "split the batch or raise batch_size"
            )
        if lengths is not None and offsets is not None:
            if offsets[0] != 0 or not np.array_equal(np.diff(offsets), lengths):
                raise KjtError("lengths and offsets are both given and contradict each other")
            offsets = None
        weights = self._weights(weights, values)
        padded_batch_size = round_up(
            batch_size if self.batch_size is None else self.batch_size, self.layout.num_local_cores
        )
        partition = self._partitioner.partition(
            values,
            lengths,
            offsets,
            weights,
            column_of_feature,
            len(keys),
            batch_size,
            padded_batch_size,
            _POLICIES[self.id_policy],
        )
        if partition.error is not None:
            self._raise(keys, len(values), *partition.error)
        if weights is not None:
            self._check_finite(keys, column_of_feature, batch_size, lengths, offsets, weights)
        if not self._has_sequences:
            return batch_size, None, partition
        if lengths is None:
            assert offsets is not None
            lengths = np.diff(offsets)
        columns = [keys.index(feature.key) for feature in self.layout.features]
        for feature, num_ids in zip(
            self.layout.stack_order_features, partition.num_samples.tolist(), strict=True
        ):
            if num_ids > self.sequence_ids.get(feature.key, num_ids):
                raise BatchSizeError(
                    f"feature {feature.key!r} has {num_ids} ids, sequence_ids allows "
                    f"{self.sequence_ids[feature.key]}; split the batch or raise the limit"
                )
        return batch_size, lengths.reshape(len(keys), batch_size)[columns], partition

    def _columns_of(self, keys: tuple[str, ...]) -> npt.NDArray[np.int32]:
        """(F) the KJT column of each feature in stack order."""
        if self._columns is not None and keys == self._columns[0]:  # nearly always
            return self._columns[1]
        if not all(isinstance(key, str) for key in keys):
            raise KjtError(f"keys must be strings, got {list(keys)}")
        if repeated := [key for key, count in Counter(keys).items() if count > 1]:
            raise DuplicateKeyError(f"KJT has keys more than once: {repeated}")
        column_of = {key: column for column, key in enumerate(keys)}
        wanted = dict.fromkeys(feature.key for feature in self.layout.features)
        if missing := [key for key in wanted if key not in column_of]:
            raise MissingKeyError(f"KJT has no keys {missing}; it has {list(keys)}")
        columns = np.array([column_of[f.key] for f in self.layout.stack_order_features], np.int32)
        self._columns = keys, columns
        return columns

    def _weights(self, weights: Any, values: IntArray) -> Float32Array | None:
        if not self.is_weighted:
            if weights is not None and not self._is_warned:
                self._is_warned = True
                warnings.warn(
                    "the KJT has weights but is_weighted=False: they are ignored",
                    UserWarning,
                    stacklevel=4,
                )
            return None
        if weights is None:
            raise WeightsError("is_weighted=True but the KJT has no weights")
        if not isinstance(weights, np.ndarray) or weights.dtype != np.float32:
            raise WeightsError(f"weights must be a float32 array, got {_describe(weights)}")
        if weights.shape != values.shape:
            raise KjtError(f"weights have shape {weights.shape}, values have {values.shape}")
        return np.require(weights, requirements=["C", "A"])

    def _check_finite(
        self,
        keys: tuple[str, ...],
        column_of_feature: npt.NDArray[np.int32],
        batch_size: int,
        lengths: IntArray | None,
        offsets: IntArray | None,
        weights: Float32Array,
    ) -> None:
        # A sum with an inf or a NaN in it is never finite: one pass is all that good batches pay.
        with np.errstate(all="ignore"):
            if np.isfinite(weights.sum()):
                return
        if offsets is None:
            assert lengths is not None
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        used = sorted(
            int(column)
            for column, feature in zip(
                column_of_feature, self.layout.stack_order_features, strict=True
            )
            if feature.combiner is not Combiner.NONE
        )
        for column in used:
            begin, end = offsets[column * batch_size], offsets[(column + 1) * batch_size]
            bad = np.flatnonzero(~np.isfinite(weights[begin:end]))
            if bad.size:
                at = int(begin + bad[0])
                bag = int(np.searchsorted(offsets, at, side="right")) - 1
                raise WeightsError(
                    f"feature {keys[column]!r}: sample {bag - column * batch_size} has weight "
                    f"{weights[at]} at position {at - int(offsets[bag])}; weights must be finite"
                )

    def _raise(
        self,
        keys: tuple[str, ...],
        num_values: int,
        kind: str,
        index: int,
        sample: int,
        position: int,
        value: int,
    ) -> NoReturn:
        """Raises the typed form of what the native code found."""
        if kind == "id":
            feature = self.layout.stack_order_features[index]
            raise IdRangeError(
                feature=feature.key,
                table=feature.table,
                sample=sample,
                position=position,
                value=value,
                num_embeddings=self.layout.stacked_table(feature.table).table.num_embeddings,
            )
        if kind == "length":
            raise KjtError(
                f"key {keys[index]!r}: sample {sample} has length {value}, not in 0..{num_values} "
                "(the number of values)"
            )
        if kind == "offset":
            raise KjtError(
                f"key {keys[index]!r}: offset {value} at position {position} (sample {sample}) is "
                f"out of order; offsets start at 0, never decrease and end at {num_values}, the "
                "number of values"
            )
        assert kind == "total", kind
        raise KjtError(f"lengths or offsets account for {value} ids, values have {num_values}")

    def _sizes(self, partition: Partition, stats: Stats) -> list[tuple[int, int]]:
        """Row pointers and slots of each stack, after the check of its capacity."""
        num_local_cores = self.layout.num_local_cores
        num_pointers = num_local_cores * pointers_per_core(self.layout.num_cores)
        slots_per_core = []
        for stack, ids, unique_ids, required in zip(
            self.layout.stacks,
            partition.ids,
            partition.unique_ids,
            stats.required_slots,
            strict=True,
        ):
            limit = self.capacity.get(stack.name)
            if limit is None:
                slots_per_core.append(int(required.max()))
                continue
            buffer_ids = limit.slots_per_core(self.layout.num_cores)
            for kind, observed, most in (
                ("ids", ids, limit.max_ids),
                ("unique ids", unique_ids, limit.max_unique_ids),
                ("buffer slots", required, buffer_ids),
            ):
                if observed.max() > most:
                    core, *target = np.unravel_index(int(observed.argmax()), observed.shape)
                    raise CapacityError(
                        stack=stack.name,
                        core=self.layout.first_local_core + int(core),
                        partition=int(target[0]) if target else None,
                        kind=kind,
                        observed=int(observed.max()),
                        limit=most,
                    )
            slots_per_core.append(buffer_ids)
        if max(slots_per_core) * num_local_cores > PAD_ID:
            raise BatchSizeError(
                f"a stack needs {max(slots_per_core):,} slots on each of {num_local_cores} cores, "
                "more than int32 can index; split the batch"
            )
        return [(num_pointers, num_local_cores * slots) for slots in slots_per_core]


class BlockPool:
    """Memory blocks that come back by themselves when the last view of them is gone.

    >>> pool = BlockPool()
    >>> first = pool.take(10)
    >>> address, view = first.ctypes.data, first[2:4]
    >>> del first
    >>> second = pool.take(10)
    >>> second.ctypes.data == address  # `view` still needs it
    False
    >>> del view
    >>> pool.take(10).ctypes.data == address
    True
    """

    MAX_FREE = 4

    def __init__(self) -> None:
        self._free: deque[Int32Array] = deque()

    def take(self, num_words: int) -> Int32Array:
        """An int32 array of `num_words`, 64-byte aligned, content undefined."""
        free = []
        while self._free:  # blocks may come back from any thread at any time; both ends are atomic
            free.append(self._free.popleft())
        free.sort(key=lambda memory: memory.size)
        fitting = (at for at, memory in enumerate(free) if memory.size >= num_words)
        at = next(fitting, None)
        if at is None:
            memory = _aligned(num_words + num_words // 8)  # room for the next batches
        else:
            memory = free.pop(at)
        self._free.extend(free[-self.MAX_FREE :])
        # NumPy views refer to the last array whose base is no array: through the memoryview that is
        # `whole`, so its death is the death of all views, and `memory` is free again.
        whole: Int32Array = np.frombuffer(memory.data, np.int32)
        weakref.finalize(whole, self._free.append, memory).atexit = False
        return whole[:num_words]


def _aligned(num_words: int) -> Int32Array:
    words = np.empty(num_words + 16, np.int32)
    first = -words.ctypes.data % 64 // 4
    return words[first : first + num_words]


def _native_tables(layout: Layout) -> npt.NDArray[np.int64]:
    """(T, 7), the columns that `_native.Partitioner` takes."""
    rows = []
    first_feature = 0
    for index, stack in enumerate(layout.stacks):
        for place in stack.tables:
            table, num_features = place.table, len(place.table.features)
            rows.append(
                (
                    index,
                    table.num_embeddings,
                    place.row_offset,
                    place.rotation,
                    first_feature,
                    num_features,
                    place.block_rows,
                )
            )
            first_feature += num_features
    return np.array(rows, np.int64)


def _stats(partition: Partition) -> Stats:
    ids, unique_ids = partition.ids, partition.unique_ids
    return Stats(
        max_ids=ids.max(axis=1),
        max_unique_ids=unique_ids.max(axis=1),
        required_slots=((ids.astype(np.int64) + 7) // 8 * 8).sum(axis=2),
        table_max_ids=partition.table_max_ids,
        table_max_unique_ids=partition.table_max_unique_ids,
        num_invalid=partition.num_invalid,
    )


def _ids(name: str, array: Any) -> IntArray:
    """`array`, when it is a vector of native int32 or int64."""
    if (
        not isinstance(array, np.ndarray)
        or array.dtype not in (np.int32, np.int64)
        or array.ndim != 1
    ):
        raise KjtError(
            f"{name} must be a one-dimensional int32 or int64 array, got {_describe(array)}"
        )
    if array.size > PAD_ID:
        raise KjtError(f"{name} has {array.size:,} elements, more than int32 can index")
    return np.require(array, requirements=["C", "A"])


def _describe(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype} of shape {array.shape}"
    return type(array).__name__


def _batch_size(num_keys: int, lengths: IntArray | None, offsets: IntArray | None) -> int:
    if lengths is None and offsets is None:
        raise KjtError("neither lengths nor offsets are given")
    for name, count in (
        ("lengths", None if lengths is None else lengths.size),
        ("offsets less the last", None if offsets is None else offsets.size - 1),
    ):
        if count is not None and (count < 0 or count % num_keys):
            raise KjtError(
                f"{count} {name} are not a multiple of {num_keys} keys: every key needs one per "
                "sample (a variable batch size per key is not supported)"
            )
    if lengths is not None:
        return lengths.size // num_keys
    assert offsets is not None
    return (offsets.size - 1) // num_keys


def _num_cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
