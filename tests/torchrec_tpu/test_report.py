"""Run records: what is written is read, what is shown is what was written."""

import dataclasses
import math
import struct
from pathlib import Path

import pytest

from torchrec_tpu.cli import main
from torchrec_tpu.plots import plot_run
from torchrec_tpu.report import (
    Comparison,
    EpochRecord,
    RecordError,
    RunRecord,
    SideRecord,
    TableDifference,
    comparison_table,
    summary,
)


def difference(value: float) -> dict[str, TableDifference]:
    return {"t": TableDifference(weight=0.5, weight_norm=value, state=0.25, state_norm=value)}


def comparison(**changes: float) -> Comparison:
    tolerances = {"early_loss": 1e-4, "first_state": 1e-4, "early_weights": 0.02}
    return Comparison(
        early_steps=20,
        early_loss=changes.get("early_loss", 1e-6),
        loss=3.0,
        auc=changes.get("auc", 0.001),
        tables={
            "step 1": difference(changes.get("first", 1e-7)),
            "step 20": difference(changes.get("early", 1e-3)),
            "end": difference(0.9),
        },
        tolerances={**tolerances, "early_state": 0.02, "auc": 0.005},
    )


def record(*, auc: float = 0.75, num_sides: int = 2) -> RunRecord:
    def side(shift: float) -> SideRecord:
        epochs = [
            EpochRecord(
                epoch=epoch,
                num_steps=30,
                train_loss=0.5 + shift,
                train_seconds=2.0,
                samples_per_second=1234.5,
                preprocess_seconds=0.25,
                test_loss=0.6,
                test_auc=auc + shift,
            )
            for epoch in (1, 2)
        ]
        losses = [0.7 - 0.001 * step + shift for step in range(60)]
        return SideRecord(losses=losses, step_seconds=[0.1] * 60, epochs=epochs)

    return RunRecord(
        started_at="2026-01-02T03:04:05+00:00",
        recipe={"name": "r", "features": [{"key": "a"}]},
        data={"name": "synthetic"},
        versions={"torch": "2"},
        machine={"num_cpus": 2},
        sides={name: side(0.01 * i) for i, name in enumerate(["ours", "plain"][:num_sides])},
        step_samples=[8] * 60,
        comparison=comparison() if num_sides == 2 else None,
    )


@pytest.mark.parametrize("num_sides", [1, 2])
def test_a_record_comes_back_as_it_was_written(tmp_path: Path, num_sides: int) -> None:
    path = tmp_path / "record.json"
    record(num_sides=num_sides).write(path)
    assert RunRecord.read(path) == record(num_sides=num_sides)
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_nan_is_written_as_null_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record(auc=math.nan).write(path)
    assert "NaN" not in path.read_text()
    assert math.isnan(RunRecord.read(path).sides["ours"].epochs[0].test_auc)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "format None"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1}', "not a run record"),
        ('{"format": 1, "sides": 3}', "not a run record"),
    ],
)
def test_other_files_are_refused(text: str, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        RunRecord.from_json(text)


def test_summary_has_a_line_for_each_model_and_epoch() -> None:
    lines = summary([record()]).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].split("|")[1:-1] == [
        " r      ", " ours  ", "     1 ", "    30 ", "     0.5000 ", "    0.6000 ", "   0.7500 ",
        "     1,234 ", "     2.0 ", "          0.2 ",
    ]  # fmt: skip
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"early_loss": 2e-4}, ["early_loss"]),
        ({"first": 1e-3}, ["first_state"]),
        ({"early": 0.03}, ["early_weights", "early_state"]),
        ({"auc": 0.006}, ["auc"]),
        ({"auc": math.nan}, ["auc"]),
        ({"early": math.nan}, ["early_weights", "early_state"]),
    ],
)
def test_figures_beyond_their_tolerance_fail(changes: dict[str, float], failing: list[str]) -> None:
    compared = comparison(**changes)
    assert compared.failures() == failing
    assert comparison_table(compared).count("EXCEEDED") == len(failing)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("num_sides", [1, 2])
def test_plot_draws_every_side(tmp_path: Path, num_sides: int) -> None:
    pytest.importorskip("matplotlib")
    plot_run(record(num_sides=num_sides), tmp_path / "run.png")
    assert png_size(tmp_path / "run.png") == (1200, 480)


def test_plot_of_a_run_without_steps_is_empty_but_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = dataclasses.replace(record(), sides={"ours": SideRecord()})
    plot_run(empty, tmp_path / "run.png")
    assert png_size(tmp_path / "run.png") == (1200, 480)


def test_report_command_prints_tables_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "record.json", tmp_path / "run.png"
    record().write(path)
    assert main(["report", str(path), str(path), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(summary([record(), record()]))
    assert printed.count(comparison_table(comparison())) == 2
    assert png_size(plot) == (1200, 480)
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
