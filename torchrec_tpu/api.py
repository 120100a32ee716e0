"""The front door: move a model's tables onto SparseCores, prepare its batches, find its limits."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack

import torch.distributed
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from torchrec_tpu.sharding.embeddings import Options, SparseCoreCollection, collections_in
from torchrec_tpu.sharding.optimizer_specs import Optimizers
from torchrec_tpu.sharding.swap import swap_embeddings
from torchrec_tpu.sparsecore.capacity import Capacity, Observation, observe
from torchrec_tpu.sparsecore.errors import TableError, TorchrecTpuError, UnshardedError

logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")


def shard(
    model: nn.Module, *, optimizer: Optimizers | None = None, **options: Unpack[Options]
) -> nn.Module:
    """Puts a model's embedding tables on the SparseCores of this process, in place.

    What was moved, and what not and why, is logged at INFO; `swap_embeddings` returns it.

    Args:
        model: any module with EmbeddingBagCollections or EmbeddingCollections inside.
        optimizer: for tables without `apply_optimizer_in_backward`: one spec, specs by table name,
            or a `fused_params` dict.
        options: see `Options`.

    Returns:
        The model; another object only when `model` was a collection itself.

    Raises:
        UnshardedError: this is one of several processes.
        TableError: no table could be moved; says why.
        OptimizerError, LayoutError: as `swap_embeddings`.

    >>> import torchrec, torchrec_tpu
    >>> model = nn.Sequential(torchrec.EmbeddingBagCollection([torchrec.EmbeddingBagConfig(
    ...     num_embeddings=100, embedding_dim=8, name="t", feature_names=["f"])]))
    >>> model = shard(model, optimizer=torchrec_tpu.adagrad(lr=0.5))
    >>> type(model[0]).__name__
    'SparseCoreEmbeddingBagCollection'
    """
    if (world_size := _world_size()) > 1:
        raise UnshardedError(
            f"this is one of {world_size} processes, and shard() places tables within one: train "
            "in a single process, or wrap the model: DistributedModelParallel(model, "
            "sharders=torchrec_tpu.sharders(...))"
        )
    report = swap_embeddings(model, optimizer=optimizer, **options)
    if not report.moved:
        raise TableError(f"the model has no embedding collection to shard; {report}")
    logger.info("%s", report)
    return report.model


@dataclasses.dataclass(slots=True, kw_only=True)
class StageTimes:
    """Where the time of one epoch went so far."""

    num_batches: int = 0
    load_seconds: float = 0.0  # in the loader, prefetch thread
    preprocess_seconds: float = 0.0  # in Collection.attach, prefetch thread
    wait_seconds: float = 0.0  # consumer, waiting for a prepared batch


class PreparedLoader(Generic[BatchT]):
    """A loader whose batches arrive preprocessed. Made by `prepare`.

    Each `iter()` is an epoch with a thread of its own, which ends when the epoch does, also when
    the consumer leaves early.

    Attributes:
        times: of the newest epoch.
    """

    def __init__(self, loader: Iterable[BatchT], model: nn.Module, *, prefetch: int) -> None:
        self.times = StageTimes()
        self._loader = loader
        self._model = model
        self._prefetch = prefetch

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return len(self._loader)

    def __iter__(self) -> Iterator[BatchT]:
        times = self.times = StageTimes()
        collections = [collection for _, collection in collections_in(self._model)]
        ready: queue.Queue[BatchT | _End] = queue.Queue(self._prefetch)
        stop = threading.Event()
        thread = threading.Thread(
            target=_produce,
            args=(self._loader, collections, ready, stop, times),
            name="torchrec_tpu prefetch",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                started = time.perf_counter()
                item = ready.get()
                times.wait_seconds += time.perf_counter() - started
                if isinstance(item, _End):
                    if item.error is not None:
                        raise item.error
                    return
                times.num_batches += 1
                yield item
        finally:
            stop.set()
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    ready.get_nowait()  # makes room for a put() that waits
                thread.join(timeout=0.01)


def prepare(
    loader: Iterable[BatchT], model: nn.Module, *, prefetch: int = 2
) -> PreparedLoader[BatchT]:
    """Preprocesses batches in a thread, ahead of the model.

    Every KJT in a batch (itself a KJT, or a tuple, list, dict, dataclass or Pipelineable that holds
    some) is preprocessed for every SparseCore collection whose keys it has. Results are those of
    the plain loader: a KJT that the model replaces or changes on the way is preprocessed again by
    the collection, and data errors are raised there.

    Args:
        loader: yields batches; iterated once an epoch.
        model: has the collections.
        prefetch: batches to keep ready.

    >>> import torch, torchrec, torchrec_tpu
    >>> model = torchrec_tpu.SparseCoreEmbeddingBagCollection([torchrec.EmbeddingBagConfig(
    ...     num_embeddings=100, embedding_dim=8, name="t", feature_names=["f"])])
    >>> kjt = torchrec.KeyedJaggedTensor(
    ...     keys=["f"], values=torch.tensor([5, 7]), lengths=torch.tensor([1, 1]))
    >>> [model(batch).values().shape for batch in prepare([kjt], model)]
    [torch.Size([2, 8])]
    """
    if prefetch < 1:
        raise ValueError(f"prefetch={prefetch} must be at least 1")
    return PreparedLoader(loader, model, prefetch=prefetch)


def calibrate(
    model: nn.Module,
    batches: Iterable[object],
    *,
    headroom: float = 0.25,
    path: str | os.PathLike[str] | None = None,
) -> dict[str, dict[str, Capacity]]:
    """Finds static limits for every SparseCore collection of a model from data like its own.

    With torch.distributed initialised every process must call it, with its own batches; all get the
    limits that suit all. Set the result to make a collection keep to it:

        for fqn, capacity in calibrate(model, batches).items():
            model.get_submodule(fqn).capacity = capacity

    Args:
        model: has the collections.
        batches: as the model gets them; KJTs are found as in `prepare`.
        headroom: what to add for batches to come, as a fraction.
        path: a directory for the observations, one JSON file a collection; `Observation.load` reads
            and `Observation.merge` joins them.

    Returns:
        FQN of the collection -> stack name -> limits.

    Raises:
        ValueError: no batch has a collection's keys, or headroom is negative.
    """
    collections = dict(collections_in(model))
    observations = {fqn: observe(module.layout) for fqn, module in collections.items()}
    for batch in batches:
        for kjt in kjts_in(batch):
            for fqn, module in collections.items():
                if has_keys(kjt, module):
                    seen = observe(module.layout, module.measure(kjt))
                    observations[fqn] = observations[fqn].merge(seen)
    if (world_size := _world_size()) > 1:
        of_ranks: list[dict[str, Observation]] = [{} for _ in range(world_size)]
        torch.distributed.all_gather_object(of_ranks, observations)
        observations = {
            fqn: of_ranks[0][fqn].merge(*(other[fqn] for other in of_ranks[1:]))
            for fqn in collections
        }
    if path is not None:
        for fqn, observation in observations.items():
            observation.save(Path(path) / f"{fqn or 'root'}.json")
    return {
        fqn: observations[fqn].suggest(module.layout, headroom=headroom)
        for fqn, module in collections.items()
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Last in the prefetch queue: the epoch is over, or this ended it."""

    error: BaseException | None = None


