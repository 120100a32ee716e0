"""Batches on their way to a device.

A `Copier` moves the one block of a `SparseBatch` while the device computes on another. On the CPU
it does the same copies without streams, so that a training loop is the same on both.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_tpu.sparsecore.batch import SparseBatch

_ROLES: Final = 3  # of a stack's slots: embedding_ids, sample_ids, gains


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBatch:
    """A batch whose block is on a device.

    Attributes:
        batch: what is known of it on the host. On the CPU its arrays are views of `block`, so that
            a collection can look it up; else they are the caller's.
        block: int32, on the device.
    """

    batch: SparseBatch
    block: Tensor

    @property
    def batch_size(self) -> int:
        """Samples."""
        return self.batch.batch_size

    @property
    def num_samples(self) -> tuple[int, ...]:
        """As of SparseBatch."""
        return self.batch.num_samples

    @property
    def samples_per_core(self) -> tuple[int, ...]:
        """As of SparseBatch."""
        return self.batch.samples_per_core

    @property
    def lengths(self) -> npt.NDArray[np.int32] | npt.NDArray[np.int64] | None:
        """As of SparseBatch."""
        return self.batch.lengths

    @property
    def fingerprint(self) -> str:
        """Of the layout that it was made for."""
        return self.batch.fingerprint

    @property
    def buffers(self) -> list[Tensor]:
        """The `buffers` argument of the ops: 4 views of the block a stack."""
        views = []
        begin = 0
        for stack in self.batch.stacks:
            slots = stack.embedding_ids.size
            sizes = [stack.row_pointers.size, *[slots] * _ROLES]
            parts = torch.split(self.block[begin : begin + sum(sizes)], sizes)
            views += [*parts[:_ROLES], parts[_ROLES].view(torch.float32)]
            begin += sum(sizes)
        return views


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """A copy that was started."""

    _batch: DeviceBatch
    _stream: _Stream

    def wait(self) -> DeviceBatch:
        """The batch, once all of it is on the device."""
        self._stream.synchronize()
        return self._batch


class Copier:
    """Copies batches to a device from staging buffers that are used again and again.

    Each staging buffer has a stream of its own. Order comes from `Stream.synchronize` alone, on the
    host: in torch_tpu 0.2.0 waiting for an event or for another stream does nothing, and events
    know only of copies to the host. So a copy is awaited before the batch is handed out, and before
    its staging buffer is overwritten.

    Thread-safe; copies start one after the other.

    Args:
        device: where batches go.
        num_staging: copies that may be under way.

    >>> Copier("cpu").num_staging
    2
    """

    def __init__(self, device: torch.device | str, *, num_staging: int = 2) -> None:
        if num_staging < 1:
            raise ValueError(f"num_staging={num_staging} must be at least 1")
        self._device = torch.device(device)
        self._staging = deque(_Staging(_new_stream(self._device)) for _ in range(num_staging))
        self._lock = threading.Lock()

    @property
    def num_staging(self) -> int:
        """Copies that may be under way."""
        return len(self._staging)

    def start(self, batch: SparseBatch) -> Pending:
        """Starts a copy. The batch's own memory is free for reuse when this returns.

        Blocks while the copy is under way that last used the same staging buffer.
        """
        with self._lock:
            staging = self._staging[0]
            self._staging.rotate(-1)
            source = staging.fill(batch)
            with staging.stream.use():
                # New memory each time: the step before may still read the last block.
                block = torch.empty(source.numel(), dtype=torch.int32, device=self._device)
                block.copy_(source, non_blocking=True)
        if self._device.type == "cpu":
            batch = batch.with_block(block.numpy())
        return Pending(_batch=DeviceBatch(batch=batch, block=block), _stream=staging.stream)


class _Stream(Protocol):
    """What a copy needs of a stream."""

    def use(self) -> AbstractContextManager[Any]:
        """A block whose work goes to the stream."""

    def synchronize(self) -> None:
        """Blocks until all work of the stream is done."""


class _HostStream:
    """The CPU's: work is done when the call returns."""

    def use(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _DeviceStream:
    """A stream of an accelerator, by the names that torch's device modules share."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def use(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def synchronize(self) -> None:
        self._stream.synchronize()


def _new_stream(device: torch.device) -> _Stream:
    return _HostStream() if device.type == "cpu" else _DeviceStream(device)


class _Staging:
    """Host memory that one copy at a time is read from. It grows, and keeps its pages."""

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        self._memory = torch.empty(0, dtype=torch.int32)

    def fill(self, batch: SparseBatch) -> Tensor:
        """The batch's block, in this memory."""
        self.stream.synchronize()  # the copy before has read all of it
        size = batch.block.size
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.int32)
        np.copyto(self._memory.numpy()[:size], batch.block)
        return self._memory[:size]
