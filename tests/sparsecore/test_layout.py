"""Layout: where rows live, and the way there and back."""

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_tpu.sparsecore import Block, Combiner, Table, make_layout
from torchrec_tpu.sparsecore.chips import CHIPS
from torchrec_tpu.sparsecore.errors import LayoutError


def table(name="t", rows=100, dim=8, combiner=Combiner.SUM, features=None, group=""):
    return Table(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        combiner=combiner,
        features=(name,) if features is None else features,
        group=group,
    )


@st.composite
def layouts(draw):
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20)), min_size=1, max_size=5)
    )
    tables = [table(f"t{i}", rows, dim) for i, (rows, dim) in enumerate(shapes)]
    num_devices = draw(st.integers(1, 5))
    cores_per_device = draw(st.sampled_from(sorted({c.cores_per_device for c in CHIPS.values()})))
    num_cores = num_devices * cores_per_device
    blocks = {}
    for t in draw(st.lists(st.sampled_from(tables), unique_by=lambda t: t.name)):
        least = -(-t.num_embeddings // num_cores)  # the last blocks may be short, or empty
        rows = draw(st.sampled_from([least, least + 3, t.num_embeddings, t.num_embeddings + 50]))
        blocks[t.name] = Block(rows, draw(st.integers(0, num_cores - 1)))
    return make_layout(
        tables,
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        stacks=draw(st.sampled_from(["auto", "none", [[t.name for t in tables]]])),
        rotation=draw(st.sampled_from([None, 0, 1, 3])),
        blocks=blocks,
    )


@given(layout=layouts())
def test_every_id_has_a_home_of_its_own(layout):
    homes = {
        (stack.name, *layout.home_of(t.table.name, i))
        for stack in layout.stacks
        for t in stack.tables
        for i in range(t.table.num_embeddings)
    }
    assert len(homes) == sum(t.num_embeddings for t in layout.tables)
    for name, core, row in homes:
        stack = next(stack for stack in layout.stacks if stack.name == name)
        assert 0 <= core < layout.num_cores
        assert 0 <= row < stack.rows_per_core


@given(layout=layouts(), dtype=st.sampled_from([np.float32, np.float16, np.int64]))
def test_packed_rows_are_where_home_of_says_and_unpack_undoes_pack(layout, dtype):
    for stack in layout.stacks:
        for t in stack.tables:
            spec = t.table
            logical = np.arange(1, spec.num_embeddings * spec.embedding_dim + 1).astype(dtype)
            logical = logical.reshape(spec.num_embeddings, spec.embedding_dim)
            block = layout.pack_table(spec.name, logical)
            assert block.shape == (layout.num_cores, t.rows_per_core, stack.dim)
            assert block.dtype == dtype
            assert (block != 0).sum() == logical.size  # padding is zero
            for i in range(spec.num_embeddings):
                core, row = layout.home_of(spec.name, i)
                np.testing.assert_array_equal(
                    block[core, row - t.row_offset, : spec.embedding_dim], logical[i]
                )
            np.testing.assert_array_equal(layout.unpack_table(spec.name, block), logical)
            scalar = logical[:, 0].copy()
            packed = layout.pack_table(spec.name, scalar)
            assert packed.shape == block.shape[:2]
            np.testing.assert_array_equal(packed, block[:, :, 0])
            np.testing.assert_array_equal(layout.unpack_table(spec.name, packed), scalar)


def test_a_table_is_spread_evenly_with_rows_padded_to_eight_on_every_core():
    layout = make_layout([table(rows=100, dim=12)], num_devices=3)  # 6 cores, not a power of two
    assert layout.stacks[0].rows_per_core == 24  # 144 rows
    assert layout.stacks[0].dim == 16
    assert layout.home_of("t", 99) == (3, 16)


def test_stacked_tables_follow_each_other_and_are_rotated_by_the_cores_of_a_device():
    layout = make_layout([table("a", 10), table("b", 100), table("c", 5)], num_devices=2)
    places = [(t.row_offset, t.rotation, t.rows_per_core) for t in layout.stacks[0].tables]
    assert places == [(0, 0, 8), (8, 2, 32), (40, 0, 8)]
    assert layout.home_of("b", 7) == (1, 9)
    alone = make_layout([table("a"), table("b")], num_devices=2, stacks="none")
    assert [t.rotation for t in alone.stack_order_tables] == [0, 0]


def test_a_table_in_blocks_has_contiguous_rows_on_each_core_from_its_first_one_on():
    tables = [table("dealt", 10), table("blocks", 10), table("whole", 9), table("tiny", 2)]
    layout = make_layout(
        tables,
        num_devices=2,
        blocks={
            "blocks": Block(3, first_core=2),
            "whole": Block(9, first_core=1),
            "tiny": Block(1),
        },
    )
    places = [(t.row_offset, t.rotation, t.rows_per_core) for t in layout.stacks[0].tables]
    assert places == [(0, 0, 8), (8, 2, 8), (16, 1, 16), (32, 0, 8)]
    assert [t.block_rows for t in layout.stacks[0].tables] == [0, 3, 9, 1]
    assert [layout.home_of("blocks", i) for i in range(10)] == [
        (2, 8), (2, 9), (2, 10), (3, 8), (3, 9), (3, 10), (0, 8), (0, 9), (0, 10), (1, 8),
    ]  # fmt: skip
    assert [layout.home_of("whole", i) for i in (0, 8)] == [(1, 16), (1, 24)]
    assert [layout.home_of("tiny", i) for i in (0, 1)] == [(0, 32), (1, 32)]
    assert layout.home_of("dealt", 6) == (2, 1)
    assert "blocks: (10, 8) sum, rows from 8, rotation 2, blocks of 3 rows, features" in repr(
        layout
    )


def test_outputs_keep_config_order_while_stacks_group_features_by_table():
    tables = [
        table("wide", dim=64, features=("x", "y")),
        table("narrow", dim=8, features=("y", "z")),
        table("other", dim=64, features=("w", "x")),
    ]
    layout = make_layout(tables, stacks=[["narrow"], ["other", "wide"]])
    assert [f.output_name for f in layout.features] == [
        "x@wide", "y@wide", "y@narrow", "z", "w", "x@other",
    ]  # fmt: skip
    assert [(f.key, f.table, f.stack) for f in layout.stack_order_features] == [
        ("y", "narrow", 0), ("z", "narrow", 0),
        ("w", "other", 1), ("x", "other", 1), ("x", "wide", 1), ("y", "wide", 1),
    ]  # fmt: skip
    assert [t.table.name for t in layout.stack_order_tables] == ["narrow", "other", "wide"]


def test_fingerprint_changes_with_all_that_decides_the_buffers_and_with_nothing_else():
    tables = [table("a"), table("b", combiner=Combiner.MEAN)]
    layout = make_layout(tables, num_devices=2)
    same = [
        make_layout(tables, num_devices=2, stacks=[["a", "b"]]),
        make_layout([dataclasses.replace(t, group="g") for t in tables], num_devices=2),
        pickle.loads(pickle.dumps(layout)),
    ]
    assert {other.fingerprint for other in same} == {layout.fingerprint}
    others = [
        make_layout(tables, num_devices=4),
        make_layout(tables, num_devices=1, cores_per_device=4),
        make_layout(tables, num_devices=2, num_local_devices=1),
        make_layout(tables, num_devices=2, rotation=1),
        make_layout(tables, num_devices=2, blocks={"a": Block(25)}),
        make_layout(tables, num_devices=2, blocks={"a": Block(26)}),
        make_layout(tables, num_devices=2, blocks={"a": Block(26, 1)}),
        make_layout(tables, num_devices=2, stacks="none"),
        make_layout(tables[::-1], num_devices=2),
        *(
            make_layout([dataclasses.replace(tables[0], **change), tables[1]], num_devices=2)
            for change in (
                {"name": "c"},
                {"num_embeddings": 99},
                {"embedding_dim": 7},
                {"combiner": Combiner.SQRTN},
                {"features": ("a", "z")},
            )
        ),
    ]
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == len(others) + 1
    # the processes of one job agree
    ranks = [
        make_layout(tables, num_devices=2, num_local_devices=1, first_local_device=rank)
        for rank in range(2)
    ]
    assert ranks[0].fingerprint == ranks[1].fingerprint
    assert [rank.first_local_core for rank in ranks] == [0, 2]


def test_numpy_integers_are_integers():
    # sizes are often computed from data
    layout = make_layout([table("t", np.int64(10), np.int32(8))], num_devices=np.int64(2))
    assert layout.fingerprint == make_layout([table("t", 10, 8)], num_devices=2).fingerprint
    assert type(layout.tables[0].num_embeddings) is int


def test_repr_names_every_table_with_its_place():
    text = repr(make_layout([table("users", 1000), table("items", 10)], num_devices=2))
    assert "2 tables on 2 devices x 2 cores, local devices 0..1" in text
    assert "users: (1,000, 8) sum, rows from 0, rotation 0, features users" in text
    assert "items: (10, 8) sum, rows from 256, rotation 2, features items" in text


def test_names_ids_and_shapes_that_do_not_exist_are_refused_by_name():
    layout = make_layout([table("t", rows=10, dim=3)])
    with pytest.raises(LayoutError, match="no table is named 'u'; tables: \\['t'\\]"):
        layout.home_of("u", 0)
    for row_id in (-1, 10):
        with pytest.raises(IndexError, match=f"ids 0..9, not {row_id}"):
            layout.home_of("t", row_id)
    with pytest.raises(LayoutError, match=r"shape \(3, 10\), expected \(10, 3\) or \(10,\)"):
        layout.pack_table("t", np.zeros((3, 10)))
    with pytest.raises(LayoutError, match=r"expected \(2, 8, 8\) or \(2, 8\)"):
        layout.unpack_table("t", np.zeros((2, 8, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings=0 must be an integer >= 1"),
        ({"num_embeddings": 1.5}, "num_embeddings=1.5 must be an integer >= 1"),
        ({"embedding_dim": -8}, "embedding_dim=-8 must be an integer >= 1"),
        ({"features": ()}, "no feature"),
        ({"features": ("a", "a")}, "listed twice"),
        ({"combiner": "max"}, "combiner='max' is not one of"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(LayoutError, match=message):
        dataclasses.replace(table(), **change)


def test_chips_name_themselves():
    assert all(chip.name == name for name, chip in CHIPS.items())


def test_layouts_need_neither_torch_nor_native_code():
    program = """
import sys
sys.modules["torchrec_tpu.sparsecore._native"] = None  # as where nothing was compiled
from torchrec_tpu.sparsecore import Capacity, Table, make_layout
table = Table(name="t", num_embeddings=9, embedding_dim=8, combiner="sum", features=("f",))
print(make_layout([table]).home_of("t", 5), Capacity(max_ids=8, max_unique_ids=8).max_ids)
try:
    from torchrec_tpu.sparsecore import Preprocessor
except ImportError:
    print("no Preprocessor")
assert "torch" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "(1, 2) 8\nno Preprocessor\n"
