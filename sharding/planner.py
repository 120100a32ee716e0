"""The planner that TorchRec's `DistributedModelParallel` asks: reads a model, searches, answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerErrorType
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_tpu.sharding.cost import Step, TableLoad, Way
from torchrec_tpu.sharding.lookups import Lookups
from torchrec_tpu.sharding.models import Found, dense_parameters, tables_in
from torchrec_tpu.sharding.plan import SparseCorePlan
from torchrec_tpu.sharding.search import HBM_SHARE, PlanError, make_plan
from torchrec_tpu.sharding.sharders import sharders as make_sharders
from torchrec_tpu.sharding.topology import TpuTopology

DEFAULT_EXPONENT: Final = 1.05
"""Skew of ids that is assumed where nothing is known: that of `datasets.Synthetic`."""

_TYPES: Final[Mapping[str, str]] = {
    "row_wise": "row_wise",
    "table_row_wise": "table_row_wise",
    "table_wise": "table_wise",
    "column_wise": "column_wise",
    "table_column_wise": "column_wise",
    "data_parallel": "data_parallel",
}
"""What a constraint on sharding types allows: one of `Option.sharding_type`."""


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
                PlannerErrorType.OTHER,
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

    def plan(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]] | None = None
    ) -> ShardingPlan:
        """The plan of every table whose module has a sharder; ours when None.

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
            pg, 0, self.plan_tables, module, sharders
        )
        return self._answer(module, found)

    def plan_tables(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]] | None = None
    ) -> SparseCorePlan:
        """The plan itself, without a word of TorchRec.

        Raises:
            PlanError: as of `plan`.
        """
        if sharders is None:
            sharders = make_sharders()
        loads, types = [], {}
        for found in tables_in(module, sharders):
            loads.append(self._load(found))
            limits = self._limits.get(found.table.name)
            if limits is not None and limits.sharding_types:
                try:
                    types[loads[-1].key] = {_TYPES[name] for name in limits.sharding_types}
                except KeyError as error:
                    raise PlanError(
                        f"constraints of table {found.table.name!r}: sharding type {error} has no "
                        f"equivalent here; there are {sorted(_TYPES)}",
                        PlannerErrorType.STRICT_CONSTRAINTS,
                    ) from None
        return make_plan(
            loads,
            Step(
                global_batch_size=self._samples * self._slice.num_devices,
                dense_parameters=dense_parameters(module, sharders),
                dense_row_slots=self._dense_row_slots,
            ),
            self._slice,
            ways=self._ways,
            sharding_types=types,
            max_widths=self._max_widths,
        )

    def _answer(self, module: nn.Module, found: SparseCorePlan) -> ShardingPlan:
        self.sparsecore_plan = found
        return found.to_sharding_plan(module, device=self._topology.compute_device)

    def _load(self, found: Found) -> TableLoad:
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
                    PlannerErrorType.OTHER,
                )
            lookups = Lookups.power_law(
                table.num_embeddings,
                factors,
                samples_per_core=math.ceil(self._samples / self._slice.chip.cores_per_device),
                num_cores=self._slice.num_cores,
                exponent=self._exponent,
            )
        return TableLoad(
            module=found.module,
            table=table,
            rule=found.rule,
            lookups=lookups,
            is_weighted=found.is_weighted,
        )
