"""Two processes over gloo: what they may not do with unsharded tables, and stock TorchRec."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from two_ranks import SCENARIOS

SCRIPT = Path(__file__).with_name("two_ranks.py")


def run_two_ranks(scenario: str, tmp_path: Path, **environment: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.rstrip().endswith("done"), output


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks(scenario: str, tmp_path: Path) -> None:
    run_two_ranks(scenario, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torch_tpu") is None, reason="torch_tpu is absent")
def test_stock_dmp_works_beside_an_autoloaded_torch_tpu(tmp_path: Path) -> None:
    run_two_ranks("stock_dmp_trains", tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
