"""Which tables share a stack."""

import numpy as np
import pytest

from torchrec_tpu.sparsecore import Block, Combiner, Table, auto_stacks, make_layout
from torchrec_tpu.sparsecore.errors import LayoutError


def table(name, dim=8, combiner=Combiner.SUM, features=None, group="", rows=100):
    return Table(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        combiner=combiner,
        features=(name,) if features is None else features,
        group=group,
    )


def stack_names(tables, **options):
    return [stack.name for stack in make_layout(tables, **options).stacks]


def test_tables_share_a_stack_when_dim_group_and_kind_agree():
    tables = [
        table("a", 8),
        table("b", 5),  # padded to 8 like a
        table("c", 16),
        table("d", 8, Combiner.MEAN),  # gains are made on the host: combiners mix
        table("e", 8, group="adam"),
        table("f", 8, Combiner.NONE),
        table("g", 8, Combiner.NONE),
    ]
    assert stack_names(tables) == ["a+b+d", "c", "e", "f+g"]
    assert stack_names(tables, stacks="none") == list("abcdefg")


def test_first_fit_by_activation_bytes_of_all_features():
    tables = [
        table("a", features=("1", "2")),
        table("b"),
        table("c", features=("1", "2", "3")),
        table("d"),
    ]
    groups = auto_stacks(tables, samples_per_core=10, limit_bytes=3 * 10 * 8 * 4)
    assert [[t.name for t in group] for group in groups] == [["a", "b"], ["c"], ["d"]]
    groups = auto_stacks(tables, samples_per_core=10, limit_bytes=4 * 10 * 8 * 4)
    assert [[t.name for t in group] for group in groups] == [["a", "b", "d"], ["c"]]
    # a table above the limit still gets a stack
    groups = auto_stacks(tables, samples_per_core=10, limit_bytes=1)
    assert [[t.name for t in group] for group in groups] == [["a"], ["b"], ["c"], ["d"]]


def test_dlrm_tables_of_dim_128_pair_up_at_4096_samples_a_device():
    # 2048 samples on each of 2 cores * 128 * 4 bytes = 1 MiB a feature; the limit is 2 MiB
    layout = make_layout([table(f"t{i}", 128) for i in range(26)])
    assert [len(stack.tables) for stack in layout.stacks] == [2] * 13
    layout = make_layout(
        [table(f"t{i}", 128) for i in range(26)], num_devices=64, num_local_devices=1
    )
    assert [len(stack.tables) for stack in layout.stacks] == [2] * 13


def test_explicit_stacks_keep_their_order_and_other_tables_stay_alone():
    tables = [table("a"), table("b", 16), table("c"), table("d")]
    layout = make_layout(tables, stacks=[["c", "b"], []])
    assert [stack.name for stack in layout.stacks] == ["c+b", "a", "d"]
    assert layout.stacks[0].dim == 16  # the widest


def test_names_of_large_stacks_stay_short_and_unique():
    names = stack_names([table(f"t{i}") for i in range(30)])
    assert names == ["t0+t1+..+t29 (30 tables)"]


@pytest.mark.parametrize(
    ("stacks", "message"),
    [
        ([["a", "x"]], r"unknown tables \['x'\]"),
        ([["a"], ["a", "b"]], r"more than once: \['a'\]"),
        ([["a", "adam"]], "mixes optimizer groups"),
        ([["a", "sequence"]], "sequences with bags"),
        ("all", "stacks='all' is not 'auto', 'none' or lists"),
    ],
)
def test_stacks_that_make_no_sense_are_refused(stacks, message):
    tables = [
        table("a"),
        table("b"),
        table("adam", group="adam"),
        table("sequence", combiner=Combiner.NONE),
    ]
    with pytest.raises(LayoutError, match=message):
        make_layout(tables, stacks=stacks)


@pytest.mark.parametrize(
    "counts",
    [
        {"num_devices": 0},
        {"cores_per_device": 0},
        {"num_local_devices": 0},
        {"num_devices": 2, "num_local_devices": 3},
        {"num_devices": 2, "num_local_devices": 1, "first_local_device": 2},
        {"first_local_device": -1},
    ],
)
def test_device_counts_that_contradict_each_other_are_refused(counts):
    with pytest.raises(LayoutError, match="counts must be >= 1 and the local devices"):
        make_layout([table("a")], **counts)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"b": Block(10)}, r"blocks name unknown tables \['b'\]; tables: \['a'\]"),
        (
            {"a": Block(24)},
            r"Block\(rows=24, first_core=0\) does not hold 100 rows on 4 cores; .* 25",
        ),
        ({"a": Block(0)}, "does not hold 100 rows"),
        ({"a": Block(-100)}, "does not hold 100 rows"),
        ({"a": Block(25, 4)}, "start on one of the cores"),
        ({"a": Block(25, -1)}, "start on one of the cores"),
        ({"a": Block(2**31)}, "more than int32 can index"),
    ],
)
def test_blocks_that_do_not_hold_their_table_are_refused(blocks, message):
    with pytest.raises(LayoutError, match=message):
        make_layout([table("a", rows=100)], num_devices=2, blocks=blocks)


def test_a_block_counts_in_integers():
    assert Block(np.int64(25)) == Block(25, 0)
    with pytest.raises(LayoutError, match=r"Block: rows=2\.5 must be an integer"):
        Block(2.5)


def test_no_tables_and_equal_names_are_refused():
    with pytest.raises(LayoutError, match="no tables"):
        make_layout([])
    with pytest.raises(LayoutError, match=r"unique, repeated: \['a'\]"):
        make_layout([table("a"), table("b"), table("a", 16)])


def test_more_rows_than_int32_can_index_are_refused():
    with pytest.raises(LayoutError, match=r"needs 2,147,483,648 rows on each of 2 cores"):
        make_layout([table("a", rows=2**32 - 2)])
    assert make_layout([table("a", rows=2**32 - 2)], num_devices=2).stacks[0].rows_per_core == 2**30
