"""What tables cost on a slice: bytes of HBM, bytes over links, and times that follow from both.

Three ways to hold a table are known (`Way`). `options` prices each of them for one table, in sums
that add up over tables; `price` does so for a whole step, device by device, for what a search has
chosen. Times are lower bounds from published figures, never calibrated on a TPU: they tell which
resource binds. `CONSTANTS` lists every number that is not in `chips.CHIPS`, and where it is from.

Legend: B samples of a step on all devices, b of one device, V rows, D padded width, G devices,
P SparseCores of all devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sharding.lookups import Counts, Lookups
from torchrec_tpu.sharding.topology import Slice
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.layout import Combiner, Layout, Stack, Table, round_up
from torchrec_tpu.sparsecore.optimizers import RULES

Floats = npt.NDArray[np.float64]
Origin = Literal["published", "measured", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number of the model: what it is, and who says so."""

    value: float
    unit: str
    origin: Origin
    source: str


CONSTANTS: Final[Mapping[str, Constant]] = MappingProxyType(
    {
        "row_id_bytes": Constant(
            value=4,
            unit="B",
            origin="measured",
            source="an id that asks for a row: all-to-all operands in schedules of libtpu 0.0.52",
        ),
        "pooled_id_bytes": Constant(
            value=8,
            unit="B",
            origin="measured",
            source="an id of a pooled table in our programs: row and sample, a 32-bit word each; "
            "4 B more for a gain where bags are weighted or not summed",
        ),
        "line_ids": Constant(
            value=128,
            unit="ids",
            origin="measured",
            source="ids of pooled tables travel in lines of so many",
        ),
        "row_buffers": Constant(
            value=6,
            unit="buffers",
            origin="measured",
            source="SparseCore memory of a step: gather and receive buffers of max_unique_ids rows "
            "for each partition, two at lookup and four at update; 0.5 % off libtpu 0.0.52 for "
            "DLRM v2 on tpu7x:4x4x2",
        ),
        "call_buffers": Constant(
            value=2,
            unit="buffers",
            origin="measured",
            source="SparseCore memory of each local lookup of a pooled table: rows of all ids that "
            "a device has room for; exact for our program, libtpu 0.0.52",
        ),
        "update_arrays": Constant(
            value=1.41,
            unit="arrays",
            origin="measured",
            source="TensorCore temporaries of a pooled update: rows of all ids that a device has "
            "room for; our program with Adagrad and 32 columns, libtpu 0.0.52",
        ),
        "pooled_room_seconds": Constant(
            value=0.36e-9,
            unit="s",
            origin="measured",
            source="TensorCore time of the update of pooled tables for each id that a device has "
            "room for: 0.8 of the compiler's cycles (our program, libtpu 0.0.52, DLRM v2) at an "
            "assumed 2.2 GHz; not in any bound",
        ),
        "pooled_id_passes": Constant(
            value=4,
            unit="passes",
            origin="assumed",
            source="HBM passes over a pooled id at its owner: received, ordered, read by lookup "
            "and by update",
        ),
        "temporaries_per_sample_value": Constant(
            value=31.5,
            unit="B",
            origin="measured",
            source="TensorCore temporaries beside the dense gradients: bytes for each float of a "
            "sample's interaction input (all pooled vectors and the dense one), libtpu 0.0.52",
        ),
        "code_bytes": Constant(
            value=9.1e6,
            unit="B",
            origin="measured",
            source="program without SparseCore stacks, DLRM v2, libtpu 0.0.52",
        ),
        "stack_code_bytes": Constant(
            value=0.61e6,
            unit="B",
            origin="measured",
            source="SparseCore program of one stack, lookup and update, libtpu 0.0.52",
        ),
        "replica_seconds": Constant(
            value=7.3e-9,
            unit="s",
            origin="measured",
            source="TensorCore time of one replicated table and sample: 16 of the compiler's "
            "cycles (17 tables moved to the TensorCore, libtpu 0.0.52) at an assumed 2.2 GHz",
        ),
        "core_table_bytes": Constant(
            value=16 * 2**30,
            unit="B",
            origin="measured",
            source="the largest table that libtpu 0.0.52 lets one SparseCore address",
        ),
        "headroom": Constant(
            value=0.25,
            unit="",
            origin="assumed",
            source="what is added to observed maxima for batches to come",
        ),
    }
)


