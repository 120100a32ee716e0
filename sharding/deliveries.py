"""What a sharded collection hands on with a batch, and the waits between its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyGetItemMixin
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from torchrec_tpu.sharding.routing import Arrival, Int64Array, Route
from torchrec_tpu.sparsecore.batch import SparseBatch
from torchrec_tpu.sparsecore.geometry import Geometry


@dataclass
class ShardedContext(Multistreamable):
    """What TorchRec's pipelines keep with a batch; all of ours is in the batch itself."""

    sharding_contexts: list[Any] = field(default_factory=list)

    def record_stream(self, stream: Any) -> None:
        """Does nothing: it has no tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """This rank's batch, before anything has travelled."""

    features: KeyedJaggedTensor
    batch: SparseBatch
    route: Route
    samples: dict[str, Tensor] | None  # by key, the bag of each sample; see kjt.py


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery(Multistreamable):
    """This rank's batch, and what arrived from all ranks for this rank's rows."""

    own: Prepared
    buffers: list[Tensor]  # of the own batch
    geometry: Geometry  # of the own batch
    arrival: Arrival
    num_rows: Int64Array  # (W, R) rows of each replicated table that each rank's batch touches

    def record_stream(self, stream: Any) -> None:
        """Does nothing: all of it is on the CPU."""


class Ids(Awaitable["Delivery"]):
    """The second wait: what the other ranks sent."""

    def __init__(self, finish: Callable[[], Delivery]) -> None:
        super().__init__()
        self._finish = finish

    def _wait_impl(self) -> Delivery:
        return self._finish()


class Counts(Awaitable[Awaitable["Delivery"]]):
    """The first wait: that all batches are good, and how much each rank sends."""

    def __init__(self, start: Callable[[], Awaitable[Delivery]]) -> None:
        super().__init__()
        self._start = start

    def _wait_impl(self) -> Awaitable[Delivery]:
        return self._start()


class PooledOutput(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]):
    """Pooled embeddings on their way; the first use waits for them."""

    def __init__(self, finish: Callable[[], KeyedTensor]) -> None:
        super().__init__()
        self._finish = finish

    def _wait_impl(self) -> KeyedTensor:
        return self._finish()


class SequenceOutput(LazyAwaitable[dict[str, JaggedTensor]]):
    """Sequence embeddings on their way; the first use waits for them."""

    def __init__(self, finish: Callable[[], dict[str, JaggedTensor]]) -> None:
        super().__init__()
        self._finish = finish

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        return self._finish()
