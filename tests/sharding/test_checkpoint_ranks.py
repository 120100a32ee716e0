"""Checkpoints of several ranks: stock TorchRec's shards, replicas, failures of one of them."""

import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from twin import assert_same_bits, bag_configs, pooled, random_kjt, snapshot
from world import World, run_world

import torchrec_tpu
from torchrec_tpu import latest_checkpoint, load_checkpoint, save_checkpoint
from torchrec_tpu.sharding.checkpoint import files, storage
from torchrec_tpu.sparsecore.errors import (
    CheckpointError,
    DamagedCheckpointError,
)
from torchrec_tpu.sparsecore.optimizers import (
    OptimizerSpec,
    adagrad,
    adam,
    rowwise_adagrad,
    sgd,
)

PLANS: Mapping[str, Mapping[str, Any]] = {
    "table-wise": {
        "users": table_wise(rank=0),
        "goods": table_wise(rank=1),
        "tags": table_wise(rank=0),
    },
    "row-wise": {"users": row_wise(), "goods": row_wise(), "tags": row_wise()},
    "mixed": {
        "users": row_wise(),
        "goods": column_wise(size_per_rank=[8, 4]),
        "tags": table_wise(rank=1),
    },
}
OURS: Mapping[str, Mapping[str, Any]] = {
    **PLANS,
    "with replicas": {
        "users": column_wise(size_per_rank=[1, 3]),
        "goods": row_wise(),
        "tags": data_parallel(),
    },
}
STOCK = {
    "sgd": (torch.optim.SGD, sgd(lr=0.1)),
    "adagrad": (torch.optim.Adagrad, adagrad(lr=0.1, eps=1e-8)),
    "rowwise_adagrad": (RowWiseAdagrad, rowwise_adagrad(lr=0.1, eps=1e-8)),
}


OUTPUTS = ["user", "item", "history@goods", "history@tags"]


