"""Every example runs and says what it promises."""

import runpy
import sys
from pathlib import Path

import pytest

from torchrec_tpu.datasets import DataNotFoundError, ml_100k
from torchrec_tpu.report import RunRecord

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *argv: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a script as `python name argv` would; returns its exit code."""
    path = str(EXAMPLES / name)
    monkeypatch.setattr(sys, "argv", [path, *argv])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture
def wheel_data() -> None:
    try:
        ml_100k()
    except DataNotFoundError as error:
        pytest.skip(str(error))


def test_quickstart_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_example("quickstart.py", monkeypatch=monkeypatch) == 0
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


def test_config_swap_gives_the_same_outputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_example("config_swap.py", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "moved: 2 tables of 1 modules" in printed
    assert "the same outputs" in printed
    assert "the same weights after a step" in printed


@pytest.mark.usefixtures("wheel_data")
def test_dlrm_v2_starts_like_plain_torchrec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = f"--data ml-100k --steps 20 --compare-torchrec --no-plot --out {tmp_path}"
    assert run_example("dlrm_v2/train.py", *argv.split(), monkeypatch=monkeypatch) == 0
    compared = RunRecord.read(tmp_path / "record.json").comparison
    assert compared is not None
    assert compared.early_loss <= 1e-4
    assert not compared.failures()


@pytest.mark.slow
@pytest.mark.usefixtures("wheel_data")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dlrm_v2_reaches_its_auc_on_ml_100k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    argv = f"--data ml-100k --epochs 3 --seed {seed} --compare-torchrec --no-plot --out {tmp_path}"
    assert run_example("dlrm_v2/train.py", *argv.split(), monkeypatch=monkeypatch) == 0
    record = RunRecord.read(tmp_path / "record.json")
    ours, plain = (record.sides[name].epochs[-1] for name in ("torchrec_tpu", "torchrec"))
    assert ours.epoch == 3
    assert ours.test_auc >= 0.775
    assert abs(ours.test_auc - plain.test_auc) <= 0.005
    assert record.comparison is not None
    assert record.comparison.early_loss <= 1e-4
