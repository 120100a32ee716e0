"""Limits: observed, merged, suggested, stored; exact to the id."""

import dataclasses
import json
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Arrays

from torchrec_tpu.sparsecore import (
    Block,
    Capacity,
    Combiner,
    Observation,
    Preprocessor,
    Table,
    calibrate,
    make_layout,
    observe,
    sum_of_table_limits,
)
from torchrec_tpu.sparsecore.errors import CapacityError, LayoutError, TorchrecTpuError

TABLES = [
    Table(
        name=name,
        num_embeddings=rows,
        embedding_dim=8,
        combiner=combiner,
        features=features,
        group=group,
    )
    for name, rows, combiner, features, group in (
        ("users", 500, Combiner.SUM, ("user",), ""),
        ("items", 40, Combiner.MEAN, ("item", "history"), ""),
        ("tags", 9, Combiner.SQRTN, ("tag",), ""),
        ("places", 200, Combiner.SUM, ("place",), ""),
    )
]
KEYS = [key for table in TABLES for key in table.features]


def random_arrays(seed, batch_size=24):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, (len(KEYS), batch_size))
    rows = [table.num_embeddings for table in TABLES for _ in table.features]
    values = [
        (num_rows * rng.random(count.sum()) ** 3).astype(np.int64)
        for num_rows, count in zip(rows, lengths, strict=True)
    ]
    return Arrays(KEYS, np.concatenate(values), lengths.ravel())


def call(preprocessor, arrays):
    return preprocessor(arrays.keys, arrays.values, lengths=arrays.lengths)


def batches(*seeds):
    return [
        {"keys": a.keys, "values": a.values, "lengths": a.lengths}
        for a in map(random_arrays, seeds)
    ]


def layout_of(stacks="auto", **options):
    return make_layout(TABLES, num_devices=2, stacks=stacks, **options)


@pytest.mark.parametrize("stacks", ["auto", "none", [["tags", "users"], ["places", "items"]]])
def test_a_batch_fits_what_it_was_seen_to_need_and_fails_with_one_less(stacks):
    layout = layout_of(stacks)
    (arrays,) = batches(0)
    exact = calibrate([arrays], layout).suggest(layout, headroom=0, multiple=1)
    batch = Preprocessor(layout, capacity=exact)(**arrays)
    for stack, buffers in zip(layout.stacks, batch.stacks, strict=True):
        limit = exact[stack.name]
        assert buffers.embedding_ids.size == layout.num_local_cores * limit.buffer_ids
        for field, kind, less in (
            ("max_ids", "ids", 1),
            ("max_unique_ids", "unique ids", 1),
            ("buffer_ids", "buffer slots", 8),
        ):
            observed = getattr(limit, field)
            tight = dataclasses.replace(limit, **{field: observed - less})
            with pytest.raises(CapacityError) as caught:
                Preprocessor(layout, capacity={**exact, stack.name: tight})(**arrays)
            error = caught.value
            assert (error.stack, error.kind) == (stack.name, kind)
            assert (error.observed, error.limit) == (observed, observed - less)


def test_capacity_error_names_global_core_partition_numbers_and_remedy():
    layout = make_layout(
        TABLES[:1], num_devices=4, num_local_devices=2, first_local_device=2, cores_per_device=2
    )
    # samples 0..3 on the local cores 0..3; the sample of core 1 has 9 ids of partition 5
    lengths = np.array([1, 9, 1, 1], np.int32)
    values = np.array([0, *range(5, 77, 8), 0, 0])
    preprocessor = Preprocessor(
        layout, capacity={"users": Capacity(max_ids=8, max_unique_ids=16)}, num_threads=1
    )
    message = "stack 'users': partition 5->5 needs 9 ids, capacity is 8. Raise the limit: calibrate"
    with pytest.raises(CapacityError, match=message) as caught:
        preprocessor(["user"], values, lengths=lengths)
    assert (caught.value.core, caught.value.partition) == (5, 5)
    small = {"users": Capacity(max_ids=16, max_unique_ids=16, buffer_ids=8)}
    with pytest.raises(CapacityError, match=r"core 5 needs 16 buffer slots, capacity is 8"):
        Preprocessor(layout, capacity=small)(["user"], values, lengths=lengths)


