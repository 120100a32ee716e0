"""The shards of one rank as TorchRec's distributed tensors, which alias them, and back.

Legend: V num_embeddings, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as AlongDim
from torch.distributed.tensor.placement_types import Placement
from torchrec.distributed.sharding_plan import placement as device_of
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardingEnv

from torchrec_tpu.sharding.placements import PlacementKind, Shard, TablePlacement
from torchrec_tpu.sparsecore.errors import StateDictError

_DTENSOR_PLACEMENTS: Final[dict[PlacementKind, Placement]] = {
    PlacementKind.ROW_WISE: AlongDim(0),
    PlacementKind.COLUMN_WISE: AlongDim(1),
    PlacementKind.TABLE_WISE: Replicate(),  # TorchRec's word for "on one rank"
}

Local = Sequence[tuple[Shard, Tensor]]
"""Shards of one rank with their tensors: (num_rows, num_columns) each, or (num_rows,)."""


def global_tensor(
    placement: TablePlacement, local: Local, env: ShardingEnv, *, dtype: torch.dtype, ndim: int = 2
) -> ShardedTensor | DTensor:
    """One table, or one optimizer state of it, over the shards of all ranks; no collective.

    A state of one number per row is (V,); of a COLUMN_WISE table, whose shards each have one, it
    is these end to end, as in TorchRec.

    Args:
        placement: of the table, not replicated.
        local: what this rank has, empty shards included; the result aliases it.
        env: says whether a DTensor is wanted.
        dtype: of the tensors.
        ndim: 2, or 1 for a state of one number per row.
    """
    metadata = [_metadata(placement, shard, env, ndim) for shard in placement.shards]
    by_shard = dict(zip(placement.shards, metadata, strict=True))
    size = torch.Size([placement.num_embeddings, placement.embedding_dim])
    if ndim == 1:
        size = torch.Size([sum(m.shard_sizes[0] for m in metadata)])
    if env.output_dtensor:
        along = _DTENSOR_PLACEMENTS[placement.kind] if ndim == 2 else AlongDim(0)
        mesh = env.device_mesh
        assert mesh is not None
        return DTensor.from_local(
            local_tensor=LocalShardsWrapper(
                local_shards=[tensor for _, tensor in local],
                local_offsets=[tuple(by_shard[shard].shard_offsets) for shard, _ in local],
            ),
            device_mesh=mesh,
            placements=(along,) * mesh.ndim,
            shape=size,
            stride=(placement.embedding_dim, 1) if ndim == 2 else (1,),
            run_check=False,
        )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [TensorShard(tensor, by_shard[shard]) for shard, tensor in local],
        ShardedTensorMetadata(
            shards_metadata=metadata,
            size=size,
            tensor_properties=TensorProperties(dtype=dtype),
        ),
        process_group=env.process_group,
    )


def parts(
    placement: TablePlacement, local: Local, value: Any, *, name: str
) -> list[tuple[Tensor, Tensor]]:
    """What of a state dict's entry belongs into this rank's shards; see `copy`.

    A whole matrix of another shape is refused by all ranks, those without a shard among them.

    Args:
        placement: of the table.
        local: destination.
        value: the whole tensor, or one that is sharded as this table is.
        name: for errors.

    Returns:
        (shard, part of the value) each.

    Raises:
        StateDictError: another shape, or other shards.
    """
    whole = placement.num_embeddings, placement.embedding_dim
    if not local and isinstance(value, Tensor) and value.ndim == 2 and tuple(value.shape) != whole:
        raise StateDictError(f"{name!r} has shape {tuple(value.shape)}, expected {whole}")
    return [(tensor, _part(placement, shard, tensor, value, name)) for shard, tensor in local]


def copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies parts into shards, once all of them are known to fit."""
    with torch.no_grad():
        for tensor, part in pairs:
            tensor.copy_(part)


def _part(placement: TablePlacement, shard: Shard, tensor: Tensor, value: Any, name: str) -> Tensor:
    """What of `value` belongs into one shard."""
    first = _offsets(placement, shard, tensor.ndim)
    shards: list[tuple[tuple[int, ...], Tensor]]
    if isinstance(value, ShardedTensor):
        shards = [(tuple(s.metadata.shard_offsets), s.tensor) for s in value.local_shards()]
    elif isinstance(value, DTensor) and isinstance(value.to_local(), LocalShardsWrapper):
        wrapper: Any = value.to_local()
        # an empty one has an offset nevertheless
        shards = list(zip(wrapper.local_offsets(), wrapper.local_shards(), strict=False))
    elif type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        whole = (placement.num_embeddings, placement.embedding_dim)[: tensor.ndim]
        if tuple(value.shape) == whole:
            rows = value[shard.row : shard.row + shard.num_rows]
            return (
                rows
                if tensor.ndim == 1
                else rows[:, shard.column : shard.column + shard.num_columns]
            )
        shards = [(first, value)] if value.shape == tensor.shape else []
    else:
        raise StateDictError(
            f"{name!r} is a {type(value).__name__}, expected a Tensor, ShardedTensor or DTensor"
        )
    for offsets, source in shards:
        if tuple(offsets) == first and source.shape == tensor.shape:
            return source
    raise StateDictError(
        f"{name!r}: this rank needs {tuple(tensor.shape)} from {first} on, the state dict has "
        f"{[(tuple(at), tuple(source.shape)) for at, source in shards] or tuple(value.shape)}; "
        "load_checkpoint brings checkpoints of other plans into this one"
    )


def _offsets(placement: TablePlacement, shard: Shard, ndim: int) -> tuple[int, ...]:
    if ndim == 2:
        return shard.row, shard.column
    if placement.kind is PlacementKind.COLUMN_WISE:
        return (placement.shards.index(shard) * placement.num_embeddings,)
    return (shard.row,)


def _metadata(
    placement: TablePlacement, shard: Shard, env: ShardingEnv, ndim: int
) -> ShardMetadata:
    group = env.process_group
    rank = shard.rank if group is None else dist.get_global_rank(group, shard.rank)
    return ShardMetadata(
        shard_offsets=list(_offsets(placement, shard, ndim)),
        shard_sizes=[shard.num_rows, shard.num_columns][:ndim],
        placement=device_of("cpu", rank, 1),
    )
