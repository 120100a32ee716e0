"""Where the rows and columns of each table live, as shards on ranks; to and from TorchRec's plans.

Legend: V num_embeddings, D embedding_dim, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import ParameterSharding

from torchrec_tpu.sparsecore.errors import PlacementError


class PlacementKind(StrEnum):
    """How a table is spread over ranks; the values are those of TorchRec's ShardingType."""

    ROW_WISE = "row_wise"
    """Equal blocks of rows on consecutive ranks; the last one may be smaller."""
    TABLE_WISE = "table_wise"
    """All of it on one rank."""
    COLUMN_WISE = "column_wise"
    """Blocks of columns, each with all rows."""
    DATA_PARALLEL = "data_parallel"
    """A copy on every rank."""


_KINDS: Final = {
    **{kind.value: kind for kind in PlacementKind},
    "table_row_wise": PlacementKind.ROW_WISE,  # rows over the ranks of one host
    "table_column_wise": PlacementKind.COLUMN_WISE,
}
"""TorchRec's ShardingType values that are one of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rectangle of a table on one rank."""

    rank: int
    row: int  # first
    num_rows: int  # 0 on ranks that are left over when a table has few rows
    column: int  # first
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlacement:
    """The shards of one table; together they are the table, and none overlap.

    Attributes:
        table: name.
        num_embeddings: V.
        embedding_dim: D.
        kind: how `shards` divide the table.
        shards: in the order of rows or columns; () for DATA_PARALLEL.

    Raises:
        PlacementError: the shards are not what `kind` says.

    >>> [shard.num_rows for shard in TablePlacement.row_wise("t", 10, 8, world_size=4).shards]
    [3, 3, 3, 1]
    """

    table: str
    num_embeddings: int
    embedding_dim: int
    kind: PlacementKind
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise PlacementError(
                f"table {self.table!r} ({self.num_embeddings}, {self.embedding_dim}), {self.kind}: "
                f"{problem}; shards: {[(s.rank, _rectangle(s)) for s in self.shards]}"
            )

    @classmethod
    def row_wise(
        cls, table: str, num_embeddings: int, embedding_dim: int, *, world_size: int
    ) -> Self:
        """ceil(V / W) rows on each rank; on the last ones what is left, which may be nothing."""
        block = -(-num_embeddings // world_size)
        starts = [min(rank * block, num_embeddings) for rank in range(world_size + 1)]
        return cls(
            table=table,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            kind=PlacementKind.ROW_WISE,
            shards=tuple(
                Shard(
                    rank=rank,
                    row=starts[rank],
                    num_rows=starts[rank + 1] - starts[rank],
                    column=0,
                    num_columns=embedding_dim,
                )
                for rank in range(world_size)
            ),
        )

    @classmethod
    def table_wise(cls, table: str, num_embeddings: int, embedding_dim: int, *, rank: int) -> Self:
        """The whole table on one rank."""
        return cls(
            table=table,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            kind=PlacementKind.TABLE_WISE,
            shards=(
                Shard(
                    rank=rank, row=0, num_rows=num_embeddings, column=0, num_columns=embedding_dim
                ),
            ),
        )

    @classmethod
    def column_wise(
        cls,
        table: str,
        num_embeddings: int,
        embedding_dim: int,
        *,
        ranks: Sequence[int],
        widths: Sequence[int] | None = None,
    ) -> Self:
        """Columns on `ranks`, in order; a rank may come again. Equal widths when None.

        Raises:
            PlacementError: the widths do not add up to D, or D cannot be divided equally.
        """
        if widths is None:
            widths = [embedding_dim // max(len(ranks), 1)] * len(ranks)
        if len(widths) != len(ranks) or sum(widths) != embedding_dim:
            raise PlacementError(
                f"table {table!r}: {embedding_dim} columns cannot go to ranks {list(ranks)} in "
                f"widths {list(widths)}; give one width for each rank, {embedding_dim} in all"
            )
        return cls(
            table=table,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            kind=PlacementKind.COLUMN_WISE,
            shards=tuple(
                Shard(
                    rank=rank,
                    row=0,
                    num_rows=num_embeddings,
                    column=sum(widths[:index]),
                    num_columns=width,
                )
                for index, (rank, width) in enumerate(zip(ranks, widths, strict=True))
            ),
        )

    @classmethod
    def data_parallel(cls, table: str, num_embeddings: int, embedding_dim: int) -> Self:
        """A copy on every rank."""
        return cls(
            table=table,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            kind=PlacementKind.DATA_PARALLEL,
            shards=(),
        )

    @classmethod
    def from_parameter_sharding(
        cls, table: str, sharding: ParameterSharding, shape: Sequence[int]
    ) -> Self:
        """The placement of one entry of TorchRec's sharding plan.

        Args:
            table: name.
            sharding: the entry.
            shape: (V, D).

        Raises:
            PlacementError: a sharding type without an equivalent here, or shards that do not fit.
        """
        kind = _KINDS.get(sharding.sharding_type)
        if kind is None:
            raise PlacementError(
                f"table {table!r}: sharding type {sharding.sharding_type!r} has no equivalent "
                f"here; use one of {sorted(_KINDS)}"
            )
        num_embeddings, embedding_dim = shape
        shards: list[Shard] = []
        if kind is not PlacementKind.DATA_PARALLEL:
            spec = sharding.sharding_spec
            if not isinstance(spec, EnumerableShardingSpec):
                raise PlacementError(
                    f"table {table!r}: {kind} needs an EnumerableShardingSpec, which lists its "
                    f"shards, got {type(spec).__name__}"
                )
            ranks = sharding.ranks or [_rank_of(table, shard) for shard in spec.shards]
            if len(ranks) != len(spec.shards):
                raise PlacementError(f"table {table!r}: {len(spec.shards)} shards, ranks {ranks}")
            for rank, shard in zip(ranks, spec.shards, strict=True):
                (row, column), (num_rows, num_columns) = shard.shard_offsets, shard.shard_sizes
                shards.append(
                    Shard(
                        rank=rank,
                        row=row,
                        num_rows=num_rows,
                        column=column,
                        num_columns=num_columns,
                    )
                )
        return cls(
            table=table,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            kind=kind,
            shards=tuple(shards),
        )

    def to_parameter_sharding(
        self, world_size: int, device_type: str = "cpu", *, local_size: int | None = None
    ) -> ParameterSharding:
        """This placement as an entry of TorchRec's sharding plan.

        Args:
            world_size: W; a copy goes to each of them.
            device_type: "cpu" or "tpu".
            local_size: ranks of a host, which number its devices; as TorchRec finds it when None.
        """
        is_replicated = self.kind is PlacementKind.DATA_PARALLEL
        kernel = EmbeddingComputeKernel.DENSE if is_replicated else EmbeddingComputeKernel.FUSED
        if local_size is None and device_type != "cpu":
            local_size = get_local_size(world_size)
        return ParameterSharding(
            sharding_type=self.kind.value,
            compute_kernel=kernel.value,
            ranks=list(range(world_size)) if is_replicated else [s.rank for s in self.shards],
            sharding_spec=None
            if is_replicated
            else EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=[shard.row, shard.column],
                        shard_sizes=[shard.num_rows, shard.num_columns],
                        placement=placement(device_type, shard.rank, local_size or world_size),
                    )
                    for shard in self.shards
                ]
            ),
        )

    @property
    def block_rows(self) -> int:
        """Rows of a full shard: V for all but ROW_WISE."""
        is_row_wise = self.kind is PlacementKind.ROW_WISE
        return self.shards[0].num_rows if is_row_wise else self.num_embeddings

    def local_shards(self, rank: int) -> tuple[Shard, ...]:
        """The non-empty shards of one rank; () of a replicated table."""
        return tuple(s for s in self.shards if s.rank == rank and s.num_rows)

    def _problem(self) -> str | None:
        """What is wrong with the shards."""
        rows, columns = self.num_embeddings, self.embedding_dim
        match self.kind:
            case PlacementKind.DATA_PARALLEL:
                return "it has shards, but every rank has all of it" if self.shards else None
            case PlacementKind.TABLE_WISE:
                if [_rectangle(s) for s in self.shards] != [(0, rows, 0, columns)]:
                    return "the one shard must be the whole table"
            case PlacementKind.COLUMN_WISE:
                if any((s.row, s.num_rows) != (0, rows) for s in self.shards):
                    return "every shard must have all rows"
                if not _tiles([(s.column, s.num_columns) for s in self.shards], columns) or any(
                    s.num_columns == 0 for s in self.shards
                ):
                    return f"the shards must be columns 0..{columns - 1} in order"
            case PlacementKind.ROW_WISE:
                if any((s.column, s.num_columns) != (0, columns) for s in self.shards):
                    return "every shard must have all columns"
                if not _tiles([(s.row, s.num_rows) for s in self.shards], rows):
                    return f"the shards must be rows 0..{rows - 1} in order"
                block = self.shards[0].num_rows
                if any(s.num_rows != min(block, rows - s.row) for s in self.shards):
                    return "all shards but the last must have the same number of rows"
                first = self.shards[0].rank
                if any(s.rank != first + at for at, s in enumerate(self.shards)):
                    return "the shards must be on consecutive ranks"
        return None if min(s.rank for s in self.shards) >= 0 else "ranks must not be negative"


def _rectangle(shard: Shard) -> tuple[int, int, int, int]:
    return shard.row, shard.num_rows, shard.column, shard.num_columns


def _tiles(pieces: Sequence[tuple[int, int]], total: int) -> bool:
    """Whether (start, size) pieces lie end to end from 0 to `total`."""
    end = 0
    for start, size in pieces:
        if start != end:
            return False
        end += size
    return end == total


def _rank_of(table: str, shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    if rank is None:
        raise PlacementError(f"table {table!r}: shard {shard} has no rank")
    return int(rank)
