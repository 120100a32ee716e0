"""The buffer format once more, in slow plain NumPy: the oracle of the native preprocessor.

Any number of cores, pooled and sequence features, plain mode (no minibatches).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_tpu.sparsecore import Combiner, Layout
from torchrec_tpu.sparsecore.batch import SparseBatch

PAD = np.iinfo(np.int32).max
ZERO = np.float32(0)
ONE = np.float32(1)


@dataclass
class Arrays:
    """A KJT's arrays; bags of key k are lengths[k * B : (k + 1) * B]."""

    keys: list[str]
    values: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None

    @property
    def batch_size(self):
        return len(self.lengths) // len(self.keys)

    def bags(self, key):
        """(ids, weights or None) of every sample."""
        column = self.keys.index(key)
        ends = np.cumsum(self.lengths, dtype=np.int64)
        for i in range(column * self.batch_size, (column + 1) * self.batch_size):
            at = slice(ends[i] - self.lengths[i], ends[i])
            weights = None if self.weights is None else self.weights[at]
            yield self.values[at].tolist(), weights

    @property
    def offsets(self):
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return np.concatenate([[0], ends]).astype(self.lengths.dtype)


@dataclass
class StackExpected:
    row_pointers: np.ndarray
    slots: list[np.ndarray]  # embedding ids, sample ids, gains as int32 bits; (C, slots) each
    is_written: np.ndarray  # (C, slots): bytes that the format specifies
    ids: np.ndarray  # (C, P)
    unique_ids: np.ndarray  # (C, P)


