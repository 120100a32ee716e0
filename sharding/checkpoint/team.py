"""The processes that save or load one checkpoint together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torchrec_tpu.sparsecore.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """One process, or the ranks of a group."""

    group: dist.ProcessGroup | None
    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} has lost another rank, or one took too long: {error}"
            ) from error
        return values

    def agree(self, error: Exception | None) -> None:
        """Goes on when no rank has an error.

        Raises:
            Exception: this rank's own.
            CheckpointError: names the other ranks, and their errors.
        """
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise CheckpointError("; ".join(failed))


@contextmanager
def team_of(group: dist.ProcessGroup | None, *, deadline_seconds: float) -> Iterator[Team]:
    """The ranks of a group, by default of the world; a single process without torch.distributed.

    Objects travel over gloo, whatever the world's own backend is.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield Team(group=None)
    elif group is not None:
        yield Team(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))
    elif dist.get_world_size() == 1:
        yield Team(group=None)
    else:
        own = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_seconds))
        try:
            yield Team(group=own, rank=dist.get_rank(), size=dist.get_world_size())
        finally:
            dist.destroy_process_group(own)
