"""Run records and the tables made of them. Nothing here measures: runs write, this reads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrec_tpu.sparsecore.errors import TorchrecTpuError

__all__ = [
    "Comparison",
    "EpochRecord",
    "RecordError",
    "RunRecord",
    "SideRecord",
    "TableDifference",
    "comparison_table",
    "summary",
]

FORMAT = 1


class RecordError(TorchrecTpuError, ValueError):
    """A file that is no run record, or one of another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One pass over the data and the evaluation after it.

    Attributes:
        epoch: counted from 1.
        num_steps: steps of this epoch; fewer than a whole epoch's when `--steps` ended the run.
        train_loss: mean over the epoch's samples, before each update.
        train_seconds: forward, backward and update, without reading data.
        samples_per_second: training samples by `train_seconds`.
        preprocess_seconds: in the prefetch thread, beside the training; 0 for plain TorchRec. When
            a run was resumed inside the epoch, of the part since then.
        test_loss: mean over the test split.
        test_auc: of the test split; NaN when it has one class only.
    """

    epoch: int
    num_steps: int
    train_loss: float
    train_seconds: float
    samples_per_second: float
    preprocess_seconds: float
    test_loss: float
    test_auc: float


@dataclass(slots=True, kw_only=True)
class SideRecord:
    """What one model did: one entry a step, one entry an epoch."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDifference:
    """How far one table of our model is from plain TorchRec's.

    Attributes:
        weight: largest absolute difference of a weight.
        weight_norm: norm of the difference / norm of TorchRec's weights.
        state: largest absolute difference of an optimizer state.
        state_norm: norm of the difference / norm of TorchRec's state; 0 without state.
    """

    weight: float
    weight_norm: float
    state: float
    state_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between our model and plain TorchRec's, and what is allowed.

    After one step only rounding separates the two. Then single weights drift apart as in any two
    runs whose sums are ordered differently (Adagrad turns a gradient of 1e-9 and its negative into
    opposite steps of full size), so later the norms are judged, and in the end the test AUC.

    Attributes:
        early_steps: number of steps that `early_loss` covers.
        early_loss: largest absolute difference of a step's loss in the first steps.
        loss: the same over the whole run.
        auc: largest absolute difference of an epoch's test AUC.
        tables: "step 1", "step <early_steps>", "end" -> table -> difference then.
        tolerances: limits by the name of the figure.
    """

    early_steps: int
    early_loss: float
    loss: float
    auc: float
    tables: dict[str, dict[str, TableDifference]]
    tolerances: dict[str, float]

    def figures(self) -> dict[str, float]:
        """What is judged, by the names of the tolerances."""
        first = self.tables["step 1"].values()
        early = self.tables[f"step {self.early_steps}"].values()
        return {
            "early_loss": self.early_loss,
            "first_state": _largest(table.state_norm for table in first),
            "early_weights": _largest(table.weight_norm for table in early),
            "early_state": _largest(table.state_norm for table in early),
            "auc": self.auc,
        }

    def failures(self) -> list[str]:
        """Names of the figures that exceed their tolerance, or are NaN."""
        return [
            name for name, value in self.figures().items() if not value <= self.tolerances[name]
        ]


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run: what ran, where, and what came out.

    Attributes:
        started_at: UTC, ISO 8601.
        recipe: the `Recipe` as nested plain values.
        data: facts of the data set.
        versions: package -> version.
        machine: processor, memory, threads; no host name, no paths.
        sides: model name -> its figures; "torchrec_tpu" is ours.
        step_samples: samples of every step.
        comparison: None unless both sides ran.
        format: version of this file format.
    """

    started_at: str
    recipe: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    sides: dict[str, SideRecord]
    step_samples: list[int] = field(default_factory=list)
    comparison: Comparison | None = None
    format: int = FORMAT

    def to_json(self) -> str:
        """The record as JSON; NaN becomes null, so that any parser reads it."""
        return json.dumps(_without_nan(dataclasses.asdict(self)), indent=1, allow_nan=False)

    def write(self, path: str | Path) -> None:
        """Writes the record whole or not at all."""
        target = Path(path)
        draft = target.with_name(target.name + ".new")
        draft.write_text(self.to_json() + "\n")
        draft.replace(target)

    @classmethod
    def from_json(cls, text: str, *, source: str = "run record") -> RunRecord:
        """The inverse of `to_json`.

        Raises:
            RecordError: not JSON, another format, or fields that do not fit.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise RecordError(f"{source}: not JSON: {error}") from None
        found = raw.get("format") if isinstance(raw, dict) else None
        if found != FORMAT:
            raise RecordError(
                f"{source}: format {found!r}, this version of torchrec_tpu reads format {FORMAT}"
            )
        try:
            sides = {
                name: SideRecord(
                    losses=[_number(loss) for loss in side["losses"]],
                    step_seconds=side["step_seconds"],
                    epochs=[EpochRecord(**_with_nan(epoch)) for epoch in side["epochs"]],
                )
                for name, side in raw["sides"].items()
            }
            comparison = raw["comparison"] and _comparison(_with_nan(raw["comparison"]))
            return cls(**{**raw, "sides": sides, "comparison": comparison})
        except (KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{source}: not a run record: {error!r}") from None

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Reads a file that `write` wrote."""
        return cls.from_json(Path(path).read_text(), source=str(path))


