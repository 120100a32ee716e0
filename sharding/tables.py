"""The tensors that hold one rank's shards, and the first values of tables that are on meta.

Legend: V num_embeddings, D embedding_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_tpu.sharding.placements import Shard

ROWS_PER_DRAW = 1 << 16


def allocate(
    shards: Sequence[Shard], *, dtype: torch.dtype, requires_grad: bool
) -> tuple[nn.Parameter, list[Tensor]]:
    """One parameter for all shards of a table on a rank, and the view of each.

    Shards lie end to end: (rows of all shards, columns) when they are equally wide, else flat.
    """
    sizes = [shard.num_rows * shard.num_columns for shard in shards]
    storage = torch.empty(sum(sizes), dtype=dtype)
    views = [
        part.view(shard.num_rows, shard.num_columns)
        for part, shard in zip(torch.split(storage, sizes), shards, strict=True)
    ]
    if len({shard.num_columns for shard in shards}) == 1:
        storage = storage.view(-1, shards[0].num_columns)
    return nn.Parameter(storage, requires_grad=requires_grad), views


@torch.no_grad()
def fill(
    config: BaseEmbeddingConfig,
    shards: Sequence[Shard],
    views: Sequence[Tensor],
    source: Tensor,
    seed: int,
) -> None:
    """Gives shards their part of a table's values.

    Args:
        config: of the table.
        shards: of this rank.
        views: their tensors.
        source: (V, D) of the module that was sharded; on meta when it has no values yet. They are
            then drawn by the config's init_fn, `ROWS_PER_DRAW` rows at a time, each draw with a
            seed of its own: the same table in any world and any plan, and no rank holds all of it.
        seed: the same on all ranks.
    """
    if not source.is_meta:
        for shard, view in zip(shards, views, strict=True):
            rows = source[shard.row : shard.row + shard.num_rows]
            view.copy_(rows[:, shard.column : shard.column + shard.num_columns])
        return
    for first in range(0, config.num_embeddings, ROWS_PER_DRAW):
        last = min(first + ROWS_PER_DRAW, config.num_embeddings)
        wanted = [
            (shard, view)
            for shard, view in zip(shards, views, strict=True)
            if shard.row < last and shard.row + shard.num_rows > first
        ]
        if not wanted:
            continue
        rows = _drawn(config, last - first, f"{seed}/{config.name}/{first}")
        for shard, view in wanted:
            begin = max(shard.row, first)
            end = min(shard.row + shard.num_rows, last)
            view[begin - shard.row : end - shard.row] = rows[
                begin - first : end - first, shard.column : shard.column + shard.num_columns
            ]


def _drawn(config: BaseEmbeddingConfig, num_rows: int, key: str) -> Tensor:
    """Rows of a new table, from a seed that `key` names; torch's own state stays as it is."""
    rows = torch.empty(num_rows, config.embedding_dim)
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        assert config.init_fn is not None
        config.init_fn(rows)
    return rows
