"""The search for a plan: tables, a step and a slice in, a `SparseCorePlan` out. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from torchrec_tpu.sharding import cost
from torchrec_tpu.sharding.cost import (
    Option,
    PooledGroup,
    PooledShard,
    Step,
    StepCost,
    TableLoad,
    Way,
    constant,
)
from torchrec_tpu.sharding.placements import PlacementKind, Shard, TablePlacement
from torchrec_tpu.sharding.plan import AllRows, PlannedStack, PlannedTable, SparseCorePlan, size
from torchrec_tpu.sharding.topology import Slice, TpuTopology, as_slice
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import TorchrecTpuError
from torchrec_tpu.sparsecore.layout import Layout, round_up
from torchrec_tpu.sparsecore.stacking import make_layout

NUM_WIDTHS: Final = 5
"""Widths of shards that are tried, each twice the one before."""

ROW_BLOCKS: Final = (2, 4, 8, 16)
"""Blocks of rows that are tried for tables with many ids a bag, on as many devices in a row."""

STACK_LIMITS_BYTES: Final = (12 << 20, 6 << 20, 2 << 20)
"""Activations of a stack on one core that are tried, from the fewest stacks to the most."""

REPLICA_LIMIT_BYTES: Final = 64 << 20
"""Weights and state of the largest table that may be replicated."""

HBM_SHARE: Final = 0.97
"""Of a device's HBM that a plan may fill; the runtime keeps some."""

_NEAR: Final = 1.08
"""Assignments so near the best are as good, and the one that moves least is taken."""

_LITTLE: Final = 0.005
"""Weight of what does not bind."""

_TRIED: Final = 24
"""Assignments that are priced exactly, the most promising ones."""

ASSUMPTIONS: Final = (
    "times are lower bounds from published peak figures (HBM, links, bf16 FLOP/s), never "
    "calibrated on a TPU; SparseCore, links and TensorCore work at once",
    "links: every straight cut through the slice and every chip's own links bound an exchange; "
    "exchanges follow one another; inside a chip they are free",
    "SparseCore: HBM bytes only; none of its instruction or transfer rates is known",
    "ids are the same in number on all devices, and rows on all cores",
)

Key = tuple[str, str]