@dataclass
class Expected:
    stacks: list[StackExpected]
    num_samples: list[int]
    samples_per_core: list[int]
    table_max_ids: list[int]
    table_max_unique_ids: list[int]
    num_invalid: list[int]
    lengths: np.ndarray | None

    @property
    def required_slots(self):
        return [(-(-stack.ids // 8) * 8).sum(axis=1) for stack in self.stacks]


def gains_of(combiner, num_ids, weights):
    """Gain of each occurrence in a bag; float32, one operation at a time."""
    if weights is None or combiner is Combiner.NONE:
        gain = ONE
        if combiner is Combiner.MEAN and num_ids:
            gain = ONE / np.float32(num_ids)
        if combiner is Combiner.SQRTN and num_ids:
            gain = ONE / np.sqrt(np.float32(num_ids))
        return [gain] * num_ids
    if combiner is Combiner.SUM:
        return list(weights)
    total = ZERO
    for weight in weights:
        if combiner is Combiner.MEAN:
            total = np.float32(total + weight)
        else:  # the square in double, the sum in float
            with np.errstate(over="ignore"):
                total = np.float32(np.float64(total) + np.float64(weight) ** 2)
    if combiner is Combiner.SQRTN:
        total = np.sqrt(total)
    if total == 0:
        return [ZERO] * num_ids
    return [np.float32(weight / total) for weight in weights]


def expect(
    layout: Layout,
    arrays: Arrays,
    *,
    batch_size: int | None = None,
    id_policy: str = "clamp",
    slots_per_core: list[int] | None = None,
) -> Expected:
    """What the preprocessor must make of `arrays`. `batch_size` is the static one."""
    P, C = layout.num_cores, layout.num_local_cores
    padded = -(-(arrays.batch_size if batch_size is None else batch_size) // C)
    result = Expected([], [], [], [], [], [], None)
    for s, stack in enumerate(layout.stacks):
        # entries[core][partition][local row, sample] = gain
        entries = [[{} for _ in range(P)] for _ in range(C)]
        table_of_row = {}
        sample_offset = 0
        for feature in stack.features:
            stacked = layout.stacked_table(feature.table)
            rows = stacked.table.num_embeddings
            occurrences = []  # (sample, id, gain)
            num_invalid = 0
            is_sequence = feature.combiner is Combiner.NONE
            num_samples = 0 if is_sequence else arrays.batch_size
            for bag, (ids, weights) in enumerate(arrays.bags(feature.key)):
                num_invalid += sum(not 0 <= i < rows for i in ids)
                kept, kept_weights = [], []
                for position, row_id in enumerate(ids):
                    is_valid = 0 <= row_id < rows
                    if is_valid or id_policy == "clamp":
                        sample = num_samples + position if is_sequence else bag
                        kept.append((sample, row_id if is_valid else 0))
                        kept_weights += [] if weights is None else [weights[position]]
                if is_sequence:
                    num_samples += len(ids)
                gains = gains_of(
                    feature.combiner, len(kept), None if weights is None else kept_weights
                )
                occurrences += [(*one, gain) for one, gain in zip(kept, gains, strict=True)]
            per_core = -(-num_samples // C) if is_sequence else padded
            for sample, row_id, gain in occurrences:
                owner, row = layout.home_of(feature.table, row_id)
                place = row, sample_offset + sample % per_core
                partition = entries[sample // per_core][owner]
                with np.errstate(over="ignore", invalid="ignore"):
                    # `in` and not +=: a first gain of -0 stays -0
                    partition[place] = partition[place] + gain if place in partition else gain
                table_of_row[row] = feature.table
            sample_offset += per_core
            result.num_samples.append(num_samples)
            result.samples_per_core.append(per_core)
            result.num_invalid.append(num_invalid)

        ids = np.array([[len(p) for p in core] for core in entries]).reshape(C, P)
        unique_ids = np.array([[len({row for row, _ in p}) for p in core] for core in entries])
        required = (-(-ids // 8) * 8).sum(axis=1)
        slots = int(required.max()) if slots_per_core is None else slots_per_core[s]
        pointers = np.zeros((C, max(P, 8)), np.int32)
        buffers = [np.zeros((C, slots), np.int32) for _ in range(3)]
        is_written = np.zeros((C, slots), bool)
        for c, core in enumerate(entries):
            at = 0
            for p, partition in enumerate(core):
                for (row, sample), gain in sorted(partition.items(), key=lambda item: item[0]):
                    bits = np.float32(gain).view(np.int32)
                    buffers[0][c, at], buffers[1][c, at], buffers[2][c, at] = row, sample, bits
                    at += 1
                pointers[c, p] = at
                while at % 8:
                    buffers[0][c, at] = buffers[1][c, at] = PAD
                    buffers[2][c, at] = 0x7FC00000
                    at += 1
            pointers[c, P:] = at
            is_written[c, :at] = True
        result.stacks.append(
            StackExpected(pointers.ravel(), buffers, is_written, ids, unique_ids.reshape(C, P))
        )
        for stacked in stack.tables:
            own = [
                [row for row, _ in partition if table_of_row[row] == stacked.table.name]
                for core in entries
                for partition in core
            ]
            result.table_max_ids.append(max(map(len, own)))
            result.table_max_unique_ids.append(max(len(set(rows)) for rows in own))
    if any(feature.combiner is Combiner.NONE for feature in layout.features):
        columns = [arrays.keys.index(feature.key) for feature in layout.features]
        result.lengths = arrays.lengths.reshape(len(arrays.keys), -1)[columns]
    return result


def assert_equal(batch: SparseBatch, expected: Expected, layout: Layout) -> None:
    """Bit by bit, in every byte that the format specifies."""
    for stack, actual, wanted in zip(layout.stacks, batch.stacks, expected.stacks, strict=True):
        np.testing.assert_array_equal(actual.row_pointers, wanted.row_pointers, stack.name)
        for name, buffer, slots in zip(
            ("embedding_ids", "sample_ids", "gains"),
            (actual.embedding_ids, actual.sample_ids, actual.gains.view(np.int32)),
            wanted.slots,
            strict=True,
        ):
            assert buffer.shape == (slots.size,), (stack.name, name)
            np.testing.assert_array_equal(
                buffer.reshape(slots.shape)[wanted.is_written],
                slots[wanted.is_written],
                f"{stack.name} {name}",
            )
    stats = batch.stats
    for s in range(len(layout.stacks)):
        np.testing.assert_array_equal(stats.max_ids[s], expected.stacks[s].ids.max(axis=0))
        np.testing.assert_array_equal(
            stats.max_unique_ids[s], expected.stacks[s].unique_ids.max(axis=0)
        )
        np.testing.assert_array_equal(stats.required_slots[s], expected.required_slots[s])
    assert stats.table_max_ids.tolist() == expected.table_max_ids
    assert stats.table_max_unique_ids.tolist() == expected.table_max_unique_ids
    assert stats.num_invalid.tolist() == expected.num_invalid
    assert list(batch.num_samples) == expected.num_samples
    assert list(batch.samples_per_core) == expected.samples_per_core
    if expected.lengths is None:
        assert batch.lengths is None
    else:
        np.testing.assert_array_equal(batch.lengths, expected.lengths)