class Model(nn.Module):
    def __init__(self, tables: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.tables = tables
        self.over = nn.Linear(36, width)

    def forward(self, kjt: Any) -> Tensor:
        pooled = self.tables(kjt)  # stock modules order values() by placement
        result: Tensor = self.over(torch.cat([pooled[name] for name in OUTPUTS], dim=1))
        return result


def stock(plan: str, optimizer: str, world_size: int, seed: int, width: int = 3) -> Any:
    """Stock DMP with stock sharders, and the optimizer of its dense part."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    torch.manual_seed(seed)
    collection = EmbeddingBagCollection(bag_configs())
    _apply_optimizer_in_backward(STOCK[optimizer][0], collection.parameters(), {"lr": 0.1})
    module_plan = construct_module_sharding_plan(
        collection,
        dict(PLANS[plan]),
        EmbeddingBagCollectionSharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        Model(collection, width),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": module_plan}),
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    )
    return dmp, dense


def ours(
    plan: str, spec: OptimizerSpec, world_size: int, seed: int, **options: Any
) -> tuple[Any, KeyedOptimizerWrapper]:
    """DMP with our sharders, and the optimizer of its dense part."""
    torch.manual_seed(seed)
    collection = EmbeddingBagCollection(bag_configs())
    sharders = torchrec_tpu.sharders(optimizer=spec, **options)
    (sharder,) = [s for s in sharders if s.module_type is EmbeddingBagCollection]
    module_plan = construct_module_sharding_plan(
        collection,
        dict(OURS[plan]),
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        Model(collection),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": module_plan}),
        sharders=sharders,
        data_parallel_wrapper=torchrec_tpu.DataParallel(),
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    )
    return dmp, dense


def train_step(dmp: Any, dense: Any, seed: int) -> None:
    dense.zero_grad()
    dmp(random_kjt(seed)).square().mean().backward()
    dense.step()


def single(optimizer: str, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    spec = STOCK[optimizer][1] if optimizer in STOCK else adam(lr=0.1)
    model = Model(pooled(optimizer=spec, **options))
    return model, torch.optim.Adam(model.over.parameters(), lr=0.05)


def everything(model: Model, dense: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All values of a model of one process."""
    of_dense = {
        f"dense.{index}.{name}": value.clone()
        for index, state in enumerate(dense.state_dict()["state"].values())
        for name, value in state.items()
    }
    weights = {name: value.clone() for name, value in model.over.state_dict().items()}
    return snapshot(model.tables) | weights | of_dense


# --------------------------------------------------------------------------------- two ranks


def go_anywhere(rank: int, world_size: int, folder: str) -> None:
    """Plan to plan to one process: the values of the first are those of the last."""
    for optimizer in STOCK:
        root = Path(folder) / optimizer
        first, first_dense = stock("table-wise", optimizer, world_size, seed=1)
        for seed in range(2):
            train_step(first, first_dense, 2 * seed + rank)
        both = CombinedOptimizer([first.fused_optimizer, first_dense])
        rng = torch.get_rng_state()
        save_checkpoint(root, first, step=1, optimizers=both, rank_state={"rank": rank}, keep=9)
        names = ["row-wise", "mixed"] if optimizer != "rowwise_adagrad" else ["row-wise"]
        for number, plan in enumerate(names):
            dmp, dense = stock(plan, optimizer, world_size, seed=50 + number)
            train_step(dmp, dense, 7)  # it has values and state of its own
            torch.manual_seed(rank + 5)
            restored = load_checkpoint(root, dmp, optimizers=dense, rng=True)
            assert torch.equal(torch.get_rng_state(), rng)
            assert restored.rank_state == {"rank": rank}
            save_checkpoint(
                root, dmp, step=2 + number, optimizers=dense, rank_state={"rank": rank}, keep=9
            )
            for state in dmp.fused_optimizer.state_dict()["state"].values():
                assert all(isinstance(value, ShardedTensor) for value in state.values())
            rng = torch.get_rng_state()
        # and on: the same step from the first and the last gives the same
        train_step(dmp, dense, 11)
        train_step(first, first_dense, 11)
        save_checkpoint(root, dmp, step=10, optimizers=dense, keep=9)
        save_checkpoint(root, first, step=11, optimizers=first_dense, keep=9)


def one_writer_a_value(rank: int, world_size: int, folder: str) -> None:
    """Replicas are written once, by whichever rank has less to write; shards by their owners."""
    dmp, dense = stock("table-wise", "adagrad", world_size, seed=1)
    train_step(dmp, dense, rank)
    path = save_checkpoint(folder, dmp, step=1, optimizers=dense)
    index = storage.Reader(path).read_metadata()
    for stored in index.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            volume = sum(chunk.sizes.numel() for chunk in stored.chunks)
            assert volume == stored.size.numel()
    size = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert size < 2 * sum(i.length for i in index.storage_data.values())
    owners = {
        name: info.relative_path
        for name in ("users", "goods")
        for entry, info in index.storage_data.items()
        if entry.fqn == f"model.tables.embedding_bags.{name}.weight"
    }
    assert owners == {"users": "__0_0.distcp", "goods": "__1_0.distcp"}


def one_rank_fails(rank: int, world_size: int, folder: str) -> None:
    dmp, dense = stock("row-wise", "adagrad", world_size, seed=1)
    train_step(dmp, dense, rank)
    save_checkpoint(folder, dmp, step=1, optimizers=dense)

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # its disk takes no more than 4 KiB a file; then write() fails for real
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    with pytest.raises(CheckpointError, match=r"rank 1: .*File too large"):
        save_checkpoint(folder, dmp, step=2, optimizers=dense)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    with pytest.raises(CheckpointError, match=r"ranks.1 cannot be saved: it may have only"):
        save_checkpoint(folder, dmp, step=2, rank_state=object() if rank == 1 else None)
    dist.barrier()
    assert [path.name for path in Path(folder).iterdir()] == ["000001-step-1"]

    # a rank whose model is another
    model, other_dense = stock("row-wise", "adagrad", world_size, seed=2, width=3)
    before = {name: blocks(value) for name, value in model.state_dict().items()}
    if rank == 1:
        model.module.over = nn.Linear(36, 4)
    with pytest.raises(CheckpointError, match=r"over.weight' is 4 x 36 here and 3 x 36"):
        load_checkpoint(folder, model, optimizers=other_dense)
    for name, value in model.state_dict().items():
        if "over" not in name:
            assert all(map(torch.equal, before[name], blocks(value))), name

    # a file that only one rank happens to check
    model, other_dense = stock("row-wise", "adagrad", world_size, seed=2)
    before = {name: blocks(value) for name, value in model.state_dict().items()}
    file = Path(folder) / "000001-step-1" / "__1_0.distcp"
    if rank == 0:
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 4
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match=r"__1_0.distcp: altered.*it holds model.tab"):
        load_checkpoint(folder, model, optimizers=other_dense)
    dist.barrier()
    if rank == 0:
        file.unlink()
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match=r"__1_0.distcp: the file is missing"):
        load_checkpoint(folder, model, optimizers=other_dense)
    for name, value in model.state_dict().items():
        assert all(map(torch.equal, before[name], blocks(value))), name


