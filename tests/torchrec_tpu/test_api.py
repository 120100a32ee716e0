"""shard, prepare and calibrate in one process."""

import itertools
import logging
import threading
import time
import traceback
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from twin import (
    assert_same_bits,
    bag_configs,
    gradient_like,
    outputs,
    pooled,
    random_kjt,
    sequence,
    sequence_configs,
    snapshot,
    train,
)

import torchrec_tpu
from torchrec_tpu.sharding.embeddings import SparseCoreCollection
from torchrec_tpu.sparsecore.capacity import Capacity, Observation
from torchrec_tpu.sparsecore.errors import CapacityError, IdRangeError, TableError


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "prefetch" in thread.name]


# ------------------------------------------------------------------------------------------- shard


def test_shard_swaps_in_place_and_logs_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(EmbeddingBagCollection(bag_configs()), nn.Embedding(4, 2))
    with caplog.at_level(logging.INFO, "torchrec_tpu.api"):
        sharded = torchrec_tpu.shard(model, optimizer=torchrec_tpu.sgd(lr=0.1), num_devices=2)
    assert sharded is model
    assert isinstance(model[0], torchrec_tpu.SparseCoreEmbeddingBagCollection)
    assert model[0].layout.num_devices == 2
    assert "moved: 3 tables" in caplog.text
    assert "nn.Embedding" in caplog.text


def test_shard_of_a_collection_returns_the_new_one() -> None:
    root = EmbeddingCollection(sequence_configs())
    sharded = torchrec_tpu.shard(root, optimizer=torchrec_tpu.sgd())
    assert isinstance(sharded, torchrec_tpu.SparseCoreEmbeddingCollection)


def test_shard_refuses_a_model_without_collections_and_says_what_there_was() -> None:
    with pytest.raises(TableError, match=r"(?s)no embedding collection.*nn\.EmbeddingBag"):
        torchrec_tpu.shard(nn.Sequential(nn.EmbeddingBag(4, 2)))


# ----------------------------------------------------------------------------------------- prepare

Pair = namedtuple("Pair", ["kjt", "label"])


@dataclass(frozen=True, slots=True)
class SlottedBatch:
    kjt: KeyedJaggedTensor


WRAPPERS: dict[str, tuple[Callable[[KeyedJaggedTensor], Any], Callable[[Any], Any]]] = {
    "kjt": (lambda kjt: kjt, lambda batch: batch),
    "tuple": (lambda kjt: (torch.zeros(1), kjt), lambda batch: batch[1]),
    "list": (lambda kjt: [kjt, 1], lambda batch: batch[0]),
    "namedtuple": (lambda kjt: Pair(kjt, 1), lambda batch: batch.kjt),
    "dict": (lambda kjt: {"x": {"y": kjt}}, lambda batch: batch["x"]["y"]),
    "dataclass": (SlottedBatch, lambda batch: batch.kjt),
    "torchrec Batch": (
        lambda kjt: Batch(torch.zeros(1), kjt, torch.zeros(1)),
        lambda batch: batch.sparse_features,
    ),
}


