"""One training step of one device as StableHLO text, with the facts that describe it.

A program runs on every device: num_replicas = num_devices and one partition, or num_partitions =
num_devices and one replica where it has pooled stacks, whose exchange compiles for partitions only.
Nothing else differs. Shapes are those of one device: S cores a device, P cores in all, N slots of a
device's buffers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.aot.adapter import Mlir
from torchrec_tpu.sparsecore.aot.exchange import Exchange, Ids
from torchrec_tpu.sparsecore.aot.pooled import IDS_PER_LINE, PooledStack, check_cover
from torchrec_tpu.sparsecore.batch import pointers_per_core
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import ProgramError
from torchrec_tpu.sparsecore.layout import Layout, Stack, Table
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.sparsecore.stacking import make_layout

if TYPE_CHECKING:
    from torch import nn

    from torchrec_tpu.sparsecore.aot.tracing import Collection, Loss, Shape, Traced

Kind = Literal[
    "table",  # f32 (S * rows_per_core, dim) of one stack
    "slot",  # optimizer state of a stack: as the table, or (S * rows_per_core,)
    "operand",  # f32 scalar of a stack's update, e.g. its learning rate
    "buffer",  # row_pointers s32 (S * max(P, 8),), embedding_ids, sample_ids s32, gains f32 (N,);
    # of a pooled stack header s32 (1 + G,), ids s32 (lines, words of a line)
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

ACTIVE: Final = "dense_operand/active"
"""f32 scalar of a pipelined step: 0 while the pipeline fills or drains, when the dense part has no
batch and must leave everything as it is; else 1."""

FORMAT: Final = 2
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
class PooledFacts:
    """One pooled stack as the program knows it.

    Attributes:
        name: of the stack.
        collection: FQN of its module, "" for the model itself.
        tables: names, in config order.
        slots: on all devices.
        rows: of one device.
        dim: row width of a core.
        samples: rows of the activations that a device makes for all devices.
        blocks: that a device gets, each a feature of a slot for its samples.
        ids: that a device has room for.
        max_ids: (G,) the most ids of a device that go to each device.
        id_bytes: what a device can send of ids in a step.
        block_bytes: of the blocks that a device gets in lookup, and sends in update.
        rule: optimizer rule; None for a frozen stack.
    """

    name: str
    collection: str
    tables: tuple[str, ...]
    slots: int
    rows: int
    dim: int
    samples: int
    blocks: int
    ids: int
    max_ids: tuple[int, ...]
    id_bytes: int
    block_bytes: int
    rule: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the text must contain; `Program.check` compares."""

    num_lookups: int
    num_updates: int
    collectives: tuple[tuple[str, int], ...]  # kind, e.g. "all_reduce", and bytes of its result
    alias_bytes: int  # tables, slots and donated dense state of one device
    num_local_lookups: int = 0  # of pooled stacks: in lookup, and in update of tables and slots


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
    pooled: tuple[PooledFacts, ...] = ()

    def check(self) -> None:
        """Compares the text with what is expected of it; a wrong step cannot pass silently.

        Raises:
            ProgramError: lookups, updates or collectives are missing or surplus, an argument that
                should be updated in place is not, or a stack's gradient does not come from the
                loss.
        """
        from torchrec_tpu.sparsecore.aot import guards

        guards.check(self)

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
            pooled=tuple(PooledFacts(**_tuples(s)) for s in facts.pop("pooled")),
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


