"""A run from data to record: train, evaluate, compare, save, resume."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import platform
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import tqdm
from torch import Tensor
from torchrec.datasets.utils import Batch

from torchrec_tpu import report
from torchrec_tpu.api import StageTimes, prepare
from torchrec_tpu.datasets import BatchStream, CriteoFile, MultiHot, Synthetic, ml_100k
from torchrec_tpu.metrics import roc_auc
from torchrec_tpu.recipes import Recipe
from torchrec_tpu.report import Comparison, EpochRecord, RunRecord, TableDifference
from torchrec_tpu.snapshots import Snapshots
from torchrec_tpu.sparsecore.errors import StateDictError, TorchrecTpuError
from torchrec_tpu.training.sides import Side, build_model, differences, our_side, plain_side

EARLY_STEPS = 20
TOLERANCES: Mapping[str, float] = {
    "early_loss": 1e-4,
    "first_state": 1e-4,
    "early_weights": 0.02,
    "early_state": 0.02,
    "auc": 0.005,
}
AUC_WINDOW = 8192  # samples of the running AUC in the progress bar


class TrainingError(TorchrecTpuError, RuntimeError):
    """A run that cannot go on."""


class UsageError(TorchrecTpuError, ValueError):
    """Options that contradict each other, or lack something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is asked to do.

    Attributes:
        recipe: data, model, optimizers, schedule.
        out: folder of the record, the plot and the snapshots.
        path: the Criteo file, or a folder with ml-100k.
        test_path: a Criteo file to test on; without one a tenth of `path` is held out.
        split: how ml-100k is divided.
        max_steps: end the run after this many steps in all.
        snapshot_steps: steps between snapshots, besides one after each epoch.
        resume: go on from the newest snapshot in `out`.
        compare: train plain TorchRec beside it, on the same batches from the same weights.
        plot: draw `run.png`.
        progress: show a progress bar.
    """

    recipe: Recipe
    out: Path
    path: Path | None = None
    test_path: Path | None = None
    split: Literal["random", "time"] = "random"
    max_steps: int | None = None
    snapshot_steps: int | None = None
    resume: bool = False
    compare: bool = False
    plot: bool = True
    progress: bool = True


def open_data(options: Options) -> tuple[BatchStream, BatchStream]:
    """(train, test) of the recipe's data set."""
    recipe = options.recipe
    if recipe.data == "ml-100k":
        return ml_100k(
            options.path, batch_size=recipe.batch_size, seed=recipe.seed, split=options.split
        )
    if recipe.data == "synthetic":
        features = [
            MultiHot(key=f.key, num_embeddings=f.num_embeddings, num_ids=f.num_ids)
            for f in recipe.features
        ]
        make = partial(
            Synthetic,
            features,
            num_dense=recipe.num_dense,
            batch_size=recipe.batch_size,
            exponent=recipe.exponent,
            seed=recipe.seed,
        )
        num_test = max(1, recipe.steps_per_epoch // 10)
        return (
            make(num_batches=recipe.steps_per_epoch, split="train"),
            make(num_batches=num_test, split="test"),
        )
    if options.path is None:
        raise UsageError("Criteo data are read from a file: pass --path FILE")
    read = partial(
        CriteoFile,
        num_embeddings=[feature.num_embeddings for feature in recipe.features],
        batch_size=recipe.batch_size,
        seed=recipe.seed,
    )
    if options.test_path is not None:
        return read(options.path), read(options.test_path, shuffle=False)
    return read(options.path, split="train"), read(options.path, split="test", shuffle=False)


@dataclass(slots=True, kw_only=True)
class Run:
    """A run in progress."""

    options: Options
    train: BatchStream
    test: BatchStream
    sides: list[Side]
    record: RunRecord
    snapshots: Snapshots
    epoch: int = 0  # current, from 0
    batch: int = 0  # batches done in it
    differences: dict[str, dict[str, TableDifference]] = field(default_factory=dict)
    interrupted: bool = False  # asked to stop after the step that is being done
    times: StageTimes = field(default_factory=StageTimes)  # of the prefetch thread, this epoch

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return len(self.record.step_samples)

    @property
    def is_over(self) -> bool:
        """Whether `max_steps` or an interrupt ends the run."""
        limit = self.options.max_steps
        return self.interrupted or (limit is not None and self.num_steps >= limit)

    def save(self) -> None:
        """Writes a snapshot of the present position."""
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "differences": {
                when: {name: dataclasses.asdict(table) for name, table in tables.items()}
                for when, tables in self.differences.items()
            },
            "record": self.record.to_json(),
            "rng": torch.get_rng_state(),
            "sides": {side.name: side.state_dict() for side in self.sides},
        }
        self.snapshots.save(state, step=self.num_steps)

    def restore(self) -> None:
        """Goes back to the newest snapshot.

        Raises:
            SnapshotError: there is none that is sound.
            StateDictError: it belongs to a run with other settings.
        """
        step, state = self.snapshots.load()
        record = RunRecord.from_json(state["record"], source=f"snapshot of step {step}")
        mine = self.record
        ignored = {"epochs", "name", "num_threads"}  # a run may be made longer
        different = [
            f"{name}={record.recipe.get(name)!r} (now {value!r})"
            for name, value in mine.recipe.items()
            if name not in ignored and record.recipe.get(name) != value
        ]
        if record.data != mine.data:
            different.append(f"data={record.data} (now {mine.data})")
        if different:
            raise StateDictError(
                f"the snapshot of step {step} was made with {'; '.join(different)}; resume with "
                "the same settings, or start anew without --resume"
            )
        if state["sides"].keys() != {side.name for side in self.sides}:
            raise StateDictError(
                f"the snapshot of step {step} holds {sorted(state['sides'])}, this run trains "
                f"{[side.name for side in self.sides]}: use --compare-torchrec in both or in none"
            )
        for side in self.sides:
            side.load_state_dict(state["sides"][side.name])
            side.record = record.sides[side.name]
        record.recipe, record.machine, record.versions = mine.recipe, mine.machine, mine.versions
        self.record = record
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.differences = {
            when: {name: TableDifference(**table) for name, table in tables.items()}
            for when, tables in state["differences"].items()
        }
        torch.set_rng_state(state["rng"])
        print(f"resumed at step {step}: epoch {self.epoch + 1}, batch {self.batch}")

    def fit(self) -> None:
        """Trains to the end of the recipe or of `max_steps`."""
        while self.epoch < self.options.recipe.epochs and not self.is_over:
            self._train_epoch()
            if not self.is_over:
                self._finish_epoch()
                self.save()
                self.record.write(self.options.out / "record.json")
        if self.batch:  # ended inside an epoch: the snapshot is older than this evaluation
            self.save()
            if self.interrupted:
                return
            self._finish_epoch()
        self._compare()
        self.record.write(self.options.out / "record.json")

    def _train_epoch(self) -> None:
        ours = self.sides[0]
        recent: deque[tuple[Tensor, Tensor]] = deque()
        num_recent = 0
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(self._progress_bar())
            loader = self.train.batches(self.epoch, start=self.batch)
            # Closing the iterator ends the prefetch thread when the loop is left early.
            prepared = prepare(loader, ours.model)
            batches = cast("Generator[Batch]", iter(prepared))
            stack.enter_context(contextlib.closing(batches))
            for batch in batches:
                logits, *_ = [side.step(batch) for side in self.sides]
                size = len(batch.labels)
                self.record.step_samples.append(size)
                self.batch += 1
                loss = ours.record.losses[-1]
                if not math.isfinite(loss):
                    raise TrainingError(
                        f"step {self.num_steps}: the loss is {loss}; a smaller --lr may help "
                        f"(now {self.options.recipe.table_optimizer})"
                    )
                if len(self.sides) > 1 and self.num_steps in (1, EARLY_STEPS):
                    self.differences[f"step {self.num_steps}"] = differences(*self.sides)
                recent.append((batch.labels, logits))
                num_recent += size
                while num_recent - len(recent[0][0]) >= AUC_WINDOW:
                    num_recent -= len(recent.popleft()[0])
                if bar.update(size):
                    auc = roc_auc(
                        *(torch.cat(column).numpy() for column in zip(*recent, strict=True))
                    )
                    bar.set_postfix(loss=f"{loss:.4f}", auc=f"{auc:.4f}", refresh=False)
                every = self.options.snapshot_steps
                if every and self.num_steps % every == 0:
                    self.save()
                if self.is_over:
                    break
        self.times = prepared.times

    def _progress_bar(self) -> Any:
        return tqdm.tqdm(
            desc=f"epoch {self.epoch + 1}/{self.options.recipe.epochs}",
            total=self.train.num_samples,
            initial=self.batch * self.train.batch_size,
            unit=" samples",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 10,
            disable=not self.options.progress,
        )

    def _finish_epoch(self) -> None:
        if not self.batch:
            raise TrainingError("the train split has no samples")
        steps = slice(self.num_steps - self.batch, None)
        samples = np.array(self.record.step_samples[steps])
        for side in self.sides:
            seconds = sum(side.record.step_seconds[steps])
            test_loss, test_auc = side.evaluate(self.test.batches(0))
            side.record.epochs.append(
                EpochRecord(
                    epoch=self.epoch + 1,
                    num_steps=self.batch,
                    train_loss=float(np.average(side.record.losses[steps], weights=samples)),
                    train_seconds=seconds,
                    samples_per_second=float(samples.sum() / seconds),
                    preprocess_seconds=(
                        self.times.preprocess_seconds if side is self.sides[0] else 0.0
                    ),
                    test_loss=test_loss,
                    test_auc=test_auc,
                )
            )
            done = side.record.epochs[-1]
            print(
                f"epoch {done.epoch} {side.name}: train loss {done.train_loss:.4f}, test loss "
                f"{test_loss:.4f}, AUC {test_auc:.4f}, {done.samples_per_second:,.0f} samples/s"
            )
        self.epoch, self.batch = self.epoch + 1, 0

    def _compare(self) -> None:
        """Fills in the record's comparison."""
        if len(self.sides) == 1 or not self.num_steps:
            return
        ours, plain = (side.record for side in self.sides)
        now = differences(*self.sides)
        steps = min(EARLY_STEPS, self.num_steps)
        losses = np.abs(np.subtract(ours.losses, plain.losses))
        aucs = [
            abs(a.test_auc - b.test_auc) for a, b in zip(ours.epochs, plain.epochs, strict=True)
        ]
        self.record.comparison = Comparison(
            early_steps=steps,
            early_loss=float(losses[:steps].max()),
            loss=float(losses.max()),
            auc=float(np.max(aucs)),
            tables={"step 1": now, f"step {steps}": now, **self.differences, "end": now},
            tolerances=dict(TOLERANCES),
        )


