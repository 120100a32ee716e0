"""The options of `torchrec-tpu train` and of examples/dlrm_v2/train.py."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_tpu.recipes import DEFAULTS, RECIPES, capped
from torchrec_tpu.sparsecore.errors import TorchrecTpuError
from torchrec_tpu.training.loop import Options, UsageError, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run."""
    add = parser.add_argument
    add("--data", choices=sorted(DEFAULTS), help="data set; ml-100k unless a recipe says otherwise")
    add("--recipe", choices=list(RECIPES), help="whole-run configuration; default: the data set's")
    add("--path", type=Path, help="Criteo file (TSV, or CSV with header; .gz too), ml-100k folder")
    add("--test-path", type=Path, help="Criteo file to test on; default: a tenth of --path")
    add("--split", choices=("random", "time"), default="random", help="of ml-100k")
    add("--epochs", type=_positive)
    add("--batch-size", type=_positive)
    add("--lr", type=float, help="of the tables")
    add("--dense-lr", type=float, help="of everything else")
    add("--seed", type=_seed, help="of weights, order and synthetic data")
    add("--threads", dest="num_threads", type=_positive, help="of PyTorch; default: the recipe's")
    add("--max-rows", type=_positive, help="cap of the rows of every table")
    add("--exponent", type=_not_negative, help="skew of synthetic ids")
    add("--steps", type=_positive, help="end after this many steps in all")
    add("--steps-per-epoch", type=_positive, help="of synthetic data")
    add("--snapshot-steps", type=_positive, help="steps between snapshots, besides one every epoch")
    add("--out", type=Path, help="folder of the results; default: runs/<recipe>")
    add("--resume", action="store_true", help="go on from the newest snapshot in --out")
    add("--compare-torchrec", action="store_true", help="train plain TorchRec beside it")
    add("--no-plot", action="store_true")
    add("--no-progress", action="store_true")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not a number from 0 up")
    return value


def options_from(args: argparse.Namespace) -> Options:
    """The options that parsed arguments ask for.

    Raises:
        UsageError: arguments that contradict each other.
    """
    recipe = RECIPES[args.recipe or DEFAULTS[args.data or "ml-100k"]]()
    if args.data is not None and args.data != recipe.data:
        raise UsageError(f"recipe {recipe.name} is for {recipe.data} data, not {args.data}")
    changes: dict[str, Any] = {
        name: value
        for name in ("epochs", "batch_size", "seed", "num_threads", "exponent", "steps_per_epoch")
        if (value := getattr(args, name)) is not None
    }
    for argument, field_name in (("lr", "table_optimizer"), ("dense_lr", "dense_optimizer")):
        if (lr := getattr(args, argument)) is not None:
            changes[field_name] = dataclasses.replace(getattr(recipe, field_name), lr=lr)
    recipe = dataclasses.replace(recipe, **changes)
    if args.max_rows is not None:
        if recipe.data == "ml-100k":
            raise UsageError("--max-rows is for hashed and synthetic ids; ml-100k has fixed ones")
        recipe = capped(recipe, max_rows=args.max_rows)
    return Options(
        recipe=recipe,
        out=args.out or Path("runs") / recipe.name,
        path=args.path,
        test_path=args.test_path,
        split=args.split,
        max_steps=args.steps,
        snapshot_steps=args.snapshot_steps,
        resume=args.resume,
        compare=args.compare_torchrec,
        plot=not args.no_plot,
        progress=not args.no_progress,
    )


def main(argv: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    return command(parser.parse_args(argv))


def command(args: argparse.Namespace) -> int:
    """Runs with parsed arguments; an error that the user can mend is printed, not traced."""
    try:
        return run(options_from(args))
    except TorchrecTpuError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
