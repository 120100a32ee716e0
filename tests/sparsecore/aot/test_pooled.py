"""Stacks of tables that stay with owners: where their rows are, and what ids travel."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from torchrec_tpu.sparsecore import Table
from torchrec_tpu.sparsecore.aot.pooled import (
    IDS_PER_LINE,
    PooledSlot,
    PooledStack,
    check_cover,
)
from torchrec_tpu.sparsecore.batch import SparseBatch
from torchrec_tpu.sparsecore.errors import CapacityError, LayoutError
from torchrec_tpu.sparsecore.preprocess import Preprocessor

BATCH_SIZE = 6
A = Table(name="a", num_embeddings=40, embedding_dim=20, combiner="sum", features=("f", "g"))
B = Table(name="b", num_embeddings=300, embedding_dim=16, combiner="mean", features=("h",))
SLOTS = (
    PooledSlot(table="a", device=0, row=0, num_rows=40, column=0),
    PooledSlot(table="a", device=2, row=0, num_rows=40, column=16),
    PooledSlot(table="b", device=2, row=0, num_rows=100, column=0),
    PooledSlot(table="b", device=0, row=100, num_rows=200, column=0),
)


def stack(**changes: Any) -> PooledStack:
    arguments: dict[str, Any] = {
        "name": "s", "tables": (A, B), "slots": SLOTS, "width": 16, "num_devices": 3,
        "cores_per_device": 2, "max_ids": (200, 0, 300),
    }  # fmt: skip
    return PooledStack(**(arguments | changes))


def batch(of: PooledStack, *, seed: int = 0, longest: int = 20) -> SparseBatch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, 3 * BATCH_SIZE).astype(np.int32)
    rows = np.repeat([40, 40, 300], lengths.reshape(3, -1).sum(1))
    values = (rng.random(len(rows)) * rows).astype(np.int64)
    preprocessor = Preprocessor(of.layout(batch_size=BATCH_SIZE), batch_size=BATCH_SIZE)
    return preprocessor(["f", "g", "h"], values, lengths=lengths)


def test_each_core_has_half_of_the_columns_of_its_device() -> None:
    packed_of = stack()
    assert (packed_of.core_width, packed_of.rows_per_core, packed_of.dummy_row) == (8, 248, 247)
    rng = np.random.default_rng(1)
    arrays = {t.name: rng.random((t.num_embeddings, t.embedding_dim)) for t in (A, B)}
    packed = packed_of.pack(arrays, dummy=7).reshape(3, 2, 248, 8)
    np.testing.assert_array_equal(packed[0, 1, :40], arrays["a"][:, 8:16])
    np.testing.assert_array_equal(packed[2, 0, :40, :4], arrays["a"][:, 16:])
    assert not packed[2, 0, :40, 4:].any()
    assert not packed[2, 1, :40].any()
    np.testing.assert_array_equal(packed[2, 1, 40:140], arrays["b"][:100, 8:])
    np.testing.assert_array_equal(packed[0, 0, 40:240], arrays["b"][100:, :8])
    assert (packed[:, :, 247] == 7).all()
    assert not packed[1, :, :247].any()


@pytest.mark.parametrize("is_vector", [False, True])
def test_what_is_packed_comes_back(is_vector: bool) -> None:
    of = stack()
    rng = np.random.default_rng(2)
    arrays = {
        t.name: rng.random((t.num_embeddings, t.embedding_dim)[: 1 if is_vector else 2])
        for t in (A, B)
    }
    back = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
    of.unpack(of.pack(arrays), back)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_blocks_are_those_of_every_core_feature_and_slot() -> None:
    of = stack()
    assert of.num_features == (3, 0, 3)
    assert [(b.slot.device, b.core, b.slot.table, b.feature) for b in of.blocks] == [
        (device, core, table, feature)
        for device in (0, 2)
        for core in (0, 1)
        for table, feature in (("a", "f"), ("a", "g"), ("b", "h"))
    ]


def test_every_id_travels_to_each_of_its_owners_in_ascending_samples() -> None:
    """Decoded from the lines as an owner would, against the batch itself."""
    of, device = stack(), 1
    ids = batch(of)
    header, lines = of.pack_ids(ids, device=device)
    assert header[0] == device
    np.testing.assert_array_equal(header[1:], -(-of.count_ids(ids) // IDS_PER_LINE))
    words = lines.reshape(-1, of.words_per_id, IDS_PER_LINE)
    starts = np.cumsum([0, *of.lines])
    per_device = of.max_features * BATCH_SIZE
    for owner in (0, 2):
        part = words[starts[owner] : starts[owner + 1]]
        rows, samples, gains = (part[:, word].ravel() for word in range(3))
        assert (np.diff(samples) >= 0).all()
        assert ((samples >= device * per_device) & (samples < (device + 1) * per_device)).all()
        is_id = rows != of.dummy_row
        assert not gains[~is_id].any()
        assert is_id[: header[1 + owner] * IDS_PER_LINE].sum() == of.count_ids(ids)[owner]
        found = sorted(
            zip(
                rows[is_id].tolist(),
                (samples[is_id] - device * per_device).tolist(),
                gains[is_id].view(np.float32).tolist(),
                strict=True,
            )
        )
        assert found == expected(of, ids, owner)


def expected(of: PooledStack, ids: SparseBatch, owner: int) -> list[tuple[int, int, float]]:
    """(row, sample, gain) of all ids of one owner."""
    found, row, block = [], 0, 0
    for slot in of.of_device[owner]:
        buffers = ids.stacks[[A, B].index(of.table(slot.table))]
        for at in range(int(buffers.row_pointers[0])):
            id_ = int(buffers.embedding_ids[at])
            if slot.row <= id_ < slot.row + slot.num_rows:
                sample = int(buffers.sample_ids[at]) + block * BATCH_SIZE
                found.append((row + id_ - slot.row, sample, float(buffers.gains[at])))
        row += slot.num_rows
        block += len(of.table(slot.table).features)
    return sorted(found)


def test_bags_without_gains_travel_in_two_words() -> None:
    summed = dataclasses.replace(B, combiner="sum")
    of = stack(tables=(A, summed))
    assert (stack().words_per_id, of.words_per_id) == (3, 2)
    assert stack(tables=(A, summed), is_weighted=True).words_per_id == 3
    _, lines = of.pack_ids(batch(of), device=0)
    assert lines.shape == (2 + 3, 2 * IDS_PER_LINE)


def test_an_empty_batch_sends_nothing() -> None:
    of = stack()
    header, lines = of.pack_ids(batch(of, longest=1), device=2)
    assert header.tolist() == [2, 0, 0, 0]
    assert (lines.reshape(-1, 3, IDS_PER_LINE)[:, 0] == of.dummy_row).all()


def test_more_ids_than_there_is_room_for_are_refused() -> None:
    of = stack(max_ids=(10, 0, 300))
    with pytest.raises(CapacityError, match=r"stack 's': partition 2->0 needs \d+ ids, capacity"):
        of.pack_ids(batch(of), device=1)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"width": 8}, "not 8 columns, or a multiple, for each core"),
        ({"max_ids": (1, 1)}, "must be 3 numbers"),
        ({"max_ids": (1, 0, 0)}, "device 2 has slots and max_ids 0"),
        ({"slots": ()}, "no slots"),
        ({"tables": (A,)}, "slots are of"),
        ({"slots": (*SLOTS, dataclasses.replace(SLOTS[0], device=3))}, "outside"),
        ({"slots": (*SLOTS, dataclasses.replace(SLOTS[0], num_rows=41))}, "outside"),
        ({"slots": (*SLOTS, dataclasses.replace(SLOTS[0], column=20))}, "outside"),
        ({"tables": (A, dataclasses.replace(B, combiner="none"))}, "id by id"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        stack(**changes)


@pytest.mark.parametrize(
    ("slots", "match"),
    [
        (SLOTS[:-1], "table 'b' .* leave parts of it out"),
        ((*SLOTS, SLOTS[2]), "table 'b' .* overlap"),
        ((SLOTS[0], dataclasses.replace(SLOTS[1], column=12), *SLOTS[2:]), "table 'a' .* overlap"),
    ],
)
def test_every_element_of_a_table_has_one_place(slots: tuple[PooledSlot, ...], match: str) -> None:
    check_cover([stack()])
    with pytest.raises(LayoutError, match=match):
        check_cover([stack(slots=slots)])


def test_an_id_that_a_bag_has_twice_counts_twice_with_or_without_gains() -> None:
    for combiner, rows, gains in (("sum", [7, 7, 9], None), ("mean", [7, 9], [2 / 3, 1 / 3])):
        table = Table(
            name="a", num_embeddings=40, embedding_dim=16, combiner=combiner, features=("f",)
        )
        of = PooledStack(
            name="s",
            tables=(table,),
            slots=(PooledSlot(table="a", device=0, row=0, num_rows=40, column=0),),
            width=16,
            num_devices=1,
            cores_per_device=2,
            max_ids=(8,),
        )
        preprocessor = Preprocessor(of.layout(batch_size=1), batch_size=1)
        ids = preprocessor(["f"], np.array([7, 9, 7]), lengths=np.array([3]))
        assert of.count_ids(ids).tolist() == [len(rows)]
        words = of.pack_ids(ids, device=0)[1].reshape(of.words_per_id, IDS_PER_LINE)
        assert words[0, : len(rows)].tolist() == rows
        if gains is not None:
            np.testing.assert_allclose(words[2, : len(rows)].view(np.float32), gains)
