"""The report of a compiled step, on a program that libtpu made (see make_fixtures.py)."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from torchrec_tpu.sparsecore.aot import adapter, hlo
from torchrec_tpu.sparsecore.aot.compile import Compiled, Memory, compile_program
from torchrec_tpu.sparsecore.aot.program import Argument, Expected, Kind, Program, StackFacts
from torchrec_tpu.sparsecore.aot.report import (
    ASSUMPTIONS,
    Report,
    Traffic,
    refused,
    report,
    roofline,
)
from torchrec_tpu.sparsecore.aot.topology import topology
from torchrec_tpu.sparsecore.chips import CHIPS
from torchrec_tpu.sparsecore.errors import CompileError, LimitsError

FIXTURES = Path(__file__).parent / "fixtures"
TARGET = topology("v6e:2x2")
ROWS, DIM, SLOTS = 1296, 16, 368
DENSE = ((128, 8), (128,), (128, 160), (128,))
DENSE_BYTES = 4 * sum(map(math.prod, DENSE))
ALIAS_BYTES = 2 * 4 * ROWS * DIM + 2 * DENSE_BYTES

STACK = StackFacts(
    name="small+large",
    collection="ebc",
    tables=("small", "large"),
    rows=ROWS,
    dim=DIM,
    samples=128,
    slots_per_device=SLOTS,
    max_ids=24,
    max_unique_ids=64,
    rule="adagrad",
)


def argument(
    name: str, kind: Kind, shape: tuple[int, ...], dtype: str = "f32", *, donated: bool = False
) -> Argument:
    return Argument(
        name=name, kind=kind, shape=shape, dtype=dtype, donated=donated, sharded=kind != "dense"
    )


PROGRAM = Program(
    text="module @step {}",
    arguments=(
        argument("ebc/small+large/table", "table", (ROWS, DIM), donated=True),
        argument("ebc/small+large/slot:sum", "slot", (ROWS, DIM), donated=True),
        argument("ebc/small+large/operand:lr", "operand", ()),
        argument("ebc/small+large/operand:eps", "operand", ()),
        argument("ebc/small+large/buffer:row_pointers", "buffer", (16,), "s32"),
        argument("ebc/small+large/buffer:embedding_ids", "buffer", (SLOTS,), "s32"),
        argument("ebc/small+large/buffer:sample_ids", "buffer", (SLOTS,), "s32"),
        argument("ebc/small+large/buffer:gains", "buffer", (SLOTS,)),
        *(argument(f"dense/{n}", "dense", s, donated=True) for n, s in enumerate(DENSE)),
        *(argument(f"dense_slot/{n}", "dense_slot", s, donated=True) for n, s in enumerate(DENSE)),
        argument("dense_operand/lr", "dense_operand", ()),
        argument("dense_operand/eps", "dense_operand", ()),
        argument("input/0", "input", (64, 8)),
    ),
    results=(),
    stacks=(STACK,),
    num_devices=4,
    cores_per_device=2,
    mode="exact",
    expected=Expected(
        num_lookups=1,
        num_updates=1,
        collectives=(("all_reduce", DENSE_BYTES + 4),),
        alias_bytes=ALIAS_BYTES,
    ),
)

FACTS = json.loads((FIXTURES / "exact.json").read_text())
COMPILED = Compiled(
    topology=TARGET.name,
    memory=Memory(**FACTS["memory"]),
    flops=FACTS["flops"],
    text=(FIXTURES / "exact.hlo.txt").read_text(),
    libtpu="0.0.52",
    seconds=12.3,
    is_kept=False,
)


@pytest.fixture(scope="module")
def made() -> Report:
    return report(PROGRAM, TARGET, COMPILED, global_batch_size=256)


def test_a_step_that_fits_has_no_reasons_and_no_findings(made: Report) -> None:
    assert made.fits
    assert made.reasons == made.findings == ()
    assert made.table_copies == 0


def test_memory_by_category_adds_up_to_libtpus_figures(made: Report) -> None:
    hbm, memory = made.hbm, COMPILED.memory
    assert hbm is not None
    assert sum(hbm.arguments.values()) == memory.argument_bytes
    assert hbm.sparsecore_stacks + hbm.tensorcore_temporaries == memory.temp_bytes
    assert hbm.alias == memory.alias_bytes
    assert hbm.total == memory.total_bytes
    assert hbm.total == (
        sum(hbm.arguments.values())
        + hbm.new_outputs
        + hbm.sparsecore_stacks
        + hbm.tensorcore_temporaries
        + hbm.code
    )
    assert hbm.capacity == CHIPS["v6e"].hbm_bytes
    assert hbm.arguments["table"] == hbm.arguments["slot"] >= 4 * ROWS * DIM


def test_sparsecore_and_tensorcore_figures_are_the_schedules(made: Report) -> None:
    schedule = hlo.parse(COMPILED.text)
    sparsecore, tensorcore = made.sparsecore, made.tensorcore
    assert sparsecore is not None
    assert tensorcore is not None
    assert sparsecore.calls == schedule.calls
    assert sparsecore.offloaded == ()
    assert sparsecore.num_sub_kernels == sum(sparsecore.sub_kernels.values()) == 28
    assert sparsecore.exchange_row_bytes == 2 * sparsecore.gather_bytes
    assert tensorcore.cycles == schedule.tc_cycles
    assert tensorcore.share_under_sparsecore == pytest.approx(
        schedule.tc_cycles_under_sparsecore / schedule.tc_cycles, abs=1e-4
    )


def test_a_host_feeds_all_its_devices(made: Report) -> None:
    of_device = 4 * (16 + 3 * SLOTS) + 4 * 64 * 8
    assert made.host_bytes_per_step == 4 * of_device  # v6e:2x2 is one host of four devices
    assert made.num_hosts == 1


def test_what_is_wrong_in_a_step_that_compiles_is_found() -> None:
    text = COMPILED.text
    (table,) = [
        line for line in text[text.index("ENTRY ") :].splitlines() if " parameter(0)" in line
    ]
    copy = f"  %copy.999 = f32[{ROWS},{DIM}]{{1,0:T(8,128)}} copy(%Arg_0.11)"
    wrong = replace(
        COMPILED,
        text=text.replace(table, f"{table}\n{copy}").replace("replica_count=4", "replica_count=2"),
        memory=replace(COMPILED.memory, alias_bytes=1000),
    )
    expected = replace(PROGRAM.expected, collectives=(("all_reduce", 5),))
    found = report(replace(PROGRAM, expected=expected), TARGET, wrong)
    assert found.fits
    assert (found.table_copies, found.table_copy_bytes) == (1, 4 * ROWS * DIM)
    devices, in_place, copies, collectives = found.findings
    assert devices == "runs on 2 devices instead of 4"
    assert "only 1,000 B of" in in_place
    assert "1 copies of the size of a table" in copies
    assert "instead of 5 B" in collectives
    assert all(f"NOTE: {finding}" in str(found) for finding in found.findings)


def test_a_step_that_takes_more_than_the_device_has_does_not_fit() -> None:
    large = replace(COMPILED, memory=replace(COMPILED.memory, temp_bytes=40 << 30))
    found = report(PROGRAM, TARGET, large)
    assert not found.fits
    assert "a device needs 43.0 GB of HBM and has 34.4 GB" in found.reasons[0]
    assert "DOES NOT FIT: a device needs" in str(found)


def test_a_refusal_is_a_report_with_its_reason() -> None:
    found = refused(PROGRAM, TARGET, LimitsError("stack 's': too much"), global_batch_size=256)
    assert not found.fits
    assert found.reasons == ("stack 's': too much",)
    assert (found.hbm, found.sparsecore, found.tensorcore, found.roofline) == (None,) * 4
    assert "DOES NOT FIT: stack 's': too much" in str(found)
    assert json.loads(found.to_json())["hbm"] is None


def test_a_schedule_of_another_program_is_refused() -> None:
    with pytest.raises(CompileError, match="19 arguments, the traced one 18"):
        report(replace(PROGRAM, arguments=PROGRAM.arguments[1:]), TARGET, COMPILED)


def test_the_keys_of_the_json_are_fixed(made: Report) -> None:
    """Others read it: a key that changes needs a new Report.format."""
    document = json.loads(made.to_json())
    assert document == json.loads(json.dumps(asdict(made)))
    assert document["format"] == 2
    assert list(document) == [
        "format", "topology", "chip", "num_chips", "num_devices", "num_hosts", "cores_per_device",
        "mode", "global_batch_size", "program", "fits", "reasons", "findings", "stacks", "pooled",
        "hbm", "sparsecore", "tensorcore", "exchange", "collectives", "table_copies",
        "table_copy_bytes", "host_bytes_per_step", "roofline", "libtpu", "compile_seconds",
    ]  # fmt: skip
    assert list(document["hbm"]) == [
        "arguments", "alias", "new_outputs", "sparsecore_stacks", "tensorcore_temporaries", "code",
        "total", "capacity",
    ]  # fmt: skip
    assert list(document["sparsecore"]) == [
        "calls", "offloaded", "num_sub_kernels", "sub_kernels", "program_bytes", "stack_bytes",
        "gather_bytes", "exchange_row_bytes", "exchange_id_bytes",
    ]  # fmt: skip
    assert list(document["tensorcore"]) == [
        "flops", "cycles", "cycles_under_sparsecore", "share_under_sparsecore", "dots",
        "dots_under_sparsecore",
    ]  # fmt: skip
    assert list(document["exchange"]) == [
        "row_ids", "rows", "pooled_ids", "pooled_vectors", "total", "pooled",
    ]  # fmt: skip


def test_the_text_names_what_was_compiled_and_every_kind_of_memory(made: Report) -> None:
    text = str(made)
    assert text.startswith("v6e:2x2: 4 chips, 4 devices of 2 SparseCores, 1 hosts; exact step")
    assert "\nfits\n" in text
    assert made.hbm is not None
    for part in (*made.hbm.arguments, "SparseCore stacks", "lookup", "update", "uncalibrated"):
        assert part in text


# ---------------------------------------------------------------------------------------- roofline


def test_bounds_are_bytes_over_published_figures() -> None:
    rows, ids = 1000.0, 3000.0
    line = roofline(
        PROGRAM, TARGET, flops=918e9, traffic={("ebc", STACK.name): Traffic(rows=rows, ids=ids)}
    )
    width = 4 * DIM
    # 4 passes over fetched rows, one read an id, one write a sample; the update the same without
    # the samples, and table and state read and written once a row.
    bytes_ = width * (4 * rows + ids + STACK.samples) + width * (ids + 4 * rows + 4 * rows)
    assert line.sparsecore_hbm_bytes == bytes_
    assert line.sparsecore_hbm_ms == pytest.approx(bytes_ / 1638e9 * 1e3, abs=1e-6)
    assert line.exchange_bytes == 2 * width * rows * 3 / 4
    assert line.exchange_injection_ms == pytest.approx(line.exchange_bytes / 400e9 * 1e3, abs=1e-6)
    assert line.dense_flops_ms == pytest.approx(1.0)
    assert (line.bound_ms, line.bound_by) == (line.dense_flops_ms, "dense_flops")
    assert (line.is_calibrated, line.traffic) == (False, "batches")
    assert line.assumptions == ASSUMPTIONS


def test_bisection_is_what_crosses_the_middle_of_the_longest_side() -> None:
    """v6e:8x4: half of what 16 chips send crosses 4 links of 100 GB/s."""
    rows = 1e6
    line = roofline(
        replace(PROGRAM, num_devices=32),
        topology("v6e:8x4"),
        flops=0.0,
        traffic={("ebc", STACK.name): Traffic(rows=rows, ids=rows)},
    )
    crossing = 2 * 16 * rows * 4 * DIM / 2
    assert line.exchange_bisection_ms == pytest.approx(crossing / (4 * 100e9) * 1e3)
    assert line.bound_by == "exchange_bisection"


def test_without_batches_the_compiled_maxima_count() -> None:
    line = roofline(PROGRAM, TARGET, flops=0.0)
    assert line.traffic == "capacity"
    assert line.rows == 2 * 8 * STACK.max_unique_ids  # cores of a device, partitions
    assert line.ids == SLOTS


def test_a_frozen_stack_sends_rows_one_way_and_one_chip_sends_none() -> None:
    frozen = replace(PROGRAM, stacks=(replace(STACK, rule=None),))
    both, one = (roofline(p, TARGET, flops=0.0) for p in (PROGRAM, frozen))
    assert one.exchange_bytes == both.exchange_bytes / 2
    alone = roofline(PROGRAM, topology("v6e:1x1"), flops=0.0)
    assert alone.exchange_bytes == alone.exchange_bisection_ms == alone.all_reduce_ms == 0


# ------------------------------------------------------------------------------------ the real one


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "pipelined"])
def test_the_fixture_is_what_libtpu_makes_today(mode: str) -> None:
    if reason := adapter.why_unavailable():
        pytest.skip(reason)
    from make_fixtures import trace

    program = trace("exact" if mode == "exact" else "pipelined")
    compiled = compile_program(program, TARGET, keep=False)
    found = report(program, TARGET, compiled)
    assert found.findings == ()
    kept = hlo.parse((FIXTURES / f"{mode}.hlo.txt").read_text())
    now = hlo.parse(compiled.text)
    assert now.num_sub_kernels == kept.num_sub_kernels
    assert now.parameter_bytes == kept.parameter_bytes
    assert now.dots == kept.dots
    assert sum(now.parameter_bytes) == compiled.memory.argument_bytes
    donated = zip(program.arguments, now.parameter_bytes, strict=True)
    assert sum(n for a, n in donated if a.donated) == compiled.memory.alias_bytes
