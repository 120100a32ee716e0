"""Embedding collections whose lookup and update run on SparseCores, or on the CPU in their stead.

`SparseCoreEmbeddingBagCollection` and `SparseCoreEmbeddingCollection` take the configs of
TorchRec's collections and return what those return; weights have the same names, shapes and first
values. The optimizer is part of the module: `loss.backward()` updates the tables.

Legend: B batch size, F features, V num_embeddings, D embedding_dim, N_f ids of a sequence feature.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypedDict, TypeVar, Unpack

import torch
import torch.distributed
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_tpu.sharding.device import DeviceTables, takes_stacks
from torchrec_tpu.sharding.kjt import arrays_of, usable_weights
from torchrec_tpu.sharding.optimizer import FusedEmbeddingOptimizer
from torchrec_tpu.sharding.transfer import DeviceBatch, Pending
from torchrec_tpu.sparsecore import backends, ops
from torchrec_tpu.sparsecore.batch import SparseBatch, Stats
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import (
    BatchLayoutError,
    KjtError,
    OptimizerError,
    TableError,
    UnshardedError,
)
from torchrec_tpu.sparsecore.layout import Combiner, Layout, Table
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad
from torchrec_tpu.sparsecore.preprocess import IdPolicy, Preprocessor
from torchrec_tpu.sparsecore.stacking import make_layout

SourceT = TypeVar("SourceT", bound=EmbeddingBagCollection | EmbeddingCollection)

Stacks = Literal["auto", "none"] | Sequence[Sequence[str]]

DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16}
"""Of the weights that a table may have."""

COMBINERS = {PoolingType.SUM: Combiner.SUM, PoolingType.MEAN: Combiner.MEAN}

_PREPARED = "_torchrec_tpu_batches"
"""Attribute of a KJT's values: batch key -> _Prepared. `kjt.to("cpu")` keeps the values' object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """What `replaced_lookup` puts in the place of a batch and its lookup."""

    batch_size: int
    num_samples: tuple[int, ...]  # (F,) stack order
    lengths: Tensor | None  # (F, B) config order
    lookup: Callable[[Sequence[int]], Tensor]


class Options(TypedDict, total=False):
    """How a collection is laid out and fed. None of it changes results.

    Attributes:
        num_devices: devices that the tables are laid out on; 1 by default.
        cores_per_device: SparseCores a device; 2 by default.
        stacks: "auto" (default) lays small tables end to end, "none" keeps every table alone, or
            lists of table names.
        capacity: static limits by stack name, from `calibrate`; by default buffers take the size
            that each batch needs.
        batch_size: largest batch that will come; by default any.
        id_policy: what happens to an id outside its table: "error" (default), "clamp" to row 0, or
            "drop".
        num_threads: preprocessing threads; as many as the machine has cores by default.
    """

    num_devices: int
    cores_per_device: int
    stacks: Stacks
    capacity: Mapping[str, Capacity] | None
    batch_size: int | None
    id_policy: IdPolicy
    num_threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A batch, and what it was made of beside the values that it hangs on."""

    batch: SparseBatch
    pending: Pending | None  # on its way to the tables' device
    keys: tuple[str, ...]
    lengths: Tensor | None
    offsets: Tensor | None  # only when there are no lengths; a KJT may compute either later
    weights: Tensor | None
    versions: tuple[int, ...]

    @classmethod
    def of(cls, kjt: KeyedJaggedTensor, batch: SparseBatch, pending: Pending | None) -> Self:
        lengths = kjt.lengths_or_none()
        return cls(
            batch=batch,
            pending=pending,
            keys=tuple(kjt.keys()),
            lengths=lengths,
            offsets=kjt.offsets_or_none() if lengths is None else None,
            weights=kjt.weights_or_none(),
            versions=_versions(kjt.values(), lengths, kjt.weights_or_none()),
        )

    def is_of(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether the KJT has the same tensors, unchanged since."""
        return (
            self.keys == tuple(kjt.keys())
            and (self.lengths is None or self.lengths is kjt.lengths_or_none())
            and (self.offsets is None or self.offsets is kjt.offsets_or_none())
            and self.weights is kjt.weights_or_none()
            and self.versions == _versions(kjt.values(), self.lengths, self.weights)
        )


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    """Numbers that change when a tensor is changed in place."""
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)


