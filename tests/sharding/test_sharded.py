"""Sharded collections in a world of two ranks, against the same model in one process."""

import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import (
    BAGS,
    CASES,
    OPTIMIZERS,
    SEQUENCES,
    STEPS,
    WORLD_SIZE,
    Case,
    Pair,
    copies,
    make_bags,
    make_model,
    make_plan,
    mixed,
    rows,
    whole,
)
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from world import run_world

import torchrec_tpu
from torchrec_tpu.sharding.placements import TablePlacement
from torchrec_tpu.sparsecore.errors import (
    IdRangeError,
    OptimizerError,
    PeerBatchError,
    PlacementError,
    TableError,
)

# ------------------------------------------------------------------------------------ one process


def train_alone(case: Case) -> dict[str, Any]:
    """Losses, tables and state of the unsharded model on the batches of all ranks."""
    model = make_model(case)
    report = torchrec_tpu.swap_embeddings(model, optimizer=case.optimizer)
    assert not report.kept
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        bags = [make_bags(case, step, rank) for rank in range(WORLD_SIZE)]
        scores = model(sum(bags[1:], bags[0]).kjt(case))
        parts = torch.split(scores, case.batch_sizes)
        of_ranks = [part.square().sum() / max(len(part), 1) for part in parts]
        dense.zero_grad()
        (torch.stack(of_ranks).sum() / WORLD_SIZE).backward()
        dense.step()
        losses.append([loss.item() for loss in of_ranks])
    state = model.sparse.fused_optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "tables": model.state_dict(),
        "state": {name: value for entry in state.values() for name, value in entry.items()},
    }


# -------------------------------------------------------------------------------------- two ranks


