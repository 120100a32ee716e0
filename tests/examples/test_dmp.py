"""The distributed example as a job: it learns, its processes die, it goes on with the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from criteo_format import criteo_lines, write_criteo
from job import (
    DEADLINE,
    EXAMPLES,
    JOB,
    SMALL,
    assert_same_bits,
    final_state,
    losses,
    run_ranks,
    torchrun,
)

DIES = Path(__file__).with_name("dies_in_step.py")
VICTIM_STEP = 8  # after the checkpoint of step 5


@pytest.mark.slow
def test_the_example_learns_and_goes_on_with_other_processes(tmp_path: Path) -> None:
    options = (
        "--batch-size=256",
        "--max-rows=200",
        f"--folder={tmp_path}",
        "--checkpoint-steps=20",
    )
    first = losses(torchrun(2, EXAMPLES / "dmp.py", *options, "--steps=40"))
    assert list(first) == list(range(1, 41))
    output = torchrun(3, EXAMPLES / "dmp.py", *options, "--steps=60")
    assert "goes on after step 40" in output
    then = losses(output)
    assert list(then) == list(range(41, 61))
    last = list(then.values())[-10:]
    assert (
        sum(last) / len(last) < 0.68
    )  # ln 2 = 0.693 is what a model knows that has learned nothing


@pytest.mark.slow
def test_the_example_reads_criteo(tmp_path: Path) -> None:
    file = tmp_path / "day"
    write_criteo(file, criteo_lines(300))
    output = torchrun(
        2, EXAMPLES / "dmp.py", "--data=criteo", f"--path={file}", *SMALL, "--steps=8"
    )
    assert list(losses(output)) == list(range(1, 9))  # into the second epoch


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = torchrun(4, EXAMPLES / "dmp.py", *JOB, f"--folder={folder}")
    assert list(losses(output)) == list(range(1, 15))
    return final_state(folder, 14)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_process_is_named_and_the_job_goes_on_with_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    outcomes = run_ranks(4, DIES, 2, VICTIM_STEP, *JOB, f"--folder={tmp_path}")
    assert outcomes[2].exit_code == -9, outcomes[2].output
    for rank in (0, 1, 3):
        assert outcomes[rank].exit_code == os.EX_TEMPFAIL, outcomes[rank].output
        assert f"rank {rank} of 4 misses rank 2" in outcomes[rank].output
        assert outcomes[rank].seconds - outcomes[2].seconds < DEADLINE
    assert max(losses(outcomes[0].output)) == VICTIM_STEP - 1

    outcomes = run_ranks(4, EXAMPLES / "dmp.py", *JOB, f"--folder={tmp_path}")
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4, outcomes
    assert "goes on after step 5" in outcomes[0].output
    assert list(losses(outcomes[0].output)) == list(range(6, 15))
    assert_same_bits(final_state(tmp_path, 14), uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_starts_the_job_again_and_it_ends_with_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    output = torchrun(4, "--max-restarts=1", DIES, 0, VICTIM_STEP, *JOB, f"--folder={tmp_path}")
    assert "goes on after step 5" in output
    assert_same_bits(final_state(tmp_path, 14), uninterrupted)
