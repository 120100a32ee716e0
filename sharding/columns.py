"""Row-wise optimizers of tables whose columns are apart.

Their state is one number a row, from the mean over all columns. Every rank with columns of a table
sees the same rows in a step, so these ranks exchange what their columns add to each row's mean, and
all make the same new state.

Legend: U rows that a batch touched, D embedding_dim, C columns of one shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_tpu.sharding.exchange import Exchange
from torchrec_tpu.sharding.placements import PlacementKind, Shard, TablePlacement
from torchrec_tpu.sharding.routing import Arrival
from torchrec_tpu.sharding.sharded_optimizer import ShardedEmbeddingOptimizer
from torchrec_tpu.sharding.sums import RowSums, SummedTable, row_sums
from torchrec_tpu.sparsecore import ops, rules


class _GivenMeans(rules.NumpyOps):
    """NumPy's functions, with the means of rows from elsewhere; zeros until they are known."""

    def __init__(self, means: NDArray[np.float32] | None = None) -> None:
        self.sums: NDArray[np.float32]  # (U,) of the last mean that was asked for
        self._means = means

    def mean_row(self, x_UC: NDArray[np.float32], /) -> NDArray[np.float32]:
        self.sums = x_UC.sum(axis=1)
        means = np.zeros_like(self.sums) if self._means is None else self._means
        return means[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Columns:
    """One shard's part of a step."""

    name: str
    table: str
    gradient: RowSums

    def apply(
        self, optimizer: ShardedEmbeddingOptimizer, functions: rules.Ops
    ) -> tuple[NDArray[np.float32], ...]:
        """New (row, *slots) of the touched rows."""
        local = optimizer.local
        arrays = [local.weight(self.name).detach(), *local.slots(self.name)]
        row, *slots = (
            array.numpy()[self.gradient.rows].astype(np.float32, copy=False) for array in arrays
        )
        return rules.apply(
            optimizer.spec(self.table).rule,
            self.gradient.sums.numpy(),
            row,
            slots,
            np.array(local.operands(self.name), np.float32),
            functions,
        )


class SharedMeans:
    """The tables of one collection whose rows have a mean over columns on several ranks.

    Args:
        placements: of all tables, in config order.
        shards: name and place of each shard of this rank, by table.
        optimizer: of the shards.
        exchange: between the ranks.
    """

    def __init__(
        self,
        placements: Mapping[str, TablePlacement],
        shards: Mapping[str, Sequence[tuple[str, Shard]]],
        optimizer: ShardedEmbeddingOptimizer,
        exchange: Exchange,
    ) -> None:
        self._placements = {
            table: placement
            for table, placement in placements.items()
            if placement.kind is PlacementKind.COLUMN_WISE
            and any(slot.width == "scalar" for slot in optimizer.spec(table).rule.slots)
        }
        self._table_of = {
            name: table for table in self._placements for name, _ in shards.get(table, ())
        }
        self._optimizer = optimizer
        self._exchange = exchange

    def __bool__(self) -> bool:
        """Whether there are such tables, on any rank."""
        return bool(self._placements)

    def __contains__(self, shard: str) -> bool:
        """Whether a shard of this rank is updated here."""
        return shard in self._table_of

    def update(self, vectors: Tensor, arrival: Arrival) -> None:
        """One update of every row of these tables that the batch named. A collective."""
        self._optimizer.sync()
        columns = self._columns(vectors, arrival)
        sums: dict[str, NDArray[np.float32]] = {}
        for part in columns:
            probe = _GivenMeans()
            part.apply(self._optimizer, probe)
            sums[part.table] = sums[part.table] + probe.sums if part.table in sums else probe.sums
        means = self._means(sums)
        for part in columns:
            arrays = [
                self._optimizer.local.weight(part.name).detach(),
                *self._optimizer.local.slots(part.name),
            ]
            new = part.apply(self._optimizer, _GivenMeans(means[part.table]))
            for array, values in zip(arrays, new, strict=True):
                array.numpy()[part.gradient.rows] = values
        self._optimizer.count_updates([part.name for part in columns])

    def _columns(self, vectors: Tensor, arrival: Arrival) -> list[_Columns]:
        """The gradients of this rank's shards, in the order of the layout."""
        local = self._optimizer.local
        chosen = [
            (name, table)
            for name, table in zip(arrival.tables, arrival.geometry.tables, strict=True)
            if name in self and local.weight(name).requires_grad
        ]
        num_cores = arrival.geometry.num_local_cores
        columns = []
        for index in sorted({table.stack for _, table in chosen}):
            stack = arrival.buffers[ops.BUFFERS_PER_STACK * index :][: ops.BUFFERS_PER_STACK]
            pointers = stack[0].view(num_cores, -1)[:, 0].tolist()
            num_slots = stack[1].numel() // num_cores
            names = [name for name, table in chosen if table.stack == index]
            tables = [
                SummedTable(
                    geometry=table,
                    num_rows=table.rows_per_core(1),
                    features=arrival.geometry.features[table.first_feature :][:1],
                    max_gradient=local.max_gradient(name),
                )
                for name, table in chosen
                if table.stack == index
            ]
            cores = [(core * num_slots, core * num_slots + n) for core, n in enumerate(pointers)]
            columns += [
                _Columns(name=name, table=self._table_of[name], gradient=gradient)
                for name, gradient in zip(
                    names, row_sums(vectors, stack, cores, tables), strict=True
                )
            ]
        return columns

    def _means(self, sums: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """(U,) mean over all columns of each row, by table."""
        rank, world_size = self._exchange.rank, self._exchange.world_size
        ranks_of = {
            table: sorted({shard.rank for shard in self._placements[table].shards})
            for table in self._placements
            if table in sums
        }
        shared = [
            [table for table, ranks in ranks_of.items() if other in ranks and other != rank]
            for other in range(world_size)
        ]
        counts = [sum(sums[table].size for table in tables) for tables in shared]
        own = [torch.from_numpy(sums[table]) for tables in shared for table in tables]
        received = self._exchange.ragged(torch.cat([torch.empty(0), *own]), counts, counts).wait()
        parts: dict[str, dict[int, NDArray[np.float32]]] = {
            table: {rank: values} for table, values in sums.items()
        }
        begin = 0
        for other, tables in enumerate(shared):
            for table in tables:
                end = begin + sums[table].size
                parts[table][other] = received[begin:end].numpy()
                begin = end
        return {
            table: np.add.reduce([parts[table][other] for other in ranks])
            / np.float32(self._placements[table].embedding_dim)
            for table, ranks in ranks_of.items()
        }
