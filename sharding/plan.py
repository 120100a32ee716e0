"""What was decided for every table, why, and what it costs: printed, kept as JSON, given to DMP."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from torchrec_tpu.sharding.cost import Option, PooledGroup, StepCost
from torchrec_tpu.sharding.placements import TablePlacement
from torchrec_tpu.sparsecore.aot.pooled import PooledSlot, PooledStack
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import PlacementError
from torchrec_tpu.sparsecore.layout import Combiner, Table

FORMAT: Final = "torchrec_tpu plan"
VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """One table's part of a plan.

    Attributes:
        module: FQN of its collection.
        table: name.
        num_embeddings: V.
        embedding_dim: D.
        features: KJT keys.
        combiner: pooling.
        is_weighted: whether its bags are weighted.
        rule: of its optimizer; None when frozen.
        ids_per_sample: mean.
        rows_per_step: distinct rows that a step touches on all devices.
        lookups: where the two figures are from.
        placement: shards, as DMP takes them.
        chosen: its costs.
        reason: why, in a sentence.
        runner_up: the next best; None when there is only one way.
        considered: all ways that were priced.
        excluded: ways that were not, each with the reason.
    """

    module: str
    table: str
    num_embeddings: int
    embedding_dim: int
    features: tuple[str, ...]
    combiner: Combiner
    is_weighted: bool
    rule: str | None
    ids_per_sample: float
    rows_per_step: float
    lookups: str
    placement: TablePlacement
    chosen: Option
    reason: str
    runner_up: Option | None
    considered: tuple[Option, ...]
    excluded: tuple[str, ...]

    def as_table(self) -> Table:
        """The table as layouts take it."""
        return Table(
            name=self.table,
            num_embeddings=self.num_embeddings,
            embedding_dim=self.embedding_dim,
            combiner=self.combiner,
            features=self.features,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStack:
    """Row-sharded tables that one SparseCore operation looks up, and its limits."""

    module: str
    name: str
    tables: tuple[str, ...]
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRows:
    """The same tables, every one row-sharded: the only placement that the peers know.

    Attributes:
        exchanged_bytes: see `StepCost`, like what follows.
        links_ms: all exchanges.
        bound_ms: of the step.
        bound_by: what binds it.
        hbm_bytes: of the fullest device.
    """

    exchanged_bytes: int
    links_ms: float
    bound_ms: float
    bound_by: str
    hbm_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SparseCorePlan:
    """Placement of every table on a slice, with its costs. Print it, or take its JSON.

    Attributes:
        topology: name of the slice.
        slice: the slice in words.
        chip: generation.
        num_chips: of the slice.
        num_devices: of the slice; ranks.
        cores_per_device: SparseCores.
        hbm_bytes: of one device.
        global_batch_size: samples of a step on all devices.
        dense_parameters: numbers outside the tables.
        tables: in the model's order.
        stacks: of the row-sharded tables.
        groups: of the pooled tables.
        cost: of a step, device by device.
        all_rows: the baseline.
        assumptions: what the figures rest on.
    """

    topology: str
    slice: str
    chip: str
    num_chips: int
    num_devices: int
    cores_per_device: int
    hbm_bytes: int
    global_batch_size: int
    dense_parameters: int
    tables: tuple[PlannedTable, ...]
    stacks: tuple[PlannedStack, ...]
    groups: tuple[PooledGroup, ...]
    cost: StepCost
    all_rows: AllRows
    assumptions: tuple[str, ...]

    def __getitem__(self, key: str | tuple[str, str]) -> PlannedTable:
        """A table by name, or by (module, name) where several modules have that name.

        Raises:
            KeyError: no table, or several.
        """
        found = [
            planned
            for planned in self.tables
            if key in (planned.table, (planned.module, planned.table))
        ]
        if len(found) == 1:
            return found[0]
        known = [(planned.module, planned.table) for planned in found or self.tables]
        raise KeyError(f"{key!r} names {len(found)} tables of the plan; it has {known}")

    def explain(self, key: str | tuple[str, str]) -> str:
        """Why a table is where it is, and what each other way would have cost."""
        return "\n".join(_explanation(self[key]))

    def capacities(self) -> dict[str, dict[str, Capacity]]:
        """Module -> stack -> limits, of the row-sharded tables."""
        found: dict[str, dict[str, Capacity]] = {}
        for stack in self.stacks:
            found.setdefault(stack.module, {})[stack.name] = stack.capacity
        return found

    def pooled_stacks(self) -> dict[str, tuple[PooledStack, ...]]:
        """Module -> pooled stacks, as a compiled program takes them (`aot.trace(pooled=...)`).

        Their `max_ids` follow the mean number of ids with headroom; `aot.fit_pooled` fits them to
        batches.
        """
        found: dict[str, list[PooledStack]] = {}
        for group in self.groups:
            shards = [
                (device, shard) for device, mine in enumerate(group.devices) for shard in mine
            ]
            planned = {
                p.table: p
                for p in self.tables
                if p.module == group.module and p.table in {shard.table for _, shard in shards}
            }
            max_ids = [
                sum(planned[shard.table].chosen.room_ids // self.num_devices for shard in mine)
                for mine in group.devices
            ]
            stacks = found.setdefault(group.module, [])
            stacks.append(
                PooledStack(
                    name=f"pooled {len(stacks)}",
                    tables=tuple(p.as_table() for p in planned.values()),
                    slots=tuple(
                        PooledSlot(
                            table=shard.table,
                            device=device,
                            row=shard.row,
                            num_rows=shard.num_rows,
                            column=shard.column,
                        )
                        for device, shard in shards
                    ),
                    width=group.width,
                    num_devices=self.num_devices,
                    cores_per_device=self.cores_per_device,
                    max_ids=tuple(max_ids),
                    is_weighted=any(p.is_weighted for p in planned.values()),
                )
            )
        return {module: tuple(stacks) for module, stacks in found.items()}

    def stacks_of(self, module: str) -> list[list[str]]:
        """Stacks of a module's row-sharded tables, as `make_layout` takes them."""
        return [list(stack.tables) for stack in self.stacks if stack.module == module]

    def placements(self) -> dict[str, dict[str, TablePlacement]]:
        """Module -> table -> placement."""
        found: dict[str, dict[str, TablePlacement]] = {}
        for planned in self.tables:
            found.setdefault(planned.module, {})[planned.table] = planned.placement
        return found

    def to_sharding_plan(
        self, model: nn.Module, world_size: int | None = None, device: str = "cpu"
    ) -> ShardingPlan:
        """The plan as `DistributedModelParallel` takes it.

        Args:
            model: has the modules and tables; on any device.
            world_size: ranks; those of the plan when None.
            device: type, "cpu" or "tpu".

        Raises:
            PlacementError: the plan is for another number of ranks, or the model has other tables.
        """
        if world_size not in (None, self.num_devices):
            raise PlacementError(
                f"the plan is for {self.num_devices} devices ({self.topology}), not {world_size}; "
                "plan again for that many"
            )
        modules = dict(model.named_modules())
        entries: dict[str, EmbeddingModuleShardingPlan] = {}
        for planned in self.tables:
            shapes = {
                config.name: (config.num_embeddings, config.embedding_dim)
                for config in _configs(modules.get(planned.module))
            }
            if shapes.get(planned.table) != (planned.num_embeddings, planned.embedding_dim):
                raise PlacementError(
                    f"the plan has table {planned.table!r} of shape "
                    f"({planned.num_embeddings}, {planned.embedding_dim}) in module "
                    f"{planned.module!r}; the model has there: {shapes or 'no tables'}"
                )
            entries.setdefault(planned.module, EmbeddingModuleShardingPlan())[planned.table] = (
                planned.placement.to_parameter_sharding(self.num_devices, device)
            )
        return ShardingPlan(plan=dict(entries))

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(document, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the text is not one, of another version, or damaged; says where.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a {FORMAT}: no JSON ({error})") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"not a {FORMAT}: its format is not {FORMAT!r}")
        if document.get("version") != VERSION:
            raise ValueError(
                f"a {FORMAT} of version {document.get('version')!r}; this release reads version "
                f"{VERSION}. Make the plan again"
            )
        fields = {k: v for k, v in document.items() if k not in ("format", "version")}
        plan = _decode(cls, fields, "plan")
        assert isinstance(plan, cls)
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON form."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the JSON form.

        Raises:
            ValueError: see `from_json`; names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


def _configs(module: nn.Module | None) -> Sequence[Any]:
    for name in ("embedding_bag_configs", "embedding_configs"):
        if callable(get := getattr(module, name, None)):
            return list(get())
    return []


# -------------------------------------------------------------------------------------------- JSON


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, as an object of the annotated type.

    Raises:
        ValueError: it is not one; says where.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (kind,) = [arg for arg in args if arg is not type(None)]
        return _decode(kind, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), "a list", value, where)
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        _expect(isinstance(value, dict), "an object", value, where)
        return {name: _decode(args[1], item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _expect(isinstance(value, dict), "an object", value, where)
        hints = typing.get_type_hints(kind)
        names = {field.name for field in dataclasses.fields(kind)}
        if names != value.keys():
            missing, extra = sorted(names - value.keys()), sorted(value.keys() - names)
            raise ValueError(f"damaged plan: {where} lacks {missing} or has unknown {extra}")
        try:
            return kind(
                **{name: _decode(hints[name], value[name], f"{where}.{name}") for name in names}
            )
        except PlacementError as error:
            raise ValueError(f"damaged plan: {where}: {error}") from error
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        values = [member.value for member in kind]
        _expect(value in values, f"one of {values}", value, where)
        return kind(value)
    if kind is float:
        _expect(
            isinstance(value, int | float) and not isinstance(value, bool), "a number", value, where
        )
        return float(value)
    exact = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    _expect(exact, f"a value of type {kind.__name__}", value, where)
    return value


def _expect(holds: bool, wanted: str, value: Any, where: str) -> None:
    if not holds:
        raise ValueError(f"damaged plan: {where} is {value!r:.60}, not {wanted}")


# -------------------------------------------------------------------------------------------- text


def _lines(plan: SparseCorePlan) -> Iterator[str]:
    cost, base = plan.cost, plan.all_rows
    yield f"{plan.slice}; global batch {plan.global_batch_size:,}, {len(plan.tables)} tables"
    yield (
        f"a device needs {size(cost.hbm_bytes)} of {size(plan.hbm_bytes)} HBM "
        f"({cost.hbm_bytes / plan.hbm_bytes:.1%})"
    )
    yield (
        f"{size(cost.exchanged_bytes)} of ids, rows, vectors and gradients leave a chip in a step, "
        f"{size(base.exchanged_bytes)} with every table row-sharded"
        + (
            f": {base.exchanged_bytes / cost.exchanged_bytes:.2f} times fewer"
            if cost.exchanged_bytes
            else ""
        )
    )
    yield (
        f"a step takes at least {cost.bound_ms:.3f} ms, bound by {cost.bound_by} (SparseCore "
        f"{cost.sparsecore_ms:.3f}, links {cost.links_ms:.3f}, TensorCore "
        f"{cost.tensorcore_ms:.3f}); row-sharded {base.bound_ms:.3f} ms, bound by {base.bound_by}"
    )
    if cost.unbounded_ms:
        yield (
            f"NOTE: not in it: pooled updates work on buffers of static size, about "
            f"{cost.unbounded_ms:.1f} ms of TensorCore time by the compiler's estimate"
        )
    yield ""
    yield from columns(
        ("table", "rows", "dim", "ids", "placement", "MB a step", "runner-up", "MB a step"),
        [
            (
                planned.table,
                f"{planned.num_embeddings:,}",
                str(planned.embedding_dim),
                f"{planned.ids_per_sample:g}",
                planned.chosen.label,
                f"{planned.chosen.exchanged_bytes / 1e6:,.1f}",
                planned.runner_up.label if planned.runner_up else "-",
                f"{planned.runner_up.exchanged_bytes / 1e6:,.1f}" if planned.runner_up else "",
            )
            for planned in plan.tables
        ],
        left=(0, 4, 6),
    )
    if plan.stacks:
        yield ""
        yield from columns(
            ("stack", "tables", "max ids", "unique"),
            [
                (
                    stack.name,
                    str(len(stack.tables)),
                    f"{stack.capacity.max_ids:,}",
                    f"{stack.capacity.max_unique_ids:,}",
                )
                for stack in plan.stacks
            ],
        )
    for group in plan.groups:
        yield ""
        yield (
            f"pooled: {group.num_shards} shards of {group.width} columns, {group.num_slots} "
            f"{'slot' if group.num_slots == 1 else 'slots'} on each device"
        )


def _explanation(planned: PlannedTable) -> Iterator[str]:
    yield (
        f"{planned.table} ({planned.num_embeddings:,}, {planned.embedding_dim}) in "
        f"{planned.module or 'the model'}: {planned.chosen.label}"
    )
    yield f"  {planned.reason}"
    yield (
        f"  lookups: {planned.ids_per_sample:g} ids a sample, {planned.rows_per_step:,.0f} rows a "
        f"step ({planned.lookups})"
    )
    marks = {planned.runner_up: "  <- runner-up", planned.chosen: "  <- chosen"}
    for option in sorted(planned.considered, key=lambda option: option.sum_ms):
        yield (
            f"  {option.label}: {size(option.exchanged_bytes)} a step, links "
            f"{option.links_ms:.4f} ms, SparseCore {option.sparsecore_ms:.4f} ms, HBM "
            f"{size(option.hbm_bytes)}{marks.get(option, '')}"
        )
    yield from (f"  not possible: {text}" for text in planned.excluded)


def size(num_bytes: float) -> str:
    """Decimal units.

    >>> size(3_396_000_000), size(512)
    ('3.40 GB', '512 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            digits = 2 if num_bytes < 10 * scale else 1
            return f"{num_bytes / scale:,.{digits}f} {unit}"
    return f"{num_bytes:,.0f} B"


def columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> Iterator[str]:
    """Lines of columns; those of `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for cells in (header, *rows):
        yield "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
