"""What pooled and sequence collections share when their tables are spread over ranks.

A rank preprocesses its own batch, sends to each owner of rows what it needs of them, and gets one
vector back for every sample that has an id there; gradients take the same way in backward, where
the owner updates its rows in place, once for all ranks. See routing.py for what travels, and
replicas.py for tables that every rank has.

Legend: B batch size of this rank, W ranks, S stacks and T tables that travel, R replicated tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_tpu.sharding.columns import SharedMeans
from torchrec_tpu.sharding.deliveries import Counts, Delivery, Ids, Prepared, ShardedContext
from torchrec_tpu.sharding.embeddings import DTYPES, check_stays, weights_of
from torchrec_tpu.sharding.exchange import Exchange, Pending
from torchrec_tpu.sharding.kjt import arrays_of, rows_of_samples
from torchrec_tpu.sharding.optimizer import FusedEmbeddingOptimizer, mark
from torchrec_tpu.sharding.outputs import Outputs
from torchrec_tpu.sharding.pieces import Piece, layout_of, pieces_of, placements_of
from torchrec_tpu.sharding.placements import PlacementKind, Shard, TablePlacement
from torchrec_tpu.sharding.replicas import Replicas
from torchrec_tpu.sharding.routing import WORDS_PER_ID, OwnedTable, Receiver, Router
from torchrec_tpu.sharding.sharded_optimizer import ShardedEmbeddingOptimizer
from torchrec_tpu.sharding.tables import allocate, fill
from torchrec_tpu.sharding.tensors import copy, global_tensor, parts
from torchrec_tpu.sparsecore import _native, ops
from torchrec_tpu.sparsecore.errors import PeerBatchError
from torchrec_tpu.sparsecore.layout import Combiner, Layout
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.sparsecore.preprocess import Preprocessor

OutT = TypeVar("OutT")

_STATUS, _FIRST_COUNT = 0, 1  # words of a header
_GOOD, _BAD = 0, 1


class ShardedCollection(
    ShardedEmbeddingModule[KJTList, tuple[Delivery, Tensor], OutT, ShardedContext],
    FusedOptimizerModule,
    Generic[OutT],
):
    """What pooled and sequence collections share: shards, exchange, update, state dicts."""

    _tables_name: ClassVar[str]  # attribute that holds the tables, as in TorchRec
    _is_weighted: bool = False

    def __init__(
        self,
        module: Any,
        configs: Sequence[Any],
        combiners: Mapping[str, Combiner],
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        specs: Mapping[str, OptimizerSpec],
        *,
        module_fqn: str | None,
        id_policy: Any,
        num_threads: int,
        deadline_seconds: float,
    ) -> None:
        super().__init__()
        self.module_sharding_plan = plan
        self._module_fqn = module_fqn
        self._unsharded_type = type(module)
        self._env = env
        self._configs = list(configs)
        self._placements = placements_of(configs, plan, env.world_size)
        self._exchange = Exchange(env.process_group, deadline_seconds=deadline_seconds)
        pieces = pieces_of(self._placements, env.rank)
        features = {config.name: tuple(config.feature_names) for config in configs}
        self._layout = layout_of(pieces, self._placements, features, combiners, env)
        self._pool = _native.ThreadPool(num_threads)
        self._preprocessor = Preprocessor(
            self._layout,
            num_threads=num_threads,
            id_policy=id_policy,
            is_weighted=self._is_weighted,
        )
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torchrec_tpu-prepare")
        self._set_up_tables(module, pieces, specs)

        replicas = [piece for piece in pieces if piece.is_replica]
        num_stacks = len(self._layout.stacks) - bool(replicas)
        by_name = {piece.name: piece for piece in pieces}
        order = [by_name[place.table.name] for place in self._layout.stack_order_tables]
        self._num_travelling = len(order) - len(replicas)
        self._router = Router(self._layout, num_stacks, self._pool)
        self._receiver = Receiver(
            self._layout,
            num_stacks,
            [
                OwnedTable(index=index, num_rows=piece.shard.num_rows)
                for index, piece in enumerate(order[: self._num_travelling])
                if piece.shard.rank == env.rank and piece.shard.num_rows
            ],
        )
        self._replicas = (
            Replicas(self._layout, self._num_travelling, self._optimizer, self._exchange)
            if replicas
            else None
        )
        self._shared_means = SharedMeans(
            self._placements, self._local_shards, self._optimizer, self._exchange
        )
        self._outputs = Outputs(self._layout, by_name, self._configs)
        self._register_state_dict_hook(_put_sharded)  # type: ignore[no-untyped-call]
        self._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _take_sharded, with_module=True
        )
        self.train(module.training)

    def _set_up_tables(
        self, module: Any, pieces: Sequence[Piece], specs: Mapping[str, OptimizerSpec]
    ) -> None:
        """Allocates and fills what this rank has of the tables, and the optimizer."""
        env = self._env
        sources = weights_of(getattr(module, self._tables_name))
        seed = self._shared_seed() if any(w.is_meta for w in sources.values()) else 0
        local: dict[str, nn.Parameter] = {}
        tables = nn.ModuleDict()
        weights: dict[str, Any] = {}
        self._global: dict[str, Any] = {}
        self._local_shards: dict[str, list[tuple[str, Shard]]] = {}
        self._views: dict[str, list[tuple[Shard, Tensor]]] = {}  # of sharded tables
        for config in self._configs:
            source, placement = sources[config.name], self._placements[config.name]
            mine = [p for p in pieces if p.table == config.name and p.shard.rank == env.rank]
            if mine:
                parameter, views = allocate(
                    [piece.shard for piece in mine],
                    dtype=source.dtype,
                    requires_grad=source.requires_grad,
                )
                fill(config, [piece.shard for piece in mine], views, source, seed)
            else:
                empty = torch.empty(0, dtype=source.dtype)
                parameter, views = nn.Parameter(empty, source.requires_grad), []
            mark(parameter)
            tables[config.name] = nn.Module()
            tables[config.name].register_parameter("weight", parameter)
            if placement.kind is PlacementKind.DATA_PARALLEL:
                torch.distributed.broadcast(
                    parameter.detach(), group_src=0, group=self._exchange.group
                )
                local[config.name] = weights[config.name] = parameter
                continue
            for piece, view in zip(mine, views, strict=True):
                is_all = view.shape == parameter.shape
                local[piece.name] = (
                    parameter if is_all else nn.Parameter(view, source.requires_grad)
                )
            self._local_shards[config.name] = [(piece.name, piece.shard) for piece in mine]
            self._views[config.name] = list(zip((p.shard for p in mine), views, strict=True))
            self._global[config.name] = global_tensor(
                placement, self._views[config.name], env, dtype=source.dtype
            )
            if mine:
                weights[config.name] = self._global[config.name]
        self.register_module(self._tables_name, tables)
        table_of = {piece.name: piece.table for piece in pieces}
        self._optimizer = ShardedEmbeddingOptimizer(
            FusedEmbeddingOptimizer(
                local, {name: specs[table_of[name]] for name in local}, key=lambda name: name
            ),
            specs,
            self._placements,
            {table: shards for table, shards in self._local_shards.items() if shards},
            weights,
            env=env,
            prefix=self._tables_name,
        )
        self._idle = [
            name
            for shards in self._local_shards.values()
            for name, shard in shards
            if not shard.num_rows
        ]

    def _shared_seed(self) -> int:
        seed = torch.randint(2**62, (1,))
        torch.distributed.broadcast(seed, group_src=0, group=self._exchange.group)
        return int(seed)

    # ---- one batch

    def create_context(self) -> ShardedContext:
        """For one batch."""
        return ShardedContext()

    def input_dist(
        self,
        ctx: ShardedContext,
        features: KeyedJaggedTensor,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts to preprocess a batch; the first wait learns that all ranks could.

        Raises:
            PeerBatchError: from the first wait, on the ranks whose own batch is good when that of
                another is not; nothing has changed. The others raise what `preprocess` does.
            PeerError: from any wait, when ranks are missing.
        """
        features = maybe_td_to_kjt(features, None)
        weights = self._usable_weights(features.weights_or_none())
        future = self._executor.submit(self._prepare, features, weights)
        return KJTListSplitsAwaitable(
            [Counts(lambda: self._send(future))],  # type: ignore[list-item]  # no KJT travels
            ctx,
            self._module_fqn,
            ["row_wise"],
        )

    def compute(
        self,
        ctx: ShardedContext,  # noqa: ARG002
        dist_input: KJTList,
    ) -> tuple[Delivery, Tensor]:
        """Looks up this rank's rows for all ranks: flat vectors, rank by rank."""
        delivery = cast("Delivery", dist_input[0])
        arrival = delivery.arrival
        if not arrival.tables:
            return delivery, torch.empty(0)
        weights = [self._optimizer.local.weight(name).detach() for name in arrival.tables]
        vectors: Tensor = ops.sparse_dense_matmul(
            arrival.buffers, weights, arrival.geometry.encode(), [arrival.num_floats]
        )
        return delivery, arrival.packed(vectors)

    def _usable_weights(self, weights: Tensor | None) -> Tensor | None:
        return weights

    def _prepare(self, features: KeyedJaggedTensor, weights: Tensor | None) -> Prepared:
        batch = self._preprocessor(**arrays_of(features, weights=weights))
        return Prepared(
            features=features,
            batch=batch,
            route=self._router.route(batch, self._outputs.geometry(batch)),
            samples=rows_of_samples(features),
        )

    def _send(self, future: Future[Prepared]) -> Ids:
        """Tells the other ranks what comes, and sends it."""
        world_size, num_tables = self._env.world_size, self._num_travelling
        num_stacks = len(self._receiver.stacks)
        num_replicas = 0 if self._replicas is None else len(self._replicas.names)
        header = np.zeros(
            (world_size, _FIRST_COUNT + num_stacks + num_tables + num_replicas), np.int64
        )
        counts = np.split(header[:, _FIRST_COUNT:], [num_stacks, num_stacks + num_tables], axis=1)
        failure = future.exception()
        if failure is None:
            own = future.result()
            counts[0][:] = own.route.num_slots
            counts[1][:] = own.route.num_samples
            counts[2][:] = own.batch.stats.table_max_unique_ids[num_tables:]
        else:
            header[:, _STATUS] = _BAD
        headers = self._exchange.headers(torch.from_numpy(header)).wait().numpy()
        if (headers[:, _STATUS] != _GOOD).any():
            self._raise_together(failure)
        num_slots, num_samples, num_rows = np.split(
            headers[:, _FIRST_COUNT:], [num_stacks, num_stacks + num_tables], axis=1
        )
        pending = self._exchange.ragged(
            own.route.payload,
            (own.route.num_slots.sum(axis=1) * WORDS_PER_ID).tolist(),
            (num_slots.sum(axis=1) * WORDS_PER_ID).tolist(),
        )

        def finish() -> Delivery:
            return Delivery(
                own=own,
                buffers=ops.as_tensors(own.batch),
                geometry=self._outputs.geometry(own.batch),
                arrival=self._receiver.receive(num_slots, num_samples, pending.wait()),
                num_rows=num_rows,
            )

        return Ids(finish)

    def _raise_together(self, failure: BaseException | None) -> None:
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        messages = self._exchange.agree(message)
        if failure is not None:
            raise failure
        bad = {rank: text for rank, text in enumerate(messages) if text is not None}
        raise PeerBatchError(
            f"{self._module_fqn or type(self).__name__}: "
            + "; ".join(f"rank {rank} has a batch with {text}" for rank, text in bad.items()),
            ranks=tuple(bad),
        )

    def _answered(self, delivery: Delivery, vectors: Tensor) -> Callable[[], Tensor]:
        """Sends the vectors back; the result gives this rank's activations."""
        route = delivery.own.route
        counts = (route.num_samples * self._router.widths).sum(axis=1).tolist()
        pending = self._exchange.ragged(vectors, delivery.arrival.floats_of_ranks, counts)
        training = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

        def compute() -> Tensor:
            return self._activations(delivery, pending)

        def update(grad: Tensor) -> None:
            self._update(delivery, grad)

        return lambda: ops.updated_in_backward(compute, update) if training else compute()

    def _activations(self, delivery: Delivery, pending: Pending[Tensor]) -> Tensor:
        batch, geometry, route = delivery.own.batch, delivery.geometry, delivery.own.route
        shape = self._outputs.shape(batch)
        if self._replicas is None:
            activations = torch.zeros(shape)
        else:
            activations = self._replicas.lookup(delivery.buffers, geometry, shape)
            for table in geometry.tables[: self._num_travelling]:
                for feature in geometry.features[table.first_feature :][: table.num_features]:
                    activations.as_strided(
                        (feature.num_samples, table.dim),
                        (feature.out_stride, 1),
                        feature.out_offset,
                    ).zero_()
        flat = activations.view(-1).numpy()
        counts = (route.num_samples * self._router.widths).sum(axis=1).tolist()
        for offsets, num_samples, packed in zip(
            route.offsets, route.num_samples, torch.split(pending.wait(), counts), strict=True
        ):
            _native.add_vectors(
                self._pool, packed.numpy(), offsets, num_samples, self._router.widths, flat
            )
        return activations

    def _update(self, delivery: Delivery, grad: Tensor) -> None:
        """The way back: gradients to the owners of the rows, who update them."""
        route, arrival = delivery.own.route, delivery.arrival
        divisor = float(self._env.world_size if get_gradient_division() else 1)
        flat = grad.detach().view(-1).numpy()
        counts = (route.num_samples * self._router.widths).sum(axis=1).tolist()
        packed = torch.empty(sum(counts))
        for offsets, num_samples, part in zip(
            route.offsets, route.num_samples, torch.split(packed, counts), strict=True
        ):
            _native.gather_vectors(
                self._pool, flat, offsets, num_samples, self._router.widths, divisor, part.numpy()
            )
        pending = self._exchange.ragged(packed, counts, arrival.floats_of_ranks)
        if self._replicas is not None:
            self._replicas.update(
                grad, delivery.buffers, delivery.geometry, delivery.num_rows, divisor
            )
        vectors = arrival.unpacked(pending.wait())
        alone = [at for at, name in enumerate(arrival.tables) if name not in self._shared_means]
        if alone:
            self._optimizer.update(
                vectors,
                arrival.buffers,
                arrival.geometry.select(alone),
                [arrival.tables[at] for at in alone],
            )
        if self._shared_means:
            self._shared_means.update(vectors, arrival)
        self._optimizer.count_updates(self._idle)

    # ---- what TorchRec asks of a module

    @property
    def fused_optimizer(self) -> ShardedEmbeddingOptimizer:
        """The optimizer that runs in backward: learning rates, state, checkpoints."""
        return self._optimizer

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of the module that was sharded."""
        return self._unsharded_type

    @property
    def layout(self) -> Layout:
        """Where the rows of every shard live; a rank is a core."""
        return self._layout

    @property
    def placements(self) -> Mapping[str, TablePlacement]:
        """Of every table, in config order."""
        return self._placements

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        check_stays(fn, {config.name: DTYPES[config.data_type] for config in self._configs})
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Placements and optimizers, for `print(model)`."""
        return "\n".join(
            f"{table}: ({p.num_embeddings}, {p.embedding_dim}) {p.kind}"
            + (f" on ranks {[shard.rank for shard in p.shards]}" if p.shards else "")
            + f", {self._optimizer.spec(table)!r}"
            for table, p in self._placements.items()
        )


def _put_sharded(
    module: ShardedCollection[Any], destination: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """In state dicts, sharded tables are the whole tables."""
    for table, tensor in module._global.items():
        destination[f"{prefix}{module._tables_name}.{table}.weight"] = tensor


def _take_sharded(
    module: ShardedCollection[Any], state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Copies whole or sharded tables into the shards; nothing is left to load for them."""
    parameters = weights_of(getattr(module, module._tables_name))
    keys = {table: f"{prefix}{module._tables_name}.{table}.weight" for table in module._views}
    found = {table: key for table, key in keys.items() if key in state_dict}
    pairs = [
        pair
        for table, key in found.items()
        for pair in parts(
            module._placements[table], module._views[table], state_dict[key], name=key
        )
    ]
    copy(pairs)
    for table, key in found.items():
        state_dict[key] = parameters[table].detach()
