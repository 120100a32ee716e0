"""Checkpoints of torchrec.experimental.torch_tpu, made by its own planner, are read row by row."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec import PoolingType
from twin import assert_same_bits, bag_configs, pooled, random_kjt, snapshot, train

from torchrec_tpu import adagrad, adam, load_checkpoint, save_checkpoint, sgd
from torchrec_tpu.sharding.embeddings import SparseCoreCollection
from torchrec_tpu.sparsecore.errors import CheckpointMismatchError

pytest.importorskip("torchrec.experimental.torch_tpu.checkpoint", reason="torchrec 1.8 lacks it")

from torchrec.experimental.torch_tpu.checkpoint import (
    SparseCoreLoadPlanner,
    SparseCoreSavePlanner,
    utils,
)
from torchrec.experimental.torch_tpu.modules import table_stacking
from torchrec.experimental.torch_tpu.modules.embedding_configs import SparseCoreEmbeddingConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore::UserWarning:torchrec.experimental.*"
)

ORDERS = {"config order": ["users", "goods", "tags"], "another order": ["tags", "users", "goods"]}


def values(table: str, offset: float) -> Tensor:
    """Every element of every table is another number."""
    (config,) = [config for config in bag_configs() if config.name == table]
    number = torch.arange(config.num_embeddings * config.embedding_dim, dtype=torch.float32)
    number += offset + 10_000 * ["users", "goods", "tags"].index(table)
    return number.view(config.num_embeddings, config.embedding_dim)


def stack(tables: list[str], num_cores: int) -> Any:
    """Their stack of some tables."""
    configs = {c.name: SparseCoreEmbeddingConfig(config=c) for c in bag_configs(PoolingType.SUM)}
    return table_stacking.stack_tables(
        [configs[name] for name in tables],
        tables,
        global_device_count=1,
        num_sc_per_device=num_cores,
        stack_table_name="stack",
    )


def save_theirs(
    path: Path, state: dict[str, Any], num_cores: int, stacks: dict[str, Any] | None
) -> None:
    planner = SparseCoreSavePlanner(num_sc_per_device=num_cores, stacked_configs=stacks)
    dcp.save(state, checkpoint_id=path, planner=planner)


def stacked_state(config: Any, tables: list[str], num_cores: int) -> dict[str, Tensor]:
    kinds = {
        "embedding_bags.stack.weight": 0.0,
        "momentums.stack": 0.25,
        "velocities.stack": 0.5,
    }
    return {
        name: utils.stack_and_shard_global_tensor(
            {table: values(table, offset) for table in tables}, config, num_cores
        )
        for name, offset in kinds.items()
    } | {"learning_rates.stack": torch.tensor(0.1)}


def assert_rows(collection: SparseCoreCollection, tables: list[str]) -> None:
    for table in tables:
        weight = collection.get_parameter(f"embedding_bags.{table}.weight")
        assert torch.equal(weight, values(table, 0.0)), table
        first, second = collection.fused_optimizer.slots(table)
        assert torch.equal(first, values(table, 0.25)), table
        assert torch.equal(second, values(table, 0.5)), table


@pytest.mark.parametrize("prefix", ["", "model"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_cores", [2, 4, 8])
def test_stacks_are_read_row_by_row(
    num_cores: int, order: str, prefix: str, tmp_path: Path
) -> None:
    """Whatever the order of tables in the stack, which their own loader takes for that of now."""
    tables = ORDERS[order]
    config = pooled_stack = stack(tables, num_cores)
    state: dict[str, Any] = stacked_state(config, tables, num_cores)
    state = {prefix: state} if prefix else state
    save_theirs(tmp_path / "theirs", state, num_cores, {"stack": pooled_stack.to_dict()})

    model = pooled(optimizer=adam())
    with pytest.warns(UserWarning, match="has no step"):
        load_checkpoint(tmp_path / "theirs", model)
    assert_rows(model, ["users", "goods", "tags"])


def test_small_reads_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrec_tpu.sharding.checkpoint import storage

    monkeypatch.setattr(storage, "BLOCK_BYTES", 100)
    test_stacks_are_read_row_by_row(4, "another order", "model", tmp_path)


@pytest.mark.parametrize("num_cores", [1, 2, 4])
def test_tables_without_stacks(num_cores: int, tmp_path: Path) -> None:
    """They are padded and dealt out over cores too; a dense embedding of a like name is not."""
    state: dict[str, Any] = {}
    for table in ("users", "goods", "tags"):
        alone = stack([table], num_cores)
        for name, offset in ((f"embedding_bags.{table}.weight", 0.0), (f"accumulators.{table}", 1)):
            state[f"tables.{name}"] = utils.stack_and_shard_global_tensor(
                {table: values(table, offset)}, alone, num_cores
            )
    positions = torch.arange(64.0).view(16, 4)
    state["position_embeddings.weight"] = positions
    save_theirs(tmp_path / "theirs", state, num_cores, None)

    model = nn.Module()
    model.tables = pooled(optimizer=adagrad())
    model.position_embeddings = nn.Embedding(16, 4)
    load_checkpoint(tmp_path / "theirs", model)
    assert torch.equal(model.position_embeddings.weight, positions)
    for table in ("users", "goods", "tags"):
        weight = model.tables.get_parameter(f"embedding_bags.{table}.weight")
        assert torch.equal(weight, values(table, 0.0))
        assert torch.equal(model.tables.fused_optimizer.slots(table)[0], values(table, 1.0))


def test_stacks_without_their_configs_are_refused(tmp_path: Path) -> None:
    """Their planner saves them so unless told otherwise."""
    tables = ["users", "goods", "tags"]
    state = stacked_state(stack(tables, 4), tables, 4)
    save_theirs(tmp_path / "theirs", state, 4, None)
    model = pooled(optimizer=adam())
    before = snapshot(model)
    with pytest.raises(CheckpointMismatchError, match=r"stack.weight' look like stacks.*_configs"):
        load_checkpoint(tmp_path / "theirs", model)
    assert_same_bits(before, snapshot(model))


def test_a_stack_of_another_size_is_refused(tmp_path: Path) -> None:
    tables = ["users", "goods", "tags"]
    config = stack(tables, 4)
    state = {"embedding_bags.stack.weight": torch.zeros(config.stack_num_embeddings + 32, 16)}
    save_theirs(tmp_path / "theirs", state, 4, {"stack": config.to_dict()})
    with pytest.raises(CheckpointMismatchError, match="its stacked_configs say"):
        load_checkpoint(tmp_path / "theirs", pooled(optimizer=sgd()))


def test_their_loader_reads_ours(tmp_path: Path) -> None:
    """It deals the rows out anew, since ours says that it was saved on one core."""
    saved = pooled(optimizer=sgd())
    train(saved, [random_kjt(0)])
    path = save_checkpoint(tmp_path, saved, step=1)
    configs = {config.name: config for config in bag_configs()}
    for num_cores in (2, 4):
        targets = {
            f"embedding_bags.{name}.weight": nn.Parameter(
                torch.zeros(stack([name], num_cores).stack_num_embeddings, config.embedding_dim)
            )
            for name, config in configs.items()
        }
        state = {f"model.{name}": parameter for name, parameter in targets.items()}
        dcp.load(
            state, checkpoint_id=path, planner=SparseCoreLoadPlanner(num_sc_per_device=num_cores)
        )
        for name, config in configs.items():
            weight = saved.get_parameter(f"embedding_bags.{name}.weight")
            found = utils.reverse_mod_shard(
                targets[f"embedding_bags.{name}.weight"].detach(),
                config.num_embeddings,
                config.embedding_dim,
                num_cores,
            )
            assert torch.equal(found, weight), (name, num_cores)
