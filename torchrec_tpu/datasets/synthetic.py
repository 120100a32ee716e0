"""Seeded batches with the table sizes, bag lengths and skew that you choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from torchrec.datasets.utils import Batch

from torchrec_tpu.datasets.stream import BatchStream, IntArray, make_batch, mix


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHot:
    """One synthetic feature: a table of `num_embeddings` rows, `num_ids` ids in every bag."""

    key: str
    num_embeddings: int
    num_ids: int = 1


class Synthetic(BatchStream):
    """Seeded batches with multi-hot bags, skewed ids, and labels that can be learned.

    Ids follow a bounded power law: the k-th most popular row has a share close to k ** -exponent
    (0 is uniform), and popular rows are spread over the table. As in MLPerf's multi-hot data, the
    first id of a bag decides the others. A fixed random weight of every first id plus a
    linear function of the dense features gives the log-odds of the label.

    Args:
        features: one per KJT key, in order.
        num_dense: D; dense features are standard normal.
        batch_size: samples of a batch.
        num_batches: batches of an epoch; each epoch has new ones.
        exponent: skew of the ids, >= 0.
        seed: of everything; the labels' rule depends on nothing else.
        split: "train" and "test" draw different samples under one rule.
    """

    def __init__(
        self,
        features: Sequence[MultiHot],
        *,
        num_dense: int = 13,
        batch_size: int,
        num_batches: int,
        exponent: float = 1.05,
        seed: int = 0,
        split: Literal["train", "test"] = "train",
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed)
        if exponent < 0:
            raise ValueError(f"exponent={exponent}: must not be negative")
        if split not in ("train", "test"):
            raise ValueError(f'split={split!r}: must be "train" or "test"')
        self.features = tuple(features)
        self.exponent = exponent
        self.split = split
        self._num_dense = num_dense
        self._num_batches = num_batches
        rng = np.random.default_rng([seed, 0xD3])
        self._dense_weights_D = (rng.standard_normal(num_dense) / max(num_dense, 1) ** 0.5).astype(
            np.float32
        )
        self._salts_F = np.random.SeedSequence([seed, 0x5A]).generate_state(
            len(self.features), np.uint64
        )
        self._strides = [_coprime(feature.num_embeddings) for feature in self.features]

    @property
    def keys(self) -> tuple[str, ...]:
        """KJT keys, in order."""
        return tuple(feature.key for feature in self.features)

    @property
    def num_dense(self) -> int:
        """Width D of `dense_features`."""
        return self._num_dense

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self._num_batches * self.batch_size

    def batches(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch `start` on."""
        return (self._make(epoch, number) for number in range(start, self._num_batches))

    def _make(self, epoch: int, number: int) -> Batch:
        rng = np.random.default_rng([self.seed, self.split == "test", epoch, number])
        dense_BD = rng.standard_normal((self.batch_size, self._num_dense), np.float32)
        logit_B = dense_BD @ self._dense_weights_D
        values, lengths = [], []
        for index, feature in enumerate(self.features):
            ranks_B = _power_law(rng.random(self.batch_size), feature.num_embeddings, self.exponent)
            # Bag slot j > 0 takes the rank that a hash of (feature, first rank, j) picks.
            slots_J = np.arange(feature.num_ids, dtype=np.uint64)
            tags_BJ = (ranks_B.astype(np.uint64)[:, None] << np.uint64(16)) + slots_J
            tags_BJ ^= self._salts_F[index]
            hashed_BJ = mix(tags_BJ).astype(np.float64) / 2.0**64
            ranks_BJ = _power_law(hashed_BJ, feature.num_embeddings, self.exponent)
            ranks_BJ[:, 0] = ranks_B
            ids_BJ = ranks_BJ * self._strides[index] % feature.num_embeddings
            logit_B += (hashed_BJ[:, 0] * 2 - 1).astype(np.float32) * (
                2.0 / len(self.features) ** 0.5
            )
            values.append(ids_BJ.astype(np.int32).reshape(-1))
            lengths.append(np.full(self.batch_size, feature.num_ids, np.int32))
        labels_B = (rng.random(self.batch_size) < 1 / (1 + np.exp(-logit_B))).astype(np.float32)
        return make_batch(
            dense_BD, self.keys, np.concatenate(values), np.concatenate(lengths), labels_B
        )


def _power_law(uniform: npt.NDArray[np.float64], num: int, exponent: float) -> IntArray:
    """Ranks 0..num-1 from uniform numbers, by a Pareto law bounded to [1, num + 1).

    >>> _power_law(np.array([0.0, 0.5, 0.999]), 100, 1.0).tolist()
    [0, 9, 99]
    """
    if abs(exponent - 1) < 1e-9:
        x = (num + 1) ** uniform
    else:
        power = 1 - exponent
        x = ((num + 1) ** power * uniform + (1 - uniform)) ** (1 / power)
    return np.clip(x.astype(np.int64) - 1, 0, num - 1)


def _coprime(num: int) -> int:
    """A stride near .618 * num that makes rank -> rank * stride mod num a bijection."""
    stride = max(1, int(num * 0.6180339887))
    while np.gcd(stride, num) != 1:
        stride += 1
    return stride
