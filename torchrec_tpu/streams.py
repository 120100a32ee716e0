"""Batches on a device ahead of time, and what torch_tpu offers for collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchrec_tpu.sharding.transfer import Copier, DeviceBatch, Pending
from torchrec_tpu.sparsecore import backends
from torchrec_tpu.sparsecore.batch import SparseBatch

__all__ = [
    "Copier",
    "DeviceBatch",
    "Pending",
    "device_mesh",
    "on_device",
    "rank_order",
    "spmd_safe",
]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def on_device(
    batches: Iterable[SparseBatch], device: torch.device | str, *, ahead: int = 1
) -> Iterator[DeviceBatch]:
    """The batches, each copied while those before it are used.

    Args:
        batches: preprocessed.
        device: where they go.
        ahead: copies to start before a batch is handed out.

    Raises:
        ValueError: ahead < 1.
    """
    if ahead < 1:
        raise ValueError(f"ahead={ahead} must be at least 1")
    copier = Copier(device, num_staging=ahead + 1)
    pending: deque[Pending] = deque()
    for batch in batches:
        pending.append(copier.start(batch))
        if len(pending) > ahead:
            yield pending.popleft().wait()
    while pending:
        yield pending.popleft().wait()


# ------------------------------------------------------------------------------------ collectives


def spmd_safe(function: FunctionT) -> FunctionT:
    """Marks a function that does the same on every rank: its collectives fuse with what is around.

    Without a TPU, it is the function itself. With one, tensors that go in or come out are
    materialised around each call; a function with control flow that depends on the rank deadlocks.
    """
    if backends.why_unavailable("tpu"):
        return function
    marked: FunctionT = _torch_tpu().distributed.spmd_safe(function)
    return marked


def rank_order(mesh_shape: Sequence[int]) -> list[int]:
    """Ranks in the order of a mesh's positions, row-major; neighbours are close on the network.

    `torch.distributed` must have been initialised on a TPU. Without one the order is 0, 1, 2, ...

    Args:
        mesh_shape: all ranks; the last axis communicates most.

    Raises:
        RuntimeError: what torch_tpu answers is no order of the ranks.

    >>> rank_order([2, 2])
    [0, 1, 2, 3]
    """
    identity = list(range(int(np.prod(mesh_shape))))
    if backends.why_unavailable("tpu"):
        return identity
    mesh: Tensor = _torch_tpu().distributed.topology_aware_mesh(tuple(mesh_shape))
    order = [int(rank) for rank in mesh.flatten().tolist()]
    if sorted(order) != identity:
        raise RuntimeError(f"topology_aware_mesh({tuple(mesh_shape)}) gave ranks {order}")
    return order


def device_mesh(mesh_shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """A DeviceMesh of all ranks in `rank_order`, on the TPU or, without one, on the CPU.

    `torch.distributed` must have been initialised.

    Args:
        mesh_shape: all ranks; the last axis communicates most.
        names: of the axes.
    """
    order = torch.tensor(rank_order(mesh_shape)).view(*mesh_shape)
    kind = "cpu" if backends.why_unavailable("tpu") else "tpu"
    return DeviceMesh(kind, order, mesh_dim_names=tuple(names))


def _torch_tpu() -> Any:
    return getattr(torch, "tpu")  # noqa: B009  # unknown to mypy
