"""One training step of one device as StableHLO text, with the facts that describe it.

A program runs on every device (num_replicas = num_devices, one partition). Shapes are those of one
device: S cores a device, P cores in all, N slots of a device's buffers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, Self

from torchrec_tpu.sparsecore.errors import ProgramError

Kind = Literal[
    "table",  # f32 (S * rows_per_core, dim) of one stack
    "slot",  # optimizer state of a stack: as the table, or (S * rows_per_core,)
    "operand",  # f32 scalar of a stack's update, e.g. its learning rate
    "buffer",  # row_pointers s32 (S * max(P, 8),), embedding_ids, sample_ids s32, gains f32 (N,)
    "dense",  # a parameter outside the collections
    "dense_slot",  # its optimizer state
    "dense_operand",  # f32 scalar of the dense update
    "input",  # a tensor of the batch
    "carry",  # what a pipelined step hands to the next: activations and their gradients
    "loss",  # f32 scalar, mean over devices
    "output",  # anything else that the loss function returns
]
Mode = Literal["exact", "pipelined"]

ITEM_BYTES: Final = {
    "f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "s16": 2,
    "s8": 1, "u8": 1, "pred": 1,
}  # fmt: skip
"""Bytes of one element, by XLA's name of its type."""

FORMAT: Final = 1
"""Version of the saved form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of the program's main function.

    Attributes:
        name: e.g. "ebc/stack/table", "ebc/stack/slot:sum", "ebc/stack/operand:lr",
            "ebc/stack/buffer:row_pointers", "dense/over_arch.weight", "dense_slot/sum/<parameter>".
        kind: see `Kind`.
        shape: of one device.
        dtype: XLA's word: "f32", "s32", ...
        donated: whether a result reuses its memory.
        sharded: whether devices hold different values; else all hold the same.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    donated: bool
    sharded: bool

    @property
    def num_bytes(self) -> int:
        """Bytes on one device, without the padding of its layout."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result of the main function; `aliases` is the argument whose memory it reuses."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    aliases: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes on one device, without the padding of its layout."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """One stack as the program knows it.

    Attributes:
        name: of the stack.
        collection: FQN of its module, "" for the model itself.
        tables: names, in the order of the stack.
        rows: of one device: S * rows_per_core.
        dim: row width, padded.
        samples: rows of one device's activations.
        slots_per_device: N, slots of one device's buffers.
        max_ids: ids of one core that go to one partition.
        max_unique_ids: distinct rows among them.
        rule: optimizer rule; None for a frozen stack, which has no update.
    """

    name: str
    collection: str
    tables: tuple[str, ...]
    rows: int
    dim: int
    samples: int
    slots_per_device: int
    max_ids: int
    max_unique_ids: int
    rule: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the text must contain; `Program.check` compares."""

    num_lookups: int
    num_updates: int
    collectives: tuple[tuple[str, int], ...]  # kind, e.g. "all_reduce", and bytes of its result
    alias_bytes: int  # tables, slots and donated dense state of one device


@dataclass(frozen=True, kw_only=True)  # no slots: `key` is kept
class Program:
    """A traced step. Get one from `trace_step`, or from disk with `load`."""

    text: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    stacks: tuple[StackFacts, ...]
    num_devices: int
    cores_per_device: int
    mode: Mode
    expected: Expected

    @cached_property
    def key(self) -> str:
        """SHA-256 (hex) of the text and all facts: what a compiled result can be cached under."""
        facts = json.dumps(self._facts(), sort_keys=True)
        return hashlib.sha256(f"{facts}\n{self.text}".encode()).hexdigest()

    def save(self, directory: Path) -> None:
        """Writes program.mlir and program.json into `directory`, which is made if missing."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "program.mlir").write_text(self.text)
        facts = {"format": FORMAT, "key": self.key, **self._facts()}
        (directory / "program.json").write_text(json.dumps(facts, indent=1))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The program that `save` wrote.

        Raises:
            ProgramError: the files are of another version, or do not belong together.
        """
        facts = json.loads((directory / "program.json").read_text())
        found, key = facts.pop("format", None), facts.pop("key", None)
        if found != FORMAT:
            raise ProgramError(
                f"{directory} holds a program of format {found!r}, this version reads {FORMAT}: "
                "trace it again"
            )
        program = cls(
            text=(directory / "program.mlir").read_text(),
            arguments=tuple(Argument(**_tuples(a)) for a in facts.pop("arguments")),
            results=tuple(Result(**_tuples(r)) for r in facts.pop("results")),
            stacks=tuple(StackFacts(**_tuples(s)) for s in facts.pop("stacks")),
            expected=Expected(**_tuples(facts.pop("expected"))),
            **facts,
        )
        if program.key != key:
            raise ProgramError(f"{directory}: program.mlir and program.json do not fit together")
        return program

    def _facts(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "text"]
        facts: dict[str, Any] = json.loads(
            json.dumps({name: _plain(getattr(self, name)) for name in names})
        )
        return facts


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def _tuples(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples they were, one level into lists of lists."""
    return {
        name: tuple(tuple(v) if isinstance(v, list) else v for v in value)
        if isinstance(value, list)
        else value
        for name, value in facts.items()
    }
