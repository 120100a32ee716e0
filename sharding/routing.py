"""The two ends of an exchange: what a rank sends to the owners of rows, and what they make of it.

A rank is one core: partition p of its batch is what goes to rank p. To each owner travel the rows,
the samples and the gains of its partition, the samples numbered 0, 1, ... so that exactly one
vector comes back for every sample that has an id there.

Legend: W ranks, S stacks, T tables in stack order, N slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_tpu.sparsecore import _native
from torchrec_tpu.sparsecore.batch import SparseBatch, pointers_per_core
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, TableGeometry
from torchrec_tpu.sparsecore.layout import Layout, Stack, round_up

Int64Array = npt.NDArray[np.int64]

WORDS_PER_ID = 3
"""A row, a sample and a gain."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """One batch, addressed: what goes to each rank, and where the vectors that return belong."""

    num_slots: Int64Array  # (W, S) ids for each rank
    num_samples: Int64Array  # (W, T) vectors that each rank returns
    payload: Tensor  # int32; rank by rank, stack by stack: rows, samples, gains
    offsets: tuple[Int64Array, ...]  # (W) of (vectors,): first float of each in the output


class Router:
    """Addresses the batches of one layout.

    Args:
        layout: of one core a rank.
        num_stacks: its first S stacks travel; those behind them stay on this rank.
        pool: threads.
    """

    def __init__(self, layout: Layout, num_stacks: int, pool: _native.ThreadPool) -> None:
        self._layout = layout
        self._stacks = layout.stacks[:num_stacks]
        self._pool = pool
        self._table_rows = [
            np.array([table.row_offset for table in stack.tables], np.int32)
            for stack in self._stacks
        ]
        dims = [table.table.embedding_dim for stack in self._stacks for table in stack.tables]
        self.widths: Int64Array = np.array(dims, np.int64)  # (T)
        self._floats: tuple[Geometry, list[Int64Array]] | None = None

    def route(self, batch: SparseBatch, geometry: Geometry) -> Route:
        """Addresses one batch; its geometry says where the vectors belong that return."""
        num_ranks = self._layout.num_cores
        num_slots = np.zeros((num_ranks, len(self._stacks)), np.int64)
        pieces: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(num_ranks)]
        offsets: list[list[Int64Array]] = [[] for _ in range(num_ranks)]
        num_samples = []
        for index, (buffers, floats) in enumerate(
            zip(batch.stacks, self._sample_floats(geometry), strict=False)
        ):
            numbers, samples = np.empty((2, buffers.sample_ids.size), np.int32)
            counts = np.empty((num_ranks, self._table_rows[index].size), np.int64)
            _native.number_samples(
                self._pool,
                buffers.row_pointers,
                buffers.embedding_ids,
                buffers.sample_ids,
                self._table_rows[index],
                floats.size,
                num_ranks,
                numbers,
                samples,
                counts,
            )
            num_samples.append(counts)
            begin = 0
            ends = buffers.row_pointers[:num_ranks].tolist()
            for rank, (end, num_vectors) in enumerate(
                zip(ends, counts.sum(axis=1).tolist(), strict=True)
            ):
                num_slots[rank, index] = end - begin
                pieces[rank] += [
                    buffers.embedding_ids[begin:end],
                    numbers[begin:end],
                    buffers.gains[begin:end].view(np.int32),
                ]
                offsets[rank].append(floats[samples[begin : begin + num_vectors]])
                begin = round_up(end, 8)
        nothing = np.empty(0, np.int32)
        payload = np.concatenate([nothing, *(piece for rank in pieces for piece in rank)])
        return Route(
            num_slots=num_slots,
            num_samples=np.concatenate([np.empty((num_ranks, 0), np.int64), *num_samples], axis=1),
            payload=torch.from_numpy(payload),
            offsets=tuple(np.concatenate([np.empty(0, np.int64), *rank]) for rank in offsets),
        )

    def _sample_floats(self, geometry: Geometry) -> list[Int64Array]:
        """First float of the output of every sample row, stack by stack."""
        if self._floats is None or self._floats[0] is not geometry:  # nearly all batches are alike
            features = iter(geometry.features)
            self._floats = (
                geometry,
                [_floats_of([next(features) for _ in stack.features]) for stack in self._stacks],
            )
        return self._floats[1]


def _floats_of(features: Sequence[FeatureGeometry]) -> Int64Array:
    """First float of the output of every sample row of one stack; padding has that of sample 0."""
    rows = features[-1].sample_offset + features[-1].samples_per_core
    floats = np.zeros(rows, np.int64)
    for feature in features:
        floats[feature.sample_offset :][: feature.num_samples] = (
            feature.out_offset + feature.out_stride * np.arange(feature.num_samples)
        )
    return floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """What arrived from all ranks, as a batch of W source cores for this rank's one partition.

    Each table's vectors are (W, most samples of a rank, D) in the lookup's flat output; `pieces`
    are the (first float, floats) that answer each rank.
    """

    buffers: list[Tensor]
    geometry: Geometry
    tables: tuple[str, ...]  # in the order of the geometry
    num_floats: int  # of the output
    pieces: tuple[tuple[tuple[int, int], ...], ...]  # (W)

    @property
    def floats_of_ranks(self) -> list[int]:
        """(W) floats that answer each rank."""
        return [sum(floats for _, floats in pieces) for pieces in self.pieces]

    def packed(self, vectors: Tensor) -> Tensor:
        """The lookup's flat output, rank by rank, without the padding."""
        pieces = [vectors[at : at + n] for pieces in self.pieces for at, n in pieces]
        return torch.cat(pieces) if pieces else vectors[:0]

    def unpacked(self, packed: Tensor) -> Tensor:
        """Undoes `packed`; the padding, which no id reads, is undefined."""
        vectors = torch.empty(self.num_floats)
        begin = 0
        for pieces in self.pieces:
            for at, num_floats in pieces:
                vectors[at : at + num_floats] = packed[begin : begin + num_floats]
                begin += num_floats
        return vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTable:
    """One table of the layout that has rows on this rank."""

    index: int  # in stack order
    num_rows: int


