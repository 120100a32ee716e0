"""Copies to a device, in a training loop on the CPU and with copies that finish late."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_tpu.sharding import transfer
from torchrec_tpu.sharding.embeddings import SparseCoreEmbeddingBagCollection
from torchrec_tpu.sparsecore.batch import SparseBatch
from torchrec_tpu.sparsecore.optimizers import adam
from torchrec_tpu.streams import Copier, device_mesh, on_device, rank_order, spmd_safe


def collection() -> SparseCoreEmbeddingBagCollection:
    torch.manual_seed(0)
    return SparseCoreEmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=8, name=name, feature_names=[f"{name}_id"]
            )
            for name, rows in (("user", 50), ("item", 30))
        ],
        optimizer=adam(lr=0.1),
    )


def batches(model: SparseCoreEmbeddingBagCollection, count: int = 12) -> Iterator[SparseBatch]:
    """Of different sizes, so that a staging buffer grows and is used in part."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        size = int(rng.integers(1, 40))
        lengths = torch.from_numpy(rng.integers(0, 5, 2 * size))
        values = torch.from_numpy(rng.integers(0, 30, int(lengths.sum())))
        yield model.preprocess(
            torchrec.KeyedJaggedTensor(keys=["user_id", "item_id"], values=values, lengths=lengths)
        )


def train(get_batches: Callable[[SparseCoreEmbeddingBagCollection], Iterator[SparseBatch]]) -> Any:
    model = collection()
    losses = []
    for batch in get_batches(model):
        loss = (model(batch).values() - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


class LateStream:
    """Copies that read and write memory only when somebody synchronises: as late as can be."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def use(self) -> contextlib.AbstractContextManager[Any]:
        waiting = self.waiting

        class Postpone(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function is torch.ops.aten.copy_.default:
                    waiting.append(lambda: function(*args, **(kwargs or {})))
                    return args[0]
                return function(*args, **(kwargs or {}))

        return Postpone()

    def synchronize(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ahead", [1, 3])
def test_training_on_copied_batches_is_training_on_the_batches(
    monkeypatch: pytest.MonkeyPatch, ahead: int, late: bool
) -> None:
    if late:
        monkeypatch.setattr(transfer, "_new_stream", lambda _: LateStream())
    losses, state = train(batches)
    copied_losses, copied_state = train(
        lambda model: (item.batch for item in on_device(batches(model), "cpu", ahead=ahead))
    )
    assert copied_losses == losses
    assert state.keys() == copied_state.keys()
    assert all(torch.equal(copied_state[name], value) for name, value in state.items())


def test_a_batch_that_was_handed_out_stays_as_it_is_while_staging_is_reused() -> None:
    model = collection()
    copier = Copier("cpu", num_staging=1)
    items = [(batch.block.copy(), copier.start(batch).wait()) for batch in batches(model)]
    for original, item in items:
        assert np.array_equal(item.block.numpy(), original)


def test_a_copy_is_over_before_its_staging_buffer_is_filled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for the first of the copies; it must not get the second one's ids."""
    monkeypatch.setattr(transfer, "_new_stream", lambda _: LateStream())
    model = collection()
    first, second = batches(model, 2)
    copier = Copier("cpu", num_staging=1)
    pending = copier.start(first)
    last = copier.start(second)
    assert np.array_equal(pending.wait().block.numpy(), first.block)
    assert np.array_equal(last.wait().block.numpy(), second.block)


def test_buffers_are_views_of_the_one_block() -> None:
    (batch,) = batches(collection(), 1)
    item = Copier("cpu").start(batch).wait()
    arrays = [
        array
        for stack in batch.stacks
        for array in (stack.row_pointers, stack.embedding_ids, stack.sample_ids, stack.gains)
    ]
    assert len(item.buffers) == len(arrays)
    begin = item.block.untyped_storage().data_ptr()
    for buffer, array in zip(item.buffers, arrays, strict=True):
        assert np.array_equal(buffer.numpy(), array, equal_nan=array.dtype == np.float32)
        assert buffer.untyped_storage().data_ptr() == begin


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_staging=0"):
        Copier("cpu", num_staging=0)
    with pytest.raises(ValueError, match="ahead=0"):
        next(on_device([], "cpu", ahead=0))


def test_without_a_tpu_functions_are_not_marked_and_ranks_are_in_order() -> None:
    def function() -> None:
        """Does nothing."""

    assert spmd_safe(function) is function
    assert rank_order([2, 3]) == [0, 1, 2, 3, 4, 5]


def test_without_a_tpu_a_mesh_is_of_the_cpu_and_in_order() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    try:
        mesh = device_mesh([2, 3], ["hosts", "chips"])
        assert (mesh.device_type, mesh.mesh_dim_names) == ("cpu", ("hosts", "chips"))
        assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
    finally:
        torch.distributed.destroy_process_group()