def trace_step(
    model: nn.Module,
    collections: Mapping[str, Collection],
    example: Any,
    *,
    loss: Loss,
    batch_size: int,
    num_devices: int,
    cores_per_device: int,
    capacities: Mapping[str, Mapping[str, Capacity]],
    dense_optimizer: OptimizerSpec,
    mode: Mode = "exact",
    layouts: Mapping[str, Layout] | None = None,
    sequence_ids: Mapping[str, int] | None = None,
    gradient_division: bool = True,
    pooled: Mapping[str, Sequence[PooledStack]] | None = None,
) -> Program:
    """Traces one training step of a device.

    exact: lookup, dense forward and backward, all-reduce of the dense gradients, dense optimizer,
    table update. pipelined: update for batch t, the dense part for t + 1, lookup for t + 2 on the
    updated tables, so that SparseCores and TensorCore work at once. A lookup then misses the update
    of the batch before it, and of that batch only: its rows are one step stale.

    Args:
        model: with its collections; on "meta" or "cpu". Nothing of it is read but shapes.
        collections: FQN -> collection, every one of the model.
        example: one device's batch: tensors in tuples, lists, dicts or dataclasses. What is neither
            (a KeyedJaggedTensor) reaches the model as it is; collections do not read it.
        loss: (model, batch) -> mean loss over the device's samples, or a tuple that begins with it.
        batch_size: samples of one device.
        num_devices: devices that the tables are spread over.
        cores_per_device: SparseCores of one.
        capacities: collection -> stack -> static limits.
        dense_optimizer: of all parameters outside the collections.
        mode: see above.
        layouts: collection -> layout with one local device; by default `program_layout`.
        sequence_ids: KJT key -> the most ids of one device, for sequence features.
        gradient_division: divide the tables' gradients by num_devices, as TorchRec does, so that
            they are those of the mean loss over all devices.
        pooled: collection -> stacks of tables that stay with owners; `layouts` have the others.
            Exact mode only.

    Raises:
        ProgramError: the model, or a stack of its tables, cannot be a program; says why.
        DependencyError: torch_tpu or jaxlib is missing or was never tested.
    """
    from torchrec_tpu.sparsecore.aot import tracing

    adapter.require()
    pooled = {name: tuple((pooled or {}).get(name, ())) for name in collections}
    if mode == "pipelined" and any(pooled.values()):
        raise ProgramError(
            f"pooled stacks {[s.name for stacks in pooled.values() for s in stacks]}: a pipelined "
            "step looks ahead of the update, which is not built for them; use mode='exact'"
        )
    shapes = {}
    for name, collection in collections.items():
        check_cover(pooled[name])
        of_owners = {table.name for stack in pooled[name] for table in stack.tables}
        layout = (
            program_layout(
                collection.layout,
                num_devices=num_devices,
                cores_per_device=cores_per_device,
                batch_size=batch_size,
                frozen=[t for t, spec in collection.table_optimizers.items() if spec is None],
                without=of_owners,
            )
            if layouts is None
            else layouts[name]
        )
        if (layout.num_devices, layout.cores_per_device, layout.num_local_devices) != (
            num_devices,
            cores_per_device,
            1,
        ):
            raise ProgramError(
                f"collection {name!r}: the layout is for {layout.num_devices} devices of "
                f"{layout.cores_per_device} cores, {layout.num_local_devices} of them local; the "
                f"program is for {num_devices} of {cores_per_device}, one local"
            )
        names = sorted([*of_owners, *(table.name for table in layout.tables)])
        if names != sorted(table.name for table in collection.layout.tables):
            raise ProgramError(
                f"collection {name!r}: layout and pooled stacks have tables {names}, expected "
                f"{[table.name for table in collection.layout.tables]}, each in one of them"
            )
        shapes[name] = tracing.Shape.of(
            layout,
            batch_size=batch_size,
            sequence_ids=sequence_ids or {},
            pooled=pooled[name],
            order=[(feature.table, feature.key) for feature in collection.layout.features],
        )
    stacks = [
        _StackPlan.of(name, shapes[name], stack, collection, capacities.get(name, {}))
        for name, collection in collections.items()
        for stack in shapes[name].layout.stacks
    ]
    owned = [
        _PooledPlan.of(name, stack, collection, batch_size, (num_devices, cores_per_device))
        for name, collection in collections.items()
        for stack in pooled[name]
    ]
    traced = tracing.trace(
        model,
        collections,
        shapes,
        example,
        loss=loss,
        num_devices=num_devices,
        dense_optimizer=dense_optimizer,
        gradient_division=gradient_division,
        is_conditional=mode == "pipelined",
    )
    program = _Assembly(
        stacks=stacks,
        pooled=owned,
        batch_size=batch_size,
        traced=traced,
        dense_optimizer=dense_optimizer,
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        mode=mode,
    ).build()
    program.check()
    return program


