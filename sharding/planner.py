"""The planner that TorchRec's `DistributedModelParallel` asks: reads a model, searches, answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerErrorType
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig

from torchrec_tpu.sharding.cost import Step, TableLoad, Way
from torchrec_tpu.sharding.lookups import Lookups
from torchrec_tpu.sharding.optimizer_specs import spec_from_class, spec_from_fused_params
from torchrec_tpu.sharding.plan import SparseCorePlan
from torchrec_tpu.sharding.search import HBM_SHARE, PlanError, make_plan
from torchrec_tpu.sharding.topology import TpuTopology
from torchrec_tpu.sparsecore.layout import Combiner, Table
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec

DEFAULT_EXPONENT: Final = 1.05
"""Skew of ids that is assumed where nothing is known: that of `datasets.Synthetic`."""

_WAYS: Final[Mapping[str, Way]] = {
    ShardingType.ROW_WISE.value: Way.ROWS,
    ShardingType.TABLE_ROW_WISE.value: Way.ROWS,
    ShardingType.TABLE_WISE.value: Way.POOLED,
    ShardingType.COLUMN_WISE.value: Way.POOLED,
    ShardingType.TABLE_COLUMN_WISE.value: Way.POOLED,
    ShardingType.DATA_PARALLEL.value: Way.REPLICATED,
}
"""What a constraint on sharding types allows."""


class TpuEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """Plans tables on a TPU slice. Takes the place of TorchRec's `EmbeddingShardingPlanner`.

    `plan` needs no process group; `collective_plan` plans on rank 0 and tells the others. The whole
    plan with its costs is kept in `sparsecore_plan`.

    Args:
        topology: the slice.
        batch_size: samples of one device, as in TorchRec.
        constraints: by table, as in TorchRec: `pooling_factors` (ids of a bag, one a feature; 1
            when absent) and `sharding_types` are read.
        lookups: by table, from data like yours (`Lookups.observed`); else a power law is assumed.
        exponent: of that power law.
        ways: that may be used.
        dense_row_slots: optimizer arrays for every parameter outside the tables.
        max_widths: see `make_plan`.

    >>> import torch
    >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    >>> from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    >>> model = EmbeddingBagCollection(device=torch.device("meta"), tables=[EmbeddingBagConfig(
    ...     name="t", num_embeddings=1000, embedding_dim=16, feature_names=["f"])])
    >>> topology = TpuTopology(world_size=8, chip="v7x", compute_device="cpu")
    >>> planner = TpuEmbeddingShardingPlanner(topology=topology, batch_size=64)
    >>> plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
    >>> plan.plan[""]["t"].sharding_type
    'row_wise'
    >>> planner.sparsecore_plan["t"].runner_up.label
    'pooled, 1 x 16 columns'
    """

    def __init__(
        self,
        topology: TpuTopology,
        batch_size: int,
        *,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        lookups: Mapping[str, Lookups] | None = None,
        exponent: float = DEFAULT_EXPONENT,
        ways: Iterable[Way | str] = tuple(Way),
        dense_row_slots: int = 1,
        max_widths: int = 1,
    ) -> None:
        if not isinstance(topology, TpuTopology):
            raise PlanError(
                f"topology is a {type(topology).__name__}; pass a TpuTopology, which knows the "
                "slice",
                PlannerErrorType.INPUT_VALIDATION,
            )
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=dict(constraints or {}),
            storage_reservation=FixedPercentageStorageReservation(1 - HBM_SHARE),
            debug=False,
            stats=[],
        )
        self.sparsecore_plan: SparseCorePlan | None = None
        self._slice = topology.slice
        self._samples = batch_size
        self._limits = dict(constraints or {})
        self._lookups = dict(lookups or {})
        self._exponent = exponent
        self._ways = tuple(map(Way, ways))
        self._dense_row_slots = dense_row_slots
        self._max_widths = max_widths

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan of every table whose module has a sharder.

        Raises:
            PlanError: the tables do not fit, or there are none.
        """
        return self._answer(module, self.plan_tables(module, sharders))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """`plan` on rank 0, told to all ranks of the group."""
        if pg is None:
            pg = dist.distributed_c10d._get_default_group()
        found: SparseCorePlan = invoke_on_rank_and_broadcast_result(
            pg, 0, self.plan_tables, module, sharders or []
        )
        return self._answer(module, found)

    def plan_tables(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
    ) -> SparseCorePlan:
        """The plan itself, without a word of TorchRec.

        Raises:
            PlanError: as of `plan`.
        """
        loads, dense_parameters, fixed = [], 0, {}
        for found in _tables_in(module, sharders):
            loads.append(self._load(found))
            limits = self._limits.get(found.table.name)
            if limits is not None and limits.sharding_types:
                try:
                    fixed[loads[-1].key] = {_WAYS[name] for name in limits.sharding_types}
                except KeyError as error:
                    raise PlanError(
                        f"constraints of table {found.table.name!r}: sharding type {error} has no "
                        f"equivalent here; there are {sorted(_WAYS)}",
                        PlannerErrorType.STRICT_CONSTRAINTS,
                    ) from None
        dense_parameters = _dense_parameters(module, sharders)
        return make_plan(
            loads,
            Step(
                global_batch_size=self._samples * self._slice.num_devices,
                dense_parameters=dense_parameters,
                dense_row_slots=self._dense_row_slots,
            ),
            self._slice,
            ways=self._ways,
            fixed=fixed,
            max_widths=self._max_widths,
        )

    def _answer(self, module: nn.Module, found: SparseCorePlan) -> ShardingPlan:
        self.sparsecore_plan = found
        return found.to_sharding_plan(module, device=self._topology.compute_device)

    def _load(self, found: _Found) -> TableLoad:
        table = found.table
        lookups = self._lookups.get(table.name)
        if lookups is None:
            limits = self._limits.get(table.name)
            given = list(limits.pooling_factors) if limits and limits.pooling_factors else [1.0]
            factors = given if len(given) > 1 else given * len(table.features)
            if len(factors) != len(table.features):
                raise PlanError(
                    f"constraints of table {table.name!r}: {len(factors)} pooling_factors for its "
                    f"{len(table.features)} features {list(table.features)}",
                    PlannerErrorType.INPUT_VALIDATION,
                )
            lookups = Lookups.power_law(
                table.num_embeddings,
                factors,
                samples_per_core=math.ceil(self._samples / self._slice.chip.cores_per_device),
                num_cores=self._slice.num_cores,
                exponent=self._exponent,
            )
        return TableLoad(module=found.module, table=table, rule=found.rule, lookups=lookups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    module: str
    table: Table
    rule: str | None


def _sharded_modules(
    model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> list[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Modules that a sharder takes, with their FQN; as TorchRec finds them, by class name."""
    by_name = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    found = []

    def visit(fqn: str, module: nn.Module) -> None:
        sharder = by_name.get(sharder_name(type(module)))
        if sharder is not None:
            found.append((fqn, module, sharder))
            return
        for name, child in module.named_children():
            visit(f"{fqn}.{name}".lstrip("."), child)

    visit("", model)
    return found


def _tables_in(model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> list[_Found]:
    """Tables of every sharded module, in the model's order."""
    found = []
    for fqn, module, sharder in _sharded_modules(model, sharders):
        shardable = sharder.shardable_parameters(module)
        for config in _configs(fqn, module):
            if config.name not in shardable:
                continue
            spec = _spec(config.name, module, shardable[config.name], sharder)
            found.append(
                _Found(
                    module=fqn,
                    table=Table(
                        name=config.name,
                        num_embeddings=config.num_embeddings,
                        embedding_dim=config.embedding_dim,
                        combiner=Combiner(config.pooling.value.lower())
                        if isinstance(config, EmbeddingBagConfig)
                        else Combiner.NONE,
                        features=tuple(config.feature_names),
                        group=spec.group if spec else "frozen",
                    ),
                    rule=spec.rule.name if spec else None,
                )
            )
    if not found:
        raise PlanError(
            f"no module of the model has a sharder; sharders are for "
            f"{[sharder.module_type.__name__ for sharder in sharders]}",
            PlannerErrorType.MISSING_MODULE_IN_PLAN
            if hasattr(PlannerErrorType, "MISSING_MODULE_IN_PLAN")
            else PlannerErrorType.OTHER,
        )
    return found


def _configs(fqn: str, module: nn.Module) -> list[BaseEmbeddingConfig]:
    for name in ("embedding_bag_configs", "embedding_configs"):
        if callable(configs := getattr(module, name, None)):
            return list(configs())
    raise PlanError(
        f"module {fqn!r} is a {type(module).__name__}, which does not tell its tables",
        PlannerErrorType.INPUT_VALIDATION,
    )


def _spec(
    table: str, module: nn.Module, weight: nn.Parameter, sharder: ModuleSharder[nn.Module]
) -> OptimizerSpec | None:
    """The optimizer of a table, from wherever TorchRec users say it; None when it is frozen."""
    if not weight.requires_grad:
        return None
    if isinstance(own := getattr(module, "table_optimizers", None), Mapping):
        spec: OptimizerSpec | None = own[table]
        return spec
    if classes := getattr(weight, "_optimizer_classes", None):
        return spec_from_class(classes[0], getattr(weight, "_optimizer_kwargs", [{}])[0])
    fused: Any = getattr(sharder, "fused_params", None) or {}
    return spec_from_fused_params(fused)


def _dense_parameters(model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> int:
    tables = {
        id(parameter)
        for _, module, _ in _sharded_modules(model, sharders)
        for parameter in module.parameters()
    }
    return sum(p.numel() for p in model.parameters() if id(p) not in tables)
