"""Tables of which every rank has a copy: one update on all of them from the gradients of all ranks.

Legend: W ranks, R replicated tables, V num_embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_tpu.sharding.exchange import Exchange
from torchrec_tpu.sharding.routing import Int64Array
from torchrec_tpu.sharding.sharded_optimizer import ShardedEmbeddingOptimizer
from torchrec_tpu.sharding.sums import RowSums, SummedTable, row_sums
from torchrec_tpu.sparsecore import ops
from torchrec_tpu.sparsecore.batch import Int32Array, pointers_per_core
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, TableGeometry
from torchrec_tpu.sparsecore.layout import Layout, round_up


class Replicas:
    """The replicated tables of one collection, on one rank.

    Args:
        layout: its last stack is these tables, all rows in this rank's partition.
        first: index of the first of them in stack order.
        optimizer: has each of them by name.
        exchange: between the ranks.
    """

    def __init__(
        self,
        layout: Layout,
        first: int,
        optimizer: ShardedEmbeddingOptimizer,
        exchange: Exchange,
    ) -> None:
        self._places = layout.stack_order_tables[first:]
        self._stack = len(layout.stacks) - 1
        self.indices = range(first, first + len(self._places))
        self.names = tuple(place.table.name for place in self._places)
        self._optimizer = optimizer
        self._exchange = exchange

    def lookup(
        self, buffers: Sequence[Tensor], geometry: Geometry, out_shape: Sequence[int]
    ) -> Tensor:
        """Activations in which only the features of these tables are defined."""
        weights = [self._optimizer.local.weight(name).detach() for name in self.names]
        activations: Tensor = ops.sparse_dense_matmul(
            buffers, weights, geometry.select(self.indices).encode(), out_shape
        )
        return activations

    def update(
        self,
        grad: Tensor,
        buffers: Sequence[Tensor],
        geometry: Geometry,
        num_rows: Int64Array,
        divisor: float,
    ) -> None:
        """The same update of all copies. A collective.

        Args:
            grad: gradient of this rank's activations.
            buffers: of this rank's batch.
            geometry: of this rank's batch.
            num_rows: (W, R) rows of each table that each rank's batch touched.
            divisor: of the gradient sums.
        """
        self._optimizer.sync()
        sums = self._sums(grad, buffers, geometry, divisor)
        for entry in sums:
            entry.sums.div_(divisor)
        rows_of_ranks: list[list[Int32Array]] = [[] for _ in self.names]
        sums_of_ranks: list[list[Tensor]] = [[] for _ in self.names]
        sparse, dense = self._choose(num_rows)
        for index, rows, values in (
            *self._gathered(sparse, sums, num_rows),
            *self._reduced(dense, sums),
        ):
            rows_of_ranks[index].append(rows)
            sums_of_ranks[index].append(values)
        self._apply(rows_of_ranks, sums_of_ranks)

    def _choose(self, num_rows: Int64Array) -> tuple[list[int], list[int]]:
        """Tables whose touched rows are fewer bytes than all of their rows, and the others."""
        sparse: list[int] = []
        dense: list[int] = []
        for index, (place, total) in enumerate(
            zip(self._places, num_rows.sum(axis=0).tolist(), strict=True)
        ):
            words = place.table.embedding_dim + 1
            # every rank receives all touched rows, or sends and receives the table once in a ring
            is_sparse = total * words < 2 * place.table.num_embeddings * words
            (sparse if is_sparse else dense).append(index)
        return sparse, dense

    def _sums(
        self, grad: Tensor, buffers: Sequence[Tensor], geometry: Geometry, divisor: float
    ) -> list[RowSums]:
        """Of this rank's batch, by table; limits are those of the divided gradient."""
        stack = buffers[ops.BUFFERS_PER_STACK * self._stack :]
        num_slots = int(stack[0][self._exchange.rank])  # all are in this rank's partition
        tables = [geometry.tables[index] for index in self.indices]
        return row_sums(
            grad,
            stack,
            [(0, num_slots)],
            [
                SummedTable(
                    geometry=table,
                    num_rows=place.rows_per_core,
                    features=geometry.features[table.first_feature :][: table.num_features],
                    max_gradient=divisor * self._optimizer.local.max_gradient(place.table.name),
                )
                for table, place in zip(tables, self._places, strict=True)
            ],
        )

    def _gathered(
        self, tables: Sequence[int], sums: Sequence[RowSums], num_rows: Int64Array
    ) -> list[tuple[int, Int32Array, Tensor]]:
        """(table, rows, sums) of every rank, in rank order."""
        if not tables:
            return []
        own = torch.cat(
            [
                piece
                for table in tables
                for piece in (
                    torch.from_numpy(sums[table].rows),
                    sums[table].sums.view(torch.int32).reshape(-1),
                )
            ]
        )
        dims = [self._places[table].table.embedding_dim for table in tables]
        words = (num_rows[:, tables] * (np.array(dims) + 1)).sum(axis=1).tolist()
        world_size = len(num_rows)
        received = self._exchange.ragged(
            own.repeat(world_size), [own.numel()] * world_size, words
        ).wait()
        gathered = []
        begin = 0
        for rank in range(world_size):
            for table, dim in zip(tables, dims, strict=True):
                n = int(num_rows[rank, table])
                rows = received[begin : begin + n].numpy()
                values = received[begin + n : begin + n + n * dim].view(torch.float32)
                gathered.append((table, rows, values.reshape(n, dim)))
                begin += n * (dim + 1)
        return gathered

    def _reduced(
        self, tables: Sequence[int], sums: Sequence[RowSums]
    ) -> list[tuple[int, Int32Array, Tensor]]:
        """(table, rows, sums) over all ranks."""
        if not tables:
            return []
        whole = []
        for table in tables:
            spec = self._places[table].table
            marked = torch.zeros(spec.num_embeddings, spec.embedding_dim + 1)
            rows = torch.from_numpy(sums[table].rows).long()
            marked[rows, :-1] = sums[table].sums
            marked[rows, -1] = 1.0
            whole.append(marked)
        flat = torch.cat([marked.view(-1) for marked in whole])
        group = self._exchange.group
        self._exchange.guard(
            lambda: dist.all_reduce(flat, group=group, async_op=True), flat, keep=flat
        ).wait()
        reduced = []
        begin = 0
        for table, marked in zip(tables, whole, strict=True):
            total = flat[begin : begin + marked.numel()].view_as(marked)
            rows = torch.nonzero(total[:, -1]).view(-1)
            reduced.append((table, rows.to(torch.int32).numpy(), total[rows, :-1]))
            begin += marked.numel()
        return reduced

    def _apply(
        self, rows: Sequence[Sequence[Int32Array]], sums: Sequence[Sequence[Tensor]]
    ) -> None:
        """One update from lists of (rows, sums), each a source core whose samples are the sums."""
        num_cores = max(map(len, rows))
        per_core = [max((len(r) for r in lists), default=0) for lists in rows]
        pointers = np.zeros((num_cores, pointers_per_core(1)), np.int32)
        slots = round_up(max(sum(per_core), 1), 8)
        ids, samples = np.empty((2, num_cores, slots), np.int32)
        tables: list[TableGeometry] = []
        features: list[FeatureGeometry] = []
        vectors: list[Tensor] = []
        row_offset = sample_offset = num_floats = 0
        for place, lists, values, most in zip(self._places, rows, sums, per_core, strict=True):
            spec = place.table
            padded = torch.zeros(num_cores, most, spec.embedding_dim)
            for core, (own, value) in enumerate(zip(lists, values, strict=True)):
                at = int(pointers[core, 0])
                ids[core, at : at + len(own)] = own + np.int32(row_offset)
                samples[core, at : at + len(own)] = sample_offset + np.arange(len(own))
                pointers[core, 0] += len(own)
                padded[core, : len(own)] = value
            tables.append(
                TableGeometry(
                    0, spec.num_embeddings, spec.embedding_dim, row_offset, 0, len(features), 1
                )
            )
            features.append(
                FeatureGeometry(
                    sample_offset, most, num_cores * most, num_floats, spec.embedding_dim
                )
            )
            vectors.append(padded.view(-1))
            row_offset += round_up(spec.num_embeddings, 8)
            sample_offset += most
            num_floats += padded.numel()
        self._optimizer.update(
            torch.cat(vectors),
            [
                torch.from_numpy(array.reshape(-1))
                for array in (pointers, ids, samples, np.ones((num_cores, slots), np.float32))
            ],
            Geometry(
                num_cores=1,
                num_local_cores=num_cores,
                num_stacks=1,
                tables=tuple(tables),
                features=tuple(features),
            ),
            self.names,
            is_clipped=True,
        )
