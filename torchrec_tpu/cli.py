"""The command `torchrec-tpu`. A subcommand is a line in `COMMANDS` and a module with two functions.

The module has `add_arguments(parser)` and `command(args) -> exit code`; it is imported only when
its command is called, so `torchrec-tpu --help` stays quick and works with whatever is broken.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: its name, its line in --help, and the module that has it."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command(
        name="doctor",
        help="what is installed, what runs here, what is missing and how to get it",
        module="torchrec_tpu.doctor",
    ),
    Command(
        name="train",
        help="train DLRM v2 on ml-100k, Criteo files or synthetic data",
        module="torchrec_tpu.training.command",
    ),
    Command(
        name="aot",
        help="compile a training step for a TPU slice that you don't have, and say what it takes",
        module="torchrec_tpu.aot",
    ),
    Command(
        name="plan",
        help="decide where every table goes on a TPU slice, and say why and what a step takes",
        module="torchrec_tpu.planning",
    ),
    Command(
        name="report",
        help="tables and plots of run records",
        module="torchrec_tpu.report",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code (2: wrong arguments, or it cannot be loaded)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="torchrec-tpu",
        description="TorchRec models with their tables on the TPU SparseCore, or on a plain CPU.",
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(dest="name", metavar="command", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.help, description=command.help.capitalize() + "."
        )
        if arguments[:1] != [command.name]:
            continue
        try:
            module = importlib.import_module(command.module)
        except ImportError as error:
            print(
                f"error: `torchrec-tpu {command.name}` cannot be loaded: {error}\n"
                "`torchrec-tpu doctor` says what is missing and how to get it",
                file=sys.stderr,
            )
            return 2
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.command)
    args = parser.parse_args(arguments)
    code: int = args.run(args)
    return code


def _version() -> str:
    try:
        return f"torchrec-tpu {metadata.version('torchrec_tpu')}"
    except metadata.PackageNotFoundError:
        return "torchrec-tpu (a source tree, not installed)"


if __name__ == "__main__":
    sys.exit(main())
