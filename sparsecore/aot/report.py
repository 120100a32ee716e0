"""What a compiled step takes of a slice: memory, SparseCore and TensorCore work, exchanges.

Bytes and counts are the compiler's. Times are not: libtpu has no cost model of the SparseCore, its
`optimal_seconds` follows the size of the tables, and its peak memory leaves the SparseCore's stacks
out. What is said about time is a roofline of published figures, marked as never calibrated.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from torchrec_tpu.sparsecore.aot import hlo
from torchrec_tpu.sparsecore.aot.compile import Compiled
from torchrec_tpu.sparsecore.aot.hlo import Collective, Ragged, SparseCoreCall
from torchrec_tpu.sparsecore.aot.lowering import RAGGED_ALL_TO_ALL
from torchrec_tpu.sparsecore.aot.program import PooledFacts, Program, StackFacts
from torchrec_tpu.sparsecore.aot.topology import Topology
from torchrec_tpu.sparsecore.errors import CompileError

FORMAT: Final = 2
"""Version of the JSON form."""

ASSUMPTIONS: Final = (
    "published peak figures of the chip, nothing measured: HBM, interconnect, bf16 FLOP/s",
    "lookup: each fetched row is read, written to be sent, sent and received (4 passes of HBM), "
    "then read once an id; activations are written once",
    "update: gradients are read once an id, summed per row, sent, received and merged (4 passes); "
    "table and row-wide slots are read and written once a row",
    "pooled tables: ids travel once and vectors both ways, all that there is room for; a device's "
    "ids are read and their rows copied twice on the way to a sample, in lookup, in the sum of "
    "gradients, and in reading and writing table and slots (3 passes each)",
    "rows travel both ways between all chips alike; a slice has no wrap-around links",
    "exchange and all-reduce overlap with everything; none of the SparseCore's own instruction or "
    "transfer rates is known",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one device looks up of one stack in a step.

    Attributes:
        rows: distinct rows for each (core, partition), summed: what travels.
        ids: after merging those of one sample.
    """

    rows: float
    ids: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hbm:
    """Memory of one device, in bytes.

    Attributes:
        arguments: by kind ("table", "slot", "dense", "buffer", ...), with the padding of layouts.
        alias: arguments that results reuse.
        new_outputs: results that reuse nothing.
        sparsecore_stacks: buffers of the SparseCore calls: rows on their way.
        tensorcore_temporaries: everything else that lives during a step.
        code: the program.
        total: arguments, new outputs, stacks, temporaries and code.
        capacity: of the device.
    """

    arguments: Mapping[str, int]
    alias: int
    new_outputs: int
    sparsecore_stacks: int
    tensorcore_temporaries: int
    code: int
    total: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCore:
    """SparseCore work of one device's step.

    Attributes:
        calls: programs that look up or update tables, in order.
        offloaded: calls for something else, e.g. a collective.
        num_sub_kernels: of the embedding calls.
        sub_kernels: the same by kind.
        program_bytes: code of the embedding calls.
        stack_bytes: HBM of their stacks, high watermarks summed.
        gather_bytes: capacity of the rows that one core reads for others in a step.
        exchange_row_bytes: capacity of the rows that one core receives in a step, both ways.
        exchange_id_bytes: capacity of the ids that one core receives in a step.
    """

    calls: tuple[SparseCoreCall, ...]
    offloaded: tuple[SparseCoreCall, ...]
    num_sub_kernels: int
    sub_kernels: Mapping[str, int]
    program_bytes: int
    stack_bytes: int
    gather_bytes: int
    exchange_row_bytes: int
    exchange_id_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCore:
    """TensorCore work of one device's step.

    Attributes:
        flops: of matrix products and the like, by XLA's count.
        cycles: the compiler's estimate; collectives count none.
        cycles_under_sparsecore: those while SparseCores look up or update.
        share_under_sparsecore: the same as a share, 0..1.
        dots: matrix products.
        dots_under_sparsecore: those while SparseCores look up or update.
    """

    flops: float
    cycles: int
    cycles_under_sparsecore: int
    share_under_sparsecore: float
    dots: int
    dots_under_sparsecore: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Times below which a step cannot be, by published figures alone. Not a prediction.

    Attributes:
        is_calibrated: whether a measurement on a TPU is in it. Always False today.
        traffic: "batches" when rows and ids were counted in batches, "capacity" when they are the
            compiled maxima.
        rows: of all stacks, see `Traffic`.
        ids: of all stacks.
        sparsecore_hbm_bytes: of one device.
        exchange_bytes: what a chip sends to others in a step: rows, both passes, and ids and
            vectors of pooled tables.
        sparsecore_hbm_ms: HBM time of lookup and update.
        exchange_injection_ms: exchange, bound by a chip's links.
        exchange_bisection_ms: exchange, bound by the links across the middle of the slice.
        all_reduce_ms: dense gradients, bound by a chip's links.
        dense_flops_ms: FLOPs at the bf16 peak.
        bound_ms: the largest of these.
        bound_by: its name.
        assumptions: all that the figures rest on.
    """

    is_calibrated: bool
    traffic: str
    rows: float
    ids: float
    sparsecore_hbm_bytes: float
    exchange_bytes: float
    sparsecore_hbm_ms: float
    exchange_injection_ms: float
    exchange_bisection_ms: float
    all_reduce_ms: float
    dense_flops_ms: float
    bound_ms: float
    bound_by: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What tables can exchange in a step, by the shapes in the compiled text. Bytes of one device.

    Attributes:
        row_ids: ids of row-sharded tables, with those of lookup and update.
        rows: their rows, and gradients of rows.
        pooled_ids: ids of pooled tables.
        pooled_vectors: their pooled vectors, and gradients of these.
        total: all of it.
        pooled: the exchanges of pooled tables, in order.
    """

    row_ids: int
    rows: int
    pooled_ids: int
    pooled_vectors: int
    total: int
    pooled: tuple[Ragged, ...]

    @classmethod
    def of(cls, schedule: hlo.Schedule, *, cores_per_device: int) -> Self:
        """From a compiled program."""
        row_ids, rows = (
            cores_per_device * sum(getattr(call, name) for call in schedule.embedding_calls)
            for name in ("exchange_id_bytes", "exchange_row_bytes")
        )
        ids, vectors = (
            sum(r.capacity_bytes for r in schedule.ragged if (r.dtype == "s32") == is_id)
            for is_id in (True, False)
        )
        return cls(
            row_ids=row_ids,
            rows=rows,
            pooled_ids=ids,
            pooled_vectors=vectors,
            total=row_ids + rows + ids + vectors,
            pooled=schedule.ragged,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A step on a slice. Print it, or take its JSON; keys are the attributes' names.

    Attributes:
        format: version of this form.
        topology: name of the slice.
        chip: its generation.
        num_chips: of the slice.
        num_devices: of the slice; all figures below are of one device unless they say otherwise.
        num_hosts: of the slice.
        cores_per_device: SparseCores.
        mode: "exact" or "pipelined".
        global_batch_size: samples of a step on all devices; None when it was not told.
        program: hash of the program, `Program.key`.
        fits: whether the step compiles for the slice, in the memory that it has.
        reasons: why it does not fit; empty when it does.
        findings: what is not as it should be in a step that fits, e.g. a table that is copied.
        stacks: tables and limits.
        pooled: stacks of tables that stay with owners.
        hbm: memory; None when the compiler refused.
        sparsecore: None when the compiler refused, like what follows.
        tensorcore: see there.
        exchange: what tables exchange.
        collectives: of the TensorCore, in order.
        table_copies: copies of something as large as a table or a slot.
        table_copy_bytes: their bytes.
        host_bytes_per_step: what the host sends to its devices: buffers and dense inputs.
        roofline: see there.
        libtpu: version of the compiler.
        compile_seconds: wall time that it took.
    """

    format: int = FORMAT
    topology: str
    chip: str
    num_chips: int
    num_devices: int
    num_hosts: int
    cores_per_device: int
    mode: str
    global_batch_size: int | None
    program: str
    fits: bool
    reasons: tuple[str, ...]
    findings: tuple[str, ...]
    stacks: tuple[StackFacts, ...]
    pooled: tuple[PooledFacts, ...]
    hbm: Hbm | None
    sparsecore: SparseCore | None
    tensorcore: TensorCore | None
    exchange: Exchange | None
    collectives: tuple[Collective, ...]
    table_copies: int
    table_copy_bytes: int
    host_bytes_per_step: int
    roofline: Roofline | None
    libtpu: str | None
    compile_seconds: float | None

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def report(
    program: Program,
    target: Topology,
    compiled: Compiled,
    *,
    global_batch_size: int | None = None,
    traffic: Mapping[tuple[str, str], Traffic] | None = None,
) -> Report:
    """The report of a program that has compiled.

    Args:
        program: the step.
        target: the slice.
        compiled: what came out.
        global_batch_size: samples of a step on all devices, to be shown.
        traffic: (collection, stack) -> rows and ids, for the roofline; the compiled maxima when
            None.

    Raises:
        CompileError: the scheduled program cannot be read, or is not of `program`.
    """
    schedule = hlo.parse(compiled.text)
    if len(schedule.parameter_bytes) != len(program.arguments):
        raise CompileError(
            f"the scheduled program has {len(schedule.parameter_bytes)} arguments, the traced one "
            f"{len(program.arguments)}: they are not the same step"
        )
    calls, memory = schedule.embedding_calls, compiled.memory
    copies = schedule.copies_of(
        {(a.dtype, math.prod(a.shape)) for a in program.arguments if a.kind in ("table", "slot")}
    )
    copy_bytes = sum(copy.num_bytes for copy in copies)
    arguments: Counter[str] = Counter()
    for argument, num_bytes in zip(program.arguments, schedule.parameter_bytes, strict=True):
        arguments[argument.kind] += num_bytes
    stack_bytes = sum(call.stack_bytes for call in schedule.calls)
    sub_kernels: Counter[str] = Counter()
    for call in calls:
        sub_kernels.update(call.sub_kernels)
    hbm = Hbm(
        arguments=dict(arguments),
        alias=memory.alias_bytes,
        new_outputs=memory.output_bytes - memory.alias_bytes,
        sparsecore_stacks=stack_bytes,
        tensorcore_temporaries=max(0, memory.temp_bytes - stack_bytes),
        code=memory.code_bytes,
        total=memory.total_bytes,
        capacity=target.chip.hbm_bytes,
    )
    tensorcore = TensorCore(
        flops=compiled.flops,
        cycles=schedule.tc_cycles,
        cycles_under_sparsecore=schedule.tc_cycles_under_sparsecore,
        share_under_sparsecore=round(schedule.tc_share_under_sparsecore, 4),
        dots=schedule.dots,
        dots_under_sparsecore=schedule.dots_under_sparsecore,
    )
    reasons: tuple[str, ...] = ()
    if hbm.total > hbm.capacity:
        reasons = (
            f"a device needs {_size(hbm.total)} of HBM and has {_size(hbm.capacity)}: use more "
            "devices, a smaller batch, or lower limits",
        )
    return Report(
        **_head(program, target, global_batch_size),
        fits=not reasons,
        reasons=reasons,
        findings=tuple(_findings(program, compiled, schedule, len(copies), copy_bytes)),
        hbm=hbm,
        sparsecore=SparseCore(
            calls=calls,
            offloaded=tuple(call for call in schedule.calls if call not in calls),
            num_sub_kernels=schedule.num_sub_kernels,
            sub_kernels=dict(sorted(sub_kernels.items())),
            program_bytes=sum(call.program_bytes for call in calls),
            stack_bytes=sum(call.stack_bytes for call in calls),
            gather_bytes=sum(call.gather_bytes for call in calls),
            exchange_row_bytes=sum(call.exchange_row_bytes for call in calls),
            exchange_id_bytes=sum(call.exchange_id_bytes for call in calls),
        ),
        tensorcore=tensorcore,
        exchange=Exchange.of(schedule, cores_per_device=program.cores_per_device),
        collectives=schedule.collectives,
        table_copies=len(copies),
        table_copy_bytes=copy_bytes,
        roofline=roofline(program, target, flops=compiled.flops, traffic=traffic),
        libtpu=compiled.libtpu,
        compile_seconds=compiled.seconds,
    )


def refused(
    program: Program,
    target: Topology,
    error: CompileError,
    *,
    global_batch_size: int | None = None,
) -> Report:
    """The report of a program that the compiler refuses; `error` is why."""
    return Report(
        **_head(program, target, global_batch_size),
        fits=False,
        reasons=(str(error),),
        findings=(),
        hbm=None,
        sparsecore=None,
        tensorcore=None,
        exchange=None,
        collectives=(),
        table_copies=0,
        table_copy_bytes=0,
        roofline=None,
        libtpu=None,
        compile_seconds=None,
    )


def roofline(
    program: Program,
    target: Topology,
    *,
    flops: float,
    traffic: Mapping[tuple[str, str], Traffic] | None = None,
) -> Roofline:
    """The lower bounds of a step; see `ASSUMPTIONS`.

    Args:
        program: the step.
        target: the slice.
        flops: of one device.
        traffic: (collection, stack) -> rows and ids; the compiled maxima when None.
    """
    chip = target.chip
    counted = {
        (stack.collection, stack.name): Traffic(
            rows=target.num_cores * chip.cores_per_device * stack.max_unique_ids,
            ids=stack.slots_per_device,
        )
        for stack in program.stacks
    } | dict(traffic or {})
    num_row_slots = Counter(
        argument.name.rpartition("/")[0]
        for argument in program.arguments
        if argument.kind == "slot" and len(argument.shape) > 1
    )
    hbm_bytes = row_bytes = 0.0  # of a device; rows of one pass
    passes = 1
    for stack in program.stacks:
        key = stack.collection, stack.name
        width = 4 * stack.dim
        rows, ids = counted[key].rows, counted[key].ids
        hbm_bytes += width * (4 * rows + ids + stack.samples)
        row_bytes += width * rows
        if stack.rule is not None:
            passes = 2
            slots = num_row_slots["/".join(filter(None, key))]
            hbm_bytes += width * (ids + 4 * rows + 2 * (1 + slots) * rows)
    moved_bytes = passes * row_bytes  # that a device sends
    for pooled in program.pooled:
        trained = pooled.rule is not None
        name = "/".join(filter(None, (pooled.collection, pooled.name)))
        arrays = 1 + (1 + 2 * (1 + num_row_slots[name]) if trained else 0)
        width = 4 * pooled.dim * program.cores_per_device
        hbm_bytes += width * 3 * arrays * pooled.ids + (1 + trained) * 2 * pooled.block_bytes
        moved_bytes += pooled.id_bytes + (1 + trained) * pooled.block_bytes
    others = 1 - 1 / target.num_chips
    chip_row_bytes = moved_bytes * chip.devices_per_chip
    one_way = chip.interconnect_bytes_per_second / 2
    links = 2 * len(target.sides)
    across = target.num_chips // max(target.sides)  # links across the middle of the longest side
    reduced = sum(n for kind, n in program.expected.collectives if kind == "all_reduce")
    times = {
        "sparsecore_hbm_ms": hbm_bytes / chip.hbm_bytes_per_second,
        "exchange_injection_ms": chip_row_bytes * others / one_way,
        "exchange_bisection_ms": (
            chip_row_bytes * target.num_chips / 4 / (across * one_way / links) if others else 0.0
        ),
        "all_reduce_ms": 2 * reduced * others / one_way,
        "dense_flops_ms": flops / chip.bf16_flops_per_second,
    }
    times = {name: round(seconds * 1e3, 6) for name, seconds in times.items()}
    bound_by = max(times, key=lambda name: times[name])
    return Roofline(
        is_calibrated=False,
        traffic="capacity" if traffic is None else "batches",
        rows=sum(t.rows for t in counted.values()),
        ids=sum(t.ids for t in counted.values()),
        sparsecore_hbm_bytes=hbm_bytes,
        exchange_bytes=chip_row_bytes * others,
        **times,
        bound_ms=times[bound_by],
        bound_by=bound_by.removesuffix("_ms"),
        assumptions=ASSUMPTIONS,
    )


def _head(program: Program, target: Topology, global_batch_size: int | None) -> dict[str, Any]:
    """What a report says with or without a compiled program."""
    fed = [
        argument
        for argument in program.arguments
        if argument.kind in ("buffer", "input") and "/update_buffer:" not in argument.name
    ]  # a pipelined step has the buffers of its update since they were looked up
    return {
        "topology": target.name,
        "chip": target.chip.name,
        "num_chips": target.num_chips,
        "num_devices": target.num_devices,
        "num_hosts": target.num_hosts,
        "cores_per_device": target.chip.cores_per_device,
        "mode": program.mode,
        "global_batch_size": global_batch_size,
        "program": program.key,
        "stacks": program.stacks,
        "pooled": program.pooled,
        "host_bytes_per_step": sum(a.num_bytes for a in fed)
        * target.num_devices
        // target.num_hosts,
    }


def _findings(
    program: Program,
    compiled: Compiled,
    schedule: hlo.Schedule,
    num_copies: int,
    copy_bytes: int,
) -> Iterator[str]:
    num_devices = schedule.num_replicas * schedule.num_partitions
    if num_devices != program.num_devices:
        yield f"runs on {num_devices} devices instead of {program.num_devices}"
    if compiled.memory.alias_bytes < program.expected.alias_bytes:
        yield (
            f"only {_size(compiled.memory.alias_bytes)} of {_size(program.expected.alias_bytes)} "
            "of tables, slots and dense state are updated in place"
        )
    if num_copies:
        yield f"{num_copies} copies of the size of a table or slot, {_size(copy_bytes)} a step"
    if program.stacks and not schedule.embedding_calls:
        yield "no SparseCore call: tables are looked up by the TensorCore"
    exchanged = sum(collective.num_bytes for collective in schedule.collectives)
    kinds = Counter[str]()
    for kind, num_bytes in program.expected.collectives:
        kinds["ragged" if kind == RAGGED_ALL_TO_ALL else "other"] += num_bytes
    ragged, expected = kinds["ragged"], kinds["other"]
    if (found := sum(r.received_bytes for r in schedule.ragged)) != ragged:
        yield f"pooled tables exchange {_size(found)} instead of {_size(ragged)}"
    if exchanged != expected:
        yield (
            f"the TensorCore's collectives exchange {_size(exchanged)} instead of {_size(expected)}"
        )


# -------------------------------------------------------------------------------------------- text


def _lines(report: Report) -> Iterator[str]:
    batch = f", global batch {report.global_batch_size:,}" if report.global_batch_size else ""
    yield (
        f"{report.topology}: {report.num_chips} chips, {report.num_devices} devices of "
        f"{report.cores_per_device} SparseCores, {report.num_hosts} hosts; "
        f"{report.mode} step{batch}"
    )
    yield "fits" if report.fits else f"DOES NOT FIT: {'; '.join(report.reasons)}"
    yield from (f"NOTE: {finding}" for finding in report.findings)
    yield ""
    yield from _table(
        ("stack", "tables", "rows", "dim", "max ids", "unique", "slots", "update"),
        [
            (
                stack.name,
                str(len(stack.tables)),
                f"{stack.rows:,}",
                str(stack.dim),
                f"{stack.max_ids:,}",
                f"{stack.max_unique_ids:,}",
                f"{stack.slots_per_device:,}",
                stack.rule or "frozen",
            )
            for stack in report.stacks
        ],
    )
    if report.pooled:
        yield ""
        yield from _table(
            ("pooled stack", "tables", "slots", "rows", "dim", "ids", "blocks", "update"),
            [
                (
                    stack.name,
                    str(len(stack.tables)),
                    f"{stack.slots:,}",
                    f"{stack.rows:,}",
                    str(stack.dim),
                    f"{stack.ids:,}",
                    f"{stack.blocks:,}",
                    stack.rule or "frozen",
                )
                for stack in report.pooled
            ],
        )
    hbm, sparsecore, tensorcore = report.hbm, report.sparsecore, report.tensorcore
    exchange, line = report.exchange, report.roofline
    if hbm is None or sparsecore is None or tensorcore is None or not exchange or line is None:
        return
    yield ""
    yield from _table(
        ("HBM of one device", "bytes"),
        [
            *((f"arguments: {kind}", _size(n)) for kind, n in hbm.arguments.items()),
            ("results that reuse no argument", _size(hbm.new_outputs)),
            ("SparseCore stacks", _size(hbm.sparsecore_stacks)),
            ("TensorCore temporaries", _size(hbm.tensorcore_temporaries)),
            ("code", _size(hbm.code)),
            (
                f"in all, {hbm.total / hbm.capacity:.1%} of {_size(hbm.capacity)}",
                _size(hbm.total),
            ),
            ("updated in place", _size(hbm.alias)),
        ],
    )
    yield ""
    yield from _table(
        (
            "SparseCore call",
            "sub-kernels",
            "code",
            "stack",
            "gather",
            "rows in",
            "TC cycles",
            "dots",
        ),
        [
            (
                _short(call),
                str(call.num_sub_kernels),
                _size(call.program_bytes),
                _size(call.stack_bytes),
                _size(call.gather_bytes),
                _size(call.exchange_row_bytes),
                f"{call.tc_cycles:,}",
                str(call.dots),
            )
            for call in (*sparsecore.calls, *sparsecore.offloaded)
        ],
    )
    yield ""
    yield (
        f"TensorCore: {tensorcore.cycles:,} cycles (estimated by the compiler), "
        f"{tensorcore.share_under_sparsecore:.1%} of them and {tensorcore.dots_under_sparsecore} "
        f"of {tensorcore.dots} matrix products under SparseCore work; "
        f"{tensorcore.flops / 1e9:,.1f} GFLOP"
    )
    yield ""
    yield from _table(
        ("exchanged by tables: room of one device", "bytes"),
        [
            ("ids of row-sharded tables", _size(exchange.row_ids)),
            ("rows and their gradients", _size(exchange.rows)),
            ("ids of pooled tables", _size(exchange.pooled_ids)),
            ("pooled vectors and their gradients", _size(exchange.pooled_vectors)),
            ("in all", _size(exchange.total)),
        ],
    )
    yield ""
    for collective in report.collectives:
        yield (
            f"{collective.kind} of {_size(collective.num_bytes)} among {collective.group_size} "
            f"devices{', under SparseCore work' if collective.is_under_sparsecore else ''}"
        )
    yield f"copies of the size of a table: {report.table_copies}"
    yield f"a host sends {_size(report.host_bytes_per_step)} a step to its devices"
    yield ""
    yield (
        f"roofline, uncalibrated (rows from {line.traffic}): a step takes at least "
        f"{line.bound_ms:.2f} ms, bound by {line.bound_by}"
    )
    yield (
        f"  ms: SparseCore HBM {line.sparsecore_hbm_ms:.2f}, exchange of rows "
        f"{line.exchange_injection_ms:.2f} (a chip's links) {line.exchange_bisection_ms:.2f} "
        f"(bisection), all-reduce {line.all_reduce_ms:.2f}, dense FLOPs {line.dense_flops_ms:.2f}"
    )
    if report.libtpu:
        yield f"libtpu {report.libtpu}, compiled in {report.compile_seconds:.0f} s"


def _short(call: SparseCoreCall) -> str:
    """A readable name: which way the rows go."""
    if call.offload != "OFFLOAD_EMBEDDING":
        return call.offload.removeprefix("OFFLOAD_").lower()
    looks_up, updates = "SparseGather" in call.sub_kernels, "SparseIota" in call.sub_kernels
    return "update and lookup" if looks_up and updates else "lookup" if looks_up else "update"


def _size(num_bytes: float) -> str:
    """Decimal units.

    >>> _size(3_396_000_000), _size(512)
    ('3,396.0 MB', '512 B')
    """
    if num_bytes >= 1e10:
        return f"{num_bytes / 1e9:,.1f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:,.1f} MB"
    return f"{num_bytes:,.0f} B"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for cells in (header, *rows):
        first, *rest = zip(cells, widths, strict=True)
        yield "  ".join((first[0].ljust(first[1]), *(c.rjust(width) for c, width in rest))).rstrip()
