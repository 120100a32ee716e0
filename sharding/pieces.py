"""The shards of all tables as one layout, whose cores are the ranks.

Rows of a table are together; each shard of columns, and each replica, is a table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_tpu.sharding.placements import PlacementKind, Shard, TablePlacement
from torchrec_tpu.sparsecore.errors import PlacementError
from torchrec_tpu.sparsecore.layout import (
    MAX_ROWS_PER_CORE,
    Block,
    Combiner,
    Layout,
    Table,
    round_up,
)
from torchrec_tpu.sparsecore.stacking import make_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One shard or replica as a table of the layout."""

    name: str
    table: str
    shard: Shard  # of a replica all of it, on this rank
    block: Block
    is_replica: bool


def placements_of(
    configs: Sequence[BaseEmbeddingConfig], plan: Mapping[str, ParameterSharding], world_size: int
) -> dict[str, TablePlacement]:
    """Where the plan puts each table, in config order.

    Raises:
        PlacementError: the plan lacks a table, or names ranks that are not there.
    """
    names = [config.name for config in configs]
    if missing := [name for name in names if name not in plan]:
        raise PlacementError(f"the plan has no placement for tables {missing}; it has {list(plan)}")
    placements = {
        config.name: TablePlacement.from_parameter_sharding(
            config.name, plan[config.name], (config.num_embeddings, config.embedding_dim)
        )
        for config in configs
    }
    for placement in placements.values():
        if ranks := [s.rank for s in placement.shards if s.rank >= world_size]:
            raise PlacementError(
                f"table {placement.table!r} is placed on ranks {ranks}, there are {world_size}: "
                "make the plan for this world"
            )
    return placements


def pieces_of(placements: Mapping[str, TablePlacement], rank: int) -> list[Piece]:
    """The tables of the layout, in config order: rows together, columns and replicas apart."""
    pieces = []
    for table, placement in placements.items():
        rows, columns = placement.num_embeddings, placement.embedding_dim
        match placement.kind:
            case PlacementKind.DATA_PARALLEL:
                whole = Shard(rank=rank, row=0, num_rows=rows, column=0, num_columns=columns)
                chosen = [(table, whole, rank)]
            case PlacementKind.ROW_WISE:
                own = [shard for shard in placement.shards if shard.rank == rank]
                shard = own[0] if own else placement.shards[0]
                chosen = [(table, shard, placement.shards[0].rank)]
            case PlacementKind.TABLE_WISE:
                chosen = [(table, placement.shards[0], placement.shards[0].rank)]
            case PlacementKind.COLUMN_WISE:
                chosen = [
                    (f"{table}[{s.column}:{s.column + s.num_columns}]", s, s.rank)
                    for s in placement.shards
                ]
        pieces += [
            Piece(
                name=name,
                table=table,
                shard=shard,
                block=Block(rows=placement.block_rows, first_core=first),
                is_replica=placement.kind is PlacementKind.DATA_PARALLEL,
            )
            for name, shard, first in chosen
        ]
    return pieces


def layout_of(
    pieces: Sequence[Piece],
    placements: Mapping[str, TablePlacement],
    features: Mapping[str, tuple[str, ...]],
    combiners: Mapping[str, Combiner],
    env: ShardingEnv,
) -> Layout:
    """All pieces on W cores. Those that travel share as few stacks as int32 rows allow."""
    travelling: list[list[str]] = [[]]
    rows = 0
    for piece in pieces:
        if piece.is_replica:
            continue
        rows += round_up(piece.block.rows, 8)
        if rows > MAX_ROWS_PER_CORE:
            travelling.append([])
            rows = round_up(piece.block.rows, 8)
        travelling[-1].append(piece.name)
    return make_layout(
        [
            Table(
                name=piece.name,
                num_embeddings=placements[piece.table].num_embeddings,
                embedding_dim=piece.shard.num_columns,
                combiner=combiners[piece.table],
                features=features[piece.table],
            )
            for piece in pieces
        ],
        num_devices=env.world_size,
        cores_per_device=1,
        num_local_devices=1,
        first_local_device=env.rank,
        stacks=[*travelling, [piece.name for piece in pieces if piece.is_replica]],
        blocks={piece.name: piece.block for piece in pieces},
    )