def _produce(
    loader: Iterable[object],
    collections: list[SparseCoreCollection],
    ready: queue.Queue[Any],
    stop: threading.Event,
    times: StageTimes,
) -> None:
    """The prefetch thread: loads and preprocesses until the loader ends or `stop` is set."""
    end = _End()
    try:
        started = time.perf_counter()
        for batch in loader:
            loaded = time.perf_counter()
            for kjt in kjts_in(batch):
                for collection in collections:
                    if has_keys(kjt, collection):
                        # The model may repair this KJT before its lookup: only that may complain.
                        with contextlib.suppress(TorchrecTpuError):
                            collection.attach(kjt)
            times.load_seconds += loaded - started
            times.preprocess_seconds += time.perf_counter() - loaded
            ready.put(batch)
            if stop.is_set():
                return
            started = time.perf_counter()
    except BaseException as error:
        end = _End(error=error)
    ready.put(end)


def _world_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def kjts_in(batch: object) -> Iterator[KeyedJaggedTensor]:
    """Every KJT in a batch: itself one, or a container of some."""
    if isinstance(batch, KeyedJaggedTensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from kjts_in(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from kjts_in(value)
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from kjts_in(getattr(batch, field.name))
    elif isinstance(batch, Pipelineable):
        yield from kjts_in(vars(batch))


def has_keys(kjt: KeyedJaggedTensor, collection: SparseCoreCollection) -> bool:
    """Whether a KJT has every feature that a collection looks up."""
    return {feature.key for feature in collection.layout.features} <= set(kjt.keys())
