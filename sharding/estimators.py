"""The cost model inside TorchRec's own planner: a ShardEstimator and a StorageReservation.

torchrec 1.9.2 counts no HBM on "tpu", so that its planner puts any table anywhere; 1.8.0 does not
know the device. With these two a stock `EmbeddingShardingPlanner` on a `TpuTopology` sees what
tables and the dense part take of a TPU. `TpuEmbeddingShardingPlanner` needs neither.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_tpu.sharding import cost
from torchrec_tpu.sharding.cost import Option, Step, TableLoad
from torchrec_tpu.sharding.lookups import Lookups
from torchrec_tpu.sharding.models import dense_parameters, spec_of
from torchrec_tpu.sharding.search import HBM_SHARE
from torchrec_tpu.sharding.topology import TpuTopology
from torchrec_tpu.sparsecore.layout import Combiner, Table


class TpuShardEstimator(ShardEstimator):
    """Storage and time of every shard that TorchRec's enumerator proposes.

    Args:
        topology: the slice.
        exponent: skew of ids that is assumed.

    >>> from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    >>> topology = TpuTopology(world_size=8, chip="v7x", compute_device="cpu")
    >>> enumerator = EmbeddingEnumerator(topology, batch_size=64,
    ...                                  estimator=TpuShardEstimator(topology))
    """

    def __init__(self, topology: TpuTopology, *, exponent: float = 1.05) -> None:
        self._topology = topology
        self._exponent = exponent

    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: SharderDataMap,
    ) -> None:
        """Sets `storage` and `perf` of all shards."""
        for option in sharding_options:
            sharder = sharder_data_map[sharder_name(type(option.module[1]))]
            self._estimate(option, sharder.fused_params or {})

    def _estimate(self, option: ShardingOption, fused_params: Mapping[str, Any]) -> None:
        target = self._topology.slice
        rows, columns = option.tensor.shape
        spec = spec_of(option.name, option.module[1], option.tensor, fused_params)
        load = TableLoad(
            module=option.path,
            table=Table(
                name=option.name,
                num_embeddings=rows,
                embedding_dim=columns,
                combiner=Combiner.SUM if option.is_pooled else Combiner.NONE,
                features=tuple(map(str, range(len(option.input_lengths)))),
            ),
            rule=spec.rule.name if spec else None,
            lookups=Lookups.power_law(
                rows,
                option.input_lengths,
                samples_per_core=math.ceil(option.batch_size / target.chip.cores_per_device),
                num_cores=target.num_cores,
                exponent=self._exponent,
            ),
        )
        step = Step(global_batch_size=option.batch_size * target.num_devices)
        kind = option.sharding_type
        if kind in (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value):
            costs = cost.rows_option(load, step, target)
            for shard in option.shards:
                share = target.num_devices * shard.size[0] / rows
                shard.storage = self._storage(costs.hbm_bytes * share)
                shard.perf = _perf(costs, costs.sparsecore_ms * share, 1)
        elif kind == ShardingType.DATA_PARALLEL.value:
            costs = cost.replicated_option(load, step, target)
            for shard in option.shards:
                shard.storage = self._storage(costs.hbm_bytes)
                shard.perf = _perf(costs, costs.tensorcore_ms, 1)
        else:
            for shard in option.shards:
                width = max(8, shard.size[1])
                costs = cost.pooled_option(load, step, target, width)
                shard.storage = self._storage(load.stored_bytes(shard.size[0], width))
                shard.perf = _perf(costs, costs.shard_ms * shard.size[0] / rows, len(option.shards))

    def _storage(self, num_bytes: float) -> Storage:
        is_tpu = self._topology.compute_device == "tpu"
        size = math.ceil(num_bytes)
        return Storage(hbm=size if is_tpu else 0, ddr=0 if is_tpu else size)


def _perf(costs: Option, compute_ms: float, num_shards: int) -> Perf:
    """Half of a step's time is lookup, half is update."""
    links = costs.links_ms / num_shards
    return Perf(
        fwd_compute=compute_ms / 2,
        fwd_comms=links / 2,
        bwd_compute=compute_ms / 2,
        bwd_comms=links / 2,
    )


class TpuStorageReservation(StorageReservation):
    """What the dense part and the runtime take of every device, before tables are placed.

    Args:
        dense_row_slots: optimizer arrays for every dense parameter.
        share: of the HBM that may be used at all.
    """

    def __init__(self, *, dense_row_slots: int = 1, share: float = HBM_SHARE) -> None:
        self._dense_row_slots = dense_row_slots
        self._share = share
        self._percentage = 1 - share  # torchrec 1.8.0 prints it when tables do not fit
        self._last: Topology | None = None

    def reserve(
        self,
        topology: Topology,
        batch_size: int,  # noqa: ARG002
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,  # noqa: ARG002
    ) -> Topology:
        """The topology with what is left for tables."""
        reserved = copy.deepcopy(topology)
        count = dense_parameters(module, sharders)
        dense = 4 * count * (2 + self._dense_row_slots)  # and gradients
        for device in reserved.devices:
            for kind in ("hbm", "ddr"):
                capacity = getattr(device.storage, kind)
                if capacity:
                    setattr(device.storage, kind, max(0, int(capacity * self._share) - dense))
        self._last = reserved
        return reserved

    @property
    def last_reserved_topology(self) -> Topology | None:
        """A copy of what `reserve` returned last."""
        return copy.deepcopy(self._last)
