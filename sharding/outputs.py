"""Where the vectors of a lookup are in the output of a sharded collection.

Legend: B batch size, D embedding_dim, N_f ids of a sequence feature.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_tpu.sharding.pieces import Piece
from torchrec_tpu.sparsecore.batch import SparseBatch
from torchrec_tpu.sparsecore.geometry import Geometry
from torchrec_tpu.sparsecore.layout import Combiner, Layout


class Outputs:
    """Where the activations of every lookup are in a collection's output.

    Pooled: (B, sum of D), a block of columns for each feature in config order. Sequences: (N_f, D)
    for each feature, one behind the other. A shard of columns is a part of its feature's columns.
    """

    def __init__(
        self, layout: Layout, pieces: Mapping[str, Piece], configs: Sequence[BaseEmbeddingConfig]
    ) -> None:
        self._layout = layout
        lookups = [(config.name, key) for config in configs for key in config.feature_names]
        index_of = {lookup: index for index, lookup in enumerate(lookups)}
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self._places = [  # (lookup, first column) of each feature in stack order
            (
                index_of[pieces[feature.table].table, feature.key],
                pieces[feature.table].shard.column,
            )
            for feature in layout.stack_order_features
        ]
        self._is_sequence = any(f.combiner is Combiner.NONE for f in layout.features)
        self._last: tuple[Geometry, Geometry] | None = None

    def geometry(self, batch: SparseBatch) -> Geometry:
        """Of a batch in the layout, with these outputs."""
        plain = self._layout.geometry(batch)
        if self._last is None or self._last[0] is not plain:  # nearly all batches are alike
            self._last = plain, self._replaced(plain, batch)
        return self._last[1]

    def num_ids(self, batch: SparseBatch) -> list[int]:
        """Samples of each lookup in config order: B, or the ids of a sequence."""
        counts = dict(zip((lookup for lookup, _ in self._places), batch.num_samples, strict=True))
        return [counts[lookup] for lookup in range(len(self._dims))]

    def shape(self, batch: SparseBatch) -> tuple[int, ...]:
        """Of the activations: (B, sum of D), or flat for sequences."""
        if not self._is_sequence:
            return batch.batch_size, sum(self._dims)
        return (sum(n * d for n, d in zip(self.num_ids(batch), self._dims, strict=True)),)

    def _replaced(self, plain: Geometry, batch: SparseBatch) -> Geometry:
        sizes = self._dims
        if self._is_sequence:
            sizes = [n * d for n, d in zip(self.num_ids(batch), self._dims, strict=True)]
        starts = [0, *itertools.accumulate(sizes)]
        return replace(
            plain,
            features=tuple(
                feature._replace(
                    out_offset=starts[lookup] + column,
                    out_stride=self._dims[lookup] if self._is_sequence else starts[-1],
                )
                for feature, (lookup, column) in zip(plain.features, self._places, strict=True)
            ),
        )