def run(options: Options) -> int:
    """Trains as asked; prints what it does; writes record, plot and snapshots.

    Returns:
        0; 1 when a comparison exceeds its tolerances; 130 when interrupted (after a snapshot).
    """
    recipe = options.recipe
    _check_memory(recipe, num_models=1 + options.compare)
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    train, test = open_data(options)
    plain_model = build_model(recipe)
    model = copy.deepcopy(plain_model) if options.compare else plain_model
    sides = [our_side(recipe, model)]
    if options.compare:
        sides.append(plain_side(recipe, plain_model))
    current = Run(
        options=options,
        train=train,
        test=test,
        sides=sides,
        record=RunRecord(
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            recipe=_plain(dataclasses.asdict(recipe)),
            data=_data_facts(options, train, test),
            versions=_versions(),
            machine=_machine(),
            sides={side.name: side.record for side in sides},
        ),
        snapshots=Snapshots(options.out / "snapshots"),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        current.restore()
    else:
        current.snapshots.clear()
    with _interruptible(current):
        current.fit()
    if current.interrupted:
        print(f"\ninterrupted at step {current.num_steps}; the same command with --resume goes on")
        return 130
    return _conclude(current)


def _check_memory(recipe: Recipe, *, num_models: int) -> None:
    """Refuses tables that the machine cannot hold, before it starts to swap."""
    num_slots = len(recipe.table_optimizer.rule.slots)
    rows = sum(feature.num_embeddings for feature in recipe.features)
    needed = rows * recipe.embedding_dim * 4 * (1 + num_slots) * num_models
    available = _memory_bytes()
    if available is not None and needed > available:
        raise UsageError(
            f"recipe {recipe.name}: tables and optimizer state take {needed / 2**30:,.1f} GiB, "
            f"this machine has {available / 2**30:,.1f}: cap the tables with --max-rows"
        )


@contextlib.contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """Lets the first Ctrl-C (or SIGTERM) end the run after its step; the second ends it at once."""

    def on_signal(_signal: int, _frame: object) -> None:
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, on_signal) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)


