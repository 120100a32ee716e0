"""The fused optimizer as a torch optimizer: learning rates, state, checkpoints."""

import copy
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR
from torchrec import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from twin import (
    CASES,
    Case,
    Twin,
    assert_equal_training,
    assert_same_bits,
    bag_configs,
    gradient_like,
    outputs,
    pooled,
    random_kjt,
    sequence,
    snapshot,
    train,
)

from torchrec_tpu.sharding.embeddings import SparseCoreCollection
from torchrec_tpu.sparsecore.errors import OptimizerError, StateDictError
from torchrec_tpu.sparsecore.optimizers import adagrad, adam, rowwise_adagrad, sgd

KEYS = [f"embedding_bags.{table}.weight" for table in ("users", "goods", "tags")]
CASE_OF = {case.name: case for case in CASES}


# ----------------------------------------------------------------------------------- learning rates

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
    "OneCycleLR": lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.3, total_steps=12, cycle_momentum=False
    ),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, T_max=12),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_schedulers_drive_the_learning_rate(
    name: str, schedule: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    case = CASE_OF[name]
    ours = pooled(optimizer=case.spec)
    twin = Twin(ours, case)
    model = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=case.spec.lr)
    scheduler, expected = schedule(ours.fused_optimizer), schedule(model)
    seen = set()
    for seed in range(12):
        kjt = random_kjt(seed)
        got, want = outputs(ours, kjt), outputs(twin.collection, kjt)
        gradient = gradient_like(got, seed)
        ours.fused_optimizer.zero_grad()
        got.backward(gradient)
        ours.fused_optimizer.step()
        want.backward(gradient)
        lr = model.param_groups[0]["lr"]
        twin.step(kjt, lr=lr)
        assert_equal_training(ours, twin)
        seen.add(lr)
        model.step()
        if seed < 11:
            scheduler.step()
            expected.step()
    assert len(seen) > 5


def test_torchrecs_warmup_drives_the_learning_rate() -> None:
    ours, plain = pooled(optimizer=sgd(lr=1.0)), pooled(optimizer=sgd(lr=1.0))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1, decay_iters=1)]
    warmup = WarmupOptimizer(ours.fused_optimizer, stages, lr=0.5)
    rates = []
    for seed in range(6):
        rates.append(ours.fused_optimizer.param_groups[0]["lr"])
        kjt = random_kjt(seed)
        for collection in (ours, plain):
            plain.fused_optimizer.param_groups[0]["lr"] = rates[-1]
            output = outputs(collection, kjt)
            output.backward(gradient_like(output, seed))
        warmup.step()
    assert rates == pytest.approx([0.05, 0.1625, 0.275, 0.3875, 0.5, 0.5])
    assert_same_bits(ours.state_dict(), plain.state_dict())
    saved = copy.deepcopy(warmup.state_dict())
    assert "__warmup" in saved["state"]
    warmup.load_state_dict(saved)
    train(ours, [random_kjt(9)])


def test_there_is_one_group_for_each_distinct_spec() -> None:
    assert len(pooled(optimizer=sgd(lr=0.1)).fused_optimizer.param_groups) == 1
    specs = {"users": sgd(lr=0.1), "goods": sgd(lr=0.2), "tags": sgd(lr=0.1)}
    ours = pooled(optimizer=specs)
    groups = ours.fused_optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    assert [len(group["params"]) for group in groups] == [2, 1]

    before = snapshot(ours)
    LambdaLR(ours.fused_optimizer, [lambda _: 0.0, lambda _: 1.0])
    train(ours, [random_kjt(0)])
    after = snapshot(ours)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [KEYS[1]]


def test_every_setting_of_a_group_is_live() -> None:
    ours = pooled(optimizer=adagrad(lr=0.1))
    ours.fused_optimizer.update_hyper_parameters({"lr": 0.3, "eps": 0.5, "max_gradient": 0.25})
    other = pooled(optimizer=adagrad(lr=0.3, eps=0.5, max_gradient=0.25))
    train(ours, [random_kjt(0)])
    train(other, [random_kjt(0)])
    assert_same_bits(snapshot(ours), snapshot(other))
    with pytest.raises(OptimizerError, match=r"\['momentum'\]; there are \['eps'"):
        ours.fused_optimizer.update_hyper_parameters({"momentum": 0.9})


