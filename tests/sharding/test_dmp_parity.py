"""DistributedModelParallel with our sharders trains like one process of TorchRec.

Every job of a world runs in the same processes (parity.py); the parent trains the reference.
"""

from dataclasses import replace

import pytest
import torch
from parity import (
    CASES,
    PLACEMENTS,
    Differences,
    Job,
    Outcome,
    RankOutcome,
    compare,
    new_model,
    tables_of,
    train_all,
    train_alone,
)
from world import run_world

LIMITS = {  # rounding of float32; several times what is measured
    "sgd": Differences(loss=5e-7, table=2e-7, state=0.0, dense=2e-7),
    "adagrad": Differences(loss=5e-7, table=5e-7, state=1e-7, dense=2e-7),
    "rowwise_adagrad": Differences(loss=5e-7, table=5e-7, state=1e-7, dense=2e-7),
    "adam": Differences(loss=5e-7, table=2e-6, state=2e-8, dense=5e-7),
}

PER_TABLE = {"users": "adam", "goods": "rowwise_adagrad", "tags": "adagrad", "words": "sgd"}

CORE = [
    *(Job(optimizer=optimizer, placement="mixed") for optimizer in CASES),
    *(Job(optimizer="sgd", placement=placement) for placement in PLACEMENTS[:4]),
    Job(optimizer="adagrad", placement="mixed", model="tower"),
]
WAYS = [  # how a job is told and run, which must not change its results
    Job(optimizer="sgd", placement="mixed", pipeline=True, note="pipeline"),
    Job(optimizer="adam", placement="mixed", pipeline=True, note="pipeline"),
    Job(optimizer="adam", placement="mixed", own_wrapper=True, note="own-wrapper"),
    Job(optimizer="adagrad", placement="mixed", scheduler=True, note="scheduler"),
    Job(optimizer=PER_TABLE, placement="mixed"),
    Job(optimizer="adam", placement="mixed", id_dtype=torch.int32, note="int32"),
    Job(optimizer="adagrad", placement="mixed", variable_batches=True, note="variable-batches"),
    Job(optimizer="sgd", placement="mixed", max_gradient=2e-3, note="max-gradient"),
    Job(
        optimizer="sgd",
        placement="mixed",
        fused_params={"optimizer": "exact_sgd", "learning_rate": 1.0},
        note="fused-params",
    ),
]
CONTROL = Job(optimizer="sgd", placement="mixed", divides=False, note="no-gradient-division")
ALL = [
    Job(optimizer=optimizer, placement=placement, model=model)
    for model in ("dlrm", "tower")
    for optimizer in CASES
    for placement in PLACEMENTS
]
VARIABLE = [
    Job(optimizer="sgd", placement=placement, variable_batches=True, note="variable-batches")
    for placement in PLACEMENTS
]

DLRM = [job for job in ALL if job.model == "dlrm"]
WORLDS = {  # name -> ranks, jobs
    "core": (2, [*CORE, CONTROL]),
    "1 rank": (1, DLRM),
    "2 ranks": (2, [*DLRM, *WAYS]),
    "3 ranks": (3, [*ALL, *VARIABLE, CONTROL]),
    "4 ranks": (4, [*DLRM, *WAYS, CONTROL]),
}
FAST = ("core",)


class Worlds:
    """Runs each world once, when its first result is wanted."""

    def __init__(self) -> None:
        self._results: dict[str, list[dict[str, RankOutcome | str]]] = {}

    def ranks(self, world: str, job: Job) -> list[RankOutcome]:
        if world not in self._results:
            world_size, jobs = WORLDS[world]
            assert len({job.name for job in jobs}) == len(jobs)
            self._results[world] = run_world(train_all, world_size, jobs, deadline=1200)
        outcomes = [outcomes[job.name] for outcomes in self._results[world]]
        errors = [f"rank {r}: {o}" for r, o in enumerate(outcomes) if isinstance(o, str)]
        assert not errors, "\n".join(errors)
        return [outcome for outcome in outcomes if isinstance(outcome, RankOutcome)]


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return Worlds()


def cases(jobs: str) -> list[object]:
    return [
        pytest.param(
            world,
            job,
            id=f"{world}-{job.name}",
            marks=() if world in FAST else (pytest.mark.slow, pytest.mark.timeout(1500)),
        )
        for world, (_, of_world) in WORLDS.items()
        for job in of_world
        if (job.divides and jobs == "jobs") or (not job.divides and jobs == "controls")
    ]


def assert_within(found: Differences, job: Job) -> None:
    names = {job.optimizer} if isinstance(job.optimizer, str) else {*job.optimizer.values()}
    for field in ("loss", "table", "state", "dense"):
        limit = max(getattr(LIMITS[name], field) for name in names)
        assert getattr(found, field) <= limit, (field, found)


def moved(job: Job, alone: Outcome) -> float:
    """The least that any table's values moved, as a maximum over the table."""
    before = tables_of(new_model(job.model), job.placement, 1)
    return min(
        (alone.weights[fqn] - table.weight.detach()).abs().max().item()
        for fqn, table in before.items()
    )


@pytest.mark.parametrize(("world", "job"), cases("jobs"))
def test_trains_like_one_process(worlds: Worlds, world: str, job: Job) -> None:
    ranks = worlds.ranks(world, job)
    alone = train_alone(job, len(ranks))
    found = compare(ranks, alone)
    print(f"{world}, {job.name}: {found}, tables moved by {moved(job, alone):.1e}")
    assert moved(job, alone) > 1e-3
    assert_within(found, job)


@pytest.mark.parametrize(("world", "job"), cases("controls"))
def test_a_missing_gradient_division_is_seen(worlds: Worlds, world: str, job: Job) -> None:
    """With limits as above, and in the tables, not only in the loss."""
    ranks = worlds.ranks(world, job)
    alone = train_alone(replace(job, divides=True), len(ranks))
    found = compare(ranks, alone)
    print(f"{world}, {job.name}: {found}")
    with pytest.raises(AssertionError):
        assert_within(found, job)
    assert found.table > 1e-3