def _conclude(run: Run) -> int:
    record, out = run.record, run.options.out
    print("\n" + report.summary([record]))
    if isinstance(run.train, CriteoFile):
        lookups, collisions = run.train.num_lookups.sum(), run.train.num_collisions.sum()
        print(f"hash collisions: {collisions:,} of {lookups:,} categories read")
    print(f"\nrecord: {out / 'record.json'}")
    if run.options.plot:
        try:
            from torchrec_tpu.plots import plot_run

            plot_run(record, out / "run.png")
            print(f"plot:   {out / 'run.png'}")
        except ModuleNotFoundError as error:
            print(f"no plot: {error}; pip install matplotlib")
    if record.comparison is None:
        return 0
    print("\n" + report.comparison_table(record.comparison))
    failures = record.comparison.failures()
    print("\nthe same as plain TorchRec" if not failures else f"\nNOT the same: {failures}")
    return 1 if failures else 0


# ----------------------------------------------------------------------------------- facts of a run


def _plain(value: Any) -> Any:
    """What JSON would give back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _data_facts(options: Options, train: BatchStream, test: BatchStream) -> dict[str, Any]:
    return {
        "name": options.recipe.data,
        "train_bytes": train.path.stat().st_size if isinstance(train, CriteoFile) else None,
        "split": options.split if options.recipe.data == "ml-100k" else None,
        "train_samples": train.num_samples,
        "test_samples": test.num_samples,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torchrec_tpu", "torch", "torchrec", "fbgemm-gpu-cpu", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _machine() -> dict[str, Any]:
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": model,
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
    }
    if (memory := _memory_bytes()) is not None:
        facts["memory_gib"] = round(memory / 2**30, 1)
    return facts


def _memory_bytes() -> int | None:
    """Physical memory; None where the system does not say."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
