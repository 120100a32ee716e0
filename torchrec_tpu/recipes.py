"""Whole-run configurations. A recipe is a function that returns a frozen `Recipe`.

Change one with `dataclasses.replace`, or fit it to a small machine with `capped`:

>>> recipe = capped(dlrm_v2_mlperf(), max_rows=1000)
>>> sum(feature.num_embeddings for feature in recipe.features)
18369
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad

__all__ = [
    "DEFAULTS",
    "RECIPES",
    "Recipe",
    "SparseFeature",
    "capped",
    "dlrm_v2_criteo",
    "dlrm_v2_criteo_sample",
    "dlrm_v2_ml_100k",
    "dlrm_v2_mlperf",
    "dlrm_v2_synthetic",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseFeature:
    """One KJT key with a table of its own.

    Attributes:
        key: KJT key; the table is called `t_<key>`.
        num_embeddings: rows.
        num_ids: ids of one bag in synthetic data.
        pooling: of the bag.
    """

    key: str
    num_embeddings: int
    num_ids: int = 1
    pooling: Literal["sum", "mean"] = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A DLRM v2 run: data, model, optimizers, schedule.

    Attributes:
        name: of the function that made it.
        data: which data set the features belong to.
        features: one table each.
        num_dense: width of the dense features.
        embedding_dim: D, of every table.
        dense_arch: widths of the bottom MLP; the last is D.
        over_arch: widths of the top MLP; the last is 1.
        dcn_layers: layers of the low-rank cross net.
        dcn_rank: its rank.
        table_optimizer: fused update of the tables.
        dense_optimizer: of everything else.
        batch_size: samples of a step.
        epochs: passes over the data.
        init_std: tables start normal(0, init_std); None: TorchRec's default, uniform within
            1 / sqrt(rows) of 0.
        exponent: skew of synthetic ids.
        steps_per_epoch: batches of an epoch of synthetic data.
        num_threads: of PyTorch; None leaves its default. Small models are fastest with one.
        seed: of the weights, the data's order, and synthetic data.
    """

    name: str
    data: Literal["ml-100k", "criteo", "synthetic"]
    features: tuple[SparseFeature, ...]
    num_dense: int
    embedding_dim: int
    dense_arch: tuple[int, ...]
    over_arch: tuple[int, ...]
    dcn_layers: int
    dcn_rank: int
    table_optimizer: OptimizerSpec
    dense_optimizer: OptimizerSpec
    batch_size: int
    epochs: int
    init_std: float | None = None
    exponent: float = 1.05
    steps_per_epoch: int = 200
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dense_arch[-1] != self.embedding_dim:
            raise ValueError(
                f"recipe {self.name!r}: dense_arch ends with {self.dense_arch[-1]}, the cross "
                f"net needs embedding_dim={self.embedding_dim} there"
            )
        if self.over_arch[-1] != 1:
            raise ValueError(
                f"recipe {self.name!r}: over_arch ends with {self.over_arch[-1]}, not 1"
            )


def capped(recipe: Recipe, *, max_rows: int) -> Recipe:
    """The same recipe with no table longer than `max_rows`."""
    features = tuple(
        dataclasses.replace(feature, num_embeddings=min(feature.num_embeddings, max_rows))
        for feature in recipe.features
    )
    return dataclasses.replace(recipe, features=features)


# MLPerf Training's DLRM v2 benchmark on multi-hot Criteo 1TB: rows and ids per bag of 26 tables.
# Source: mlcommons/training, recommendation_v2/torchrec_dlrm/README.md.
# fmt: off
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
)
MLPERF_IDS_PER_BAG = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)
# fmt: on


def _criteo_features(rows: tuple[int, ...], num_ids: tuple[int, ...]) -> tuple[SparseFeature, ...]:
    return tuple(
        SparseFeature(key=f"C{number}", num_embeddings=num, num_ids=ids)
        for number, (num, ids) in enumerate(zip(rows, num_ids, strict=True), start=1)
    )