class PlanError(TorchrecTpuError, PlannerError):
    """Tables that cannot be placed on a slice; says which, what they need and what there is."""

    def __init__(
        self, message: str, error_type: PlannerErrorType = PlannerErrorType.INSUFFICIENT_STORAGE
    ) -> None:
        PlannerError.__init__(self, message, error_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assignment:
    """An option for every table, and what follows."""

    chosen: Mapping[Key, Option]
    layouts: Mapping[str, Layout]
    capacities: Mapping[str, Mapping[str, Capacity]]
    groups: tuple[PooledGroup, ...]
    cost: StepCost


def make_plan(
    loads: Sequence[TableLoad],
    step: Step,
    target: Slice | TpuTopology | str,
    *,
    ways: Iterable[Way | str] = tuple(Way),
    fixed: Mapping[Key, Iterable[Way | str]] | None = None,
    sharding_types: Mapping[Key, Collection[str]] | None = None,
    max_widths: int = 1,
) -> SparseCorePlan:
    """The placement of tables on a slice with the lowest bound of a step that was found.

    Args:
        loads: tables, in the model's order.
        step: batch and dense part.
        target: the slice.
        ways: that may be used. `[Way.ROWS]` is the baseline.
        fixed: (module, table) -> ways of that table alone.
        sharding_types: (module, table) -> TorchRec's sharding types that may be used for it.
        max_widths: different widths of pooled shards, 1 or 2. Each is a lookup and an update of its
            own in the program.

    Raises:
        PlanError: the tables do not fit, in any way.

    >>> from torchrec_tpu.sharding.cost import Lookups
    >>> from torchrec_tpu.sparsecore.layout import Table
    >>> table = Table(name="t", num_embeddings=10_000, embedding_dim=64, combiner="sum",
    ...               features=("f",))
    >>> lookups = Lookups.power_law(10_000, [20], samples_per_core=128, num_cores=16, exponent=0.5)
    >>> load = TableLoad(module="ebc", table=table, rule="adagrad", lookups=lookups)
    >>> make_plan([load], Step(global_batch_size=2048), "tpu7x:2x2x1")["t"].chosen.way
    <Way.POOLED: 'pooled'>
    """
    target = as_slice(target)
    if not loads:
        raise PlanError("no tables to plan", PlannerErrorType.OTHER)
    if step.global_batch_size % target.num_devices:
        raise PlanError(
            f"a global batch of {step.global_batch_size} does not divide by the "
            f"{target.num_devices} devices of {target.name}",
            PlannerErrorType.OTHER,
        )
    allowed = frozenset(map(Way, ways))
    search = _Search(loads, step, target, allowed, fixed or {}, sharding_types or {}, max_widths)
    best = search.best()
    baseline = best.cost if allowed == {Way.ROWS} and not fixed else search.all_rows().cost
    return SparseCorePlan(
        topology=target.name,
        slice=str(target),
        chip=target.chip.name,
        num_chips=target.num_chips,
        num_devices=target.num_devices,
        cores_per_device=target.chip.cores_per_device,
        hbm_bytes=target.hbm_bytes,
        global_batch_size=step.global_batch_size,
        dense_parameters=step.dense_parameters,
        tables=tuple(search.planned(load, best) for load in loads),
        stacks=tuple(
            PlannedStack(
                module=module,
                name=stack.name,
                tables=tuple(stacked.table.name for stacked in stack.tables),
                capacity=best.capacities[module][stack.name],
            )
            for module, layout in best.layouts.items()
            for stack in layout.stacks
        ),
        groups=best.groups,
        cost=best.cost,
        all_rows=AllRows(
            exchanged_bytes=baseline.exchanged_bytes,
            links_ms=baseline.links_ms,
            bound_ms=baseline.bound_ms,
            bound_by=baseline.bound_by,
            hbm_bytes=baseline.hbm_bytes,
        ),
        assumptions=ASSUMPTIONS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Shards that go to devices in a row, each with its time and memory."""

    time: float
    stored: float
    shards: tuple[PooledShard, ...]


class _Search:
    """Options of every table, and assignments made of them."""

    def __init__(
        self,
        loads: Sequence[TableLoad],
        step: Step,
        target: Slice,
        ways: frozenset[Way],
        fixed: Mapping[Key, Iterable[Way | str]],
        sharding_types: Mapping[Key, Collection[str]],
        max_widths: int,
    ) -> None:
        self.loads = {load.key: load for load in loads}
        self.step, self.target, self.max_widths = step, target, max_widths
        # The cores of a device share the columns of a slot, at least 8 each.
        self.widths = tuple(8 * target.chip.cores_per_device * 2**n for n in range(NUM_WIDTHS))
        if len(self.loads) < len(loads):
            raise PlanError("two tables have one name in one module", PlannerErrorType.OTHER)
        self.options: dict[Key, tuple[Option, ...]] = {}
        self.excluded: dict[Key, tuple[str, ...]] = {}
        for load in loads:
            of_table = frozenset(map(Way, fixed[load.key])) if load.key in fixed else ways
            options, excluded = self._options(load, of_table)
            if load.key in sharding_types:
                wanted = sharding_types[load.key]
                options = tuple(o for o in options if o.sharding_type in wanted)
                excluded = (*excluded, f"sharding types other than {sorted(wanted)}: constraints")
            if not options:
                raise PlanError(
                    f"table {load.table.name!r}: no way is left. {'; '.join(excluded)}",
                    PlannerErrorType.STRICT_CONSTRAINTS,
                )
            self.options[load.key], self.excluded[load.key] = options, excluded
        self._layouts: dict[tuple[str, frozenset[str]], tuple[Layout, dict[str, Capacity]]] = {}

    def _options(
        self, load: TableLoad, ways: frozenset[Way]
    ) -> tuple[tuple[Option, ...], tuple[str, ...]]:
        options, excluded = [], []
        table, step, target = load.table, self.step, self.target
        for way in Way:
            if way not in ways:
                excluded.append(f"{way}: not asked for")
            elif way is Way.ROWS:
                options.append(cost.rows_option(load, step, target))
            elif way is Way.REPLICATED:
                replica = cost.replicated_option(load, step, target)
                moved = cost.rows_option(load, step, target).exchanged_bytes
                if load.logical_bytes > REPLICA_LIMIT_BYTES:
                    excluded.append(
                        f"{way}: {size(load.logical_bytes)} on every device, at most "
                        f"{size(REPLICA_LIMIT_BYTES)}"
                    )
                elif replica.exchanged_bytes > moved and Way.ROWS in ways:
                    excluded.append(
                        f"{way}: gradients of {size(replica.exchanged_bytes)} leave a chip in a "
                        f"step, more than the {size(moved)} of rows"
                    )
                else:
                    options.append(replica)
            elif not load.can_pool:
                excluded.append(f"{way}: ids of a sequence are looked up one by one")
            else:
                for width in self.widths:
                    num_bytes = 4 * round_up(table.num_embeddings, 8) * width
                    if num_bytes > constant("core_table_bytes"):
                        excluded.append(
                            f"{way} in {width} columns: {size(num_bytes)} on one device, whose "
                            f"lookup addresses {size(constant('core_table_bytes'))}"
                        )
                    elif width < table.embedding_dim and load.num_scalar_slots:
                        excluded.append(
                            f"{way} in {width} columns: {load.rule} takes a mean over the row, "
                            "which must be whole"
                        )
                    elif width == self.widths[0] or width < 2 * table.dim:
                        options.append(cost.pooled_option(load, step, target, width))
                whole = next((width for width in self.widths if width >= table.dim), 0)
                for blocks in ROW_BLOCKS if whole else ():
                    num_bytes = 4 * table.num_embeddings * whole // blocks
                    if (
                        blocks <= min(target.num_devices, table.num_embeddings)
                        and num_bytes <= constant("core_table_bytes")
                        and load.lookups.ids_per_sample >= 2 * blocks
                    ):
                        options.append(cost.pooled_option(load, step, target, whole, blocks))
        return tuple(options), tuple(excluded)

    # ----------------------------------------------------------------------------- assignments

    def best(self) -> _Assignment:
        """The cheapest assignment that fits.

        Raises:
            PlanError: none does.
        """
        usable = HBM_SHARE * self.target.hbm_bytes
        fitting: list[_Assignment] = []
        for chosen in self._candidates():
            assignment = self._assign(chosen)
            if assignment.cost.hbm_bytes <= usable:
                fitting.append(assignment)
        if not fitting:
            raise self._refusal(usable)
        lowest = min(_objective(assignment.cost) for assignment in fitting)
        near = [found for found in fitting if _objective(found.cost) <= _NEAR * lowest]
        return min(near, key=lambda found: found.cost.exchanged_bytes)

    def all_rows(self) -> _Assignment:
        """Every table row-sharded, whether it fits or not."""
        return self._assign(
            {
                key: cost.rows_option(load, self.step, self.target)
                for key, load in self.loads.items()
            }
        )

    def _candidates(self) -> Iterator[dict[Key, Option]]:
        """The most promising assignments, and the one with the least memory.

        Costs of options add up but for the fullest device, so that the best choice for weighted
        sums is a choice for each table alone. Weights, widths and the largest shard are varied.
        """
        keys = list(self.options)
        widest = max(map(len, self.options.values()))
        fields = (
            "links_ms",
            "sparsecore_ms",
            "tensorcore_ms",
            "shard_ms",
            "hbm_bytes",
            "width",
            "room_ids",
        )
        table = np.full((len(fields), len(keys), widest), np.inf)
        for row, key in enumerate(keys):
            for column, option in enumerate(self.options[key]):
                table[:, row, column] = [getattr(option, field) for field in fields]
        links, sparsecore, tensorcore, shard, hbm, width, room = table
        room *= 1e3 * constant("pooled_room_seconds")
        every = np.arange(len(keys))
        rows_bound = float(links.min(axis=1).sum() + sparsecore.min(axis=1).sum())
        scored: dict[bytes, tuple[float, npt.NDArray[np.intp]]] = {}

        def consider(weight: npt.NDArray[np.float64]) -> None:
            pick = weight.argmin(axis=1)
            if not np.isfinite(weight[every, pick]).all():
                return
            arrays = links, sparsecore, tensorcore, shard, hbm, room
            of = [array[every, pick] for array in arrays]
            busiest = of[1].sum() + of[3].max()
            score = max(of[0].sum(), busiest, of[2].sum()) + _LITTLE * float(
                of[0].sum() + of[1].sum() + of[2].sum() + of[5].max()
            )
            if of[4].sum() > self.target.hbm_bytes:
                score += 1e6 * of[4].sum() / self.target.hbm_bytes
            scored[pick.tobytes()] = float(score), pick

        widths = [
            {0.0, *map(float, some)}
            for number in range(1, self.max_widths + 1)
            for some in itertools.combinations(self.widths, number)
        ]
        for some in widths:
            usable = np.isin(width, list(some))
            for cap in (np.inf, *(rows_bound * 0.5**n for n in range(7))):
                possible = usable & (shard <= cap)
                for share in (0.9, 0.7, 0.5, 0.3):
                    weight = share * links + (1 - share) * sparsecore + 0.2 * tensorcore
                    weight += _LITTLE * room
                    consider(np.where(possible, weight, np.inf))
        best = sorted(scored.values(), key=lambda found: found[0])[:_TRIED]
        for pick in (*(pick for _, pick in best), hbm.argmin(axis=1)):
            yield {key: self.options[key][column] for key, column in zip(keys, pick, strict=True)}

    def _assign(self, chosen: Mapping[Key, Option]) -> _Assignment:
        of_module: dict[str, list[Key]] = defaultdict(list)
        for key, option in chosen.items():
            if option.way is Way.ROWS:
                of_module[key[0]].append(key)
        laid_out = {module: self._layout(module, keys) for module, keys in of_module.items()}
        layouts = {module: layout for module, (layout, _) in laid_out.items()}
        capacities = {module: capacity for module, (_, capacity) in laid_out.items()}
        groups = self._deal(chosen)
        return _Assignment(
            chosen=chosen,
            layouts=layouts,
            capacities=capacities,
            groups=groups,
            cost=cost.price(
                self.loads, chosen, layouts, capacities, groups, self.step, self.target
            ),
        )

    def _layout(self, module: str, keys: Sequence[Key]) -> tuple[Layout, dict[str, Capacity]]:
        """Row-sharded tables in as few stacks as a SparseCore can hold."""
        memo = module, frozenset(name for _, name in keys)
        if memo in self._layouts:
            return self._layouts[memo]
        target, step = self.target, self.step
        lookups = {name: self.loads[module, name].lookups for _, name in keys}
        for limit in STACK_LIMITS_BYTES:
            layout = make_layout(
                [self.loads[key].table for key in keys],
                num_devices=target.num_devices,
                cores_per_device=target.chip.cores_per_device,
                num_local_devices=1,
                batch_size=step.global_batch_size // target.num_devices,
                activation_limit_bytes=limit,
            )
            capacities = {
                stack.name: cost.stack_capacity(stack, lookups, num_cores=target.num_cores)
                for stack in layout.stacks
            }
            if all(
                cost.fits_tiles(capacities[stack.name], stack.dim, target)
                for stack in layout.stacks
            ):
                break
        self._layouts[memo] = layout, capacities
        return layout, capacities

    def _deal(self, chosen: Mapping[Key, Option]) -> tuple[PooledGroup, ...]:
        """Shards of each width and optimizer, the same number of slots on every device."""
        devices = self.target.num_devices
        units: dict[tuple[str, int, str, bool], list[_Unit]] = defaultdict(list)
        for key, option in chosen.items():
            if option.way is not Way.POOLED:
                continue
            load = self.loads[key]
            name = load.module, option.width, load.table.group, load.has_gains
            block = -(-load.table.num_embeddings // option.num_blocks)
            for start in range(0, load.table.embedding_dim, option.width):
                shards = tuple(
                    PooledShard(
                        module=load.module,
                        table=load.table.name,
                        row=row,
                        num_rows=min(block, load.table.num_embeddings - row),
                        column=start,
                        num_columns=min(option.width, load.table.embedding_dim - start),
                    )
                    for row in range(0, load.table.num_embeddings, block)
                )
                stored = load.stored_bytes(block, option.width)
                units[name].append(_Unit(time=option.shard_ms, stored=stored, shards=shards))
        order = np.array(self.target.spread(devices))
        busy, full = np.zeros(devices), np.zeros(devices)
        groups = []
        for named in sorted(units):
            (module, width, _, has_gains), group = named, units[named]
            count = sum(len(unit.shards) for unit in group)
            slots = -(-count // devices)
            taken = np.zeros(devices, int)
            mine: list[list[PooledShard]] = [[] for _ in range(devices)]
            mean_busy = sum(unit.time * len(unit.shards) for unit in group) / devices
            mean_full = sum(unit.stored * len(unit.shards) for unit in group) / devices
            for unit in sorted(
                group,
                key=lambda u: (-len(u.shards), -u.time / mean_busy - u.stored / mean_full),
            ):
                filled = busy / mean_busy + full / mean_full + np.where(taken < slots, 0, np.inf)
                length = len(unit.shards)
                if length > 1:  # on devices in a row: the one that is filled most counts
                    windows = np.lib.stride_tricks.sliding_window_view(filled, length)
                    filled = np.append(windows.max(axis=1), [np.inf] * (length - 1))
                first = int(order[filled[order].argmin()])
                for device, shard in enumerate(unit.shards, start=first):
                    mine[device].append(shard)
                    taken[device] += 1
                    busy[device] += unit.time
                    full[device] += unit.stored
            groups.append(
                PooledGroup(
                    module=module,
                    width=width,
                    rule=self.loads[module, group[0].shards[0].table].rule,
                    has_gains=has_gains,
                    devices=tuple(map(tuple, mine)),
                )
            )
        return tuple(groups)

    # ----------------------------------------------------------------------------- words

    def planned(self, load: TableLoad, assignment: _Assignment) -> PlannedTable:
        """A table's part of the plan."""
        key, table = load.key, load.table
        chosen = assignment.chosen[key]
        others = [option for option in self.options[key] if option != chosen]
        # Shards of another width of the same way are no other idea, unless there is none.
        ideas = [option for option in others if option.way is not chosen.way] or others
        runner_up = min(ideas, key=lambda option: option.sum_ms, default=None)
        return PlannedTable(
            module=load.module,
            table=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            features=table.features,
            combiner=table.combiner,
            is_weighted=load.is_weighted,
            rule=load.rule,
            ids_per_sample=load.lookups.ids_per_sample,
            rows_per_step=load.lookups.rows(self.step.global_batch_size),
            lookups=load.lookups.origin,
            placement=self._placement(load, chosen, assignment.groups),
            chosen=chosen,
            reason=_reason(chosen, runner_up),
            runner_up=runner_up,
            considered=self.options[key],
            excluded=self.excluded[key],
        )

    def _placement(
        self, load: TableLoad, option: Option, groups: Sequence[PooledGroup]
    ) -> TablePlacement:
        table = load.table
        shape = table.name, table.num_embeddings, table.embedding_dim
        if option.way is Way.ROWS:
            return TablePlacement.row_wise(*shape, world_size=self.target.num_devices)
        if option.way is Way.REPLICATED:
            return TablePlacement.data_parallel(*shape)
        found = [
            Shard(
                rank=device,
                row=shard.row,
                num_rows=shard.num_rows,
                column=shard.column,
                num_columns=shard.num_columns,
            )
            for group in groups
            for device, mine in enumerate(group.devices)
            for shard in mine
            if (shard.module, shard.table) == load.key
        ]
        shards = tuple(sorted(found, key=lambda shard: (shard.row, shard.column)))
        if len(shards) == 1:
            return TablePlacement.table_wise(*shape, rank=shards[0].rank)
        if option.num_blocks > 1:
            return TablePlacement(
                table=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                kind=PlacementKind.ROW_WISE,
                shards=shards,
            )
        return TablePlacement.column_wise(
            *shape,
            ranks=[shard.rank for shard in shards],
            widths=[shard.num_columns for shard in shards],
        )

    def _refusal(self, usable: float) -> PlanError:
        """Why the tables do not fit: the largest, its bytes, and what there is."""
        target = self.target
        least = {
            key: min(option.hbm_bytes for option in options)
            for key, options in self.options.items()
        }
        largest = sorted(least, key=lambda key: -least[key])
        total = sum(least.values())
        named = ", ".join(
            f"{key[1]!r} {size(self.loads[key].logical_bytes)}" for key in largest[:4]
        ) + (f" and {len(largest) - 4} more" if len(largest) > 4 else "")
        head = largest[0]
        alone = (
            f"table {head[1]!r} alone needs {size(least[head])} on each of {target.num_devices} "
            f"devices. "
            if least[head] > usable
            else ""
        )
        return PlanError(
            f"the tables do not fit {target.name}: a device has {size(target.hbm_bytes)} of HBM, "
            f"{size(usable)} usable, and needs {size(total)} for tables and optimizer state alone. "
            f"{alone}With optimizer state: {named}; all devices have "
            f"{size(target.num_devices * target.hbm_bytes)}. Use more devices, fewer rows, "
            "narrower rows, or an optimizer with less state"
        )


def _objective(found: StepCost) -> float:
    """The bound, and a little of everything, so that what does not bind is not wasted."""
    everything = found.sparsecore_ms + found.links_ms + found.tensorcore_ms + found.unbounded_ms
    return found.bound_ms + _LITTLE * everything


def _reason(chosen: Option, other: Option | None) -> str:
    if other is None:
        return "the only way that is possible"
    mine, theirs = chosen.exchanged_bytes, other.exchanged_bytes
    if mine < theirs:
        return f"{size(mine)} leave a chip in a step, {size(theirs)} if {other.label}" + (
            f": {theirs / mine:.1f} times fewer" if mine and theirs >= 1.1 * mine else ""
        )
    saved = [
        f"{what} {getattr(chosen, name):.4f} ms instead of {getattr(other, name):.4f}"
        for what, name in (("SparseCore", "sparsecore_ms"), ("TensorCore", "tensorcore_ms"))
        if getattr(chosen, name) < getattr(other, name)
    ]
    if chosen.shard_ms < other.shard_ms:
        saved.append(f"no device has a shard of {other.shard_ms:.4f} ms")
    if chosen.hbm_bytes < other.hbm_bytes:
        saved.append(f"HBM {size(chosen.hbm_bytes)} instead of {size(other.hbm_bytes)}")
    return f"{size(mine)} leave a chip in a step, {size(theirs)} if {other.label}, but " + (
        ", ".join(saved) or "the whole step is cheaper so"
    )