def test_a_limit_without_buffer_has_room_for_full_partitions():
    assert Capacity(max_ids=9, max_unique_ids=1).slots_per_core(num_cores=4) == 64


observations = st.builds(
    lambda seeds: calibrate(batches(*seeds), layout_of()), st.lists(st.integers(0, 50), max_size=2)
)


@given(a=observations, b=observations, c=observations)
def test_merge_is_associative_and_commutative(a, b, c):
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == c.merge(a, b)
    assert a.merge(b) == b.merge(a)
    assert a.merge(observe(layout_of())) == a


def test_merging_ranks_equals_observing_all_batches_on_one():
    layout = layout_of()
    ranks = [calibrate(batches(2 * rank, 2 * rank + 1), layout) for rank in range(4)]
    assert reduce(Observation.merge, ranks) == calibrate(batches(*range(8)), layout)
    assert ranks[0].merge(*ranks[1:]).num_batches == 8


def test_other_stacks_get_limits_that_no_observed_batch_exceeds():
    seen = batches(*range(5))
    stackings = ["auto", "none", [["tags", "users"]], [["items", "tags", "places"], ["users"]]]
    layouts = [
        layout_of(stacks, rotation=rotation) for stacks in stackings for rotation in (None, 1)
    ]
    for observed_on in layouts:
        observation = calibrate(seen, observed_on)
        for layout in layouts:
            suggested = observation.suggest(layout, headroom=0, multiple=1)
            preprocessor = Preprocessor(layout, capacity=suggested)
            for batch in seen:
                preprocessor(**batch)  # raises CapacityError otherwise


def test_the_same_tables_in_another_order_keep_their_own_maxima_when_rotations_agree():
    layout = layout_of([["users", "items"]], rotation=0)
    observation = calibrate(batches(1, 2), layout)
    turned = layout_of([["items", "users"]], rotation=0)
    assert observation.suggest(turned)["items+users"] == observation.suggest(layout)["users+items"]
    # with other rotations other ids meet: the sum of the tables' maxima is the safe answer
    rotated = observation.suggest(
        layout_of([["users", "items"]], rotation=1), headroom=0, multiple=1
    )
    both = observation.tables["users"].max_ids + observation.tables["items"].max_ids
    assert rotated["users+items"].max_ids == both
    # and so it is with rows in blocks
    blocks = layout_of([["users", "items"]], rotation=0, blocks={"users": Block(125)})
    in_blocks = observation.suggest(blocks, headroom=0, multiple=1)
    assert in_blocks["users+items"].max_ids == both


def test_headroom_and_rounding():
    layout = make_layout(TABLES[:1])
    lengths = np.array([10, 0], np.int32)
    values = np.arange(0, 20, 2)
    observation = calibrate([{"keys": ["user"], "values": values, "lengths": lengths}], layout)
    assert observation.suggest(layout, headroom=0, multiple=1) == {
        "users": Capacity(max_ids=10, max_unique_ids=10, buffer_ids=16)
    }
    assert observation.suggest(layout, headroom=0.5) == {
        "users": Capacity(max_ids=16, max_unique_ids=16, buffer_ids=24)
    }
    # more distinct rows than the stack has never come
    huge = observation.suggest(layout, headroom=1000)["users"]
    assert huge.max_unique_ids == layout.stacks[0].rows_per_core < huge.max_ids


