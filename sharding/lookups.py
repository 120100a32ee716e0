"""What a step looks up of a table: ids, distinct rows, the fullest partition.

From data (`Lookups.observed`) or from an assumed skew (`Lookups.power_law`).

Legend: V rows, P SparseCores of all devices, K observed source cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookups:
    """What a step looks up of one table.

    Make one from data (`observed`) or from an assumed skew (`power_law`).

    Attributes:
        ids_per_sample: mean, over all features of the table.
        curve: (samples, distinct rows among them), both rising; rows between and beyond follow
            straight lines in logarithms.
        ids_KP: ids of one source core by partition (rotation 0), repeats in a sample merged.
        rows_KP: distinct rows among them.
        shares: of the ids, in each of `NUM_BLOCKS` equal blocks of rows.
        origin: in words.
    """

    num_embeddings: int
    ids_per_sample: float
    curve: tuple[tuple[float, float], ...]
    ids_KP: Counts
    rows_KP: Counts
    shares: Floats
    origin: str

    def rows(self, samples: float) -> float:
        """Distinct rows in so many samples, expected."""
        x, y = np.log(np.maximum(np.array(self.curve), 1e-9)).T
        at = math.log(max(samples, 1e-9))
        index = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2)) if len(x) > 1 else 0
        slope = (y[index + 1] - y[index]) / (x[index + 1] - x[index]) if len(x) > 1 else 1.0
        found = math.exp(y[index] + slope * (at - x[index]))
        return min(found, self.num_embeddings, max(samples * self.ids_per_sample, 1e-9))

    @property
    def merged_per_sample(self) -> float:
        """Ids of a sample after repeats in one bag are merged."""
        return float(self.ids_KP.sum(axis=1).mean()) / max(1.0, self.curve[0][0])

    def largest_share(self, blocks: int) -> float:
        """Share of the ids that the fullest of so many equal blocks of rows gets."""
        return float(self.shares.reshape(blocks, -1).sum(axis=1).max())

    @classmethod
    def observed(
        cls,
        num_embeddings: int,
        batches: Sequence[tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]],
        *,
        samples: int,
        cores: int,
        num_cores: int,
        exponent: float | None = None,
        is_linked: bool = False,
        is_merged: bool = True,
    ) -> Lookups:
        """From batches of one device.

        Args:
            num_embeddings: V.
            batches: (ids, sample of each id) of each.
            samples: of a batch, b.
            cores: source cores that share it.
            num_cores: P.
            exponent: skew that the data are known to have; tells how many distinct rows all
                devices see. Without it the last observed growth goes on.
            is_linked: whether the first id of a bag decides the others.
            is_merged: whether repeats in a sample are one id, as in bags; in sequences they are
                not.
        """
        each = -(-samples // cores)
        ids_KP, rows_KP, of_core, of_device = [], [], [], []
        seen = np.zeros(0, np.int64)
        for values, sample in batches:
            ids = np.asarray(values, np.int64)
            for core in range(cores):
                mine = (sample >= core * each) & (sample < (core + 1) * each)
                pairs = ids[mine]
                if is_merged:
                    pairs = np.unique(pairs * samples + sample[mine]) // samples
                distinct = np.unique(pairs)
                ids_KP.append(np.bincount(pairs % num_cores, minlength=num_cores))
                rows_KP.append(np.bincount(distinct % num_cores, minlength=num_cores))
                of_core.append(distinct.size)
            of_device.append(np.unique(ids).size)
            seen = np.union1d(seen, ids)
        num_ids = sum(ids.size for ids, _ in batches) / len(batches)
        curve = [(float(each), float(np.mean(of_core)))]
        if cores > 1:
            curve.append((float(samples), float(np.mean(of_device))))
        if len(batches) > 1:
            curve.append((float(samples * len(batches)), float(seen.size)))
        if exponent is not None:
            law = _Law(num_embeddings, exponent)
            last_samples, last_rows = curve[-1]
            per_bag = num_ids / samples
            scale = last_rows / max(law.rows(last_samples, per_bag, is_linked), 1e-9)
            curve += [
                (n, scale * law.rows(n, per_bag, is_linked))
                for n in last_samples * 2.0 ** np.arange(0.5, 22, 0.5)
            ]
        return cls(
            num_embeddings=num_embeddings,
            ids_per_sample=num_ids / samples,
            curve=_rising(curve),
            ids_KP=np.array(ids_KP),
            rows_KP=np.array(rows_KP),
            shares=_shares(np.concatenate([ids for ids, _ in batches]), num_embeddings),
            origin=f"{len(batches)} batches of one device"
            + (f", continued with exponent {exponent:g}" if exponent is not None else ""),
        )

    @classmethod
    def power_law(
        cls,
        num_embeddings: int,
        ids_per_bag: Sequence[float],
        *,
        samples_per_core: int,
        num_cores: int,
        exponent: float,
        seed: int = 0,
    ) -> Lookups:
        """From an assumed skew: the k-th most popular row has a share close to k ** -exponent.

        Args:
            num_embeddings: V.
            ids_per_bag: mean of each feature of the table.
            samples_per_core: of a step.
            num_cores: P.
            exponent: 0 is uniform.
            seed: of the draws from which partition maxima are taken.
        """
        law = _Law(num_embeddings, exponent)
        per_sample = float(sum(ids_per_bag))
        draws = max(1, round(samples_per_core * per_sample))
        num_slices = int(np.clip(_MAX_DRAWS // draws, 1, 4))
        rng = np.random.default_rng([seed, num_embeddings, draws])
        ids_KP, rows_KP, drawn = [], [], []
        for _ in range(num_slices):
            ranks = law.ranks(rng.random(draws))
            ids = (ranks * _spreading(num_embeddings)) % num_embeddings  # popular rows lie apart
            drawn.append(ids)
            ids_KP.append(np.bincount(ids % num_cores, minlength=num_cores))
            rows_KP.append(np.bincount(np.unique(ids) % num_cores, minlength=num_cores))
        points = samples_per_core * 2.0 ** np.arange(0, 22, 0.5)
        return cls(
            num_embeddings=num_embeddings,
            ids_per_sample=per_sample,
            curve=_rising([(n, law.rows(n, per_sample, is_linked=False)) for n in points]),
            ids_KP=np.array(ids_KP),
            rows_KP=np.array(rows_KP),
            shares=_shares(np.concatenate(drawn), num_embeddings),
            origin=f"assumed power law, exponent {exponent:g}",
        )


NUM_BLOCKS: Final = 64
"""Blocks of rows whose ids are counted; what divides it can be told too."""

_MAX_DRAWS: Final = 1 << 17


def _shares(ids: npt.NDArray[np.integer], num_embeddings: int) -> Floats:
    blocks = np.asarray(ids, np.int64) * NUM_BLOCKS // num_embeddings
    counts = np.bincount(np.clip(blocks, 0, NUM_BLOCKS - 1), minlength=NUM_BLOCKS)
    shares: Floats = counts / max(1, counts.sum())
    return shares


def _rising(curve: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    points: list[tuple[float, float]] = []
    for samples, rows in curve:
        if not points or samples > points[-1][0]:
            points.append((float(samples), max(rows, points[-1][1] if points else 1e-9)))
    return tuple(points)


def _spreading(num: int) -> int:
    stride = max(1, int(num * 0.6180339887))
    while math.gcd(stride, num) != 1:
        stride += 1
    return stride


class _Law:
    """A Pareto law bounded to [1, V + 1), cut to ranks 0..V-1, as in `datasets.Synthetic`."""

    def __init__(self, num_embeddings: int, exponent: float) -> None:
        self._power = 1 - exponent if abs(exponent - 1) > 1e-9 else 0.0
        self._num = num_embeddings
        edges = np.unique(np.round(np.geomspace(1, num_embeddings + 1.0, 400)).astype(np.int64))
        below = (
            np.log(edges) / math.log(num_embeddings + 1.0)
            if self._power == 0
            else (edges**self._power - 1) / ((num_embeddings + 1.0) ** self._power - 1)
        )
        self._ranks_in_bin = np.diff(edges).astype(np.float64)
        share = np.diff(below) / self._ranks_in_bin
        self._log_missed = np.log1p(-np.minimum(share, 1 - 1e-12))

    def _distinct(self, draws: float) -> float:
        return float((self._ranks_in_bin * -np.expm1(draws * self._log_missed)).sum())

    def rows(self, samples: float, ids_per_sample: float, is_linked: bool) -> float:
        """Distinct rows, expected. Linked: equal first ids make equal bags."""
        if not is_linked or ids_per_sample <= 1:
            return self._distinct(samples * ids_per_sample)
        return self._distinct(samples + (ids_per_sample - 1) * self._distinct(samples))

    def ranks(self, uniform: Floats) -> Counts:
        """Ranks from uniform numbers."""
        if self._power == 0:
            x = (self._num + 1.0) ** uniform
        else:
            end = (self._num + 1.0) ** self._power
            x = (end * uniform + (1 - uniform)) ** (1 / self._power)
        return np.clip(x.astype(np.int64) - 1, 0, self._num - 1)