class _Collection(FusedOptimizerModule, nn.Module, Generic[SourceT]):
    """What pooled and sequence collections share: layout, batches, lookup, optimizer."""

    _tables_name: str  # attribute that holds the tables, as in TorchRec
    _replacement: _Replacement | None = None
    _on_device: DeviceTables | None = None  # where the tables are, when not in the parameters
    _combiner: Callable[[Any], Combiner]

    @classmethod
    def from_torchrec(
        cls,
        collection: SourceT,
        *,
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec],
        **options: Unpack[Options],
    ) -> Self:
        """A collection that shares its tables, parameter by parameter, with TorchRec's.

        The source stays usable; once it is not used any more, `fused_optimizer.mark_parameters()`
        tells TorchRec that the tables need no other optimizer. `swap_embeddings` does all of it.
        """
        self = cls.__new__(cls)
        self._adopt(collection, optimizer, **options)
        return self

    @abstractmethod
    def _adopt(
        self,
        source: SourceT,
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec],
        **options: Unpack[Options],
    ) -> None:
        """Becomes a collection with the tables of `source`."""

    def _set_up(
        self,
        source: EmbeddingBagCollection | EmbeddingCollection,
        configs: Sequence[BaseEmbeddingConfig],
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec],
        *,
        is_weighted: bool = False,
        num_devices: int = 1,
        cores_per_device: int = 2,
        stacks: Stacks = "auto",
        capacity: Mapping[str, Capacity] | None = None,
        batch_size: int | None = None,
        id_policy: IdPolicy = "error",
        num_threads: int | None = None,
    ) -> None:
        """Takes over the table modules of `source`: the same names and the same storage."""
        modules: nn.ModuleDict = getattr(source, self._tables_name)
        weights = weights_of(modules)
        specs = _spec_per_table(optimizer, list(weights))
        tables = []
        for config in configs:
            check_table(config, weights[config.name])
            tables.append(
                Table(
                    name=config.name,
                    num_embeddings=config.num_embeddings,
                    embedding_dim=config.embedding_dim,
                    combiner=type(self)._combiner(config),
                    features=tuple(config.feature_names),
                    group=specs[config.name].group,
                )
            )
        self._layout = make_layout(
            tables,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            stacks=stacks,
            batch_size=4096 if batch_size is None else batch_size,
        )
        self._table_order = [t.table.name for t in self._layout.stack_order_tables]
        self._is_weighted = is_weighted
        self._batch_size = batch_size
        self._id_policy: IdPolicy = id_policy
        self._num_threads = num_threads
        self._capacity = None if capacity is None else dict(capacity)
        self._preprocessor = self._new_preprocessor()
        self.register_module(self._tables_name, modules)
        self._optimizer = FusedEmbeddingOptimizer(
            weights, specs, key=lambda table: f"{self._tables_name}.{table}.weight"
        )
        self.register_state_dict_post_hook(_read_from_device)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_write_to_device)  # type: ignore[no-untyped-call]

    def _new_preprocessor(self) -> Preprocessor:
        return self.preprocessor(self._layout, batch_size=self._batch_size, capacity=self._capacity)

    @property
    def layout(self) -> Layout:
        """Where every row lives; its repr shows stacks and tables."""
        return self._layout

    @property
    def capacity(self) -> Mapping[str, Capacity] | None:
        """Static limits by stack name; None when buffers take the size that a batch needs."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: Mapping[str, Capacity] | None) -> None:
        self._capacity, old = None if capacity is None else dict(capacity), self._capacity
        try:
            preprocessor = self._new_preprocessor()
            if self._on_device is not None:
                self._on_device.capacity = self._capacity
        except Exception:
            self._capacity = old
            raise
        self._preprocessor = preprocessor

    @property
    def fused_optimizer(self) -> FusedEmbeddingOptimizer:
        """The optimizer that runs in backward: learning rates, state, checkpoints."""
        return self._optimizer

    @property
    def device(self) -> torch.device:
        """Where the tables are; on an accelerator, their parameters are on "meta"."""
        if self._on_device is not None:
            return self._on_device.device
        return next(iter(self._weights().values())).device

    def preprocess(self, features: KeyedJaggedTensor) -> SparseBatch:
        """The packed form of a KJT, which `forward` accepts in its place.

        Raises:
            KjtError: arrays that contradict each other, or a variable batch size per key.
            MissingKeyError: the KJT lacks a key.
            WeightsError: weights are missing although is_weighted=True, or ask for a gradient.
            IdRangeError: an id is outside its table.
            BatchSizeError, CapacityError: the batch exceeds a static limit.
        """
        return self._preprocessor(**self.arrays(features))

    def measure(self, features: KeyedJaggedTensor) -> Stats:
        """What a KJT needs of the static limits; they are not enforced. See `calibrate`.

        Raises:
            KjtError, MissingKeyError, WeightsError, IdRangeError, BatchSizeError: as `preprocess`.
        """
        return self._preprocessor.measure(**self.arrays(features))

    def preprocessor(
        self,
        layout: Layout,
        *,
        batch_size: int | None = None,
        capacity: Mapping[str, Capacity] | None = None,
        sequence_ids: Mapping[str, int] | None = None,
    ) -> Preprocessor:
        """A preprocessor with this collection's settings for another layout of its tables.

        Call it with `arrays(kjt)`. `batch_size`, `capacity` and `sequence_ids` are static limits:
        see `Preprocessor`.
        """
        return Preprocessor(
            layout,
            batch_size=batch_size,
            capacity=capacity,
            num_threads=self._num_threads,
            id_policy=self._id_policy,
            is_weighted=self._is_weighted,
            sequence_ids=sequence_ids,
        )

    def arrays(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        """The KJT as a preprocessor's arguments, sharing its memory.

        Raises:
            KjtError: arrays that contradict each other, or a variable batch size per key.
        """
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise KjtError(
                "the KJT has a variable batch size per key (stride_per_key_per_rank or "
                "inverse_indices), which is not supported; expand it to one batch size first"
            )
        return arrays_of(features, weights=self._usable_weights(features.weights_or_none()))

    def _usable_weights(self, weights: Tensor | None) -> Tensor | None:
        """The weights to preprocess."""
        return usable_weights(weights, is_weighted=self._is_weighted)

    def attach(self, features: KeyedJaggedTensor) -> SparseBatch:
        """Preprocesses a KJT ahead of `forward`, which finds the result with the KJT's tensors.

        When the tables are on a device, the copy to it starts here too.
        It is used as long as those are the same tensors and unchanged: `kjt.to("cpu")` keeps it,
        while a KJT with new tensors (`permute`, ...) is preprocessed again.
        """
        attached = self._attached(features)
        if attached is not None:
            return attached.batch
        batch = self.preprocess(features)
        pending = None if self._on_device is None else self._on_device.start(batch)
        prepared = getattr(features.values(), _PREPARED, None)
        if prepared is None:
            prepared = {}
            setattr(features.values(), _PREPARED, prepared)
        prepared[self._batch_key] = _Prepared.of(features, batch, pending)
        return batch

    def _attached(self, features: KeyedJaggedTensor) -> _Prepared | None:
        prepared: _Prepared | None
        prepared = getattr(features.values(), _PREPARED, {}).get(self._batch_key)
        return prepared if prepared is not None and prepared.is_of(features) else None

    @property
    def _batch_key(self) -> tuple[object, ...]:
        """Modules with equal keys make equal batches."""
        capacity = None if self._capacity is None else tuple(sorted(self._capacity.items()))
        return (
            self._layout.fingerprint,
            self._is_weighted,
            self._id_policy,
            self._batch_size,
            capacity,
            None if self._on_device is None else str(self.device),
        )

    @contextmanager
    def replaced_lookup(
        self,
        lookup: Callable[[Sequence[int]], Tensor],
        *,
        batch_size: int,
        num_samples: tuple[int, ...],
        lengths: Tensor | None = None,
    ) -> Iterator[None]:
        """Within the block, `forward` takes its activations from `lookup`: the seam for tracing.

        `forward` does not read its argument then, and nothing is updated in backward.

        Args:
            lookup: shape of the activations -> activations, float32, as `Layout.geometry` says.
            batch_size: B.
            num_samples: (F,) stack order: B, or the ids of a sequence feature.
            lengths: (F, B) in config order, for sequences.
        """
        self._replacement = _Replacement(
            batch_size=batch_size, num_samples=num_samples, lengths=lengths, lookup=lookup
        )
        try:
            yield
        finally:
            self._replacement = None

    @property
    def table_optimizers(self) -> dict[str, OptimizerSpec | None]:
        """The optimizer of each table, in config order; None for a frozen one."""
        return {
            name: self._optimizer.spec(name) if weight.requires_grad else None
            for name, weight in self._weights().items()
        }

    def _batch_of(
        self, features: KeyedJaggedTensor | SparseBatch | DeviceBatch
    ) -> SparseBatch | DeviceBatch | _Replacement:
        if self._replacement is not None:
            return self._replacement
        if isinstance(features, SparseBatch | DeviceBatch):
            if features.fingerprint != self._layout.fingerprint:
                raise BatchLayoutError(
                    f"the SparseBatch was made for layout {features.fingerprint[:12]}, this module "
                    f"has {self._layout.fingerprint[:12]}: use its own preprocess()"
                )
            return features
        attached = self._attached(features)
        if attached is None:
            return self.preprocess(features)
        return attached.batch if attached.pending is None else attached.pending.wait()

    def _lookup(
        self, batch: SparseBatch | DeviceBatch | _Replacement, out_shape: Sequence[int]
    ) -> Tensor:
        if isinstance(batch, _Replacement):
            return batch.lookup(out_shape)
        weights = self._weights()
        training = torch.is_grad_enabled() and any(w.requires_grad for w in weights.values())
        if training:
            self._refuse_replicas()
        if self.device.type == "meta":
            raise TableError(
                f"tables {self._table_order} are on the meta device: call "
                'to_empty(device="cpu") and reset_parameters(), or load a checkpoint'
            )
        tables: list[Tensor]
        if self._on_device is not None:
            buffers, tables, geometry = self._on_device.inputs(batch)
        else:
            host = batch.batch if isinstance(batch, DeviceBatch) else batch
            buffers, geometry = ops.as_tensors(host), self._layout.geometry(host)
            tables = [weights[name] for name in self._table_order]

        def update(grad: Tensor) -> None:
            self._optimizer.update(grad, buffers, geometry, self._table_order)

        return ops.lookup(
            buffers,
            tables,
            geometry,
            out_shape,
            update=update if training else None,
        )

    def _refuse_replicas(self) -> None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        if (world_size := distributed.get_world_size()) > 1:
            raise UnshardedError(
                f"tables {self._table_order} are not sharded, and this is one of {world_size} "
                "processes: each would update its own copy and the copies would drift apart. Wrap "
                "the model: DistributedModelParallel(model, sharders=torchrec_tpu.sharders(...)), "
                "or train in one process; inference works (torch.no_grad())"
            )

    def _weights(self) -> dict[str, nn.Parameter]:
        return weights_of(getattr(self, self._tables_name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        allowed = ("meta", *backends.FOR_DEVICE)
        dtypes = {name: weight.dtype for name, weight in self._weights().items()}
        device = check_stays(fn, dtypes, allowed, device=self.device)
        if self._on_device is not None and device == self.device:
            return self
        if takes_stacks(device):
            self._to_device(device)
        else:
            if self._on_device is not None:
                self._to_host()
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self._optimizer.rebind(self._weights())
        return self

    def _to_device(self, device: torch.device) -> None:
        """Moves tables and their state into device form; their parameters become shapes."""
        weights: dict[str, nn.Parameter] = self._weights()
        optimizer: FusedEmbeddingOptimizer = self._optimizer
        if half := [name for name, w in weights.items() if w.dtype is not torch.float32]:
            raise TableError(
                f"tables {half} are float16, and SparseCores look up and update float32 tables: "
                "give them DataType.FP32, or leave this module on the CPU"
            )
        tables = DeviceTables(
            self._layout,
            optimizers=self.table_optimizers,
            specs={name: optimizer.spec(name) for name in weights},
            capacity=self._capacity,
            device=device,
        )
        if self._on_device is not None:
            self._to_host()
        tables.fill({name: [w, *optimizer.slots(name)] for name, w in self._weights().items()})
        self._replace_weights({n: torch.empty_like(w, device="meta") for n, w in weights.items()})
        self._optimizer.rebind(self._weights(), device=tables)
        self._on_device = tables

    def _to_host(self) -> None:
        """Moves tables and their state out of device form, into the parameters."""
        assert self._on_device is not None
        self._replace_weights({name: self._on_device.read(name) for name in self._weights()})
        self._optimizer.rebind(self._weights())
        self._on_device = None

    def _replace_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, module in getattr(self, self._tables_name).items():
            module.weight = nn.Parameter(weights[name], requires_grad=module.weight.requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        """All but the preprocessor, whose threads and scratch memory cannot be copied."""
        return {**self.__dict__, "_preprocessor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._preprocessor = self._new_preprocessor()
        self._optimizer.mark_parameters()

    def extra_repr(self) -> str:
        """Layout and optimizers, for `print(model)`."""
        specs = dict.fromkeys(repr(self._optimizer.spec(name)) for name in self._weights())
        return f"{self._layout!r}\noptimizer: {', '.join(specs)}"


class SparseCoreEmbeddingBagCollection(
    _Collection[EmbeddingBagCollection], EmbeddingBagCollectionInterface
):
    """Pooled embeddings of several tables: TorchRec's `EmbeddingBagCollection` with its optimizer.

    Parameters are `embedding_bags.<table>.weight`, (V, D). Under the same seed they start with the
    same bits as TorchRec's.

    Args:
        tables: configs, FP32 or FP16; results are float32 in either case.
        is_weighted: whether KJTs carry a weight per id. MEAN divides by the sum of weights.
        device: "cpu", or "meta" to allocate later.
        optimizer: one for all tables, or one per table name.
        options: see `Options`.

    Raises:
        TableError: a table has another dtype or kind.
        LayoutError: tables, features or stacks contradict each other.
        OptimizerError: `optimizer` names other tables.

    >>> import torch, torchrec
    >>> ebc = SparseCoreEmbeddingBagCollection(
    ...     [torchrec.EmbeddingBagConfig(num_embeddings=4, embedding_dim=2, name="t",
    ...                                  feature_names=["f"])])
    >>> kjt = torchrec.KeyedJaggedTensor(
    ...     keys=["f"], values=torch.tensor([0, 3, 3]), lengths=torch.tensor([1, 0, 2]))
    >>> ebc(kjt)["f"].shape
    torch.Size([3, 2])
    """

    _tables_name = "embedding_bags"

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec] | None = None,
        **options: Unpack[Options],
    ) -> None:
        _check_kinds(tables)
        source = EmbeddingBagCollection(
            tables=tables, is_weighted=is_weighted, device=_device(device)
        )
        self._adopt(source, optimizer or adagrad(), **options)
        self._optimizer.mark_parameters()

    def _adopt(
        self,
        source: EmbeddingBagCollection,
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec],
        **options: Unpack[Options],
    ) -> None:
        nn.Module.__init__(self)
        self._configs = source.embedding_bag_configs()
        self._embedding_names = [
            name for names in get_embedding_names_by_table(self._configs) for name in names
        ]
        self._widths = [
            config.embedding_dim for config in self._configs for _ in config.feature_names
        ]
        self._set_up(source, self._configs, optimizer, is_weighted=source.is_weighted(), **options)
        self.train(source.training)

    @staticmethod
    def _combiner(config: EmbeddingBagConfig) -> Combiner:
        return COMBINERS[config.pooling]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the preprocessor is native code
    def forward(self, features: KeyedJaggedTensor | SparseBatch | DeviceBatch) -> KeyedTensor:
        """Pools the rows of every bag; an empty bag gives zeros.

        Args:
            features: KJT with at least the features of the tables, or `preprocess`'s result.

        Returns:
            float32 (B, sum of D), one block of columns a feature, in config order.
        """
        if not isinstance(features, SparseBatch | DeviceBatch):
            features = maybe_td_to_kjt(features, None)
        batch = self._batch_of(features)
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._widths,
            values=self._lookup(batch, (batch.batch_size, sum(self._widths))),
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs, in output order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether KJTs must have weights."""
        return self._is_weighted

    def reset_parameters(self) -> None:
        """Gives every table its first values again, by the config's init_fn."""
        _reset(self._configs, self._weights(), self._on_device)


