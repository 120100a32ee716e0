"""Placements: what they accept, and the way to TorchRec's plans and back."""

import dataclasses

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_tpu.sharding.placements import PlacementKind, Shard, TablePlacement
from torchrec_tpu.sparsecore.errors import PlacementError

V, D, W = 10, 32, 4


def torchrec_plan(generator) -> ParameterSharding:
    """TorchRec's own entry for a (V, D) table on W ranks of two hosts."""
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t",
                num_embeddings=V,
                embedding_dim=D,
                feature_names=["f"],
                init_fn=lambda t: t,
            )
        ]
    )
    plan = construct_module_sharding_plan(
        ebc,
        {"t": generator},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=W // 2,
        world_size=W,
        device_type="cpu",
    )
    return plan["t"]


@pytest.mark.parametrize(
    ("generator", "placement"),
    [
        (row_wise(), TablePlacement.row_wise("t", V, D, world_size=W)),
        (table_wise(rank=2), TablePlacement.table_wise("t", V, D, rank=2)),
        (
            column_wise(ranks=[3, 0, 3, 1]),
            TablePlacement.column_wise("t", V, D, ranks=[3, 0, 3, 1]),
        ),
        (
            column_wise(size_per_rank=[4, 20, 8]),
            TablePlacement.column_wise("t", V, D, ranks=[0, 1, 2], widths=[4, 20, 8]),
        ),
        (data_parallel(), TablePlacement.data_parallel("t", V, D)),
    ],
    ids=["row", "table", "column", "columns of several widths", "replica"],
)
def test_placement_is_torchrecs_plan_and_back(generator, placement):
    theirs = torchrec_plan(generator)
    assert TablePlacement.from_parameter_sharding("t", theirs, (V, D)) == placement
    ours = placement.to_parameter_sharding(W)
    assert (ours.sharding_type, ours.ranks) == (theirs.sharding_type, theirs.ranks)
    assert ours.sharding_spec == theirs.sharding_spec
    assert ours.compute_kernel == (
        "dense" if placement.kind is PlacementKind.DATA_PARALLEL else "fused"
    )
    assert TablePlacement.from_parameter_sharding("t", ours, (V, D)) == placement


def test_rows_of_one_host_are_row_wise():
    placement = TablePlacement.from_parameter_sharding(
        "t", torchrec_plan(table_row_wise(host_index=1)), (V, D)
    )
    assert placement.kind is PlacementKind.ROW_WISE
    assert [(s.rank, s.row, s.num_rows) for s in placement.shards] == [(2, 0, 5), (3, 5, 5)]
    assert placement.block_rows == 5


@pytest.mark.parametrize(
    ("num_embeddings", "rows"),
    [(5, [2, 2, 1, 0]), (1, [1, 0, 0, 0]), (8, [2, 2, 2, 2]), (10, [3, 3, 3, 1])],
)
def test_row_wise_divides_as_torchrec_does(num_embeddings, rows):
    placement = TablePlacement.row_wise("t", num_embeddings, D, world_size=W)
    assert [shard.num_rows for shard in placement.shards] == rows
    assert [len(placement.local_shards(rank)) for rank in range(W)] == [min(n, 1) for n in rows]


def shard(rank, row, num_rows, column=0, num_columns=D):
    return Shard(rank=rank, row=row, num_rows=num_rows, column=column, num_columns=num_columns)


@pytest.mark.parametrize(
    ("kind", "shards", "message"),
    [
        ("row_wise", [shard(0, 0, 4), shard(1, 4, 2), shard(2, 6, 4)], "same number of rows"),
        ("row_wise", [shard(0, 0, 5), shard(2, 5, 5)], "consecutive ranks"),
        ("row_wise", [shard(0, 0, 5), shard(1, 5, 4)], "rows 0..9 in order"),
        ("row_wise", [shard(0, 0, 10, 0, 8)], "all columns"),
        ("row_wise", [], "rows 0..9 in order"),
        ("table_wise", [shard(0, 0, 9)], "whole table"),
        ("table_wise", [shard(-1, 0, 10)], "negative"),
        ("column_wise", [shard(0, 0, 10, 0, 8), shard(1, 0, 10, 9, 23)], "columns 0..31"),
        ("column_wise", [shard(0, 0, 5)], "all rows"),
        ("data_parallel", [shard(0, 0, 10)], "every rank has all of it"),
    ],
)
def test_shards_that_are_not_the_table_are_refused(kind, shards, message):
    with pytest.raises(PlacementError, match=message):
        TablePlacement(
            table="t",
            num_embeddings=V,
            embedding_dim=D,
            kind=PlacementKind(kind),
            shards=tuple(shards),
        )


def test_column_widths_must_add_up():
    with pytest.raises(PlacementError, match="32 in all"):
        TablePlacement.column_wise("t", V, D, ranks=[0, 1, 2])


def test_a_sharding_type_without_equivalent_is_named():
    theirs = dataclasses.replace(torchrec_plan(table_wise(rank=0)), sharding_type="grid_shard")
    with pytest.raises(PlacementError, match="'grid_shard' has no equivalent"):
        TablePlacement.from_parameter_sharding("t", theirs, (V, D))
    without_shards = dataclasses.replace(theirs, sharding_type="row_wise", sharding_spec=None)
    with pytest.raises(PlacementError, match="EnumerableShardingSpec"):
        TablePlacement.from_parameter_sharding("t", without_shards, (V, D))
