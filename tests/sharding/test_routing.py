"""Routers and receivers of several ranks in one process, and the native code below them."""

import numpy as np
import pytest
import torch

from torchrec_tpu.sharding.routing import WORDS_PER_ID, OwnedTable, Receiver, Router
from torchrec_tpu.sparsecore import _native, ops
from torchrec_tpu.sparsecore.layout import Block, Table
from torchrec_tpu.sparsecore.preprocess import Preprocessor
from torchrec_tpu.sparsecore.stacking import make_layout

POOL = _native.ThreadPool(2)
ROWS = {"a": 37, "b": 5}
DIMS = {"a": 8, "b": 3}
TABLES = [
    Table(name="a", num_embeddings=37, embedding_dim=8, combiner="sum", features=("f", "g")),
    Table(name="b", num_embeddings=5, embedding_dim=3, combiner="mean", features=("g",)),
]


def exchange(parts, counts):
    """(parts for each rank, how many each has) of every rank -> what each rank receives."""
    split = [torch.split(part, of_rank) for part, of_rank in zip(parts, counts, strict=True)]
    return [torch.cat([of_rank[to] for of_rank in split]) for to in range(len(parts))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_vectors_that_come_back_are_the_lookup(num_ranks):
    rng = np.random.default_rng(num_ranks)
    weights = {t.name: rng.random((t.num_embeddings, t.embedding_dim), np.float32) for t in TABLES}
    blocks = {"a": Block(-(-37 // num_ranks)), "b": Block(5, num_ranks - 1)}
    routes, batches, layouts, routers = [], [], [], []
    for rank in range(num_ranks):
        layout = make_layout(
            TABLES,
            num_devices=num_ranks,
            cores_per_device=1,
            num_local_devices=1,
            first_local_device=rank,
            stacks=[["a", "b"]],
            blocks=blocks,
        )
        batch_size = 4 + rank
        lengths = rng.integers(0, 4, 2 * batch_size).astype(np.int32)
        values = rng.integers(0, 5, lengths.sum())
        values[: lengths[:batch_size].sum()] += rng.integers(0, 33)  # f reaches all rows of a
        batch = Preprocessor(layout)(["f", "g"], values, lengths=lengths)
        routers.append(Router(layout, 1, POOL))
        routes.append(routers[-1].route(batch, layout.geometry(batch)))
        batches.append(batch)
        layouts.append(layout)

    words = [(route.num_slots.sum(axis=1) * WORDS_PER_ID).tolist() for route in routes]
    payloads = exchange([route.payload for route in routes], words)
    sent_back, sizes = [], []
    for rank, layout in enumerate(layouts):
        first = rank * blocks["a"].rows
        local = {"a": weights["a"][first : first + blocks["a"].rows]}
        if rank == num_ranks - 1:
            local["b"] = weights["b"]
        owned = [
            OwnedTable(index=index, num_rows=len(local[place.table.name]))
            for index, place in enumerate(layout.stack_order_tables)
            if place.table.name in local
        ]
        arrival = Receiver(layout, 1, owned).receive(
            np.stack([route.num_slots[rank] for route in routes]),
            np.stack([route.num_samples[rank] for route in routes]),
            payloads[rank],
        )
        vectors = ops.sparse_dense_matmul(
            arrival.buffers,
            [torch.from_numpy(local[name]) for name in arrival.tables],
            arrival.geometry.encode(),
            [arrival.num_floats],
        )
        packed = arrival.packed(vectors)
        assert torch.equal(arrival.packed(arrival.unpacked(packed)), packed)
        sent_back.append(packed)
        sizes.append(arrival.floats_of_ranks)
    returned = exchange(sent_back, sizes)

    for rank, (route, batch, layout) in enumerate(zip(routes, batches, layouts, strict=True)):
        found = np.zeros((batch.batch_size, 19), np.float32)
        counts = (route.num_samples * routers[rank].widths).sum(axis=1).tolist()
        for owner, part in enumerate(torch.split(returned[rank], counts)):
            _native.add_vectors(
                POOL,
                part.numpy(),
                route.offsets[owner],
                route.num_samples[owner],
                routers[rank].widths,
                found.reshape(-1),
            )
        wanted = ops.sparse_dense_matmul(
            ops.as_tensors(batch),
            [torch.from_numpy(weights[p.table.name]) for p in layout.stack_order_tables],
            layout.geometry(batch).encode(),
            [batch.batch_size, 19],
        )
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-6)
        # exactly one vector for every (owner, sample) with an id there
        for offsets in route.offsets:
            assert len(np.unique(offsets)) == len(offsets)


def test_samples_are_numbered_in_the_order_of_their_slots():
    numbers, samples = np.full((2, 16), -1, np.int32)
    counts = np.empty((2, 2), np.int64)
    _native.number_samples(
        POOL,
        np.array([4, 10], np.int32),
        np.array([0, 0, 3, 8, 9, 9, 9, 9, 1, 9, 0, 0, 0, 0, 0, 0], np.int32),
        np.array([5, 2, 5, 7, 0, 0, 0, 0, 2, 6, 0, 0, 0, 0, 0, 0], np.int32),
        np.array([0, 8], np.int32),
        8,
        2,
        numbers,
        samples,
        counts,
    )
    assert numbers[:4].tolist() == [0, 1, 0, 2]
    assert samples[:3].tolist() == [5, 2, 7]
    assert numbers[8:10].tolist() == [0, 1]
    assert samples[8:10].tolist() == [2, 6]
    assert counts.tolist() == [[2, 1], [1, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_ids": np.full(8, 8, np.int32)}, "sample 8 of slot 0 is not in 0..7"),
        ({"row_pointers": np.array([9], np.int32)}, "row pointer 9"),
        ({"numbers": np.empty(7, np.int32)}, "sizes do not fit"),
    ],
)
def test_slots_that_contradict_themselves_are_refused(change, message):
    arguments = {
        "row_pointers": np.array([8], np.int32),
        "embedding_ids": np.zeros(8, np.int32),
        "sample_ids": np.zeros(8, np.int32),
        "table_rows": np.zeros(1, np.int32),
        "num_samples": 8,
        "num_partitions": 1,
        "numbers": np.empty(8, np.int32),
        "samples": np.empty(8, np.int32),
        "counts": np.empty((1, 1), np.int64),
    }
    _native.number_samples(POOL, **arguments)
    with pytest.raises(ValueError, match=message):
        _native.number_samples(POOL, **{**arguments, **change})


def test_vectors_are_gathered_and_added():
    spread = np.arange(12, dtype=np.float32)
    offsets, counts, widths = (np.array(x, np.int64) for x in ([4, 0, 9], [2, 1], [2, 3]))
    packed = np.empty(7, np.float32)
    _native.gather_vectors(POOL, spread, offsets, counts, widths, 2.0, packed)
    assert packed.tolist() == [2.0, 2.5, 0.0, 0.5, 4.5, 5.0, 5.5]
    _native.add_vectors(POOL, packed, offsets, counts, widths, spread)
    assert spread.tolist() == [0.0, 1.5, 2.0, 3.0, 6.0, 7.5, 6.0, 7.0, 8.0, 13.5, 15.0, 16.5]


@pytest.mark.parametrize(
    ("offsets", "counts", "message"),
    [
        ([4, 0, 10], [2, 1], "outside 12"),
        ([-1, 0, 9], [2, 1], "outside 12"),
        ([4, 0, 9], [2, 2], "run 1 has 2 vectors"),
        ([4, 0, 9], [3, 0], "do not fit"),
    ],
)
def test_vectors_outside_their_buffer_are_refused(offsets, counts, message):
    spread, packed = np.zeros(12, np.float32), np.zeros(7, np.float32)
    runs = (np.array(offsets, np.int64), np.array(counts, np.int64), np.array([2, 3], np.int64))
    with pytest.raises(ValueError, match=message):
        _native.gather_vectors(POOL, spread, *runs, 1.0, packed)
    with pytest.raises(ValueError, match=message):
        _native.add_vectors(POOL, packed, *runs, spread)