def constant(name: str) -> float:
    """The value of one of `CONSTANTS`."""
    return CONSTANTS[name].value


class Way(StrEnum):
    """How a step reaches the rows of a table."""

    ROWS = "rows"
    """Row r lives on core r mod P. Distinct rows travel to the samples, gradients back."""
    POOLED = "pooled"
    """Whole columns live on one device. Ids travel there, one pooled vector a bag returns."""
    REPLICATED = "replicated"
    """Every device has all rows. Gradients are summed over devices."""


# ------------------------------------------------------------------------------------------ tables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableLoad:
    """A table and what a step does to it.

    Attributes:
        module: FQN of the collection.
        table: name, shape, pooling, features.
        rule: key of `optimizers.RULES`; None for a frozen table.
        lookups: see there.
        is_weighted: whether its bags are weighted.
    """

    module: str
    table: Table
    rule: str | None
    lookups: Lookups
    is_weighted: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """(module, table)."""
        return self.module, self.table.name

    @property
    def num_row_slots(self) -> int:
        """Optimizer arrays as wide as the table."""
        return sum(slot.width == "row" for slot in RULES[self.rule].slots) if self.rule else 0

    @property
    def num_scalar_slots(self) -> int:
        """Optimizer arrays of one number a row."""
        return sum(slot.width == "scalar" for slot in RULES[self.rule].slots) if self.rule else 0

    @property
    def can_pool(self) -> bool:
        """Whether its ids become bags; those of a sequence stay single rows."""
        return not self.table.is_sequence

    @property
    def has_gains(self) -> bool:
        """Whether an id of a pooled table travels with a factor."""
        return self.is_weighted or self.table.combiner is not Combiner.SUM

    @property
    def sent_per_sample(self) -> float:
        """Ids of a sample that go to a pooled shard: repeats are merged where gains can tell."""
        lookups = self.lookups
        return lookups.merged_per_sample if self.has_gains else lookups.ids_per_sample

    def pooled_ids(self, batch_size: float) -> int:
        """Ids of one device that go to a shard, in whole lines."""
        return round_up(math.ceil(batch_size * self.sent_per_sample), int(constant("line_ids")))

    @property
    def logical_bytes(self) -> int:
        """Weights and optimizer state without padding."""
        width = self.table.embedding_dim * (1 + self.num_row_slots) + self.num_scalar_slots
        return 4 * self.table.num_embeddings * width

    def stored_bytes(self, rows: float, width: int) -> float:
        """Weights and state of so many rows of so many columns."""
        return 4 * rows * (width * (1 + self.num_row_slots) + self.num_scalar_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The rest of a training step.

    Attributes:
        global_batch_size: B.
        dense_parameters: numbers outside the tables, one copy on each device.
        dense_row_slots: optimizer arrays for each.
    """

    global_batch_size: int
    dense_parameters: int = 0
    dense_row_slots: int = 1

    def flops(self, target: Slice) -> float:
        """Of one device: every dense parameter is in one multiply-add, three times over."""
        return 6.0 * self.dense_parameters * self.global_batch_size / target.num_devices


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to hold one table: costs that add up over tables.

    Attributes:
        way: see `Way`.
        width: columns of a shard, for `Way.POOLED`; 0 otherwise.
        num_shards: blocks of columns or of rows, for `Way.POOLED`; 1 otherwise.
        num_blocks: of rows.
        largest_share: of the ids, in the fullest block of rows.
        room_ids: that a device with one shard has room for, of all devices, for `Way.POOLED`.
        id_bytes: ids that travel in a step, from all devices together, like what follows.
        forward_bytes: rows or pooled vectors to the samples.
        backward_bytes: gradients.
        reduced_bytes: of the replica's gradient on one device; its all-reduce.
        gathered_bytes: gradient rows that all devices send to all, where that is less.
        exchanged_bytes: all of these that leave a chip, over all chips.
        links_ms: what that adds to the exchanges if it is spread evenly.
        sparsecore_ms: HBM time of one device, mean.
        shard_ms: HBM time of the busiest shard on its device, on top of every device's share.
        tensorcore_ms: of one device.
        hbm_bytes: of one device, mean.
    """

    way: Way
    width: int = 0
    num_shards: int = 1
    num_blocks: int = 1
    largest_share: float = 1.0
    room_ids: int = 0
    id_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    reduced_bytes: float = 0.0
    gathered_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    links_ms: float = 0.0
    sparsecore_ms: float = 0.0
    shard_ms: float = 0.0
    tensorcore_ms: float = 0.0
    hbm_bytes: float = 0.0

    @property
    def sharding_type(self) -> str:
        """TorchRec's word for it; blocks of rows on some devices are its "table_row_wise"."""
        if self.way is not Way.POOLED:
            return {Way.ROWS: "row_wise", Way.REPLICATED: "data_parallel"}[self.way]
        if self.num_blocks > 1:
            return "table_row_wise"
        return "table_wise" if self.num_shards == 1 else "column_wise"

    @property
    def sum_ms(self) -> float:
        """All that a table adds to a step, of whatever resource."""
        return self.links_ms + self.sparsecore_ms + self.tensorcore_ms

    @property
    def label(self) -> str:
        """In words, e.g. "pooled, 4 x 32 columns"."""
        if self.way is not Way.POOLED:
            return {Way.ROWS: "rows over all cores", Way.REPLICATED: "replicated"}[self.way]
        if self.num_blocks > 1:
            return f"pooled, {self.num_blocks} blocks of rows"
        return f"pooled, {self.num_shards} x {self.width} columns"


def _priced(target: Slice, **costs: Any) -> Option:
    """An option with what its bytes take of the links."""
    option = Option(**costs)
    moved = option.id_bytes + option.forward_bytes + option.backward_bytes
    reduced = 2 * option.reduced_bytes * target.num_chips
    seconds = (
        target.uniform_seconds(moved)
        + target.all_reduce_seconds(option.reduced_bytes)
        + _all_gather_seconds(target, option.gathered_bytes)
    )
    return dataclasses.replace(
        option,
        exchanged_bytes=(moved + option.gathered_bytes + reduced) * target.share_between_chips,
        links_ms=1e3 * seconds,
    )


def _all_gather_seconds(target: Slice, num_bytes: float) -> float:
    """`num_bytes` arrive, in all; each chip takes its share through its links."""
    return (
        num_bytes
        * target.share_between_chips
        / target.num_chips
        / target.injection_bytes_per_second
    )


def rows_option(load: TableLoad, step: Step, target: Slice) -> Option:
    """`Way.ROWS`."""
    table, lookups = load.table, load.lookups
    batch = step.global_batch_size
    rows = lookups.rows(batch / target.num_cores) * target.num_cores  # (source core, row) pairs
    ids, samples = batch * lookups.ids_per_sample, batch * _bags(load)
    wide = 4 * table.dim
    touched = lookups.rows(batch)
    # Lookup: a row is read, then written to be sent, sent and received, and read once an id.
    hbm = wide * (4 * rows + ids + samples) + 24 * ids
    if load.rule is not None:  # gradients once an id, then as rows; rows and state in and out
        hbm += wide * (ids + 4 * rows + 2 * (1 + load.num_row_slots) * touched)
    padded = table.rows_per_core(target.num_cores) * target.chip.cores_per_device
    return _priced(
        target,
        way=Way.ROWS,
        id_bytes=constant("row_id_bytes") * rows,
        forward_bytes=wide * rows,
        backward_bytes=wide * rows if load.rule is not None else 0.0,
        sparsecore_ms=1e3 * hbm / target.num_devices / target.chip.hbm_bytes_per_second,
        hbm_bytes=load.stored_bytes(padded, table.dim)
        + constant("row_buffers")
        * target.chip.cores_per_device
        * target.num_cores
        * wide
        * _with_headroom(int(lookups.rows_KP.max())),
    )


def pooled_option(
    load: TableLoad, step: Step, target: Slice, width: int, num_blocks: int = 1
) -> Option:
    """`Way.POOLED` in shards of `width` columns, or of all columns and a block of rows.

    A bag sends its ids to every block of columns, and to that block of rows which has them. It gets
    a vector from every shard.
    """
    table, lookups = load.table, load.lookups
    batch, devices = step.global_batch_size, target.num_devices
    num_columns = -(-table.dim // width)
    num_shards = num_columns * num_blocks
    ids, bags = batch * load.sent_per_sample, batch * _bags(load)
    touched = lookups.rows(batch)
    wide = max(4 * width, target.chip.granule_bytes)
    id_bytes = constant("pooled_id_bytes") + 4 * load.has_gains
    speed = target.chip.hbm_bytes_per_second
    trains = load.rule is not None

    def owner(share: float) -> float:
        """HBM bytes of a device with a share of the rows: ids; a row read an id; vectors."""
        num_bytes = constant("pooled_id_passes") * id_bytes * ids * share
        num_bytes += wide * (ids * share + 2 * bags)  # written and sent
        if trains:  # gradients received, read once an id, summed per row; rows, state in and out
            rows = (2 + 2 * (1 + load.num_row_slots)) * touched * share
            num_bytes += wide * (2 * bags + ids * share + rows)
        return num_bytes

    largest = lookups.largest_share(num_blocks)
    # At the samples: ids written and sent, vectors received, gradients sent.
    sample = num_columns * 2 * id_bytes * ids + num_shards * (4 if trains else 2) * wide * bags
    return _priced(
        target,
        way=Way.POOLED,
        width=width,
        num_shards=num_shards,
        num_blocks=num_blocks,
        largest_share=largest,
        room_ids=devices * load.pooled_ids(batch / devices * largest * (1 + constant("headroom"))),
        id_bytes=num_columns * id_bytes * devices * load.pooled_ids(batch / devices),
        forward_bytes=num_shards * 4 * width * bags,
        backward_bytes=num_shards * 4 * width * bags if trains else 0.0,
        sparsecore_ms=1e3 * (num_shards * owner(1 / num_blocks) + sample) / devices / speed,
        shard_ms=1e3 * owner(largest) / speed,
        hbm_bytes=num_columns
        * load.stored_bytes(round_up(table.num_embeddings, 8), width)
        / devices,
    )


def replicated_option(load: TableLoad, step: Step, target: Slice) -> Option:
    """`Way.REPLICATED`: gradients as one dense buffer or as touched rows, whichever is less."""
    table, lookups = load.table, load.lookups
    batch, devices = step.global_batch_size, target.num_devices
    wide = 4 * table.dim
    dense = wide * table.num_embeddings
    touched = lookups.rows(batch / devices)
    gathered = devices * (devices - 1) * touched * (wide + 4)
    is_dense = 2 * dense * target.num_chips <= gathered
    trains = load.rule is not None
    ids, bags = batch / devices * lookups.ids_per_sample, batch / devices * _bags(load)
    hbm = wide * (ids + bags)
    if trains:
        rows = table.num_embeddings if is_dense else lookups.rows(batch)
        hbm += wide * (ids + (4 + 2 * (1 + load.num_row_slots)) * rows)
    return _priced(
        target,
        way=Way.REPLICATED,
        reduced_bytes=dense if trains and is_dense else 0.0,
        gathered_bytes=gathered if trains and not is_dense else 0.0,
        tensorcore_ms=1e3
        * (constant("replica_seconds") * bags + hbm / target.chip.hbm_bytes_per_second),
        hbm_bytes=load.stored_bytes(table.num_embeddings, table.dim) + (dense if trains else 0),
    )


def _bags(load: TableLoad) -> float:
    """Vectors of one sample: a bag each, or the ids of its sequences."""
    return (
        load.lookups.ids_per_sample if load.table.is_sequence else float(len(load.table.features))
    )


def _with_headroom(observed: int) -> int:
    return round_up(max(1, math.ceil(observed * (1 + constant("headroom")))), 8)


# ------------------------------------------------------------------------------------ a whole step


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledShard:
    """A block of columns or of rows of a table; narrower than its slot where the table ends."""

    module: str
    table: str
    row: int
    num_rows: int
    column: int
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledGroup:
    """Shards of one width and optimizer: one lookup and one update of the program.

    All devices run one program, so each has as many slots, and as much memory, as the fullest; a
    device with fewer shards has empty slots. The SparseCores of a device share a slot's columns.

    Attributes:
        module: FQN of the collection.
        width: of a slot.
        rule: of the update; None for frozen tables.
        has_gains: whether ids travel with a factor.
        devices: (G,) the shards of each.
    """

    module: str
    width: int
    rule: str | None
    has_gains: bool
    devices: tuple[tuple[PooledShard, ...], ...]

    @property
    def num_slots(self) -> int:
        """Of each device."""
        return max(map(len, self.devices), default=0)

    @property
    def num_shards(self) -> int:
        """Of all devices."""
        return sum(map(len, self.devices))


HBM_CAUSES: Final = (
    "row-sharded tables",
    "pooled tables",
    "pooled padding",
    "replicas",
    "id buffers",
    "SparseCore buffers",
    "pooled exchange",
    "dense",
    "temporaries",
    "code",
)
ICI_CAUSES: Final = ("ids", "rows", "row gradients", "pooled ids", "vectors", "vector gradients")
ICI_CAUSES_REDUCED: Final = ("replica gradients", "dense gradients")
TIME_CAUSES: Final = (
    "SparseCore: row-sharded",
    "SparseCore: pooled",
    "links: ids",
    "links: rows and vectors",
    "links: gradients",
    "links: all-reduce",
    "TensorCore",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """One device's share of a step, by cause.

    Attributes:
        hbm_bytes: memory.
        ici_bytes: sent plus received, over links to other chips.
        time_ms: lower bounds; SparseCore, links and TensorCore work at once.
    """

    hbm_bytes: Mapping[str, int]
    ici_bytes: Mapping[str, int]
    time_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A step on the slice.

    Attributes:
        exchanged_bytes: what leaves a chip because of tables, over all chips: ids, rows, vectors
            and their gradients, those of replicas included.
        reduced_bytes: the same because of the dense part, whose gradients are summed.
        sparsecore_ms: of the busiest device.
        links_ms: all exchanges, one after the other.
        tensorcore_ms: dense FLOPs at the bf16 peak, and replicas.
        bound_ms: the largest of the three.
        bound_by: its name.
        unbounded_ms: what the bound leaves out: TensorCore time, by the compiler's estimate, of
            pooled updates on buffers of static size.
        hbm_bytes: of the fullest device.
        devices: one by one.
    """

    exchanged_bytes: int
    reduced_bytes: int
    sparsecore_ms: float
    links_ms: float
    tensorcore_ms: float
    bound_ms: float
    bound_by: str
    unbounded_ms: float
    hbm_bytes: int
    devices: tuple[DeviceCost, ...]


def price(
    loads: Mapping[tuple[str, str], TableLoad],
    chosen: Mapping[tuple[str, str], Option],
    layouts: Mapping[str, Layout],
    capacities: Mapping[str, Mapping[str, Capacity]],
    groups: Sequence[PooledGroup],
    step: Step,
    target: Slice,
) -> StepCost:
    """What a step costs each device.

    Args:
        loads: (module, table) -> table.
        chosen: the option of each.
        layouts: module -> stacks of its `Way.ROWS` tables; modules without any are left out.
        capacities: module -> stack -> limits.
        groups: all shards of `Way.POOLED` tables.
        step: batch and dense part.
        target: the slice.
    """
    devices = target.num_devices
    hbm: dict[str, Floats] = {cause: np.zeros(devices) for cause in HBM_CAUSES}
    _row_sharded_memory(hbm, loads, layouts, capacities, target)
    rooms = [_pooled_memory(hbm, loads, chosen, group, step, target) for group in groups]

    # Bytes that each device sends to, and receives from, all devices alike.
    sent: dict[str, Floats] = {cause: np.zeros(devices) for cause in ICI_CAUSES}
    received = {cause: np.zeros(devices) for cause in ICI_CAUSES}
    core_rows, core_pooled = np.zeros(devices), np.zeros(devices)
    replica_bytes = gathered = tensorcore = 0.0
    for option in chosen.values():
        if option.way is Way.ROWS:
            for cause, num_bytes in (
                ("ids", option.id_bytes),
                ("rows", option.forward_bytes),
                ("row gradients", option.backward_bytes),
            ):
                sent[cause] += num_bytes / devices
                received[cause] += num_bytes / devices
            core_rows += option.sparsecore_ms
        elif option.way is Way.POOLED:
            evenly = option.sparsecore_ms - option.num_shards * option.shard_ms / devices
            core_pooled += evenly
        else:
            replica_bytes += option.reduced_bytes
            gathered += option.gathered_bytes
            tensorcore += option.tensorcore_ms
            hbm["replicas"] += option.hbm_bytes
    for group in groups:
        for device, shards in enumerate(group.devices):
            for shard in shards:
                option = chosen[shard.module, shard.table]
                each = 1 / option.num_shards
                received["pooled ids"][device] += option.id_bytes * each
                sent["vectors"][device] += option.forward_bytes * each
                received["vector gradients"][device] += option.backward_bytes * each
                core_pooled[device] += option.shard_ms
    sent["pooled ids"] += received["pooled ids"].sum() / devices
    received["vectors"] += sent["vectors"].sum() / devices
    sent["vector gradients"] += received["vector gradients"].sum() / devices

    def links(*causes: str) -> float:
        """What meets in one phase has the same links to pass: bounds add up."""
        return 1e3 * sum(target.exchange_seconds(sent[name], received[name]) for name in causes)

    dense_bytes = 4.0 * step.dense_parameters
    times = {
        "links: ids": links("ids", "pooled ids"),
        "links: rows and vectors": links("rows", "vectors"),
        "links: gradients": links("row gradients", "vector gradients")
        + 1e3 * _all_gather_seconds(target, gathered),
        "links: all-reduce": 1e3 * target.all_reduce_seconds(replica_bytes + dense_bytes),
        "TensorCore": 1e3 * step.flops(target) / target.chip.bf16_flops_per_second + tensorcore,
    }
    hbm["dense"] += (1 + step.dense_row_slots) * dense_bytes
    values = sum(load.table.dim * _bags(load) for load in loads.values())
    hbm["temporaries"] += (
        dense_bytes
        + constant("temporaries_per_sample_value") * values * step.global_batch_size / devices
    )
    num_stacks = sum(len(layout.stacks) for layout in layouts.values())
    hbm["code"] += constant("code_bytes") + constant("stack_code_bytes") * (
        num_stacks + len(groups)
    )

    share = target.share_between_chips
    both_ways = {cause: share * (sent[cause] + received[cause]) for cause in ICI_CAUSES}
    per_chip = target.num_devices / target.num_chips
    summed = {
        "replica gradients": share * (4 * replica_bytes / per_chip + 2 * gathered / devices),
        "dense gradients": share * 4 * dense_bytes / per_chip,
    }
    sparsecore = core_rows + core_pooled
    links_ms = sum(t for name, t in times.items() if name.startswith("links"))
    bounds = {
        "SparseCore": float(sparsecore.max()),
        "links": links_ms,
        "TensorCore": times["TensorCore"],
    }
    bound_by = max(bounds, key=lambda name: bounds[name])
    of_devices = tuple(
        DeviceCost(
            hbm_bytes={cause: round(of[device]) for cause, of in hbm.items()},
            ici_bytes={
                **{cause: round(of[device]) for cause, of in both_ways.items()},
                **{cause: round(num_bytes) for cause, num_bytes in summed.items()},
            },
            time_ms={
                "SparseCore: row-sharded": float(core_rows[device]),
                "SparseCore: pooled": float(core_pooled[device]),
                **times,
            },
        )
        for device in range(devices)
    )
    return StepCost(
        exchanged_bytes=round(sum(option.exchanged_bytes for option in chosen.values())),
        reduced_bytes=round(share * 2 * dense_bytes * target.num_chips),
        sparsecore_ms=bounds["SparseCore"],
        links_ms=links_ms,
        tensorcore_ms=bounds["TensorCore"],
        bound_ms=bounds[bound_by],
        bound_by=bound_by,
        unbounded_ms=1e3
        * constant("pooled_room_seconds")
        * sum(room for group, room in zip(groups, rooms, strict=True) if group.rule is not None),
        hbm_bytes=max(sum(device.hbm_bytes.values()) for device in of_devices),
        devices=of_devices,
    )


def _row_sharded_memory(
    hbm: dict[str, Floats],
    loads: Mapping[tuple[str, str], TableLoad],
    layouts: Mapping[str, Layout],
    capacities: Mapping[str, Mapping[str, Capacity]],
    target: Slice,
) -> None:
    cores = target.chip.cores_per_device
    for module, layout in layouts.items():
        for stack in layout.stacks:
            load = loads[module, stack.tables[0].table.name]
            limits = capacities[module][stack.name]
            hbm["row-sharded tables"] += load.stored_bytes(cores * stack.rows_per_core, stack.dim)
            pointers = 4 * cores * max(target.num_cores, 8)
            hbm["id buffers"] += 12 * cores * limits.slots_per_core(target.num_cores) + pointers
            buffers = constant("row_buffers") if load.rule is not None else 2
            hbm["SparseCore buffers"] += (
                buffers * cores * target.num_cores * limits.max_unique_ids * 4 * stack.dim
            )


def _pooled_memory(
    hbm: dict[str, Floats],
    loads: Mapping[tuple[str, str], TableLoad],
    chosen: Mapping[tuple[str, str], Option],
    group: PooledGroup,
    step: Step,
    target: Slice,
) -> float:
    """Adds what a group takes; returns the ids that each device has room for."""
    devices = target.num_devices
    batch = step.global_batch_size / devices
    stored, room, features = (np.zeros(devices) for _ in range(3))
    for device, shards in enumerate(group.devices):
        for shard in shards:
            load = loads[shard.module, shard.table]
            stored[device] += load.stored_bytes(shard.num_rows, group.width)
            room[device] += chosen[load.key].room_ids
            features[device] += len(load.table.features)
    hbm["pooled tables"] += stored
    hbm["pooled padding"] += stored.max() - stored
    hbm["id buffers"] += 4 * (2 + group.has_gains) * room.sum() / devices
    # Every device has as much room as the fullest. Each call of the SparseCore reads rows for all
    # ids: in lookup; in update gradients, old values of table and slots, and changes of both.
    ids, wide = float(room.max()), 4 * group.width
    num_arrays = 1 + load.num_row_slots
    calls = 1 + (1 + 2 * num_arrays if group.rule is not None else 0)
    vectors = batch * (devices * features.max() + features.sum()) * wide
    hbm["pooled exchange"] += constant("call_buffers") * calls * ids * wide + vectors
    if group.rule is not None:  # measured for Adagrad, whose table and slot are two arrays
        hbm["pooled exchange"] += constant("update_arrays") * ids * wide * num_arrays / 2
    return ids


def stack_capacity(stack: Stack, lookups: Mapping[str, Lookups], *, num_cores: int) -> Capacity:
    """Limits of a stack: what its tables need of one partition at once, with headroom.

    Args:
        stack: tables and their rotations.
        lookups: table -> lookups, observed on as many cores.
        num_cores: P.
    """
    totals: dict[str, Counts] = defaultdict(lambda: np.zeros((1, num_cores), np.int64))
    slices = min(len(lookups[stacked.table.name].ids_KP) for stacked in stack.tables)
    for stacked in stack.tables:
        of = lookups[stacked.table.name]
        for name, counts in (("ids", of.ids_KP), ("rows", of.rows_KP)):
            totals[name] = totals[name] + np.roll(counts[:slices], stacked.rotation, axis=1)
    max_ids = _with_headroom(int(totals["ids"].max()))
    slots = (totals["ids"] + 7) // 8 * 8
    return Capacity(
        max_ids=max_ids,
        max_unique_ids=min(
            _with_headroom(int(totals["rows"].max())), max(1, stack.rows_per_core), max_ids
        ),
        buffer_ids=min(_with_headroom(int(slots.sum(axis=1).max())), num_cores * max_ids),
    )


def fits_tiles(capacity: Capacity, dim: int, target: Slice) -> bool:
    """Whether limits are well below those that libtpu 0.0.52 refuses; see `aot.probe`."""
    chip, unique = target.chip, capacity.max_unique_ids
    return (
        2 * 36 * unique <= chip.tile_memory_bytes
        and 2 * 4 * (dim + 1) * unique <= chip.tiles_per_core * chip.tile_memory_bytes
    )
