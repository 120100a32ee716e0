"""Run by test_processes.py, once per rank: python two_ranks.py SCENARIO RANK FILE.

What several processes see of collections that are not sharded, and stock TorchRec beside us.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchrec_tpu  # before torchrec, which does not work beside torch_tpu without our help

WORLD_SIZE = 2


def unsharded_training_is_refused(rank: int) -> None:
    from twin import bag_configs, pooled, random_kjt

    from torchrec_tpu.sparsecore.errors import UnshardedError

    torch.manual_seed(0)
    collection = pooled()
    before = {name: value.clone() for name, value in collection.state_dict().items()}
    with pytest.raises(UnshardedError, match=r"one of 2 processes.*DistributedModelParallel"):
        collection(random_kjt(rank))
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name]), name

    with torch.no_grad():
        assert collection(random_kjt(rank)).values().shape == (9, 36)
    collection.requires_grad_(False)
    collection(random_kjt(rank))

    from torchrec import EmbeddingBagCollection

    model = nn.Sequential(EmbeddingBagCollection(bag_configs()))
    with pytest.raises(UnshardedError, match="one of 2 processes"):
        torchrec_tpu.shard(model, optimizer=torchrec_tpu.sgd())
    assert type(model[0]) is EmbeddingBagCollection


def calibration_is_that_of_all_ranks(rank: int) -> None:
    from twin import pooled, random_kjt

    collection = pooled()
    mine = [random_kjt(seed, batch_size=20 + 60 * rank) for seed in range(2 + rank)]
    directory = Path(sys.argv[3]).parent / f"observations{rank}"
    found = torchrec_tpu.calibrate(collection, mine, headroom=0.0, path=directory)
    of_ranks: list[object] = [None] * WORLD_SIZE
    dist.all_gather_object(of_ranks, found)
    assert of_ranks[0] == of_ranks[1], of_ranks
    collection.capacity = found[""]
    with torch.no_grad():
        for seed in range(3):
            collection(random_kjt(seed, batch_size=80))
    from torchrec_tpu.sparsecore.capacity import Observation

    assert Observation.load(directory / "root.json").num_batches == 2 + 3


def stock_dmp_trains(rank: int) -> None:
    """And its fused optimizer has the state names and shapes that ours has."""
    torchrec_tpu.SparseCoreEmbeddingBagCollection  # noqa: B018 - the first use of any name imports
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim import RowWiseAdagrad
    from twin import bag_configs, pooled, random_kjt

    specs = {
        torch.optim.SGD: torchrec_tpu.sgd(lr=0.1),
        torch.optim.Adagrad: torchrec_tpu.adagrad(lr=0.1),
        RowWiseAdagrad: torchrec_tpu.rowwise_adagrad(lr=0.1),
    }
    for optimizer, spec in specs.items():
        collection = EmbeddingBagCollection(bag_configs())
        _apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1})
        places = {
            "users": table_wise(rank=0),
            "goods": table_wise(rank=1),
            "tags": table_wise(rank=0),
        }
        plan = construct_module_sharding_plan(
            collection,
            places,
            EmbeddingBagCollectionSharder(),
            local_size=WORLD_SIZE,
            world_size=WORLD_SIZE,
            device_type="cpu",
        )
        dmp = DistributedModelParallel(
            nn.Sequential(collection), device=torch.device("cpu"), plan=ShardingPlan({"0": plan})
        )
        for seed in range(2):
            dmp(random_kjt(2 * seed + rank)).values().sum().backward()

        ours = pooled(optimizer=spec).fused_optimizer.state_dict()["state"]
        theirs = dmp.fused_optimizer.state_dict()["state"]
        for parameter, state in theirs.items():
            mine = ours[parameter.removeprefix("0.")]
            assert list(state) == list(mine), (state, mine)
            assert [len(v.size()) for v in state.values()] == [v.dim() for v in mine.values()]
        assert len(theirs) == (2 if rank == 0 else 1)


def unsharded_collections(rank: int) -> None:
    unsharded_training_is_refused(rank)
    calibration_is_that_of_all_ranks(rank)


SCENARIOS = {scenario.__name__: scenario for scenario in (unsharded_collections, stock_dmp_trains)}

if __name__ == "__main__":
    scenario, rank, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD_SIZE)
    SCENARIOS[scenario](rank)
    dist.destroy_process_group()
    print("done")
