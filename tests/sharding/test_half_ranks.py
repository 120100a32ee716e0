"""Float16 tables spread over ranks: every placement, with the optimizer in backward."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from twin import assert_same_bits, bag_configs, gradient_like, random_kjt
from world import run_world

import torchrec_tpu
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad, rowwise_adagrad

PLANS: list[dict[str, Any]] = [
    {"users": row_wise(), "goods": column_wise(size_per_rank=[8, 4]), "tags": table_wise(rank=1)},
    {"users": table_wise(rank=1), "goods": row_wise(), "tags": data_parallel()},
]


def sharded(plan: dict[str, Any], spec: OptimizerSpec, data_type: DataType) -> Any:
    torch.manual_seed(7)
    configs = bag_configs()
    for config in configs:
        config.data_type = data_type
    collection = EmbeddingBagCollection(configs)
    sharders = torchrec_tpu.sharders(optimizer=spec)
    (sharder,) = [s for s in sharders if s.module_type is EmbeddingBagCollection]
    of_module = construct_module_sharding_plan(
        collection, plan, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    return DistributedModelParallel(
        collection,
        device=torch.device("cpu"),
        plan=ShardingPlan({"": of_module}),
        sharders=sharders,
        data_parallel_wrapper=torchrec_tpu.DataParallel(),
    )


def local(state: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's tensors of a state dict."""
    tensors = {}
    for name, value in state.items():
        shards = value.local_shards() if isinstance(value, ShardedTensor) else [value]
        for index, shard in enumerate(shards):
            tensors[f"{name}.{index}"] = getattr(shard, "tensor", shard).detach()
    return tensors


def steps_are_rounded_float32_steps(rank: int, world_size: int) -> int:
    num_rounded = 0
    for plan, spec in zip(PLANS, (adagrad(lr=0.1), rowwise_adagrad(lr=0.1)), strict=True):
        half, exact = (sharded(plan, spec, t) for t in (DataType.FP16, DataType.FP32))
        weights, widened = local(half.state_dict()), local(exact.state_dict())
        assert {weight.dtype for weight in weights.values()} <= {torch.float16}
        for seed in range(3):
            for name, weight in weights.items():
                widened[name].copy_(weight)
            kjt = random_kjt(world_size * seed + rank)
            got, want = (model(kjt).values() for model in (half, exact))
            assert torch.equal(got, want)
            assert got.dtype is torch.float32
            for output in (got, want):
                output.backward(gradient_like(output, seed))
            assert_same_bits(weights, {name: value.half() for name, value in widened.items()})
            num_rounded += sum(
                int((weight.float() != widened[name]).sum()) for name, weight in weights.items()
            )
        states = [
            {
                f"{table}.{name}": value
                for table, slots in model.fused_optimizer.state_dict()["state"].items()
                for name, value in local(slots).items()
            }
            for model in (half, exact)
        ]
        assert_same_bits(*states)
    return num_rounded


def test_steps_are_those_of_float32_tables_rounded() -> None:
    assert min(run_world(steps_are_rounded_float32_steps, 2)) > 50
