"""Training against FBGEMM's fused CPU kernels, where those are right.

They are not for weighted MEAN, weight decay of row-wise Adagrad, and Adam (not supported on CPU).
"""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec import KeyedJaggedTensor, PoolingType
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
    fused_params, pooling = CASES[name]
    fused_params = {"learning_rate": 0.1, **fused_params}
    weighted = name == "weighted"
    configs = bag_configs()
    for config, feature in zip(configs, FEATURES, strict=True):
        config.pooling, config.feature_names = pooling, [feature]
    ours = SparseCoreEmbeddingBagCollection(
        configs, is_weighted=weighted, optimizer=spec_from_fused_params(fused_params)
    )
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (c.num_embeddings, c.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for c in configs
        ],
        pooling_mode=PoolingMode.SUM if pooling is PoolingType.SUM else PoolingMode.MEAN,
        **fused_params,
    )
    weights = [ours.get_parameter(f"embedding_bags.{c.name}.weight") for c in configs]
    for mine, split in zip(weights, theirs.split_embedding_weights(), strict=True):
        split.copy_(mine.detach())
    for seed in range(20):
        kjt = random_kjt(seed, weighted=weighted)
        got = outputs(ours, kjt)
        want = _forward(theirs, kjt)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
        gradient = gradient_like(got, seed)
        got.backward(gradient)
        want.backward(gradient)
    for mine, split in zip(weights, theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(mine.detach(), split, rtol=1e-5, atol=2e-6)
    if name == "sgd":
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
