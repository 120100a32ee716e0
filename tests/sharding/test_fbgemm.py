"""Training against FBGEMM's fused CPU kernels, where those are right.

They are not for weighted MEAN, weight decay of row-wise Adagrad, and Adam (not supported on CPU).
"""

from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType
from twin import bag_configs, gradient_like, outputs, random_kjt

from torchrec_tpu.sharding.embeddings import SparseCoreEmbeddingBagCollection
from torchrec_tpu.sharding.optimizer_specs import spec_from_fused_params

pytestmark = pytest.mark.oracle

FEATURES = ["user", "item", "history"]

CASES: dict[str, tuple[dict[str, Any], PoolingType]] = {
    "sgd": ({"optimizer": EmbOptimType.EXACT_SGD}, PoolingType.SUM),
    "adagrad": ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 1e-6}, PoolingType.MEAN),
    "rowwise_adagrad": ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, PoolingType.SUM),
    "clipped": (
        {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "max_gradient": 0.5,
            "gradient_clipping": True,
        },
        PoolingType.MEAN,
    ),
    "weighted": ({"optimizer": EmbOptimType.EXACT_ADAGRAD}, PoolingType.SUM),
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_fbgemm_in_weights_and_state(name: str) -> None:
    ours, theirs = _pair(name, DataType.FP32)
    weights = _weights(ours)
    for mine, split in zip(weights, theirs.split_embedding_weights(), strict=True):
        split.copy_(mine)
    for seed in range(20):
        got, want = _step(ours, theirs, random_kjt(seed, weighted=name == "weighted"), seed)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
    for mine, split in zip(weights, theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(mine, split, rtol=1e-5, atol=2e-6)
    _assert_equal_state(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_float16_steps_equal_fbgemms_within_a_rounding(name: str) -> None:
    """FBGEMM's float16 SGD and Adagrad round the change, then the new weight; we round once."""
    ours, theirs = _pair(name, DataType.FP16)
    num_different = 0
    for seed in range(20):
        before = [weight.clone() for weight in _weights(ours)]
        for mine, split in zip(before, theirs.split_embedding_weights(), strict=True):
            split.copy_(mine)
        got, want = _step(ours, theirs, random_kjt(seed, weighted=name == "weighted"), seed)
        assert got.dtype is want.dtype is torch.float32
        torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-7)
        for old, mine, split in zip(
            before, _weights(ours), theirs.split_embedding_weights(), strict=True
        ):
            largest = torch.maximum(mine.abs(), (mine.float() - old.float()).abs().half())
            difference = (mine.float() - split.float()).abs()
            assert (difference <= torch.from_numpy(np.spacing(largest.numpy()))).all()
            num_different += int((difference > 0).sum())
    _assert_equal_state(ours, theirs)
    if name in ("rowwise_adagrad", "clipped"):  # they round once, too
        assert num_different <= 3


def _pair(
    name: str, data_type: DataType
) -> tuple[SparseCoreEmbeddingBagCollection, SplitTableBatchedEmbeddingBagsCodegen]:
    """A collection and FBGEMM's module of the same tables."""
    fused_params, pooling = CASES[name]
    fused_params = {"learning_rate": 0.1, **fused_params}
    configs = bag_configs()
    for config, feature in zip(configs, FEATURES, strict=True):
        config.pooling, config.feature_names = pooling, [feature]
        config.data_type = data_type
    ours = SparseCoreEmbeddingBagCollection(
        configs, is_weighted=name == "weighted", optimizer=spec_from_fused_params(fused_params)
    )
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (c.num_embeddings, c.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for c in configs
        ],
        pooling_mode=PoolingMode.SUM if pooling is PoolingType.SUM else PoolingMode.MEAN,
        weights_precision=SparseType[data_type.name],
        stochastic_rounding=False,
        **fused_params,
    )
    return ours, theirs


def _weights(ours: SparseCoreEmbeddingBagCollection) -> list[torch.Tensor]:
    return [weight.detach() for weight in ours.parameters()]


def _step(
    ours: SparseCoreEmbeddingBagCollection,
    theirs: SplitTableBatchedEmbeddingBagsCodegen,
    kjt: KeyedJaggedTensor,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both outputs, after their update."""
    got, want = outputs(ours, kjt), _forward(theirs, kjt)
    gradient = gradient_like(got, seed)
    got.backward(gradient)
    want.backward(gradient)
    return got.detach(), want.detach()


def _assert_equal_state(
    ours: SparseCoreEmbeddingBagCollection, theirs: SplitTableBatchedEmbeddingBagsCodegen
) -> None:
    configs = ours.embedding_bag_configs()
    if not ours.fused_optimizer.slots(configs[0].name):
        return
    for config, split in zip(configs, theirs.split_optimizer_states(), strict=True):
        (state,) = ours.fused_optimizer.slots(config.name)
        torch.testing.assert_close(state, split[0], rtol=1e-5, atol=1e-6)


def _forward(theirs: SplitTableBatchedEmbeddingBagsCodegen, kjt: KeyedJaggedTensor) -> torch.Tensor:
    parts = [kjt[key] for key in FEATURES]
    lengths = torch.cat([part.lengths() for part in parts])
    weights = None
    if kjt.weights_or_none() is not None:
        weights = torch.cat([part.weights() for part in parts])
    result: torch.Tensor = theirs(
        torch.cat([part.values() for part in parts]),
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        per_sample_weights=weights,
    )
    return result
