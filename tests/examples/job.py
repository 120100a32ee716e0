"""Runs of examples/dmp.py, and what they leave behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from world import Outcome, Processes, child_environment, free_port

from torchrec_tpu import latest_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 20.0
SMALL = ("--batch-size=64", "--max-rows=50", f"--deadline-seconds={DEADLINE}")
JOB = (*SMALL, "--steps=14", "--checkpoint-steps=5")


def torchrun(world_size: int, *command: object) -> str:
    """Runs a job to its end under the elastic agent; returns what it printed."""
    agent = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*agent, f"--nproc-per-node={world_size}", *map(str, command)],
        check=False,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_ranks(world_size: int, *command: object) -> list[Outcome]:
    """How processes ended that no agent watches."""
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    with Processes([[sys.executable, *map(str, command)]] * world_size, ranks) as processes:
        return processes.join(250, grace=2 * DEADLINE)


def losses(output: str) -> dict[int, float]:
    """By step, of rank 0."""
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(words[1].rstrip(":")): float(words[3]) for words in lines}


def final_state(folder: Path, step: int) -> dict[str, Any]:
    """Model, optimizers and progress of the newest checkpoint, by name."""
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert newest.name.endswith(f"-step-{step}")
    file = folder / "whole.pt"
    dcp_to_torch_save(newest, file)
    named = dict(_leaves(torch.load(file, weights_only=False)))
    return {name: value for name, value in named.items() if not name.startswith("ranks")}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    tables = [name for name in wanted if name.endswith("t_C1.weight")]
    assert tables, wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name
