"""The parser of scheduled programs, on programs that libtpu made (see make_fixtures.py)."""

import json
import re
from pathlib import Path

import pytest

from torchrec_tpu.sparsecore.aot import hlo
from torchrec_tpu.sparsecore.errors import CompileError

FIXTURES = Path(__file__).parent / "fixtures"
EXACT = (FIXTURES / "exact.hlo.txt").read_text()
PIPELINED = (FIXTURES / "pipelined.hlo.txt").read_text()
DENSE_BYTES = 4 * (8 * 128 + 128 + 160 * 128 + 128)  # the model's dense parameters
ROWS, DIM = 1296, 16  # of its stack, on one device


def memory_of(name: str) -> dict[str, int]:
    facts: dict[str, dict[str, int]] = json.loads((FIXTURES / f"{name}.json").read_text())
    return facts["memory"]


def entry_of(text: str) -> list[str]:
    return text[text.index("\nENTRY ") :].splitlines()


def line_with(text: str, pattern: str) -> str:
    (line,) = [line for line in entry_of(text) if re.search(pattern, line)]
    return line


def test_an_exact_step_has_a_lookup_and_an_update() -> None:
    lookup, update = hlo.parse(EXACT).embedding_calls
    assert lookup.sub_kernels == {
        "AllToAllDynamic": 2,
        "DynamicBoundedSlice": 4,
        "DynamicSliceCsr": 1,
        "PartitionCsr": 1,
        "RowPtrSanityCheck": 1,
        "SparseGather": 1,
        "SparseMapRow": 3,
        "all-to-all": 3,
    }
    assert update.num_sub_kernels == 12
    assert "SparseGather" not in update.sub_kernels
    assert (lookup.program_bytes, update.program_bytes) == (159_488, 333_568)
    assert 0 < lookup.stack_bytes < update.stack_bytes


def test_capacities_are_those_of_all_partitions_of_one_core() -> None:
    """8 partitions of 64 distinct rows of 16: what is gathered is what travels, each way."""
    lookup, update = hlo.parse(EXACT).embedding_calls
    rows = 8 * 64
    assert lookup.gather_bytes == lookup.exchange_row_bytes == rows * DIM * 4
    assert (update.gather_bytes, update.exchange_row_bytes) == (0, rows * DIM * 4)
    assert lookup.exchange_id_bytes == rows * 4


def test_a_pipelined_step_has_one_call_under_which_all_products_run() -> None:
    schedule = hlo.parse(PIPELINED)
    (call,) = schedule.embedding_calls
    assert call.num_sub_kernels == sum(c.num_sub_kernels for c in hlo.parse(EXACT).calls)
    assert {"SparseGather", "SparseIota"} <= call.sub_kernels.keys()
    assert schedule.dots == schedule.dots_under_sparsecore == call.dots == 5
    assert schedule.tc_share_under_sparsecore > 0.9 > hlo.parse(EXACT).tc_share_under_sparsecore


def test_shares_are_of_what_stands_between_start_and_done() -> None:
    schedule = hlo.parse(EXACT)
    assert schedule.tc_cycles_under_sparsecore == sum(c.tc_cycles for c in schedule.calls)
    assert schedule.dots_under_sparsecore == sum(c.dots for c in schedule.calls) == 3
    # The update ends as soon as it has begun: only the lookup still covers something.
    done = line_with(EXACT, r"%sparse-core-call\.cloned\.1\.call-done =")
    begin = line_with(EXACT, r"%sparse-core-call\.cloned\.1\.call-update =")
    moved = EXACT.replace(f"{done}\n", "").replace(begin, f"{begin}\n{done}")
    lookup, update = hlo.parse(moved).calls
    assert (update.tc_cycles, update.dots) == (0, 0)
    assert hlo.parse(moved).tc_cycles_under_sparsecore == lookup.tc_cycles
    assert hlo.parse(moved).tc_cycles == schedule.tc_cycles


