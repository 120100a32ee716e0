"""What every data set yields: TorchRec batches, epoch after epoch, resumable at any batch.

Shapes: B samples of a batch, N samples of a data set, F features, D dense features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tpu.sparsecore.errors import StateDictError, TorchrecTpuError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class DataNotFoundError(TorchrecTpuError, FileNotFoundError):
    """A data set that is not on this machine; the message says how to get it."""


class DataFormatError(TorchrecTpuError, ValueError):
    """A line that is not in the expected format.

    Attributes:
        file: path of the file.
        line: 1-based line number, the header included.
        column: name of the column, or "" when the line as a whole is wrong.
    """

    def __init__(self, file: str | Path, line: int, column: str, problem: str) -> None:
        self.file = str(file)
        self.line = line
        self.column = column
        where = f"line {line}, column {column}" if column else f"line {line}"
        super().__init__(f"{self.file}: {where}: {problem}")


class BatchStream(ABC):
    """Batches of one split, epoch after epoch, resumable at any batch.

    Iterating yields what is left of the current epoch and then moves to the next one. Behind a
    prefetching loader the stream runs ahead of the training step: there keep your own count of
    batches and call `batches(epoch, start=count)`.
    """

    def __init__(self, *, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        self.batch_size = batch_size
        self.seed = seed
        self._epoch = 0
        self._batch = 0

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """KJT keys, in order."""

    @property
    @abstractmethod
    def num_dense(self) -> int:
        """Width D of `dense_features`."""

    @property
    def num_samples(self) -> int | None:
        """Samples of one epoch; None when only reading to the end would tell."""
        return None

    @abstractmethod
    def batches(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch `start` on: a pure function of seed, epoch, start."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches(self._epoch, start=self._batch):
            self._batch += 1
            yield batch
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The position: batches handed out in the current epoch, and what it was counted with."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "seed": self.seed,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues at a saved position; refuses one counted with another seed or batch size."""
        for name, mine in (("seed", self.seed), ("batch_size", self.batch_size)):
            if state[name] != mine:
                raise StateDictError(
                    f"the position was saved with {name}={state[name]}, this stream has "
                    f"{name}={mine}: make the stream with the saved value"
                )
        self._epoch, self._batch = state["epoch"], state["batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """One sparse feature of N samples: sample i owns values[offsets[i]:offsets[i + 1]].

    Attributes:
        values: ids, int32.
        offsets: int64 (N + 1,), or None when every bag has exactly one id.
    """

    values: npt.NDArray[np.int32]
    offsets: IntArray | None = None

    def take(self, rows_B: IntArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(values, lengths) of the given samples.

        >>> bags = Bags(values=np.int32([7, 8, 9]), offsets=np.int64([0, 2, 2, 3]))
        >>> [x.tolist() for x in bags.take(np.int64([2, 0]))]
        [[9, 7, 8], [1, 2]]
        """
        if self.offsets is None:
            return self.values[rows_B], np.ones(len(rows_B), np.int32)
        starts = self.offsets[rows_B]
        lengths = self.offsets[rows_B + 1] - starts
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
        return self.values[positions], lengths.astype(np.int32)


class InMemory(BatchStream):
    """A data set that fits in memory, reshuffled every epoch.

    Args:
        dense_ND: float32.
        bags: one entry per KJT key, in KJT order.
        labels_N: float32 0 or 1.
    """

    def __init__(
        self,
        dense_ND: FloatArray,
        bags: Mapping[str, Bags],
        labels_N: FloatArray,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed)
        self.dense_ND = dense_ND
        self.bags = dict(bags)
        self.labels_N = labels_N
        self.shuffle = shuffle

    @property
    def keys(self) -> tuple[str, ...]:
        """KJT keys, in order."""
        return tuple(self.bags)

    @property
    def num_dense(self) -> int:
        """Width D of `dense_features`."""
        return int(self.dense_ND.shape[1])

    @property
    def num_samples(self) -> int:
        """Samples of one epoch, N."""
        return len(self.labels_N)

    def batches(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch `start` on."""
        order = np.arange(self.num_samples)
        if self.shuffle:
            np.random.default_rng([self.seed, epoch]).shuffle(order)
        for first in range(start * self.batch_size, self.num_samples, self.batch_size):
            rows_B = order[first : first + self.batch_size]
            columns = [bags.take(rows_B) for bags in self.bags.values()]
            yield make_batch(
                self.dense_ND[rows_B],
                self.keys,
                np.concatenate([values for values, _ in columns]),
                np.concatenate([lengths for _, lengths in columns]),
                self.labels_N[rows_B],
            )


def make_batch(
    dense_BD: FloatArray,
    keys: Sequence[str],
    values: npt.NDArray[np.int32],
    lengths_FB: npt.NDArray[np.int32],
    labels_B: FloatArray,
) -> Batch:
    """A TorchRec batch that borrows the arrays; `values` are the features one after the other."""
    kjt = KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths_FB.reshape(-1)),
    )
    return Batch(
        dense_features=torch.from_numpy(dense_BD),
        sparse_features=kjt,
        labels=torch.from_numpy(labels_B),
    )


def part_of(batch: Batch, rank: int, world_size: int) -> Batch:
    """What one of several processes takes of a batch: a range of samples, equal up to one.

    >>> from torchrec_tpu.datasets import MultiHot, Synthetic
    >>> feature = MultiHot(key="f", num_embeddings=9, num_ids=2)
    >>> [batch] = Synthetic([feature], batch_size=5, num_batches=1).batches(0)
    >>> [part_of(batch, rank, 2).sparse_features.values().numel() for rank in range(2)]
    [4, 6]
    """
    begin, end = (len(batch.labels) * number // world_size for number in (rank, rank + 1))
    kjt = batch.sparse_features
    starts_FB = kjt.offsets().view(-1)[:-1].view(len(kjt.keys()), -1)
    lengths_FB = kjt.lengths().view(len(kjt.keys()), -1)[:, begin:end]
    values = (
        [
            kjt.values()[int(first) :][: int(count)]
            for first, count in zip(starts_FB[:, begin], lengths_FB.sum(1), strict=True)
        ]
        if end > begin
        else []
    )
    return Batch(
        dense_features=batch.dense_features[begin:end],
        sparse_features=KeyedJaggedTensor(
            keys=kjt.keys(),
            values=torch.cat([kjt.values()[:0], *values]),
            lengths=lengths_FB.reshape(-1),
        ),
        labels=batch.labels[begin:end],
    )


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection that mixes all 64 bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_to_row(values: IntArray, *, num_embeddings: int) -> npt.NDArray[np.int32]:
    """The table row of each category: 0 for a blank (-1), else 1 + mix(value) mod (rows - 1).

    `mix` is the finalizer of splitmix64, so equal values meet in every run and on every machine.
    A table with a single row keeps everything in row 0.

    >>> hash_to_row(np.int64([-1, 5, 5, 6]), num_embeddings=1000).tolist()
    [0, 45, 45, 888]
    """
    if num_embeddings == 1:
        return np.zeros(len(values), np.int32)
    rows = 1 + mix(values.astype(np.uint64)) % np.uint64(num_embeddings - 1)
    return np.where(values < 0, 0, rows.astype(np.int64)).astype(np.int32)