class SparseCoreEmbeddingCollection(_Collection[EmbeddingCollection], EmbeddingCollectionInterface):
    """Embeddings of sequences: TorchRec's `EmbeddingCollection` with its optimizer.

    Parameters are `embeddings.<table>.weight`, (V, D), the same D for all tables. Under the same
    seed they start with the same bits as TorchRec's. A KJT's weights are ignored, as there.

    Args:
        tables: configs, FP32 or FP16; results are float32 in either case.
        device: "cpu", or "meta" to allocate later.
        need_indices: whether the ids come back as the `weights` of the results.
        optimizer: one for all tables, or one per table name.
        options: see `Options`.

    Raises:
        TableError: a table has another dtype or kind.
        LayoutError: tables, features or stacks contradict each other.
        OptimizerError: `optimizer` names other tables.

    >>> import torch, torchrec
    >>> ec = SparseCoreEmbeddingCollection(
    ...     [torchrec.EmbeddingConfig(num_embeddings=4, embedding_dim=2, name="t",
    ...                               feature_names=["f"])])
    >>> kjt = torchrec.KeyedJaggedTensor(
    ...     keys=["f"], values=torch.tensor([0, 3, 3]), lengths=torch.tensor([1, 0, 2]))
    >>> ec(kjt)["f"].values().shape, ec(kjt)["f"].lengths()
    (torch.Size([3, 2]), tensor([1, 0, 2]))
    """

    _tables_name = "embeddings"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec] | None = None,
        **options: Unpack[Options],
    ) -> None:
        _check_kinds(tables)
        source = EmbeddingCollection(
            tables=tables, device=_device(device), need_indices=need_indices
        )
        self._adopt(source, optimizer or adagrad(), **options)
        self._optimizer.mark_parameters()

    def _adopt(
        self,
        source: EmbeddingCollection,
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec],
        **options: Unpack[Options],
    ) -> None:
        nn.Module.__init__(self)
        self._configs = source.embedding_configs()
        self._names_by_table = source.embedding_names_by_table()
        self._need_indices = source.need_indices()
        self._dim = source.embedding_dim()
        self._set_up(source, self._configs, optimizer, **options)
        self.train(source.training)

    @staticmethod
    def _combiner(config: EmbeddingConfig) -> Combiner:  # noqa: ARG004
        return Combiner.NONE

    def _usable_weights(self, weights: Tensor | None) -> Tensor | None:  # noqa: ARG002
        return None  # TorchRec's sequences know no weights either

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def forward(
        self, features: KeyedJaggedTensor | SparseBatch | DeviceBatch
    ) -> dict[str, JaggedTensor]:
        """Looks up every id.

        Args:
            features: KJT with at least the features of the tables, or `preprocess`'s result (which
                holds no indices, so not with need_indices=True).

        Returns:
            By output name, in config order: values float32 (N_f, D), lengths (B,) of the KJT's
            dtype, and with need_indices the ids as weights.
        """
        if not isinstance(features, SparseBatch | DeviceBatch):
            features = maybe_td_to_kjt(features, None)
        elif self._need_indices:
            raise BatchLayoutError(
                "need_indices=True returns the ids, which a SparseBatch no longer has: pass the "
                "KJT (attach() prepares it ahead)"
            )
        batch = self._batch_of(features)
        assert batch.lengths is not None
        num_ids = dict(
            zip(
                (feature.config_index for feature in self._layout.stack_order_features),
                batch.num_samples,
                strict=True,
            )
        )
        sizes = [num_ids[feature.config_index] for feature in self._layout.features]
        vectors = self._lookup(batch, (sum(sizes), self._dim))
        rows = torch.split(vectors, sizes)
        lengths = (
            batch.lengths if isinstance(batch.lengths, Tensor) else torch.from_numpy(batch.lengths)
        ).to(vectors.device)
        indices = self._indices(features, vectors.device)
        return {
            feature.output_name: JaggedTensor(
                values=rows[index],
                lengths=lengths[index],
                weights=None if indices is None else indices[feature.key],
            )
            for index, feature in enumerate(self._layout.features)
        }

    def _indices(
        self, features: KeyedJaggedTensor | SparseBatch | DeviceBatch, device: torch.device
    ) -> dict[str, Tensor] | None:
        if not self._need_indices or isinstance(features, SparseBatch | DeviceBatch):
            return None
        indices = torch.split(features.values().to(device), features.length_per_key())
        return dict(zip(features.keys(), indices, strict=True))

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs, in output order."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether results carry their ids."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """D, of every table."""
        return self._dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names, table by table."""
        return self._names_by_table

    def reset_parameters(self) -> None:
        """Gives every table its first values again, by the config's init_fn."""
        _reset(self._configs, self._weights(), self._on_device)


