"""Recipes: the numbers that others rely on, and that each one trains."""

import dataclasses
from pathlib import Path

import pytest
from criteo_format import criteo_lines, write_criteo

from torchrec_tpu.recipes import DEFAULTS, RECIPES, capped, dlrm_v2_ml_100k, dlrm_v2_mlperf
from torchrec_tpu.training import Options, build_model
from torchrec_tpu.training.loop import open_data
from torchrec_tpu.training.sides import our_side


def test_mlperf_sizes_are_those_of_the_benchmark() -> None:
    recipe = dlrm_v2_mlperf()
    assert len(recipe.features) == 26
    assert sum(feature.num_embeddings for feature in recipe.features) == 204_184_588
    assert sum(feature.num_ids for feature in recipe.features) == 214
    assert recipe.embedding_dim == 128
    assert recipe.dense_arch == (512, 256, 128)
    assert recipe.over_arch == (1024, 1024, 512, 256, 1)
    assert (recipe.dcn_layers, recipe.dcn_rank) == (3, 512)
    assert recipe.table_optimizer.name == "adagrad"
    assert recipe.batch_size == 65_536


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_frozen_and_knows_its_name(name: str) -> None:
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert recipe == RECIPES[name]()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.epochs = 9  # type: ignore[misc]


def test_every_data_set_has_a_default_recipe_of_its_own() -> None:
    assert {data: RECIPES[name]().data for data, name in DEFAULTS.items()} == {
        data: data for data in DEFAULTS
    }


def test_cap_shortens_long_tables_only() -> None:
    recipe = capped(dlrm_v2_ml_100k(), max_rows=100)
    assert [f.num_embeddings for f in recipe.features] == [100, 100, 8, 2, 21, 19]
    assert dataclasses.replace(recipe, features=dlrm_v2_ml_100k().features) == dlrm_v2_ml_100k()


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"embedding_dim": 8}, "dense_arch"), ({"over_arch": (4, 2)}, "over_arch")],
)
def test_contradicting_widths_are_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(dlrm_v2_ml_100k(), **change)


@pytest.mark.parametrize("name", [name for name in RECIPES if "ml_100k" not in name])
def test_every_recipe_trains_when_capped(name: str, tmp_path: Path) -> None:
    """Real layer sizes, short tables, one step of four samples."""
    recipe = dataclasses.replace(
        capped(RECIPES[name](), max_rows=50), batch_size=4, num_threads=None, steps_per_epoch=1
    )
    path = write_criteo(tmp_path / "a.tsv", criteo_lines(8))
    options = Options(recipe=recipe, out=tmp_path, path=path)
    train, _ = open_data(options)
    side = our_side(recipe, build_model(recipe))
    before = {name: weight.detach().clone() for name, weight in side.tables.items()}
    logits = side.step(next(train.batches(0)))
    assert logits.shape == (4,)
    assert all(not weight.equal(before[table]) for table, weight in side.tables.items())