def summary(records: Iterable[RunRecord]) -> str:
    """A Markdown table with one line for each model and epoch of the records.

    Speeds compare inside one record only, where both sides ran interleaved. Preprocessing ran in a
    thread beside them and is not in `train s`.
    """
    rows = [
        (
            str(record.recipe["name"]),
            name,
            str(epoch.epoch),
            str(epoch.num_steps),
            f"{epoch.train_loss:.4f}",
            f"{epoch.test_loss:.4f}",
            f"{epoch.test_auc:.4f}",
            f"{epoch.samples_per_second:,.0f}",
            f"{epoch.train_seconds:.1f}",
            f"{epoch.preprocess_seconds:.1f}",
        )
        for record in records
        for name, side in record.sides.items()
        for epoch in side.epochs
    ]
    header = (
        "recipe",
        "model",
        "epoch",
        "steps",
        "train loss",
        "test loss",
        "test AUC",
        "samples/s",
        "train s",
        "preprocess s",
    )
    return _table(header, rows, num_text_columns=2)


def comparison_table(comparison: Comparison) -> str:
    """The figures of a comparison beside their tolerances, and the differences of every table."""
    steps = comparison.early_steps
    words = {
        "early_loss": f"loss of a step, first {steps} steps",
        "first_state": "optimizer state after step 1 (norm)",
        "early_weights": f"weights after step {steps} (norm)",
        "early_state": f"optimizer state after step {steps} (norm)",
        "auc": "test AUC of an epoch",
    }
    failures = comparison.failures()
    rows = [
        (
            words[name],
            f"{value:.2e}",
            f"{comparison.tolerances[name]:.0e}",
            "EXCEEDED" if name in failures else "ok",
        )
        for name, value in comparison.figures().items()
    ]
    rows.append(("loss of a step, whole run", f"{comparison.loss:.2e}", "-", ""))
    largest = [
        (when, name, f"{table.weight:.2e}", f"{table.state:.2e}")
        for when, tables in comparison.tables.items()
        for name, table in tables.items()
    ]
    header = ("difference to plain TorchRec", "found", "allowed", "")
    per_table = ("after", "table", "largest of a weight", "largest of the state")
    return "\n\n".join(
        (
            _table(header, rows, num_text_columns=1),
            _table(per_table, largest, num_text_columns=2),
        )
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        "-" * width if index < num_text_columns else "-" * (width - 1) + ":"
        for index, width in enumerate(widths)
    )
    return "\n".join((line(header), f"| {' | '.join(rule)} |", *map(line, rows)))


def _largest(values: Iterable[float]) -> float:
    """The maximum, 0 for none, NaN when one is NaN."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _comparison(raw: dict[str, Any]) -> Comparison:
    tables = {
        when: {name: TableDifference(**table) for name, table in differences.items()}
        for when, differences in raw["tables"].items()
    }
    return Comparison(**{**raw, "tables": tables})


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    return math.nan if value is None else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torchrec-tpu report`."""
    parser.add_argument("records", nargs="+", type=Path, help="record.json files of runs")
    parser.add_argument("--plot", type=Path, help="also draw the first record into this PNG")


def command(args: argparse.Namespace) -> int:
    """Prints a table of all records and the comparison of each that has one."""
    try:
        records = [RunRecord.read(path) for path in args.records]
    except (RecordError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(records))
    for record in records:
        if record.comparison is not None:
            print(f"\n{record.recipe['name']}, {record.started_at}\n")
            print(comparison_table(record.comparison))
    if args.plot is not None:
        from torchrec_tpu.plots import plot_run

        plot_run(records[0], args.plot)
    return 0