def dlrm_v2_mlperf() -> Recipe:
    """The MLPerf benchmark's model: 204 M rows of 128, 209 GB with Adagrad state. Data: synthetic.

    Layer sizes, batch and learning rate are those of the reference implementation; see `capped`.
    """
    return Recipe(
        name="dlrm_v2_mlperf",
        data="synthetic",
        features=_criteo_features(MLPERF_ROWS, MLPERF_IDS_PER_BAG),
        num_dense=13,
        embedding_dim=128,
        dense_arch=(512, 256, 128),
        over_arch=(1024, 1024, 512, 256, 1),
        dcn_layers=3,
        dcn_rank=512,
        table_optimizer=adagrad(lr=0.005, eps=1e-8),
        dense_optimizer=adagrad(lr=0.005, eps=1e-8),
        batch_size=65_536,
        epochs=1,
    )


def dlrm_v2_synthetic() -> Recipe:
    """The benchmark's 26 multi-hot features on a laptop: at most 10,000 rows of 16."""
    return Recipe(
        name="dlrm_v2_synthetic",
        data="synthetic",
        features=_criteo_features(
            tuple(min(rows, 10_000) for rows in MLPERF_ROWS), MLPERF_IDS_PER_BAG
        ),
        num_dense=13,
        embedding_dim=16,
        dense_arch=(64, 16),
        over_arch=(64, 1),
        dcn_layers=2,
        dcn_rank=32,
        table_optimizer=adagrad(lr=0.05, eps=1e-8),
        dense_optimizer=adagrad(lr=0.02, eps=1e-8),
        batch_size=512,
        epochs=1,
        init_std=0.01,
        num_threads=1,
    )


def dlrm_v2_ml_100k() -> Recipe:
    """MovieLens-100k: learns to its best in three epochs, seconds on a laptop."""
    return Recipe(
        name="dlrm_v2_ml_100k",
        data="ml-100k",
        features=(
            SparseFeature(key="user", num_embeddings=944),
            SparseFeature(key="item", num_embeddings=1683),
            SparseFeature(key="age", num_embeddings=8),
            SparseFeature(key="gender", num_embeddings=2),
            SparseFeature(key="occupation", num_embeddings=21),
            SparseFeature(key="genres", num_embeddings=19, pooling="mean"),
        ),
        num_dense=9,
        embedding_dim=16,
        dense_arch=(64, 16),
        over_arch=(64, 1),
        dcn_layers=3,
        dcn_rank=32,
        table_optimizer=adagrad(lr=0.05, eps=1e-8),
        dense_optimizer=adagrad(lr=0.02, eps=1e-8),
        batch_size=512,
        epochs=3,
        init_std=0.01,
        num_threads=1,
    )


def dlrm_v2_criteo() -> Recipe:
    """Criteo files of tens of millions of lines on one machine: 26 hashed tables of 100,000 rows.

    One epoch: these data overfit in the second. The learning rates are those of small batches; a
    much larger batch wants its own.
    """
    return Recipe(
        name="dlrm_v2_criteo",
        data="criteo",
        features=_criteo_features((100_000,) * 26, (1,) * 26),
        num_dense=13,
        embedding_dim=16,
        dense_arch=(512, 256, 16),
        over_arch=(512, 256, 1),
        dcn_layers=3,
        dcn_rank=64,
        table_optimizer=adagrad(lr=0.02, eps=1e-8),
        dense_optimizer=adagrad(lr=0.01, eps=1e-8),
        batch_size=2048,
        epochs=1,
    )


def dlrm_v2_criteo_sample() -> Recipe:
    """Criteo samples of some hundred lines: proves that a file can be read and learned, no more."""
    return dataclasses.replace(
        dlrm_v2_criteo(),
        name="dlrm_v2_criteo_sample",
        features=_criteo_features((1000,) * 26, (1,) * 26),
        dense_arch=(32, 16),
        over_arch=(32, 1),
        dcn_layers=2,
        dcn_rank=16,
        batch_size=32,
        epochs=2,
        init_std=0.01,
        num_threads=1,
    )


RECIPES: Mapping[str, Callable[[], Recipe]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            dlrm_v2_ml_100k,
            dlrm_v2_criteo,
            dlrm_v2_criteo_sample,
            dlrm_v2_synthetic,
            dlrm_v2_mlperf,
        )
    }
)

DEFAULTS: Mapping[str, str] = MappingProxyType(
    {"ml-100k": "dlrm_v2_ml_100k", "criteo": "dlrm_v2_criteo", "synthetic": "dlrm_v2_synthetic"}
)
"""The recipe of each data set when none is named."""