class Receiver:
    """Turns what arrives at one rank into batches for its own rows.

    Args:
        layout: as the routers'.
        num_stacks: S.
        owned: tables with rows here, in stack order.
    """

    def __init__(self, layout: Layout, num_stacks: int, owned: Sequence[OwnedTable]) -> None:
        self.stacks: tuple[Stack, ...] = layout.stacks[:num_stacks]
        self._owned = tuple(owned)
        self._places = layout.stack_order_tables
        self._stack_of = [at for at, stack in enumerate(self.stacks) for _ in stack.tables]
        ends = np.cumsum([0, *(len(stack.tables) for stack in self.stacks)]).tolist()
        self._tables_of = [slice(*pair) for pair in itertools.pairwise(ends)]
        self.tables = tuple(self._places[table.index].table.name for table in owned)

    def receive(self, num_slots: Int64Array, num_samples: Int64Array, payload: Tensor) -> Arrival:
        """The batch of one exchange.

        Args:
            num_slots: (W, S) ids that came from each rank.
            num_samples: (W, T) distinct samples among them.
            payload: int32, the ranks' payloads for this rank, one behind the other.
        """
        num_ranks = len(num_slots)
        per_rank = num_samples.max(axis=0, initial=0)  # (T)
        sample_offsets = np.zeros_like(per_rank)
        shifts = np.zeros_like(num_samples)
        for tables in self._tables_of:  # a rank numbers the samples of a stack without gaps
            sample_offsets[tables] = np.cumsum(per_rank[tables]) - per_rank[tables]
            firsts = np.cumsum(num_samples[:, tables], axis=1) - num_samples[:, tables]
            shifts[:, tables] = sample_offsets[tables] - firsts
        words = payload.numpy()
        ends = np.cumsum(num_slots * WORDS_PER_ID).reshape(num_slots.shape)
        buffers: list[Tensor] = []
        for at, (stack, tables) in enumerate(zip(self.stacks, self._tables_of, strict=True)):
            slots = round_up(max(int(num_slots[:, at].max()), 1), 8)
            pointers = np.zeros((num_ranks, pointers_per_core(1)), np.int32)
            pointers[:, 0] = num_slots[:, at]
            rows, samples, gains = np.empty((WORDS_PER_ID, num_ranks, slots), np.int32)
            first_rows = [table.row_offset for table in stack.tables]
            for rank in range(num_ranks):
                n, end = int(num_slots[rank, at]), int(ends[rank, at])
                sent = words[end - WORDS_PER_ID * n : end].reshape(WORDS_PER_ID, n)
                rows[rank, :n], samples[rank, :n], gains[rank, :n] = sent
                runs = np.diff([*np.searchsorted(sent[0], first_rows).tolist(), n])
                samples[rank, :n] += np.repeat(shifts[rank, tables], runs).astype(np.int32)
            buffers += [
                torch.from_numpy(array.reshape(-1))
                for array in (pointers, rows, samples, gains.view(np.float32))
            ]
        return self._arrival(buffers, num_samples, per_rank.tolist(), sample_offsets.tolist())

    def _arrival(
        self,
        buffers: list[Tensor],
        num_samples: Int64Array,
        per_rank: list[int],
        sample_offsets: list[int],
    ) -> Arrival:
        num_ranks = len(num_samples)
        tables: list[TableGeometry] = []
        features: list[FeatureGeometry] = []
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        num_floats = 0
        for owned in self._owned:
            place = self._places[owned.index]
            dim, samples = place.table.embedding_dim, per_rank[owned.index]
            tables.append(
                TableGeometry(
                    self._stack_of[owned.index],
                    owned.num_rows,
                    dim,
                    place.row_offset,
                    0,
                    len(features),
                    1,
                )
            )
            features.append(
                FeatureGeometry(
                    sample_offsets[owned.index], samples, num_ranks * samples, num_floats, dim
                )
            )
            for rank, count in enumerate(num_samples[:, owned.index].tolist()):
                if count:
                    pieces[rank].append((num_floats + rank * samples * dim, count * dim))
            num_floats += num_ranks * samples * dim
        return Arrival(
            buffers=buffers,
            geometry=Geometry(
                num_cores=1,
                num_local_cores=num_ranks,
                num_stacks=len(self.stacks),
                tables=tuple(tables),
                features=tuple(features),
            ),
            tables=self.tables,
            num_floats=num_floats,
            pieces=tuple(map(tuple, pieces)),
        )
