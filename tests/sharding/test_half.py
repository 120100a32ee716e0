"""Float16 tables: float32 arithmetic between a load and a store that rounds."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType
from twin import (
    assert_same_bits,
    bag_configs,
    gradient_like,
    outputs,
    random_kjt,
    sequence_configs,
    snapshot,
    train,
)

from torchrec_tpu import aot
from torchrec_tpu.sharding.embeddings import (
    SparseCoreCollection,
    SparseCoreEmbeddingBagCollection,
    SparseCoreEmbeddingCollection,
)
from torchrec_tpu.sharding.swap import swap_embeddings
from torchrec_tpu.sparsecore.errors import ProgramError
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad, adam, rowwise_adagrad, sgd

Build = Callable[..., SparseCoreCollection]


def of_type(configs: list[Any], *data_types: DataType) -> list[Any]:
    """The configs with these types of data, in turn."""
    for index, config in enumerate(configs):
        config.data_type = data_types[index % len(data_types)]
    return configs


def pooled(*data_types: DataType, **options: Any) -> SparseCoreEmbeddingBagCollection:
    torch.manual_seed(7)
    return SparseCoreEmbeddingBagCollection(of_type(bag_configs(), *data_types), **options)


def sequence(*data_types: DataType, **options: Any) -> SparseCoreEmbeddingCollection:
    torch.manual_seed(7)
    return SparseCoreEmbeddingCollection(of_type(sequence_configs(), *data_types), **options)


KINDS = pytest.mark.parametrize("build", [pooled, sequence])
FP16, FP32 = DataType.FP16, DataType.FP32


def tables(collection: SparseCoreCollection) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in collection.named_parameters()}


@KINDS
@pytest.mark.parametrize("types", [(FP16,), (FP16, FP32)])
@pytest.mark.parametrize(
    "spec",
    [
        sgd(lr=0.1, max_gradient=0.5),
        adagrad(lr=0.1, weight_decay=0.1),
        rowwise_adagrad(lr=0.1),
        adam(lr=0.02),
    ],
    ids=lambda spec: spec.name,
)
def test_a_step_is_that_of_the_float32_table_rounded(
    build: Build, types: tuple[DataType, ...], spec: OptimizerSpec
) -> None:
    half, exact = build(*types, optimizer=spec), build(FP32, optimizer=spec)
    was_rounded = False
    for seed in range(5):
        for own, other in zip(tables(half).values(), tables(exact).values(), strict=True):
            other.copy_(own)
        kjt = random_kjt(seed)
        got, want = outputs(half, kjt), outputs(exact, kjt)
        assert got.dtype is torch.float32
        assert torch.equal(got, want)
        for output in (got, want):
            output.backward(gradient_like(output, seed))
        for own, other in zip(tables(half).values(), tables(exact).values(), strict=True):
            assert torch.equal(own, other.to(own.dtype))
            was_rounded |= not torch.equal(own.float(), other)
        states = [
            {k: v for slots in c.fused_optimizer.state.values() for k, v in slots.items()}
            for c in (half, exact)
        ]
        assert_same_bits(*states)
        assert all(value.dtype is not torch.float16 for value in states[0].values())
    assert was_rounded


@KINDS
def test_layouts_and_threads_do_not_change_bits(build: Build) -> None:
    kjts = [random_kjt(seed) for seed in range(4)]
    runs = []
    for options in ({"num_threads": 1}, {"num_threads": 3, "stacks": "none"}):
        collection = build(FP16, optimizer=adagrad(lr=0.1), **options)
        runs.append({str(i): out for i, out in enumerate(train(collection, kjts))})
        runs[-1] |= snapshot(collection)
    assert_same_bits(*runs)


def test_lookups_equal_torchrecs() -> None:
    kjt = random_kjt(0, 64)
    bags, sequences = pooled(FP16), sequence(FP16)
    theirs: nn.Module = EmbeddingBagCollection(bags.embedding_bag_configs())
    theirs.load_state_dict(bags.state_dict())
    # torch adds up a bag in float32 and then rounds its output to float16
    torch.testing.assert_close(outputs(bags, kjt), outputs(theirs, kjt), rtol=1e-3, atol=1e-4)
    theirs = EmbeddingCollection(sequences.embedding_configs())
    theirs.load_state_dict(sequences.state_dict())
    assert torch.equal(outputs(sequences, kjt), outputs(theirs, kjt))


def test_a_swapped_model_keeps_its_parameters_and_their_type() -> None:
    model = nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(of_type(bag_configs(), FP16, FP32)),
            "rows": EmbeddingCollection(of_type(sequence_configs(), FP16)),
        }
    )
    before = dict(model.named_parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    report = swap_embeddings(model, optimizer=adagrad(lr=0.1))
    assert len(report.moved) == 6
    assert not report.kept
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert_same_bits(model.state_dict(), values)
    half = {name for name, weight in after.items() if weight.dtype is torch.float16}
    assert half == set(after) - {"bags.embedding_bags.goods.weight"}
    train(model["bags"], [random_kjt(0)])
    assert not torch.equal(
        after["bags.embedding_bags.users.weight"], values["bags.embedding_bags.users.weight"]
    )


def test_copies_and_checkpoints_go_on_with_the_same_bits() -> None:
    collection = pooled(FP16, optimizer=adam(lr=0.02))
    train(collection, [random_kjt(0)])
    clone = copy.deepcopy(collection)
    loaded = pooled(FP16, optimizer=adam(lr=0.02))
    loaded.load_state_dict(collection.state_dict())
    loaded.fused_optimizer.load_state_dict(collection.fused_optimizer.state_dict())
    kjts = [random_kjt(1), random_kjt(2)]
    for one in (collection, clone, loaded):
        train(one, kjts)
        assert_same_bits(snapshot(one), snapshot(collection))
    float32 = pooled(FP32)
    float32.load_state_dict(collection.state_dict())  # widened
    assert all(
        torch.equal(own, other.float())
        for own, other in zip(tables(float32).values(), tables(collection).values(), strict=True)
    )


def test_meta_tables_are_allocated_as_float16() -> None:
    collection = pooled(FP16, device="meta")
    collection.to_empty(device="cpu")
    torch.manual_seed(7)
    collection.reset_parameters()
    assert {weight.dtype for weight in tables(collection).values()} == {torch.float16}
    want = pooled(FP16)
    torch.manual_seed(7)
    want.reset_parameters()
    assert_same_bits(tables(collection), tables(want))


def test_a_program_of_float16_tables_is_refused() -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"], data_type=FP16
    )
    model = SparseCoreEmbeddingBagCollection([config])
    with pytest.raises(ProgramError, match=r"tables \['t'\] are float16.*DataType.FP32"):
        aot.trace(model, None, num_devices=1, cores_per_device=2, dense_optimizer=sgd(lr=0.1))