@pytest.mark.parametrize(("wrap", "unwrap"), WRAPPERS.values(), ids=WRAPPERS.keys())
def test_prepared_batches_are_used_and_give_the_same_bits(
    wrap: Callable[[KeyedJaggedTensor], Any],
    unwrap: Callable[[Any], KeyedJaggedTensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inline, ahead = pooled(), pooled()
    loader = torchrec_tpu.prepare([wrap(random_kjt(seed)) for seed in range(6)], ahead)
    here = threading.get_ident()
    threads = []
    preprocess = type(ahead).preprocess

    def recorded(self: Any, kjt: KeyedJaggedTensor) -> Any:
        threads.append(threading.get_ident())
        return preprocess(self, kjt)

    monkeypatch.setattr(type(ahead), "preprocess", recorded)
    for batch in loader:
        train(ahead, [unwrap(batch)])
    assert len(threads) == 6
    assert here not in threads
    train(inline, [random_kjt(0)])
    for seed in range(1, 6):
        output = outputs(inline, random_kjt(seed))
        output.backward(gradient_like(output, 0))
    assert_same_bits(snapshot(ahead), snapshot(inline))


def test_every_collection_of_a_model_finds_its_batch() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.sequences = pooled(), sequence()

    model = Both()
    (kjt,) = torchrec_tpu.prepare([random_kjt(0)], model)
    for collection in (model.bags, model.sequences):
        assert collection.attach(kjt) is collection.attach(kjt)
        assert collection._attached(kjt) is not None


def test_epochs_follow_each_other_and_the_length_is_the_loaders() -> None:
    loader = torchrec_tpu.prepare([random_kjt(seed) for seed in range(5)], pooled(), prefetch=1)
    assert len(loader) == 5
    for _ in range(3):
        assert len(list(loader)) == 5
        assert loader.times.num_batches == 5
    assert loader.times.preprocess_seconds > 0
    assert loader.times.load_seconds >= 0
    assert loader.times.wait_seconds > 0
    with pytest.raises(TypeError, match="generator has no length"):
        len(torchrec_tpu.prepare((random_kjt(0) for _ in range(2)), pooled()))
    with pytest.raises(ValueError, match="prefetch=0"):
        torchrec_tpu.prepare([], pooled(), prefetch=0)


def test_it_reads_ahead_as_far_as_asked_and_no_further() -> None:
    taken = []

    def loader() -> Iterator[KeyedJaggedTensor]:
        for seed in itertools.count():
            taken.append(seed)
            yield random_kjt(seed)

    epoch = iter(torchrec_tpu.prepare(loader(), pooled(), prefetch=3))
    next(epoch)
    deadline = time.monotonic() + 10
    while len(taken) < 5 and time.monotonic() < deadline:  # 1 used, 3 ready, 1 in the hand
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(taken) == 5
    epoch.close()  # type: ignore[attr-defined]


def test_a_consumer_that_leaves_early_ends_the_thread() -> None:
    for batch in torchrec_tpu.prepare((random_kjt(0) for _ in itertools.count()), pooled()):
        assert prefetch_threads()
        del batch
        break
    assert not prefetch_threads()


def test_an_error_of_the_consumer_ends_the_thread() -> None:
    def consume() -> None:
        for _ in torchrec_tpu.prepare((random_kjt(0) for _ in itertools.count()), pooled()):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        consume()
    assert not prefetch_threads()


def test_an_error_of_the_loader_arrives_in_order_with_its_traceback() -> None:
    def faulty_loader() -> Iterator[KeyedJaggedTensor]:
        yield random_kjt(0)
        yield random_kjt(1)
        raise RuntimeError("disk on fire")

    seen = []
    with pytest.raises(RuntimeError, match="disk on fire") as caught:
        seen.extend(torchrec_tpu.prepare(faulty_loader(), pooled()))
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "faulty_loader" in frames
    assert not prefetch_threads()


def test_data_errors_are_raised_where_the_batch_is_used() -> None:
    """As without prefetching: the model may still repair ids on the way to its tables."""
    bad = random_kjt(1)
    bad.values()[0] = 10**6
    collection = pooled()
    seen = []

    def epoch() -> None:
        for kjt in torchrec_tpu.prepare([random_kjt(0), bad, random_kjt(2)], collection):
            seen.append(kjt)
            collection(kjt)

    with pytest.raises(IdRangeError, match="1000000"):
        epoch()
    assert len(seen) == 2
    repaired = [
        KeyedJaggedTensor(kjt.keys(), kjt.values() % 7, lengths=kjt.lengths())
        for kjt in torchrec_tpu.prepare([random_kjt(0), bad], collection)
    ]
    train(collection, repaired)


def test_a_kjt_without_a_collections_keys_is_left_alone() -> None:
    other = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
    collection = pooled()
    (kjt,) = torchrec_tpu.prepare([other], collection)
    assert kjt is other
    assert collection._attached(kjt) is None


def test_batches_stay_valid_however_many_are_ready() -> None:
    """Buffers are reused only when nothing refers to them."""
    inline, ahead = pooled(), pooled()
    kjts = [random_kjt(seed, batch_size=20) for seed in range(12)]
    want = [outputs(inline, kjt) for kjt in kjts]
    ready = list(torchrec_tpu.prepare(kjts, ahead, prefetch=4))
    got = [outputs(ahead, kjt) for kjt in reversed(ready)]
    assert all(map(torch.equal, got, reversed(want)))
    for output in (*got, *reversed(want)):
        output.sum().backward()
    assert_same_bits(snapshot(ahead), snapshot(inline))


# --------------------------------------------------------------------------------------- calibrate


def test_calibrated_limits_suit_the_batches_they_came_from(tmp_path: Path) -> None:
    model = nn.ModuleDict({"bags": pooled(), "sequences": sequence()})
    batches = [(random_kjt(seed, batch_size=30), seed) for seed in range(4)]
    found = torchrec_tpu.calibrate(model, batches, headroom=0.0, path=tmp_path)
    assert found.keys() == {"bags", "sequences"}
    before = snapshot(model["bags"])
    for fqn, capacity in found.items():
        collection = model.get_submodule(fqn)
        assert isinstance(collection, SparseCoreCollection)
        assert capacity.keys() == {stack.name for stack in collection.layout.stacks}
        assert all(isinstance(limit, Capacity) for limit in capacity.values())
        collection.capacity = capacity
        with torch.no_grad():
            for kjt, _ in batches:
                outputs(collection, kjt)
        with pytest.raises(CapacityError, match="capacity is"):
            outputs(collection, random_kjt(0, batch_size=300))
        observation = Observation.load(tmp_path / f"{fqn}.json")
        assert observation.num_batches == 4
        assert observation.suggest(collection.layout, headroom=0.0) == capacity
    assert_same_bits(snapshot(model["bags"]), before)


def test_headroom_makes_limits_larger() -> None:
    batches = [random_kjt(0, batch_size=60)]
    (tight,) = torchrec_tpu.calibrate(pooled(), batches, headroom=0.0).values()
    (roomy,) = torchrec_tpu.calibrate(pooled(), batches, headroom=1.0).values()
    assert all(roomy[name].max_ids > tight[name].max_ids for name in tight)


def test_calibrate_without_a_fitting_batch_says_so() -> None:
    other = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="no batch"):
        torchrec_tpu.calibrate(pooled(), [other])