def pieces_of(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(offsets, tensor) of what this rank has."""
    if isinstance(value, ShardedTensor):
        return [(tuple(s.metadata.shard_offsets), s.tensor.clone()) for s in value.local_shards()]
    if isinstance(value, DTensor):
        wrapper = value.to_local()
        pairs = zip(wrapper.local_offsets(), wrapper.local_shards(), strict=False)  # or empty
        return [(tuple(offsets), tensor.clone()) for offsets, tensor in pairs]
    return [((0,) * value.ndim, value.detach().clone())]


def make_dmp(case: Case, model: torch.nn.Module, fqn: str = "sparse") -> Any:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.output_dtensor = case.as_dtensor
    optimizer = None if case.is_ours else case.optimizer
    return DistributedModelParallel(
        model,
        env=env,
        plan=make_plan(case, fqn),
        sharders=torchrec_tpu.sharders(optimizer=optimizer, deadline_seconds=10),
        data_parallel_wrapper=torchrec_tpu.DataParallel(deadline_seconds=10)
        if case.own_wrapper
        else None,
    )


def train_case(case: Case, rank: int) -> dict[str, Any]:
    model: Any = make_model(case)
    if rank:  # the dense part is rank 0's
        torch.nn.init.zeros_(model.dense.weight)
    if case.is_ours:
        torchrec_tpu.swap_embeddings(model, optimizer=case.optimizer)
    if not case.own_wrapper:
        del model.unused  # DDP wants every parameter to be used
    wrapped = Pair(model) if case.is_pipelined else model
    dmp = make_dmp(case, wrapped, "model.sparse" if case.is_pipelined else "sparse")
    dense = torch.optim.SGD(
        [p for n, p in dmp.named_parameters() if "dense" in n and "sparse" not in n], lr=0.1
    )

    def batch(step: int) -> Any:
        bags = make_bags(case, step, rank)
        return bags.kjt_per_key(case) if case.varies_per_key else bags.kjt(case)

    losses = []
    if case.is_pipelined:
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        pipeline = TrainPipelineSparseDist(dmp, dense, torch.device("cpu"))
        batches = iter([batch(step) for step in range(STEPS)])
        losses = [float(pipeline.progress(batches)) for _ in range(STEPS)]
        assert [type(m).__name__ for m in pipeline._pipelined_modules] == [
            "ShardedSparseCoreEmbeddingBagCollection"
        ]
    for step in range(0 if case.is_pipelined else STEPS):
        scores = dmp(batch(step))
        loss = scores.square().sum() / max(len(scores), 1)
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    assert all(p.grad is None for n, p in dmp.named_parameters() if "embedding" in n)
    state = dmp.fused_optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "tables": {
            name.removeprefix("model."): pieces_of(value)
            for name, value in dmp.state_dict().items()
        },
        "state": {
            name: pieces_of(value) for entry in state.values() for name, value in entry.items()
        },
    }


# Scenarios: what a rank sees. They assert on their own, or return what the test compares.

PLAIN = Case(name="plain", optimizer=OPTIMIZERS["adagrad"])


def tables_of(dmp: Any) -> dict[str, Any]:
    return {name: pieces_of(value) for name, value in dmp.state_dict().items()}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, pieces in left.items():
        for (at, mine), (there, theirs) in zip(pieces, right[name], strict=True):
            assert at == there, name
            assert torch.equal(mine, theirs), name


def train_step(dmp: Any, rank: int, step: int = 0) -> None:
    dmp(make_bags(PLAIN, step, rank).kjt(PLAIN)).square().mean().backward()


def meta_tables_are_the_same_in_every_plan(rank: int) -> Any:
    found = []
    for place in (mixed, rows, copies):
        case = replace(PLAIN, place=place)
        model = make_model(case, "meta")
        torch.manual_seed(5 + rank)  # that of rank 0 counts
        found.append(tables_of(make_dmp(case, model)))
    return found


def two_forwards_before_a_backward(rank: int) -> Any:
    dmp = make_dmp(PLAIN, make_model(PLAIN))
    first, second = (dmp(make_bags(PLAIN, step, rank).kjt(PLAIN)) for step in range(2))
    (first.square().mean() + second.square().mean()).backward()
    return tables_of(dmp)


def inference_changes_nothing(rank: int) -> None:
    dmp = make_dmp(PLAIN, make_model(PLAIN))
    before = tables_of(dmp)
    with torch.no_grad():
        scores = dmp(make_bags(PLAIN, 0, rank).kjt(PLAIN))
    assert not scores.requires_grad
    dmp.requires_grad_(False)
    assert not dmp(make_bags(PLAIN, 0, rank).kjt(PLAIN)).requires_grad
    assert_same(before, tables_of(dmp))


def a_bad_batch_raises_on_every_rank(rank: int) -> None:
    dmp = make_dmp(PLAIN, make_model(PLAIN))
    before = tables_of(dmp)
    batch = make_bags(PLAIN, 0, rank).kjt(PLAIN)
    if rank == 1:
        batch.values()[0] = 10**6
        with pytest.raises(IdRangeError, match="sample"):
            dmp(batch)
    else:
        with pytest.raises(PeerBatchError, match=r"sparse: rank 1 .*IdRangeError.*1000000") as info:
            dmp(batch)
        assert info.value.ranks == (1,)
    assert_same(before, tables_of(dmp))
    train_step(dmp, rank)
    assert any(
        not torch.equal(mine, theirs)
        for name, pieces in tables_of(dmp).items()
        for (_, mine), (_, theirs) in zip(pieces, before[name], strict=True)
    )


def state_dicts_are_live_and_load(rank: int) -> None:
    for case in (PLAIN, replace(PLAIN, as_dtensor=True), replace(PLAIN, place=rows)):
        dmp = make_dmp(case, make_model(case))
        train_step(dmp, rank)
        saved = tables_of(dmp)
        optimizer = dmp.fused_optimizer.state_dict()
        kept = {
            name: pieces_of(value)
            for entry in optimizer["state"].values()
            for name, value in entry.items()
        }
        for value in (*dmp.state_dict().values(), *optimizer["state"].values()):
            for tensor in value.values() if isinstance(value, dict) else [value]:
                for piece in local_tensors(tensor):
                    piece.fill_(7.0)
        assert float(dmp.module.sparse.embedding_bags["users"].weight.detach().min()) == 7.0
        whole = {name: whole_tensor(pieces, name) for name, pieces in gathered(saved).items()}
        dmp.load_state_dict(whole)
        assert_same(saved, tables_of(dmp))

        sharded = dmp.state_dict()
        other = make_dmp(case, make_model(case))
        other.load_state_dict(sharded)
        assert_same(saved, tables_of(other))
        again = other.fused_optimizer
        for entry in again.state_dict()["state"].values():
            for name, value in entry.items():
                for piece, (_, tensor) in zip(local_tensors(value), kept[name], strict=True):
                    piece.copy_(tensor)
        dmp.fused_optimizer.load_state_dict(again.state_dict())
        loaded = dmp.fused_optimizer.state_dict()["state"]
        assert_same(kept, {n: pieces_of(v) for entry in loaded.values() for n, v in entry.items()})


def keys_are_those_of_the_model_and_of_torchrec(rank: int) -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    case = replace(PLAIN, place=whole)
    dmp = make_dmp(case, make_model(case))
    stock = DistributedModelParallel(
        make_model(case),
        plan=make_plan(case, "sparse"),
        sharders=[
            EmbeddingBagCollectionSharder(
                fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
            )
        ],
    )
    assert dmp.state_dict().keys() == make_model(case).state_dict().keys()
    assert dmp.state_dict().keys() == stock.state_dict().keys()
    mine, theirs = (m.fused_optimizer.state_dict()["state"] for m in (dmp, stock))
    assert mine.keys() == theirs.keys()
    for key, entry in mine.items():
        assert entry.keys() == theirs[key].keys()
    names = [name for name, _ in dmp.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in stock.named_parameters())
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    assert all("sparse" not in name for name in dense)
    assert len(dense) == 4


def schedulers_set_the_learning_rate(rank: int) -> None:
    model = make_model(replace(PLAIN, place=rows))
    case = replace(PLAIN, place=rows, optimizer=OPTIMIZERS["sgd"])
    dmp = make_dmp(case, model)
    optimizer = CombinedOptimizer([dmp.fused_optimizer])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step != 1))
    for moves in (True, False, True):
        before = tables_of(dmp)["sparse.embedding_bags.users.weight"][0][1]
        train_step(dmp, rank)
        after = tables_of(dmp)["sparse.embedding_bags.users.weight"][0][1]
        assert torch.equal(before, after) != moves
        optimizer.step()
        scheduler.step()


def optimizers_in_backward_are_taken_over(rank: int) -> None:
    case = replace(PLAIN, is_ours=True)  # no optimizer for the sharders
    model = make_model(case)
    apply_optimizer_in_backward(
        torch.optim.Adagrad, model.sparse.parameters(), {"lr": 0.1, "eps": 1e-3}
    )
    apply = make_dmp(case, model)
    given = make_dmp(PLAIN, make_model(PLAIN))
    for dmp in (apply, given):
        train_step(dmp, rank)
    assert_same(tables_of(apply), tables_of(given))
    fused = make_sharders(
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-3}
    )
    assert_same(tables_of(given), tables_of(trained_with(fused, rank)))
    with pytest.raises(OptimizerError, match=r"sparse\.users.*has no optimizer"):
        trained_with(torchrec_tpu.sharders(), rank)


def make_sharders(fused_params: dict[str, Any]) -> Any:
    return torchrec_tpu.sharders(fused_params=fused_params)


def trained_with(sharders: Any, rank: int) -> Any:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    dmp = DistributedModelParallel(
        make_model(PLAIN), plan=make_plan(PLAIN, "sparse"), sharders=sharders
    )
    train_step(dmp, rank)
    return dmp


def gradients_are_divided_as_torchrec_says(rank: int) -> Any:
    from torchrec.distributed.comm_ops import set_gradient_division

    case = replace(PLAIN, optimizer=OPTIMIZERS["sgd"])
    dmp = make_dmp(case, make_model(case))
    set_gradient_division(False)
    try:
        train_step(dmp, rank)
    finally:
        set_gradient_division(True)
    return tables_of(dmp)


def torchrecs_planner_places_the_tables(rank: int) -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    dmp = DistributedModelParallel(
        make_model(PLAIN), sharders=torchrec_tpu.sharders(optimizer=PLAIN.optimizer)
    )
    assert dmp.plan.plan["sparse"].keys() == {config.name for config in BAGS}
    train_step(dmp, rank)


def plans_that_do_not_fit_are_refused(rank: int) -> None:
    plan = make_plan(PLAIN, "sparse")
    del plan.plan["sparse"]["tags"]
    with pytest.raises(PlacementError, match=r"no placement for tables \['tags'\]"):
        make_dmp_with(plan)
    plan = make_plan(PLAIN, "sparse")
    plan.plan["sparse"]["tags"] = TablePlacement.table_wise(
        "tags", 5, 4, rank=WORLD_SIZE
    ).to_parameter_sharding(WORLD_SIZE + 1)
    with pytest.raises(PlacementError, match=r"on ranks \[2\], there are 2"):
        make_dmp_with(plan)
    with pytest.raises(TableError, match=r"sparse: sharded tables are .* on cuda:0"):
        make_dmp_with(make_plan(PLAIN, "sparse"), "cuda:0")


def make_dmp_with(plan: Any, device: str = "cpu") -> Any:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    return DistributedModelParallel(
        make_model(PLAIN),
        plan=plan,
        device=torch.device(device),
        sharders=torchrec_tpu.sharders(optimizer=PLAIN.optimizer),
    )


def dense_gradients_are_averaged(rank: int) -> None:
    dmp = make_dmp(PLAIN, make_model(PLAIN))
    model = dmp.module
    assert all(p.grad is None for p in model.parameters())
    scores = dmp(make_bags(PLAIN, 0, rank).kjt(PLAIN))
    loss = scores.sum() * (rank + 1)
    if rank:  # only this rank's loss depends on it
        loss = loss + model.unused.weight.sum() * 3
    loss.backward()
    bias = torch.tensor([5.0, 10.0]).mean()
    assert torch.equal(model.dense.bias.grad, bias.view(1))
    assert torch.equal(model.unused.weight.grad, torch.tensor([[1.5]]))
    assert model.unused.bias.grad is None


def bad_ids_are_clamped_or_dropped_and_come_back(rank: int) -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    config = replace(SEQUENCES[0], feature_names=["f"])
    case = replace(PLAIN, place=rows, is_sequence=True)
    for policy, row in (("clamp", 0), ("drop", None)):
        torch.manual_seed(0)
        source = EmbeddingCollection(tables=[config], need_indices=True)
        weight = source.embeddings["users"].weight.detach().clone()
        dmp = DistributedModelParallel(
            torch.nn.ModuleDict({"sparse": source}),
            plan=make_plan(case, "sparse", [config]),
            sharders=torchrec_tpu.sharders(optimizer=PLAIN.optimizer, id_policy=policy),
        )
        ids = torch.tensor([3, 99, 30, 3])
        result = dmp.module["sparse"](
            KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.tensor([1, 3]))
        )["f"]
        wanted = weight[ids.clamp(max=36)]
        wanted[1] = 0 if row is None else weight[row]
        assert torch.equal(result.values(), wanted)
        assert torch.equal(result.weights(), ids)
        assert result.lengths().tolist() == [1, 3]


SCENARIOS = (
    bad_ids_are_clamped_or_dropped_and_come_back,
    meta_tables_are_the_same_in_every_plan,
    two_forwards_before_a_backward,
    inference_changes_nothing,
    a_bad_batch_raises_on_every_rank,
    state_dicts_are_live_and_load,
    keys_are_those_of_the_model_and_of_torchrec,
    schedulers_set_the_learning_rate,
    optimizers_in_backward_are_taken_over,
    gradients_are_divided_as_torchrec_says,
    torchrecs_planner_places_the_tables,
    plans_that_do_not_fit_are_refused,
    dense_gradients_are_averaged,
)


def local_tensors(value: Any) -> list[torch.Tensor]:
    """What this rank has, not copied."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, DTensor):
        return list(value.to_local().local_shards())
    return [value]


def gathered(tables: dict[str, Any]) -> dict[str, Any]:
    """By name, the pieces of all ranks."""
    of_ranks: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(of_ranks, tables)
    return {name: [piece for rank in of_ranks for piece in rank[name]] for name in tables}


def attempt(run: Any, *args: Any) -> tuple[Any, str | None]:
    """(result, None), or (None, traceback): one failure must not hide the other results."""
    try:
        return run(*args), None
    except Exception:
        return None, traceback.format_exc()


def in_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    assert world_size == WORLD_SIZE
    results = {}
    for case in CASES:
        results[case.name] = attempt(train_case, case, rank)
    for scenario in SCENARIOS:
        results[scenario.__name__] = attempt(scenario, rank)
    return results


# ------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    """By rank, what each case and each scenario gave."""
    return run_world(in_two_ranks, WORLD_SIZE, deadline=200)


def results_of(world: list[dict[str, Any]], name: str) -> list[Any]:
    failures = [f"---- rank {rank}\n{r[name][1]}" for rank, r in enumerate(world) if r[name][1]]
    assert not failures, "\n".join(failures)
    return [of_rank[name][0] for of_rank in world]


def whole_tensor(pieces: list[tuple[tuple[int, ...], torch.Tensor]], name: str) -> torch.Tensor:
    """The tensor whose (offsets, piece) these are; copies must be the same bits."""
    ends = [[a + n for a, n in zip(at, t.shape, strict=True)] for at, t in pieces]
    shape = [max(of_dim) for of_dim in zip(*ends, strict=True)]
    found = torch.full(shape, float("nan"), dtype=pieces[0][1].dtype) if shape else pieces[0][1]
    for at, tensor in pieces:
        place = found[tuple(slice(a, a + n) for a, n in zip(at, tensor.shape, strict=True))]
        assert torch.equal(torch.where(place.isnan(), tensor, place), tensor), f"{name} differs"
        place.copy_(tensor)
    assert not found.isnan().any(), name
    return found


def assert_tables(ranks: list[dict[str, Any]], wanted: dict[str, torch.Tensor]) -> None:
    assert all(of_rank.keys() == ranks[0].keys() for of_rank in ranks)
    assert ranks[0].keys() == wanted.keys()
    for name, value in wanted.items():
        found = whole_tensor([piece for of_rank in ranks for piece in of_rank[name]], name)
        torch.testing.assert_close(
            found, value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_train_as_one_process(case: Case, world: list[dict[str, Any]]) -> None:
    ranks, alone = results_of(world, case.name), train_alone(case)
    for rank, found in enumerate(ranks):
        wanted = [of_ranks[rank] for of_ranks in alone["losses"]]
        torch.testing.assert_close(found["losses"], wanted, rtol=1e-5, atol=1e-6)
    tables = {n: v for n, v in alone["tables"].items() if case.own_wrapper or "unused" not in n}
    assert_tables([found["tables"] for found in ranks], tables)
    moved = {
        name: not torch.equal(value, make_model(case).state_dict()[name])
        for name, value in alone["tables"].items()
        if "embedding" in name
    }
    still = {"embedding_bags.one.weight", f"embedding_bags.{case.frozen}.weight"}
    assert {n for n, m in moved.items() if not m} == {f"sparse.{n}" for n in still} & moved.keys()

    for name, value in alone["state"].items():
        pieces = [piece for found in ranks for piece in found["state"].get(name, [])]
        found = whole_tensor(pieces, name)
        if found.shape != value.shape:  # each shard of columns has the state of all rows
            assert value.ndim == 1
            copies_of = found.view(-1, len(value))
            assert all(torch.equal(copy, copies_of[0]) for copy in copies_of), name
            found = copies_of[0]
        torch.testing.assert_close(
            found, value, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    "scenario",
    [s.__name__ for s in SCENARIOS if "meta" not in s.__name__ and "divided" not in s.__name__],
)
def test_in_two_ranks(scenario: str, world: list[dict[str, Any]]) -> None:
    results_of(world, scenario)


def test_two_forwards_before_a_backward_are_two_updates(world: list[dict[str, Any]]) -> None:
    model = make_model(PLAIN)
    torchrec_tpu.swap_embeddings(model, optimizer=PLAIN.optimizer)
    scores = [
        model((make_bags(PLAIN, step, 0) + make_bags(PLAIN, step, 1)).kjt(PLAIN))
        for step in range(2)
    ]
    (scores[0].square().mean() + scores[1].square().mean()).backward()
    assert_tables(
        results_of(world, "two_forwards_before_a_backward"),
        model.state_dict(),
    )


def test_meta_tables_are_the_same_in_every_plan(world: list[dict[str, Any]]) -> None:
    ranks = results_of(world, "meta_tables_are_the_same_in_every_plan")
    first, *others = (
        {
            name: whole_tensor([piece for rank in ranks for piece in rank[plan][name]], name)
            for name in ranks[0][plan]
            if "embedding" in name
        }
        for plan in range(3)
    )
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in others), name
        config = next(c for c in BAGS if f".{c.name}." in name)
        limit = config.num_embeddings**-0.5
        assert value.abs().max() <= limit
        assert config.num_embeddings < 5 or value.std() > 0.3 * limit
    assert len({float(value[0, 0]) for value in first.values()}) == len(first)


def test_without_gradient_division_updates_are_larger(world: list[dict[str, Any]]) -> None:
    model = make_model(PLAIN)
    torchrec_tpu.swap_embeddings(model, optimizer=OPTIMIZERS["sgd"])
    bags = make_bags(PLAIN, 0, 0) + make_bags(PLAIN, 0, 1)
    (model(bags.kjt(PLAIN)).square().mean() * WORLD_SIZE).backward()
    assert_tables(
        results_of(world, "gradients_are_divided_as_torchrec_says"),
        model.state_dict(),
    )
