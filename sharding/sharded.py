"""Embedding collections whose tables are spread over ranks, for `DistributedModelParallel`.

Legend: B batch size of this rank, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_tpu.sharding.deliveries import (
    Delivery,
    PooledOutput,
    SequenceOutput,
    ShardedContext,
)
from torchrec_tpu.sharding.embeddings import (
    COMBINERS,
    SparseCoreEmbeddingBagCollection,
    SparseCoreEmbeddingCollection,
)
from torchrec_tpu.sharding.kjt import select_bags, usable_weights
from torchrec_tpu.sharding.sharded_collection import ShardedCollection
from torchrec_tpu.sparsecore.layout import Combiner
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec


class ShardedSparseCoreEmbeddingBagCollection(ShardedCollection[KeyedTensor]):
    """Pooled embeddings whose tables are spread over ranks. `sharders()` make it from a module.

    Parameters are `embedding_bags.<table>.weight`: what this rank has of the table, empty when it
    has nothing. In state dicts they are the whole tables, as ShardedTensors or DTensors.
    """

    _tables_name = "embedding_bags"

    def __init__(
        self,
        module: EmbeddingBagCollection | SparseCoreEmbeddingBagCollection,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        specs: Mapping[str, OptimizerSpec],
        **options: Any,
    ) -> None:
        configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        combiners = {config.name: COMBINERS[config.pooling] for config in configs}
        super().__init__(module, configs, combiners, plan, env, specs, **options)
        self._embedding_names = [
            name for names in get_embedding_names_by_table(configs) for name in names
        ]
        self._widths = [config.embedding_dim for config in configs for _ in config.feature_names]
        self._keys = [key for config in configs for key in config.feature_names]

    def output_dist(
        self,
        ctx: ShardedContext,  # noqa: ARG002
        output: tuple[Delivery, Tensor],
    ) -> LazyAwaitable[KeyedTensor]:
        """Sends the vectors to the ranks of their samples: (B, sum of D) there."""
        delivery, vectors = output
        answered = self._answered(delivery, vectors)
        samples = delivery.own.samples

        def finish() -> KeyedTensor:
            values = answered()
            if samples is not None:
                blocks = torch.split(values, self._widths, dim=1)
                values = torch.cat(
                    [
                        block.index_select(0, samples[key])
                        for key, block in zip(self._keys, blocks, strict=True)
                    ],
                    dim=1,
                )
            return KeyedTensor(
                keys=self._embedding_names, length_per_key=self._widths, values=values
            )

        return PooledOutput(finish)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs, in output order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether KJTs must have weights."""
        return self._is_weighted

    def _usable_weights(self, weights: Tensor | None) -> Tensor | None:
        return usable_weights(weights, is_weighted=self._is_weighted)


class ShardedSparseCoreEmbeddingCollection(ShardedCollection[dict[str, JaggedTensor]]):
    """Embeddings of sequences, with tables spread over ranks. `sharders()` make it from a module.

    Parameters are `embeddings.<table>.weight`, as those of the pooled collection.
    """

    _tables_name = "embeddings"

    def __init__(
        self,
        module: EmbeddingCollection | SparseCoreEmbeddingCollection,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        specs: Mapping[str, OptimizerSpec],
        **options: Any,
    ) -> None:
        configs = module.embedding_configs()
        combiners = dict.fromkeys((config.name for config in configs), Combiner.NONE)
        super().__init__(module, configs, combiners, plan, env, specs, **options)
        self._need_indices = module.need_indices()
        self._dim = module.embedding_dim()
        names = [name for names in module.embedding_names_by_table() for name in names]
        keys = [key for config in configs for key in config.feature_names]
        self._names_and_keys = list(zip(names, keys, strict=True))

    def output_dist(
        self,
        ctx: ShardedContext,  # noqa: ARG002
        output: tuple[Delivery, Tensor],
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Sends the vectors to the ranks of their ids."""
        delivery, vectors = output
        answered = self._answered(delivery, vectors)
        features = delivery.own.features
        samples = delivery.own.samples
        num_ids = self._outputs.num_ids(delivery.own.batch)

        def finish() -> dict[str, JaggedTensor]:
            rows = torch.split(answered().view(-1, self._dim), num_ids)
            result = {}
            for (name, key), values in zip(self._names_and_keys, rows, strict=True):
                sequences = features[key]
                tensor = JaggedTensor(
                    values=values,
                    lengths=sequences.lengths(),
                    weights=sequences.values() if self._need_indices else None,
                )
                result[name] = tensor if samples is None else select_bags(tensor, samples[key])
            return result

        return SequenceOutput(finish)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs, in output order."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether results carry their ids."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """D, of every table."""
        return self._dim

    def _usable_weights(self, weights: Tensor | None) -> Tensor | None:  # noqa: ARG002
        return None  # TorchRec's sequences know no weights either