SparseCoreCollection = SparseCoreEmbeddingBagCollection | SparseCoreEmbeddingCollection


def collections_in(model: nn.Module) -> Iterator[tuple[str, SparseCoreCollection]]:
    """FQN and module of every SparseCore collection in a model, each once."""
    for fqn, module in model.named_modules():
        if isinstance(module, SparseCoreCollection):
            yield fqn, module


def weights_of(tables: nn.ModuleDict) -> dict[str, nn.Parameter]:
    """Table name -> parameter, in config order."""
    return {name: table.get_parameter("weight") for name, table in tables.items()}


def check_table(config: BaseEmbeddingConfig, weight: Tensor) -> None:
    """Refuses a table that a SparseCore collection cannot hold.

    Raises:
        TableError: says why.
    """
    _check_kinds([config])
    dtype = DTYPES[config.data_type]
    if weight.dtype is not dtype or weight.device.type not in ("cpu", "meta"):
        raise TableError(
            f"table {config.name!r}: weight is {weight.dtype} on {weight.device}, expected {dtype} "
            "on cpu"
        )
    if not weight.is_contiguous():
        raise TableError(f"table {config.name!r}: weight is not contiguous; clone it")


def check_stays(
    fn: Callable[[Tensor], Tensor],
    tables: Mapping[str, torch.dtype],
    devices: Sequence[str] = ("cpu",),
    *,
    device: torch.device | str = "cpu",
) -> torch.device:
    """Refuses what `nn.Module._apply` would do to tables when it changes their dtype or device.

    Args:
        fn: as of `_apply`.
        tables: dtype of each.
        devices: types of those that they may be on.
        device: where they are.

    Returns:
        Where they would be.

    Raises:
        TableError: says what it would become.
    """
    for dtype in dict.fromkeys(tables.values()):
        probe = fn(torch.empty(0, dtype=dtype, device=device))
        if probe.dtype is not dtype or probe.device.type not in devices:
            names = [name for name, own in tables.items() if own is dtype]
            raise TableError(
                f"tables {names} are {str(dtype).removeprefix('torch.')} on "
                f"{torch.device(device).type}, they cannot become {probe.dtype} on {probe.device}"
            )
    return probe.device