def test_store_keeps_everything_and_is_readable(tmp_path):
    observation = calibrate(batches(1, 2, 3), layout_of())
    path = tmp_path / "runs" / "capacity.json"
    observation.save(path)
    observation.save(path)  # overwrites
    assert Observation.load(path) == observation
    assert [entry.name for entry in path.parent.iterdir()] == ["capacity.json"]
    document = json.loads(path.read_text())
    assert document["version"] == 1
    for stack in document["stacks"]:  # as files were before tables had blocks
        for table in stack["tables"]:
            assert table.pop("block_rows") == 0
    older = tmp_path / "older.json"
    older.write_text(json.dumps(document))
    assert Observation.load(older) == observation
    assert document["tables"]["users"] == {
        "max_ids": observation.tables["users"].max_ids,
        "max_unique_ids": observation.tables["users"].max_unique_ids,
    }


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "capacity.json"
    observation = calibrate(batches(1), layout_of())
    observation.save(path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="disk full"):
        observation.merge(observation).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "another"}',
        '{"format": "torchrec_tpu capacity observation", "version": 2}',
        '{"format": "torchrec_tpu capacity observation", "version": 1, "num_cores": null}',
    ],
)
def test_a_file_that_is_no_observation_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "capacity.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"capacity\.json is not a torchrec_tpu capacity"):
        Observation.load(path)


def test_what_cannot_be_suggested_or_merged_is_refused():
    observation = calibrate(batches(1), layout_of())
    with pytest.raises(LayoutError, match="observed on 4 cores, asked for 8"):
        observation.suggest(make_layout(TABLES, num_devices=4))
    extra = dataclasses.replace(TABLES[0], name="new")
    with pytest.raises(LayoutError, match=r"tables \['new'\] were not observed"):
        observation.suggest(make_layout([*TABLES, extra], num_devices=2))
    with pytest.raises(LayoutError, match="different layouts do not merge"):
        observation.merge(calibrate(batches(1), layout_of("none")))
    with pytest.raises(ValueError, match="no batch was observed"):
        observe(layout_of()).suggest(layout_of())
    with pytest.raises(ValueError, match="headroom=-1"):
        observation.suggest(layout_of(), headroom=-1)


def test_table_limits_add_up_over_a_stack():
    layout = layout_of([["users", "items"]])
    limits = {
        "users": Capacity(max_ids=100, max_unique_ids=50, buffer_ids=400),
        "items": Capacity(max_ids=30, max_unique_ids=10, buffer_ids=120),
        "tags": Capacity(max_ids=8, max_unique_ids=8),
    }
    assert sum_of_table_limits(layout, limits) == {
        "users+items": Capacity(max_ids=130, max_unique_ids=60, buffer_ids=520),
        "tags": Capacity(max_ids=8, max_unique_ids=8),
    }
    with pytest.raises(LayoutError, match=r"tables \['items'\] have no limit but share the stack"):
        sum_of_table_limits(layout, {"users": limits["users"]})
    with pytest.raises(LayoutError, match="no table is named 'x'"):
        sum_of_table_limits(layout, {"x": limits["users"]})


@pytest.mark.parametrize(
    "limits",
    [
        {"max_ids": 0, "max_unique_ids": 1},
        {"max_ids": 1, "max_unique_ids": 0},
        {"max_ids": 8, "max_unique_ids": 8, "buffer_ids": 0},
        {"max_ids": 8, "max_unique_ids": 8, "buffer_ids": 12},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(LayoutError, match=r"Capacity\(max_ids="):
        Capacity(**limits)


def test_a_capacity_for_an_unknown_stack_is_refused():
    with pytest.raises(LayoutError, match=r"unknown stacks \['nope'\]; stacks: \['users"):
        Preprocessor(layout_of(), capacity={"nope": Capacity(max_ids=8, max_unique_ids=8)})


def test_a_capacity_error_changes_nothing_and_the_next_batch_is_right():
    layout = layout_of()
    good, bad = batches(3, 4)
    exact = calibrate([good], layout).suggest(layout, headroom=0, multiple=1)
    preprocessor = Preprocessor(layout, capacity=exact)
    batch = preprocessor(**good)
    before = batch.block.copy()
    with pytest.raises(TorchrecTpuError):
        preprocessor(**bad, out=batch)
    np.testing.assert_array_equal(batch.block, before)
    np.testing.assert_array_equal(preprocessor(**good, out=batch).block, before)