def blocks(value: Tensor) -> list[Tensor]:
    return [block.tensor.clone() for block in storage.blocks_of(value)]


def torch_tpu_saves(rank: int, world_size: int, folder: str) -> None:
    """Upstream's own form: tensors sharded over devices, each with the rows of its cores."""
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.experimental.torch_tpu.checkpoint import SparseCoreSavePlanner, utils
    from torchrec.experimental.torch_tpu.modules import table_stacking
    from torchrec.experimental.torch_tpu.modules.embedding_configs import (
        SparseCoreEmbeddingConfig,
    )

    numbers = {
        config.name: torch.arange(config.num_embeddings * config.embedding_dim, dtype=torch.float32)
        .view(config.num_embeddings, config.embedding_dim)
        .add(1000 * index)
        for index, config in enumerate(bag_configs()[:2])
    }
    configs = [SparseCoreEmbeddingConfig(config=c) for c in bag_configs() if c.name in numbers]
    for config in configs:
        config.config.pooling = configs[0].config.pooling
    stack = table_stacking.stack_tables(
        configs, list(numbers), global_device_count=2, num_sc_per_device=2, stack_table_name="both"
    )
    mesh = init_device_mesh("cpu", (world_size,))
    whole = utils.stack_and_shard_global_tensor(numbers, stack, 4)
    state = {
        "embedding_bags.both.weight": distribute_tensor(whole, mesh, [Shard(0)]),
        "accumulators.both": distribute_tensor(whole + 0.5, mesh, [Shard(0)]),
    }
    planner = SparseCoreSavePlanner(num_sc_per_device=2, stacked_configs={"both": stack.to_dict()})
    dcp.save({"model": state}, checkpoint_id=folder, planner=planner)

    torch.manual_seed(0)
    collection = EmbeddingBagCollection(bag_configs()[:2])
    _apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    plan = construct_module_sharding_plan(
        collection,
        {"users": row_wise(), "goods": column_wise(size_per_rank=[8, 4])},
        EmbeddingBagCollectionSharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    model = nn.Module()
    model.tables = collection
    dmp = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan})
    )
    load_checkpoint(folder, dmp.module.tables)
    states = dmp.fused_optimizer.state_dict()["state"]
    for name, expected in numbers.items():
        key = f"tables.embedding_bags.{name}.weight"
        for value, offset in (
            (dmp.state_dict()[key], 0.0),
            (states[key][f"{name}.momentum1"], 0.5),
        ):
            for block in storage.blocks_of(value):
                part = expected
                for dim, start in enumerate(block.offsets):
                    part = part.narrow(dim, start, block.tensor.size(dim))
                assert torch.equal(block.tensor, part + offset), name


