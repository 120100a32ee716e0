"""What `DistributedModelParallel` and TorchRec's planners need to shard embedding collections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    StorageUsageType,
    compute_storage_usage,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_tpu.sharding.embeddings import (
    SparseCoreEmbeddingBagCollection,
    SparseCoreEmbeddingCollection,
    check_table,
    weights_of,
)
from torchrec_tpu.sharding.optimizer_specs import Optimizers, requested_specs, spec_of_table
from torchrec_tpu.sharding.placements import PlacementKind
from torchrec_tpu.sharding.sharded import (
    ShardedSparseCoreEmbeddingBagCollection,
    ShardedSparseCoreEmbeddingCollection,
)
from torchrec_tpu.sparsecore.errors import OptimizerError, TableError
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.sparsecore.preprocess import IdPolicy

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ShardingOptions(TypedDict, total=False):
    """How sharded collections run. None of it changes results of good batches.

    Attributes:
        id_policy: what happens to an id outside its table: "error" (default), "clamp" to row 0, or
            "drop".
        num_threads: of a rank; by default its share of the host's CPUs.
        deadline_seconds: after which a collective that misses a rank raises; 300 by default.
    """

    id_policy: IdPolicy
    num_threads: int
    deadline_seconds: float


def sharders(
    *,
    fused_params: Mapping[str, Any] | None = None,
    optimizer: Optimizers | None = None,
    **options: Unpack[ShardingOptions],
) -> list[ModuleSharder[nn.Module]]:
    """Sharders for the `sharders=` of DistributedModelParallel and of planners.

    They take EmbeddingBagCollections, EmbeddingCollections and this package's own collections. A
    table whose parameter was given to `apply_optimizer_in_backward` keeps that optimizer, one of
    this package's collections its own; others get what is asked for here.

    Args:
        fused_params: optimizer of all tables, in FBGEMM's words.
        optimizer: instead of it: a spec for all tables, or specs by table name.
        options: see `ShardingOptions`.

    Raises:
        OptimizerError: both are given.

    >>> import torchrec_tpu
    >>> [sharder.module_type.__name__ for sharder in sharders(optimizer=torchrec_tpu.sgd(lr=0.1))]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['EmbeddingBagCollection', 'EmbeddingCollection', 'SparseCoreEmbeddingBagCollection',
     'SparseCoreEmbeddingCollection']
    """
    if fused_params is not None and optimizer is not None:
        raise OptimizerError("give fused_params or optimizer, not both: they mean the same")
    chosen = fused_params if optimizer is None else optimizer
    types: tuple[type[nn.Module], ...] = (
        EmbeddingBagCollection,
        EmbeddingCollection,
        SparseCoreEmbeddingBagCollection,
        SparseCoreEmbeddingCollection,
    )
    return [SparseCoreSharder(module_type, chosen, **options) for module_type in types]


class SparseCoreSharder(BaseEmbeddingSharder[ModuleT], Generic[ModuleT]):
    """Shards one type of collection; `sharders()` makes one for each type."""

    def __init__(
        self,
        module_type: type[ModuleT],
        optimizer: Optimizers | None = None,
        **options: Unpack[ShardingOptions],
    ) -> None:
        fused_params = None
        if isinstance(optimizer, Mapping) and not any(
            isinstance(value, OptimizerSpec) for value in optimizer.values()
        ):
            fused_params = dict(optimizer)
        super().__init__(fused_params=fused_params)
        self._module_type = module_type
        self._optimizer = optimizer
        self._options = options

    @property
    def module_type(self) -> type[ModuleT]:
        """What it shards."""
        return self._module_type

    @property
    def optimizer(self) -> Optimizers | None:
        """What was asked for: of tables that have none of their own."""
        return self._optimizer

    def shard(
        self,
        module: ModuleT,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """The collection with its tables where the plan says. A collective.

        Raises:
            PlacementError: the plan leaves tables out, or places them as no collection can.
            OptimizerError: a table has no optimizer, or one that has no fused update here.
            TableError: a table has another dtype or kind, or is wanted on a device.
        """
        _check_device(module, device, module_fqn)
        options: dict[str, Any] = {
            "id_policy": "error",
            "num_threads": threads_of_rank(env.world_size),
            "deadline_seconds": 300.0,
            **self._options,
            "module_fqn": module_fqn,
        }
        if isinstance(module, EmbeddingBagCollection | SparseCoreEmbeddingBagCollection):
            specs = self._specs(module, module.embedding_bag_configs(), module_fqn)
            return ShardedSparseCoreEmbeddingBagCollection(module, params, env, specs, **options)
        assert isinstance(module, EmbeddingCollection | SparseCoreEmbeddingCollection)
        specs = self._specs(module, module.embedding_configs(), module_fqn)
        return ShardedSparseCoreEmbeddingCollection(module, params, env, specs, **options)

    def shardable_parameters(self, module: ModuleT) -> dict[str, nn.Parameter]:
        """Table name -> parameter."""
        return _weights(module)

    def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """All placements, on any device."""
        return [kind.value for kind in PlacementKind]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """TorchRec's names: "fused", as updates run in backward; "dense" where it asks for it."""
        is_replicated = sharding_type == PlacementKind.DATA_PARALLEL
        kernel = EmbeddingComputeKernel.DENSE if is_replicated else EmbeddingComputeKernel.FUSED
        return [kernel.value]

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Bytes of a table, by memory."""
        if compute_device_type == "tpu":
            return {"hbm": tensor.numel() * tensor.element_size()}
        usage: dict[str, int] = compute_storage_usage(
            tensor, compute_device_type, compute_kernel, StorageUsageType.BASE
        )
        return usage

    def _specs(
        self, module: nn.Module, configs: Any, module_fqn: str | None
    ) -> dict[str, OptimizerSpec]:
        weights = _weights(module)
        optimizer = self._optimizer
        if isinstance(optimizer, Mapping) and self.fused_params is None:  # of all collections
            optimizer = {name: spec for name, spec in optimizer.items() if name in weights} or None
        requested = requested_specs(optimizer, weights.keys())
        if isinstance(module, SparseCoreEmbeddingBagCollection | SparseCoreEmbeddingCollection):
            requested = {**requested, **module.fused_optimizer.specs}
        for config in configs:
            check_table(config, weights[config.name])
        return {
            name: spec_of_table(f"{module_fqn or ''}.{name}".lstrip("."), w, requested.get(name))
            for name, w in weights.items()
        }


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    name = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
    return weights_of(getattr(module, name))


def _check_device(module: nn.Module, device: torch.device | None, module_fqn: str | None) -> None:
    """Refuses what sharded collections cannot do yet: tables that are not in a rank's memory."""
    devices = {torch.device("cpu") if device is None else device}
    if isinstance(module, SparseCoreEmbeddingBagCollection | SparseCoreEmbeddingCollection):
        devices.add(module.device)
    if elsewhere := sorted(str(d) for d in devices if d.type not in ("cpu", "meta")):
        raise TableError(
            f"{module_fqn or type(module).__name__}: sharded tables are in the memory of their "
            f"rank's host, and there is no lookup of exchanged ids on {', '.join(elsewhere)}: use "
            "DistributedModelParallel(device=torch.device('cpu')). For a step that is compiled for "
            "a slice see torchrec_tpu.aot, which takes the same plan"
        )


def threads_of_rank(world_size: int) -> int:
    """A rank's share of its host's CPUs, with LOCAL_WORLD_SIZE ranks, or all, on the host."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cpus // ranks)
