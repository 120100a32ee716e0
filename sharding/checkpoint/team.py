"""The processes that save or load one checkpoint together."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from torchrec_tpu.sharding.exchange import Exchange
from torchrec_tpu.sparsecore.errors import CheckpointError, PeerError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """One process, or the ranks of a group."""

    exchange: Exchange | None
    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order.

        Raises:
            CheckpointError: names the ranks that are missing.
        """
        if self.exchange is None:
            return [value]
        text = base64.b64encode(pickle.dumps(value)).decode()
        try:
            texts = self.exchange.agree(text)
        except PeerError as error:
            raise CheckpointError(str(error)) from error
        return [pickle.loads(base64.b64decode(text)) for text in texts if text is not None]

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


def team_of(group: dist.ProcessGroup | None, *, deadline_seconds: float) -> Team:
    """The ranks of a group, by default of the world; a single process without torch.distributed.

    They talk over a gloo group of their own, whatever the group's backend is: made at the first
    call, and kept.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Team(exchange=None)
    parent = dist.group.WORLD if group is None else group
    assert parent is not None
    if parent.size() == 1:
        return Team(exchange=None)
    known = _groups.get(parent.group_name)
    if known is None or known[0] is not parent:  # the name of a world that was started anew
        own = dist.new_group(
            dist.get_process_group_ranks(parent),
            backend="gloo",
            timeout=timedelta(seconds=deadline_seconds),
            use_local_synchronization=True,
        )
        _groups[parent.group_name] = known = (parent, own)
    exchange = Exchange(known[1], deadline_seconds=deadline_seconds)
    return Team(exchange=exchange, rank=exchange.rank, size=exchange.world_size)


_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Name of a group -> it, and that over which its checkpoints are agreed upon."""