def two_ranks(rank: int, world_size: int, folder: str) -> None:
    go_anywhere(rank, world_size, f"{folder}/anywhere")
    one_writer_a_value(rank, world_size, f"{folder}/writers")
    one_rank_fails(rank, world_size, f"{folder}/fails")
    try:
        import torchrec.experimental.torch_tpu.checkpoint  # noqa: F401
    except ModuleNotFoundError:
        return  # torchrec 1.8
    torch_tpu_saves(rank, world_size, f"{folder}/torch_tpu")


def test_two_ranks(tmp_path: Path) -> None:
    run_world(two_ranks, 2, str(tmp_path), deadline=280)
    for optimizer in STOCK:
        folder = tmp_path / "anywhere" / optimizer
        seen = {}
        for number in [c.step for c in files.published(folder)]:
            model, dense = single(optimizer)
            load_checkpoint(folder, model, step=number, optimizers=dense)
            seen[number] = everything(model, dense)
        before = [number for number in seen if number < 10]
        assert len(before) >= 2
        for number in before[1:]:
            assert_same_bits(seen[1], seen[number])
        for name, value in seen[10].items():
            torch.testing.assert_close(value, seen[11][name], msg=name)
            assert not name.endswith("momentum1") or not torch.equal(value, seen[1][name])


def test_one_process_to_two_ranks(tmp_path: Path) -> None:
    model, dense = single("adagrad")
    for seed in range(2):
        train_step(model, dense, seed)
    save_checkpoint(tmp_path, model, step=1, optimizers=dense)
    run_world(load_and_save, 2, str(tmp_path), deadline=120)
    again, again_dense = single("adagrad")
    assert load_checkpoint(tmp_path, again, optimizers=again_dense).world_size == 2
    assert_same_bits(everything(model, dense), everything(again, again_dense))


def load_and_save(rank: int, world_size: int, folder: str) -> None:
    dmp, dense = stock("mixed", "adagrad", world_size, seed=3)
    load_checkpoint(folder, dmp, optimizers=dense)
    save_checkpoint(folder, dmp, step=2, optimizers=dense)


def through_ours(rank: int, world_size: int, folder: str, step: int, plans: list[str]) -> None:
    """Loads and saves in one plan of our sharders after another, with every optimizer."""
    for optimizer in (*STOCK, "adam"):
        spec = STOCK[optimizer][1] if optimizer in STOCK else adam(lr=0.1)
        for number, plan in enumerate(plans):
            dmp, dense = ours(plan, spec, world_size, seed=50 + number)
            train_step(dmp, dense, 7 + rank)  # it has values and state of its own
            load_checkpoint(f"{folder}/{optimizer}", dmp, optimizers=dense)
            save_checkpoint(
                f"{folder}/{optimizer}", dmp, step=step + number, optimizers=dense, keep=99
            )
        if optimizer in STOCK:  # TorchRec's own shards read what ours have saved
            for number, plan in enumerate(PLANS):
                if world_size == 2 and not (plan == "mixed" and optimizer == "rowwise_adagrad"):
                    dmp, dense = stock(plan, optimizer, world_size, seed=60 + number)
                    load_checkpoint(f"{folder}/{optimizer}", dmp, optimizers=dense)
                    save_checkpoint(
                        f"{folder}/{optimizer}",
                        dmp,
                        step=step + 10 + number,
                        optimizers=dense,
                        keep=99,
                    )


def saved_by_one(folder: Path) -> dict[str, dict[str, Tensor]]:
    """A checkpoint of one process for each optimizer, and what it holds."""
    values = {}
    for optimizer in (*STOCK, "adam"):
        model, dense = single(optimizer)
        for seed in range(2):
            train_step(model, dense, seed)
        save_checkpoint(folder / optimizer, model, step=1, optimizers=dense)
        values[optimizer] = everything(model, dense)
    return values