def test_the_names_that_later_versions_give_to_the_triple_are_read() -> None:
    renamed = re.sub(r" async-(start|update|done)\(", r" custom-call-\1(", EXACT)
    assert renamed != EXACT
    assert hlo.parse(renamed) == hlo.parse(EXACT)


@pytest.mark.parametrize(("name", "text"), [("exact", EXACT), ("pipelined", PIPELINED)])
def test_arguments_take_what_libtpu_says(name: str, text: str) -> None:
    assert sum(hlo.parse(text).parameter_bytes) == memory_of(name)["argument_bytes"]


@pytest.mark.parametrize("text", [EXACT, PIPELINED])
def test_there_is_one_all_reduce_of_all_dense_gradients_and_the_loss(text: str) -> None:
    (collective,) = hlo.parse(text).collectives
    assert collective == hlo.Collective(
        kind="all-reduce",
        num_bytes=DENSE_BYTES + 4,
        num_groups=1,
        group_size=4,
        is_under_sparsecore=True,
    )


@pytest.mark.parametrize(
    ("groups", "num_groups", "group_size"),
    [
        ("replica_groups={}", 1, 4),
        ("replica_groups={{0,1,2,3}}", 1, 4),
        ("replica_groups={{0,1},{2,3}}", 2, 2),
        ("replica_groups=[2,2]<=[4]", 2, 2),
        ("replica_groups=[1,4]<=[4]T(0)", 1, 4),
    ],
)
def test_replica_groups_are_read_in_every_notation(
    groups: str, num_groups: int, group_size: int
) -> None:
    old = line_with(EXACT, r" all-reduce(-start)?\(")
    new = re.sub(r"replica_groups=(\{\{.*?\}\}|\[.*?\]<=\[\d+\])", groups, old)
    (collective,) = hlo.parse(EXACT.replace(old, new)).collectives
    assert (collective.num_groups, collective.group_size) == (num_groups, group_size)


def test_the_model_copies_no_table_and_a_copy_would_be_seen() -> None:
    array = {("f32", ROWS * DIM)}
    assert hlo.parse(EXACT).copies_of(array) == ()
    table = line_with(EXACT, r" parameter\(0\)")
    copied = EXACT.replace(
        table, f"{table}\n  %copy.999 = f32[16,{ROWS}]{{0,1:T(8,128)}} copy(%Arg_0.11)"
    )
    (copy,) = hlo.parse(copied).copies_of(array)
    assert (copy.name, copy.num_bytes) == ("copy.999", 4 * ROWS * DIM)
    assert hlo.parse(copied).copies_of({("s32", ROWS * DIM)}) == ()


def test_cycles_of_a_loop_are_those_of_one_trip() -> None:
    loop = """
%body.1 (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %f.1 = f32[8]{0} fusion(%p.1), calls=%fused.1, backend_config={"estimated_cycles":"70"}
}

%condition.1 (p.2: f32[8]) -> pred[] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %c.2 = pred[] constant(true)
}
"""
    entry = """
ENTRY %main.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %w = f32[8]{0} while(%q), condition=%condition.1, body=%body.1
}
"""
    schedule = hlo.parse(f"HloModule m, is_scheduled=true\n{loop}{entry}")
    assert schedule.tc_cycles == 70
    assert (schedule.num_replicas, schedule.calls, schedule.parameter_bytes) == (1, (), (32,))


def test_a_text_that_is_not_scheduled_is_refused() -> None:
    with pytest.raises(CompileError, match="no scheduled HLO"):
        hlo.parse(EXACT.replace("is_scheduled=true", "is_scheduled=false"))
    with pytest.raises(CompileError, match="begins with 'module @step"):
        hlo.parse("module @step {}")


def test_a_call_that_never_ends_is_refused() -> None:
    done = line_with(EXACT, r"%sparse-core-call\.cloned\.1\.call-done =")
    with pytest.raises(CompileError, match="never ends"):
        hlo.parse(EXACT.replace(done, ""))