def test_a_learning_rate_that_is_not_finite_is_refused_before_any_update() -> None:
    ours = pooled(optimizer={"users": sgd(), "goods": adam(), "tags": sgd()})
    before = snapshot(ours)
    ours.fused_optimizer.param_groups[1]["lr"] = float("nan")
    output = outputs(ours, random_kjt(0))
    with pytest.raises(OptimizerError, match=r"table 'goods'.*nan"):
        output.sum().backward()
    assert_same_bits(snapshot(ours), before)


def test_step_and_zero_grad_change_nothing() -> None:
    ours = pooled(optimizer=adam(lr=0.1))
    train(ours, [random_kjt(0)])
    before = snapshot(ours)
    ours.fused_optimizer.step()
    ours.fused_optimizer.zero_grad(set_to_none=True)
    ours.fused_optimizer.init_state()
    assert_same_bits(snapshot(ours), before)
    assert all(parameter.grad is None for parameter in ours.parameters())


# -------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("spec", "names", "shape"),
    [
        (sgd(), [], None),
        (adagrad(), ["users.momentum1"], (53, 4)),
        (rowwise_adagrad(), ["users.momentum1"], (53,)),
        (adam(), ["users.momentum1", "users.exp_avg_sq", "users.step"], (53, 4)),
    ],
    ids=["sgd", "adagrad", "rowwise_adagrad", "adam"],
)
def test_state_has_torchrecs_names_and_logical_shapes(
    spec: Any, names: list[str], shape: tuple[int, ...] | None
) -> None:
    optimizer = pooled(optimizer=spec).fused_optimizer
    assert list(optimizer.params) == KEYS
    state = optimizer.state_dict()["state"]
    assert list(state) == KEYS
    assert list(state[KEYS[0]]) == names
    if shape:
        assert state[KEYS[0]]["users.momentum1"].shape == shape


def test_the_state_dict_is_live() -> None:
    ours = pooled(optimizer=adagrad(lr=0.1))
    kept = ours.fused_optimizer.state_dict()["state"][KEYS[0]]["users.momentum1"]
    assert not kept.any()
    train(ours, [random_kjt(0)])
    assert kept.any()


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
@pytest.mark.parametrize("build", [pooled, sequence])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    build: Callable[..., SparseCoreCollection], case: Case
) -> None:
    kjts = [random_kjt(seed) for seed in range(8)]
    straight = build(optimizer=case.spec)
    train(straight, kjts[:4])
    saved = copy.deepcopy((straight.state_dict(), straight.fused_optimizer.state_dict()))
    train(straight, kjts[4:])

    resumed = build(optimizer=case.spec, num_devices=2, stacks="none")
    train(resumed, kjts[:2])  # another state than that of the checkpoint
    resumed.load_state_dict(saved[0])
    resumed.fused_optimizer.load_state_dict(saved[1])
    train(resumed, kjts[4:])
    want = snapshot(straight)
    for name, value in snapshot(resumed).items():
        torch.testing.assert_close(value, want[name], rtol=1e-6, atol=1e-7)

    same = build(optimizer=case.spec)
    same.load_state_dict(saved[0])
    same.fused_optimizer.load_state_dict(saved[1])
    train(same, kjts[4:])
    assert_same_bits(snapshot(same), want)


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state_dict = copy.deepcopy(pooled(optimizer=adam()).fused_optimizer.state_dict())
    for slots in state_dict["state"].values():
        for value in slots.values():
            value.add_(5)
    change(state_dict["state"])
    return state_dict


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("'tags'.*no 'embedding_bags.tags.weight'", lambda state: state.pop(KEYS[2])),
        (
            r"'tags'.*expected \(7, 8\)",
            lambda state: state[KEYS[2]].update({"tags.exp_avg_sq": torch.zeros(7, 9)}),
        ),
        (
            "'tags'.* has .*'adam' has",
            lambda state: state[KEYS[2]].pop("tags.exp_avg_sq"),
        ),
        ("'tags'.* has", lambda state: state[KEYS[2]].update({"tags.other": torch.zeros(1)})),
        (r"\['new'\] that are not here", lambda state: state.update(new={})),
        ("is a float", lambda state: state[KEYS[2]].update({"tags.momentum1": 1.0})),
    ],
)
def test_a_wrong_state_dict_names_the_table_and_changes_nothing(
    message: str, change: Callable[[dict[str, Any]], object]
) -> None:
    ours = pooled(optimizer=adam())
    train(ours, [random_kjt(0)])
    before = snapshot(ours)
    with pytest.raises(StateDictError, match=message):
        ours.fused_optimizer.load_state_dict(broken(change))
    assert_same_bits(snapshot(ours), before)
    ours.fused_optimizer.load_state_dict(broken(lambda _: None))
    assert snapshot(ours)["tags.step"] == 5