def _check_kinds(configs: Sequence[BaseEmbeddingConfig]) -> None:
    for config in configs:
        if config.data_type not in DTYPES:
            raise TableError(
                f"table {config.name!r}: data_type {config.data_type} is not supported; use "
                f"{' or '.join(map(str, DTYPES))}"
            )
        if isinstance(config, EmbeddingBagConfig) and config.pooling not in COMBINERS:
            raise TableError(
                f"table {config.name!r}: pooling {config.pooling} is not supported; use one of "
                f"{', '.join(pooling.value for pooling in COMBINERS)}, or an EmbeddingConfig"
            )
        if config.use_virtual_table:
            raise TableError(f"table {config.name!r}: virtual tables are not supported")


def _spec_per_table(
    optimizer: OptimizerSpec | Mapping[str, OptimizerSpec], tables: Sequence[str]
) -> dict[str, OptimizerSpec]:
    if isinstance(optimizer, OptimizerSpec):
        return dict.fromkeys(tables, optimizer)
    if optimizer.keys() != set(tables):
        raise OptimizerError(
            f"optimizers are given for {sorted(optimizer)}, the tables are {sorted(tables)}"
        )
    return {table: optimizer[table] for table in tables}


def _device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else torch.device(device)


def _reset(
    configs: Sequence[BaseEmbeddingConfig],
    weights: Mapping[str, nn.Parameter],
    on_device: DeviceTables | None,
) -> None:
    for config in configs:
        weight: Tensor = weights[config.name]
        if on_device is not None:
            weight = torch.empty_like(weight, device="cpu")
        if not weight.is_meta and config.init_fn is not None:
            config.init_fn(weight)
            if on_device is not None:
                on_device.write(config.name, weight)


def _read_from_device(
    module: _Collection[Any],
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],  # noqa: ARG001
) -> None:
    """Puts logical tables into a state dict, where there are only shapes."""
    if module._on_device is not None:
        for name in module._weights():
            key = f"{prefix}{module._tables_name}.{name}.weight"
            state_dict[key] = module._on_device.read(name)


def _write_to_device(
    module: _Collection[Any],
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],  # noqa: ARG001
    strict: bool,  # noqa: ARG001
    missing_keys: list[str],  # noqa: ARG001
    unexpected_keys: list[str],  # noqa: ARG001
    error_msgs: list[str],
) -> None:
    """Takes logical tables out of a state dict; what is left for the parameters are shapes."""
    if module._on_device is None:
        return
    for name, weight in module._weights().items():
        key = f"{prefix}{module._tables_name}.{name}.weight"
        value = state_dict.get(key)
        if value is None or value.shape != weight.shape:
            continue  # torch complains of it
        try:
            module._on_device.write(name, value)
        except Exception as error:
            error_msgs.append(f"table {name!r}: {error}")
        state_dict[key] = weight