def assert_all_steps_are(folder: Path, values: Mapping[str, dict[str, Tensor]], count: int) -> None:
    for optimizer, expected in values.items():
        steps = [checkpoint.step for checkpoint in files.published(folder / optimizer)]
        assert len(steps) >= count
        for number in steps:
            model, dense = single(optimizer, num_devices=2 + number % 3, stacks="none")
            load_checkpoint(folder / optimizer, model, step=number, optimizers=dense)
            found = everything(model, dense)
            if optimizer != "rowwise_adagrad":
                assert_same_bits(expected, found)
                continue
            assert expected.keys() == found.keys()
            for name, value in expected.items():  # a mean of means is rounded
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0, msg=name)


def test_ours_on_two_ranks(tmp_path: Path) -> None:
    values = saved_by_one(tmp_path)
    run_world(through_ours, 2, str(tmp_path), 2, list(OURS), deadline=280)
    assert_all_steps_are(tmp_path, values, count=1 + len(OURS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_to_four_to_eight_to_one(tmp_path: Path) -> None:
    values = saved_by_one(tmp_path)
    run_world(through_ours, 4, str(tmp_path), 20, ["with replicas", "mixed"], deadline=500)
    run_world(through_ours, 8, str(tmp_path), 40, ["row-wise"], deadline=600)
    assert_all_steps_are(tmp_path, values, count=4)


# -------------------------------------------------------------------------------- kill -9

VICTIMS = {
    "rank 1 in its data": (1, storage._HashingStream, "write", 20, 1),
    "rank 1 when all is written": (1, storage.Writer, "written", 1, 1),
    "rank 0 before the rename": (0, Path, "rename", 2, 1),
    "rank 0 after the rename": (0, files, "sync_directory", 2, 2),
}


def die_in_a_save(rank: int, world_size: int, folder: str, victim: str) -> str:
    dmp, dense = stock("row-wise", "adagrad", world_size, seed=1)
    train_step(dmp, dense, rank)
    save_checkpoint(folder, dmp, step=1, optimizers=dense)
    train_step(dmp, dense, 3 + rank)
    who, owner, name, count, _ = VICTIMS[victim]
    if rank == who:
        die_at_call(owner, name, count)
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder, dmp, step=2, optimizers=dense, keep=1, deadline_seconds=60)
    assert time.monotonic() - started < 60
    return str(caught.value)


def die_at_call(owner: Any, name: str, count: int) -> None:
    """Makes this process kill itself in the count-th call of a function, or read of a property."""
    original = vars(owner)[name]
    calls = 0

    def die(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        function = original.fget if isinstance(original, property) else original
        return function(*args, **kwargs)

    setattr(owner, name, property(die) if isinstance(original, property) else die)


@pytest.mark.parametrize(
    "victim",
    [pytest.param(v, marks=pytest.mark.slow if number else ()) for number, v in enumerate(VICTIMS)],
)
def test_a_killed_rank_is_named_and_the_last_checkpoint_stays(victim: str, tmp_path: Path) -> None:
    who, *_, newest = VICTIMS[victim]
    with World(die_in_a_save, 2, str(tmp_path), victim) as world:
        outcomes = world.join(150, grace=75)
    assert outcomes[who].exit_code == -signal.SIGKILL, outcomes[who].output
    survivor = outcomes[1 - who]
    assert survivor.error is None, survivor.error
    assert f"rank {who}" in survivor.result

    model, dense = single("adagrad")
    draft = list(tmp_path.glob("*.draft"))
    if draft:
        with pytest.warns(UserWarning, match=r"000002-step-2.draft: torn"):
            restored = load_checkpoint(tmp_path, model, optimizers=dense)
    else:
        restored = load_checkpoint(tmp_path, model, optimizers=dense)
    assert restored.step == newest
    assert latest_checkpoint(tmp_path) == restored.path