def program_layout(
    layout: Layout,
    *,
    num_devices: int,
    cores_per_device: int,
    batch_size: int,
    stacks: Literal["auto", "none"] | Sequence[Sequence[str]] = "auto",
    frozen: Iterable[str] = (),
    without: Container[str] = (),
) -> Layout:
    """The tables of `layout` on the devices of a program, as device 0 feeds it.

    Args:
        layout: of a collection, for any number of devices.
        num_devices: of the program.
        cores_per_device: SparseCores of one.
        batch_size: samples of one device, which bounds a stack's activations.
        stacks: as in `make_layout`; how `layout` stacks its tables does not matter.
        frozen: tables without updates, which share no stack with others.
        without: tables that are in no layout, because they are in pooled stacks.
    """
    frozen = set(frozen)
    tables = [
        dataclasses.replace(table, group=f"frozen {table.group}") if table.name in frozen else table
        for table in layout.tables
        if table.name not in without
    ]
    if not tables:
        return Layout(
            tables=(),
            stacks=(),
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            num_local_devices=1,
            first_local_device=0,
        )
    return make_layout(
        tables,
        stacks=stacks,
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        num_local_devices=1,
        batch_size=batch_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StackPlan:
    """One stack of one collection, with what its calls need."""

    collection: str
    stack: Stack
    layout: Layout
    capacity: Capacity
    samples: int  # rows of a device's activations
    optimizer: OptimizerSpec | None  # None for a frozen stack

    @classmethod
    def of(
        cls,
        name: str,
        shape: Shape,
        stack: Stack,
        collection: Collection,
        capacities: Mapping[str, Capacity],
    ) -> _StackPlan:
        tables = [stacked.table for stacked in stack.tables]
        optimizer = _optimizer_of(stack.name, tables, collection)
        if stack.name not in capacities:
            raise ProgramError(
                f"stack {stack.name!r} of collection {name!r} has no capacity; a compiled program "
                f"needs one. Capacities are given for {sorted(capacities)}; calibrate(batches) "
                "suggests them"
            )
        return cls(
            collection=name,
            stack=stack,
            layout=shape.layout,
            capacity=capacities[stack.name],
            samples=shape.samples(stack),
            optimizer=optimizer,
        )

    @property
    def prefix(self) -> str:
        return f"{self.collection}/{self.stack.name}".lstrip("/")

    @property
    def facts(self) -> StackFacts:
        return StackFacts(
            name=self.stack.name,
            collection=self.collection,
            tables=tuple(stacked.table.name for stacked in self.stack.tables),
            rows=self.layout.cores_per_device * self.stack.rows_per_core,
            dim=self.stack.dim,
            samples=self.samples,
            slots_per_device=self.layout.cores_per_device
            * self.capacity.slots_per_core(self.layout.num_cores),
            max_ids=self.capacity.max_ids,
            max_unique_ids=self.capacity.max_unique_ids,
            rule=self.optimizer.rule.name if self.optimizer else None,
        )

    @property
    def limits(self) -> lowering.Limits:
        return lowering.Limits(
            max_ids=self.capacity.max_ids, max_unique_ids=self.capacity.max_unique_ids
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledPlan:
    """One pooled stack of one collection, with what its operations need."""

    collection: str
    stack: PooledStack
    batch_size: int
    optimizer: OptimizerSpec | None  # None for a frozen stack

    @classmethod
    def of(
        cls,
        name: str,
        stack: PooledStack,
        collection: Collection,
        batch_size: int,
        devices_and_cores: tuple[int, int],
    ) -> _PooledPlan:
        if (stack.num_devices, stack.cores_per_device) != devices_and_cores:
            raise ProgramError(
                f"pooled stack {stack.name!r} is for {stack.num_devices} devices of "
                f"{stack.cores_per_device} cores, the program for {devices_and_cores[0]} of "
                f"{devices_and_cores[1]}"
            )
        optimizer = _optimizer_of(stack.name, stack.tables, collection)
        if optimizer and _has_mean(optimizer):
            dims = {table.name: table.embedding_dim for table in stack.tables}
            if split := [name for name, dim in dims.items() if dim > stack.width]:
                raise ProgramError(
                    f"pooled stack {stack.name!r}: {optimizer} takes a mean over the row, and the "
                    f"columns of {split} are on several devices; place them table-wise"
                )
        return cls(collection=name, stack=stack, batch_size=batch_size, optimizer=optimizer)

    @property
    def prefix(self) -> str:
        return f"{self.collection}/{self.stack.name}".lstrip("/")

    @property
    def facts(self) -> PooledFacts:
        stack, cores = self.stack, self.stack.cores_per_device
        line_bytes = 4 * stack.words_per_id * IDS_PER_LINE
        return PooledFacts(
            name=stack.name,
            collection=self.collection,
            tables=tuple(table.name for table in stack.tables),
            slots=len(stack.slots),
            rows=cores * stack.rows_per_core,
            dim=stack.core_width,
            samples=cores * stack.samples_per_core(self.batch_size),
            blocks=len(stack.blocks),
            ids=stack.num_ids,
            max_ids=stack.max_ids,
            id_bytes=sum(stack.lines) * line_bytes,
            block_bytes=4 * len(stack.blocks) * self.batch_size * stack.core_width,
            rule=self.optimizer.rule.name if self.optimizer else None,
        )

    @property
    def collectives(self) -> list[tuple[str, int]]:
        """Kind, and bytes of the result."""
        stack = self.stack
        found = [
            ("all_to_all", 4 * stack.num_devices),
            (lowering.RAGGED_ALL_TO_ALL, 4 * stack.words_per_id * stack.num_ids),
            (lowering.RAGGED_ALL_TO_ALL, self.facts.block_bytes),
        ]
        if self.optimizer:
            found.append((lowering.RAGGED_ALL_TO_ALL, 4 * self.facts.samples * stack.core_width))
        return found

    @property
    def num_local_lookups(self) -> int:
        """Of the lookup; of its rows' gradients, and of reading and writing table and slots."""
        return 1 + (1 + 2 * (1 + len(self.optimizer.rule.slots)) if self.optimizer else 0)


def _optimizer_of(
    stack: str, tables: Sequence[Table], collection: Collection
) -> OptimizerSpec | None:
    """The one optimizer of a stack's tables."""
    optimizers = {collection.table_optimizers[table.name] for table in tables}
    if len(optimizers) > 1:
        raise ProgramError(
            f"stack {stack!r}: its tables have different optimizers {optimizers}, or some are "
            "frozen and some not; one call updates them all. Lay them out in several stacks"
        )
    (optimizer,) = optimizers
    if optimizer and _has_mean(optimizer) and len({table.embedding_dim for table in tables}) > 1:
        raise ProgramError(
            f"stack {stack!r}: {optimizer} takes a mean over the row, and the rows of "
            f"{[table.name for table in tables]} have different lengths; lay them out in several "
            "stacks"
        )
    return optimizer


def _has_mean(optimizer: OptimizerSpec) -> bool:
    return any(slot.width == "scalar" for slot in optimizer.rule.slots)


@dataclass(slots=True, kw_only=True)
class _Assembly:
    """Puts lookups, the traced graphs, collectives and updates together into one function."""

    stacks: Sequence[_StackPlan]
    pooled: Sequence[_PooledPlan]
    batch_size: int
    traced: Traced
    dense_optimizer: OptimizerSpec
    num_devices: int
    cores_per_device: int
    mode: Mode
    _arguments: dict[str, tuple[Argument, Any]] = dataclasses.field(default_factory=dict)
    _values: dict[str, Any] = dataclasses.field(default_factory=dict)
    _channels: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def build(self) -> Program:
        graphs = [self.traced.gradients, *([self.traced.update] if self.traced.update else [])]
        texts = adapter.to_stablehlo(graphs)
        with adapter.mlir() as mlir:
            parts = [mlir.ir.Module.parse(text) for text in texts]
            gradients, *update = map(lowering.public_function, parts)
            self._declare(mlir, gradients)
            replicas, partitions = self.num_devices, 1
            if self.pooled:
                replicas, partitions = partitions, replicas
            module = mlir.ir.Module.parse(
                f"module @step attributes {{mhlo.num_replicas = {replicas} : i32, "
                f"mhlo.num_partitions = {partitions} : i32}} {{}}"
            )
            types = [type_ for _, type_ in self._arguments.values()]
            with mlir.ir.InsertionPoint(module.body):
                main = mlir.func.FuncOp("main", (types, []))
                block = main.add_entry_block()
            self._values = dict(zip(self._arguments, block.arguments, strict=True))
            with mlir.ir.InsertionPoint(block):
                results = self._step(mlir, module, gradients, update[0] if update else None)
                mlir.func.ReturnOp(list(results.values()))
            main.attributes["function_type"] = mlir.ir.TypeAttr.get(
                mlir.ir.FunctionType.get(types, [value.type for value in results.values()])
            )
            arguments = [argument for argument, _ in self._arguments.values()]
            position = {argument.name: index for index, argument in enumerate(arguments)}
            facts = tuple(
                Result(
                    name=name,
                    kind=_result_kind(name, arguments, position),
                    shape=tuple(value.type.shape),
                    dtype=_dtype(mlir, value.type),
                    aliases=position.get(name),
                )
                for name, value in results.items()
            )
            names = list(results)
            main.arg_attrs = mlir.ir.ArrayAttr.get(
                [
                    mlir.ir.DictAttr.get(
                        _layout(mlir, argument)
                        | (
                            {"tf.aliasing_output": _int32(mlir, names.index(argument.name))}
                            if argument.donated
                            else {}
                        )
                    )
                    for argument in arguments
                ]
            )
            main.attributes["res_attrs"] = mlir.ir.ArrayAttr.get(
                [mlir.ir.DictAttr.get(_layout(mlir, result)) for result in facts]
            )
            if not module.operation.verify():
                raise ProgramError("the assembled step is not valid StableHLO")
            lowering.flatten_concatenations(mlir, main.regions[0].blocks[0])
            adapter.simplify(module)  # values of the module do not survive this
            lowering.slice_sources(mlir, lowering.public_function(module).regions[0].blocks[0])
            adapter.simplify(module)
            return Program(
                text=str(module),
                arguments=tuple(arguments),
                results=facts,
                stacks=tuple(plan.facts for plan in self.stacks),
                pooled=tuple(plan.facts for plan in self.pooled),
                num_devices=self.num_devices,
                cores_per_device=self.cores_per_device,
                mode=self.mode,
                expected=self._expected(arguments),
            )

    @property
    def _is_pipelined(self) -> bool:
        return self.mode == "pipelined"

    def _declare(self, mlir: Mlir, gradients: Any) -> None:
        """All arguments, in the order that `Program.arguments` promises."""
        f32, s32 = mlir.ir.F32Type.get(), mlir.ir.IntegerType.get_signless(32)

        def add(
            name: str,
            kind: Kind,
            type_: Any,
            *,
            donated: bool = False,
            sharded: bool = False,
        ) -> None:
            argument = Argument(
                name=name,
                kind=kind,
                shape=tuple(mlir.ir.RankedTensorType(type_).shape),
                dtype=_dtype(mlir, type_),
                donated=donated,
                sharded=sharded,
            )
            self._arguments[name] = argument, type_

        def tensor(shape: Iterable[int], element: Any = f32) -> Any:
            return mlir.ir.RankedTensorType.get(list(shape), element)

        plans: list[_StackPlan | _PooledPlan] = [*self.stacks, *self.pooled]
        for plan in plans:
            facts, is_trained = plan.facts, plan.optimizer is not None
            shape = facts.rows, facts.dim
            name = f"{plan.prefix}/table"
            add(name, "table", tensor(shape), donated=is_trained, sharded=True)
            if plan.optimizer:
                for slot in plan.optimizer.rule.slots:
                    name = f"{plan.prefix}/slot:{slot.name}"
                    add(name, "slot", tensor(slot.shape(*shape)), donated=True, sharded=True)
                for operand in plan.optimizer.rule.operands:
                    add(f"{plan.prefix}/operand:{operand}", "operand", tensor(()))
        for stacked in self.stacks:
            pointers = self.cores_per_device * pointers_per_core(stacked.layout.num_cores)
            for role in ("buffer", "update_buffer") if self._is_pipelined else ("buffer",):
                if role == "update_buffer" and not stacked.optimizer:
                    continue
                slots = (stacked.facts.slots_per_device,)
                for array, type_ in (
                    ("row_pointers", tensor((pointers,), s32)),
                    ("embedding_ids", tensor(slots, s32)),
                    ("sample_ids", tensor(slots, s32)),
                    ("gains", tensor(slots)),
                ):
                    add(f"{stacked.prefix}/{role}:{array}", "buffer", type_, sharded=True)

        for owned in self.pooled:
            stack = owned.stack
            line = sum(stack.lines), stack.words_per_id * IDS_PER_LINE
            for array, type_ in (
                ("header", tensor((1 + stack.num_devices,), s32)),
                ("ids", tensor(line, s32)),
            ):
                add(f"{owned.prefix}/buffer:{array}", "buffer", type_, sharded=True)

        traced = self.traced
        types = list(gradients.type.inputs)
        frozen_at = len(traced.trained)
        inputs_at = frozen_at + len(traced.frozen)
        lengths_at = inputs_at + len(traced.inputs)
        for name, type_ in zip(traced.trained, types, strict=False):
            add(f"dense/{name}", "dense", type_, donated=True)
        for name, type_ in zip(traced.frozen, types[frozen_at:], strict=False):
            add(f"dense/{name}", "dense", type_)
        for name, dense_slots in traced.slots.items():
            for slot_name, slot_shape in dense_slots:
                type_ = tensor(slot_shape)
                add(f"dense_slot/{slot_name}/{name}", "dense_slot", type_, donated=True)
        for operand in self.dense_optimizer.rule.operands:
            add(f"dense_operand/{operand}", "dense_operand", tensor(()))
        if self._is_pipelined:
            add(ACTIVE, "dense_operand", tensor(()))
        for name, type_ in zip(traced.inputs, types[inputs_at:], strict=False):
            add(f"input/{name}", "input", type_, sharded=True)
        for name, type_ in zip(traced.lengths, types[lengths_at:], strict=False):
            add(f"{name}/lengths".lstrip("/"), "input", type_, sharded=True)
        if self._is_pipelined:
            for stacked in self.stacks:
                type_ = tensor((stacked.samples, stacked.stack.dim))
                for part in ("activations", "gradients")[: 2 if stacked.optimizer else 1]:
                    name = f"{stacked.prefix}/carry:{part}"
                    add(name, "carry", type_, donated=True, sharded=True)

    def _step(self, mlir: Mlir, module: Any, gradients: Any, update: Any) -> dict[str, Any]:
        """The body: name -> value of each result, in order."""
        values, traced = self._values, self.traced
        if self._is_pipelined:
            tables = self._updates(
                mlir,
                module,
                {p.prefix: values.get(f"{p.prefix}/carry:gradients") for p in self.stacks},
                "update_buffer",
            )
            new_activations = self._lookups(mlir, values | tables)
            activations = {p.prefix: values[f"{p.prefix}/carry:activations"] for p in self.stacks}
        else:
            activations = self._lookups(mlir, values)
        exchange = Exchange(mlir=mlir, batch_size=self.batch_size, channels=self._channels)
        ids: dict[str, Ids] = {}
        for owned in self.pooled:
            name = owned.prefix
            header, lines = (values[f"{name}/buffer:{array}"] for array in ("header", "ids"))
            ids[name] = exchange.receive(owned.stack, header, lines)
            activations[name] = exchange.lookup(owned.stack, ids[name], values[f"{name}/table"])

        rest = iter(
            lowering.inline(
                gradients,
                [
                    *(values[f"dense/{name}"] for name in (*traced.trained, *traced.frozen)),
                    *(values[f"input/{name}"] for name in traced.inputs),
                    *(values[f"{name}/lengths".lstrip("/")] for name in traced.lengths),
                    *(activations["/".join(filter(None, key))] for key in traced.activations),
                    *lowering.constants(mlir, traced.gradients.constants),
                ],
            )
        )
        loss = next(rest)
        outputs = {name: next(rest) for name in traced.outputs}
        dense_gradients = [next(rest) for _ in traced.trained]
        plans: list[_StackPlan | _PooledPlan] = [*self.stacks, *self.pooled]
        trained = {plan.prefix for plan in plans if plan.optimizer}
        names = ["/".join(filter(None, key)) for key in traced.activations]
        of_activations = {name: next(rest) for name in names if name in trained}
        if self.num_devices > 1:
            *dense_gradients, loss = self._sums(mlir, [*dense_gradients, loss])
            count = np.array(self.num_devices, np.float32)
            loss = mlir.hlo.divide(loss, mlir.hlo.constant(mlir.ir.DenseElementsAttr.get(count)))
        dense = self._dense_update(mlir, update, dense_gradients)
        if not self._is_pipelined:
            tables = self._updates(mlir, module, of_activations, "buffer")
        for owned in self.pooled:
            grad = of_activations.get(owned.prefix)
            tables |= self._pooled_update(exchange, owned, ids[owned.prefix], grad)
        results = tables | dense | {"loss": loss} | outputs
        if self._is_pipelined:
            for plan in self.stacks:
                results[f"{plan.prefix}/carry:activations"] = new_activations[plan.prefix]
                if plan.optimizer:
                    results[f"{plan.prefix}/carry:gradients"] = of_activations[plan.prefix]
        return results

    def _sums(self, mlir: Mlir, values: Sequence[Any]) -> list[Any]:
        """Of each value over all devices."""
        if not self.pooled:
            return lowering.all_reduce(mlir, values, num_devices=self.num_devices)
        return [  # XLA takes them one by one from partitions, and libtpu joins them again
            total
            for value in values
            for total in lowering.all_reduce(
                mlir, [value], num_devices=self.num_devices, channel=next(self._channels)
            )
        ]

    def _buffers(self, plan: _StackPlan, role: str) -> lowering.Buffers:
        names = ("row_pointers", "embedding_ids", "sample_ids", "gains")
        return lowering.Buffers(
            **{name: self._values[f"{plan.prefix}/{role}:{name}"] for name in names}
        )

    def _lookups(self, mlir: Mlir, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            plan.prefix: lowering.lookup(
                mlir,
                self._buffers(plan, "buffer"),
                values[f"{plan.prefix}/table"],
                samples=plan.samples,
                limits=plan.limits,
            )
            for plan in self.stacks
        }

    def _updates(
        self, mlir: Mlir, module: Any, gradients: Mapping[str, Any], role: str
    ) -> dict[str, Any]:
        """Name -> new value of all tables and slots."""
        new: dict[str, Any] = {}
        for index, plan in enumerate(self.stacks):
            if not plan.optimizer:
                continue
            rule = plan.optimizer.rule
            names = [f"{plan.prefix}/table"]
            names += [f"{plan.prefix}/slot:{slot.name}" for slot in rule.slots]
            table, *slots = (self._values[name] for name in names)
            results = lowering.update(
                mlir,
                module,
                self._buffers(plan, role),
                gradients[plan.prefix],
                table,
                slots,
                [self._values[f"{plan.prefix}/operand:{operand}"] for operand in rule.operands],
                rule=rule,
                limits=plan.limits,
                name=f"{rule.name}_{index}",
                logical_dim=plan.stack.tables[0].table.embedding_dim,
            )
            new |= dict(zip(names, results, strict=True))
        return new

    def _pooled_update(
        self, exchange: Exchange, plan: _PooledPlan, ids: Ids, grad: Any
    ) -> dict[str, Any]:
        """Name -> new value of table and slots."""
        if not plan.optimizer:
            return {}
        rule = plan.optimizer.rule
        names = [f"{plan.prefix}/table"]
        names += [f"{plan.prefix}/slot:{slot.name}" for slot in rule.slots]
        table, *slots = (self._values[name] for name in names)
        results = exchange.update(
            plan.stack,
            ids,
            grad,
            table,
            slots,
            [self._values[f"{plan.prefix}/operand:{operand}"] for operand in rule.operands],
            rule=rule,
            logical_dim=plan.stack.tables[0].embedding_dim,
        )
        return dict(zip(names, results, strict=True))

    def _dense_update(self, mlir: Mlir, update: Any, gradients: Sequence[Any]) -> dict[str, Any]:
        """Name -> new value of all dense parameters and their slots."""
        if self.traced.update is None:
            return {}
        names = [f"dense/{name}" for name in self.traced.trained]
        names += [
            f"dense_slot/{slot}/{name}"
            for name, slots in self.traced.slots.items()
            for slot, _ in slots
        ]
        operands = [f"dense_operand/{name}" for name in self.dense_optimizer.rule.operands]
        if self._is_pipelined:
            operands.append(ACTIVE)
        values = [self._values[name] for name in (*names, *operands)]
        values += lowering.constants(mlir, self.traced.update.constants)
        return dict(zip(names, lowering.inline(update, [*gradients, *values]), strict=True))

    def _expected(self, arguments: Sequence[Argument]) -> Expected:
        reduced = [a.num_bytes for a in arguments if a.kind == "dense" and a.donated]
        reduced.append(ITEM_BYTES["f32"])  # the loss
        if not self.pooled:
            reduced = [sum(reduced)]
        if self.num_devices == 1:
            reduced = []
        of_owners = [pair for plan in self.pooled for pair in plan.collectives]
        return Expected(
            num_local_lookups=sum(plan.num_local_lookups for plan in self.pooled),
            num_lookups=len(self.stacks),
            num_updates=sum(plan.optimizer is not None for plan in self.stacks),
            collectives=(*(("all_reduce", num_bytes) for num_bytes in reduced), *of_owners),
            alias_bytes=sum(a.num_bytes for a in arguments if a.donated),
        )


def _result_kind(name: str, arguments: Sequence[Argument], position: Mapping[str, int]) -> Kind:
    if name in position:
        return arguments[position[name]].kind
    return "loss" if name == "loss" else "output"


def _dtype(mlir: Mlir, type_: Any) -> str:
    """XLA's word for the element type of a tensor."""
    element = str(mlir.ir.RankedTensorType(type_).element_type)
    return {"i1": "pred"}.get(element) or (
        f"s{element[1:]}" if element[0] == "i" else element
    ).replace("ui", "u")


def _layout(mlir: Mlir, fact: Argument | Result) -> dict[str, Any]:
    """The layout that SparseCores want: without it a narrow table is copied in and out."""
    if fact.kind not in ("table", "slot", "carry"):
        return {}
    dims = ",".join(map(str, reversed(range(len(fact.shape)))))
    return {"mhlo.layout_mode": mlir.ir.StringAttr.get(f"{{{dims}:T(8)}}")}


def _int32(mlir: Mlir, value: int) -> Any:
    return mlir.ir.IntegerAttr.get(mlir.ir.IntegerType.get_signless(32), value)


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