def test_a_checkpoint_without_steps_is_loaded_with_a_warning() -> None:
    """TorchRec's fused optimizers save no step."""
    ours = pooled(optimizer=adam())
    train(ours, [random_kjt(0)])

    def drop_steps(state: dict[str, Any]) -> None:
        for slots in state.values():
            for name in [name for name in slots if name.endswith(".step")]:
                del slots[name]

    with pytest.warns(UserWarning, match="goes on from step 1"):
        ours.fused_optimizer.load_state_dict(broken(drop_steps))
    assert snapshot(ours)["users.momentum1"].eq(5).all()
    assert snapshot(ours)["users.step"] == 1
    ours.fused_optimizer.set_optimizer_step(7)
    assert snapshot(ours)["users.step"] == 7


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_one_process_is_plain_tables(tmp_path: Path) -> None:
    """Written from the live tensors, read into them, and read by TorchRec's own collection."""

    def parts(collection: SparseCoreCollection) -> dict[str, Any]:
        return {
            "model": collection.state_dict(),
            "optimizer": collection.fused_optimizer.state_dict(),
        }

    ours, other = pooled(optimizer=adam(lr=0.1)), pooled(optimizer=adam(lr=0.1), num_devices=2)
    train(ours, [random_kjt(0), random_kjt(1)])
    checkpoint.save(parts(ours), checkpoint_id=tmp_path, no_dist=True)
    checkpoint.load(parts(other), checkpoint_id=tmp_path, no_dist=True)
    assert_same_bits(snapshot(other), snapshot(ours))
    assert snapshot(other)["users.step"] == 2

    theirs = {"model": EmbeddingBagCollection(bag_configs()).state_dict()}
    checkpoint.load(theirs, checkpoint_id=tmp_path, no_dist=True)
    assert_same_bits(theirs["model"], ours.state_dict())


def test_param_groups_are_saved_on_request() -> None:
    ours, other = (pooled(optimizer=adagrad(lr=lr)) for lr in (0.1, 0.5))
    for optimizer in (ours.fused_optimizer, other.fused_optimizer):
        optimizer.save_param_groups(True)
    other.fused_optimizer.load_state_dict(ours.fused_optimizer.state_dict())
    assert other.fused_optimizer.param_groups[0]["lr"] == 0.1


# -------------------------------------------------------------------------------- with TorchRec


def test_it_works_inside_a_combined_optimizer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = pooled(optimizer=adam(lr=0.1))
            self.dense = nn.Linear(36, 1)

    def combined(model: Model) -> CombinedOptimizer:
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        assert list(dense) == ["dense.weight", "dense.bias"]
        return CombinedOptimizer(
            [
                ("sparse", model.sparse.fused_optimizer),
                KeyedOptimizerWrapper(dense, lambda some: torch.optim.Adagrad(some, lr=0.1)),
            ]
        )

    def steps(model: Model, optimizer: CombinedOptimizer, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            optimizer.zero_grad()
            loss = model.dense(model.sparse(random_kjt(seed)).values()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(3)
    model = Model()
    optimizer = combined(model)
    assert list(optimizer.params)[:3] == [f"sparse.{key}" for key in KEYS]
    steps(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    want = steps(model, optimizer, range(5, 8))

    resumed = Model()
    other = combined(resumed)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert steps(resumed, other, range(5, 8)) == want

    LambdaLR(other, lambda _: 0.0)
    before = snapshot(resumed.sparse)
    steps(resumed, other, range(8, 9))
    after = snapshot(resumed.sparse)
    assert all(torch.equal(before[key], after[key]) for key in KEYS)
