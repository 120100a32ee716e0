"""The integers that travel with a batch."""

import re

import numpy as np
import pytest

from torchrec_tpu.sparsecore import (
    Block,
    Combiner,
    Geometry,
    SparseBatch,
    Stats,
    Table,
    make_layout,
)

EMPTY = np.zeros(0, np.int32)


def batch_of(layout, batch_size, num_samples, samples_per_core):
    stats = Stats(
        max_ids=EMPTY,
        max_unique_ids=EMPTY,
        required_slots=EMPTY,
        table_max_ids=EMPTY,
        table_max_unique_ids=EMPTY,
        num_invalid=EMPTY.astype(np.int64),
    )
    return SparseBatch(
        stacks=(),
        block=EMPTY,
        batch_size=batch_size,
        num_samples=num_samples,
        samples_per_core=samples_per_core,
        lengths=None,
        stats=stats,
        fingerprint=layout.fingerprint,
    )


def table(name, dim, features, combiner=Combiner.SUM):
    return Table(
        name=name, num_embeddings=50, embedding_dim=dim, combiner=combiner, features=features
    )


def test_pooled_outputs_are_columns_in_config_order():
    tables = [table("a", 3, ("x", "y")), table("b", 12, ("x",)), table("c", 5, ("z",))]
    layout = make_layout(tables, num_devices=2, stacks=[["b"], ["c", "a"]], blocks={"c": Block(20)})
    geometry = layout.geometry(batch_of(layout, 10, (10,) * 4, (3,) * 4))
    width = 3 + 3 + 12 + 5
    assert (geometry.num_cores, geometry.num_local_cores, geometry.num_stacks) == (4, 4, 2)
    assert geometry.tables == (
        # stack, rows, dim, row offset, rotation, first feature, features, rows of a block
        (0, 50, 12, 0, 0, 0, 1, 0),
        (1, 50, 5, 0, 0, 1, 1, 20),
        (1, 50, 3, 24, 2, 2, 2, 0),
    )
    assert [t.rows_per_core(4) for t in geometry.tables] == [16, 24, 16]
    assert [t.rows_per_core for t in layout.stack_order_tables] == [16, 24, 16]
    assert geometry.features == (
        # sample offset, samples per core, samples, output offset, output stride
        (0, 3, 10, 6, width),  # b.x
        (0, 3, 10, 18, width),  # c.z
        (3, 3, 10, 0, width),  # a.x
        (6, 3, 10, 3, width),  # a.y
    )


def test_sequence_outputs_follow_each_other_in_config_order():
    tables = [
        table("a", 3, ("x",), Combiner.NONE),
        table("b", 4, ("y",), Combiner.NONE),
        table("c", 5, ("z",)),
    ]
    layout = make_layout(tables, stacks=[["b", "a"], ["c"]])
    geometry = layout.geometry(batch_of(layout, 10, (7, 20, 10), (4, 10, 5)))
    pooled = 10 * 5
    assert geometry.features == (
        (0, 4, 7, pooled + 20 * 3, 4),  # b.y
        (4, 10, 20, pooled, 3),  # a.x
        (0, 5, 10, 0, 5),  # c.z
    )


def test_batches_of_many_sizes_each_get_their_own_geometry():
    layout = make_layout([table("a", 3, ("x",)), table("b", 4, ("y",))])
    for _ in range(2):
        for size in range(1, 40):
            geometry = layout.geometry(batch_of(layout, size, (size, size), (size, size)))
            assert [f[:3] for f in geometry.features] == [(0, size, size), (size, size, size)]


def test_decode_undoes_encode_and_refuses_other_ints():
    layout = make_layout([table("a", 3, ("x", "y")), table("b", 12, ("x",))])
    geometry = layout.geometry(batch_of(layout, 4, (4, 4, 4), (2, 2, 2)))
    ints = geometry.encode()
    assert Geometry.decode(ints) == geometry
    assert all(type(value) is int for value in ints)
    for wrong in (ints[:-1], [*ints, 0], [], ints[:4], [0, *ints[1:]], [*ints[:3], -1, *ints[4:]]):
        with pytest.raises(ValueError, match=re.escape(f"{len(wrong)} ints with header")):
            Geometry.decode(wrong)
