"""TorchRec's own sharding tests, as its wheel has them, with our sharders in the place of its own.

One case of that harness (torchrec.distributed.test_utils.test_sharding) builds a model of pooled
collections on the meta device, lets the stock planner place it, wraps it in
DistributedModelParallel, writes the weights of an unsharded model into the shards of
`state_dict()`, which have to be live, makes one SGD step in both and compares the predictions of
all ranks with those of the unsharded model. Its tolerance sees a sparse gradient that is wrong by
a third; the controls and the tighter tolerance here see a few percent. test_dmp_parity.py compares
weights and optimizer state over many steps.
"""

import copy
import random
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from world import run_world

pytestmark = pytest.mark.oracle

PLACEMENTS = ("row_wise", "table_wise", "column_wise", "data_parallel")

TOLERANCE = {"atol": 2e-6, "rtol": 0.0}  # predictions are about 1.5, of which this is 16 ulp

CASES: Mapping[str, Mapping[str, Any]] = {
    "sum": {"weighted": False},
    "sum and weighted": {},
    "mean": {"pooling": "mean", "weighted": False},
    "mean and weighted": {"pooling": "mean"},
    "offsets": {"use_offsets": True},
    "int32 ids": {"indices_dtype": torch.int32},
    "int32 ids, lengths and offsets": {
        "indices_dtype": torch.int32,
        "lengths_dtype": torch.int32,
        "offsets_dtype": torch.int32,
    },
    "fp16": {"data_type": "FP16", "atol": None, "rtol": None},  # the harness has its own tolerance
    "variable batch": {"variable_batch_size": True},
    "variable batch per feature": {"variable_batch_per_feature": True, "weighted": False},
    "variable batch per feature, mean": {
        "variable_batch_per_feature": True,
        "weighted": False,
        "pooling": "mean",
    },
    "variable batch per feature, constant in all": {
        "variable_batch_per_feature": True,
        "weighted": False,
        "global_constant_batch": True,
    },
    "variable batch per feature, weighted": {"variable_batch_per_feature": True},
    "apply_optimizer_in_backward": {
        "apply_optimizer_in_backward_config": {"embedding_bags": (torch.optim.SGD, {"lr": 0.1})}
    },
}
"""Arguments of the harness; "weighted", "pooling" and "data_type" choose its tables."""

CONTROLS: Mapping[str, Mapping[str, Any]] = {
    "no gradient division": {"gradient_division": False},
    "no update": {"learning_rate": 0.0},
}
"""What the harness has to notice."""

OF_THREE_RANKS = ("sum and weighted", "mean", "variable batch", "variable batch per feature")

Found = dict[tuple[str, str], str | None]
"""Placement and case -> why it failed."""


def import_harness() -> ModuleType:
    """The harness of the wheel, which imports one name from tests that are not in the wheel.

    Only its test of two-dimensional parallelism, which needs GPUs, uses that name.
    """
    missing = ModuleType("torchrec.distributed.tests.test_sequence_model")
    missing.TestEmbeddingCollectionSharder = None  # type: ignore[attr-defined]
    sys.modules.setdefault(missing.__name__, missing)
    from torchrec.distributed.test_utils import test_sharding

    return test_sharding


def run_case(
    rank: int,
    world_size: int,
    placement: str,
    *,
    weighted: bool = True,
    pooling: str = "sum",
    data_type: str = "FP32",
    learning_rate: float = 0.1,
    gradient_division: bool = True,
    **arguments: Any,
) -> None:
    """One case on one rank.

    Raises:
        AssertionError: predictions differ, or our modules were not used.
    """
    harness = import_harness()
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.comm_ops import set_gradient_division
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.test_utils.test_model import TestSparseNN
    from torchrec.distributed.test_utils.test_model_parallel import ModelParallelTestShared
    from torchrec.modules.embedding_configs import DataType

    import torchrec_tpu

    suite = ModelParallelTestShared()
    suite.setUp(backend="gloo")
    suite._build_tables_and_groups(data_type=DataType[data_type])
    tables = suite.tables if pooling == "sum" else suite.mean_tables
    weighted_tables = suite.weighted_tables if weighted else None
    used: list[tuple[str, Any, Any]] = []
    sharders = torchrec_tpu.sharders(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": learning_rate}
    )
    for sharder in sharders:

        def shard(
            module: Any, params: Any, *rest: Any, original: Any = sharder.shard, **options: Any
        ) -> Any:
            sharded = original(module, params, *rest, **options)
            used.append((type(sharded).__module__, sharded, params))
            return sharded

        sharder.shard = shard  # type: ignore[method-assign]
    set_gradient_division(gradient_division)
    try:
        harness.sharding_single_rank_test_single_process(
            pg=dist.group.WORLD,
            device=torch.device("cpu"),
            rank=rank,
            world_size=world_size,
            local_size=world_size,
            model_class=TestSparseNN,
            embedding_groups=suite.embedding_groups,
            tables=tables,
            weighted_tables=weighted_tables,
            sharders=sharders,
            optim=EmbOptimType.EXACT_SGD,
            constraints={
                table.name: ParameterConstraints(sharding_types=[placement], min_partition=4)
                for table in (*tables, *(weighted_tables or ()))
            },
            **{**TOLERANCE, **arguments},
        )
    finally:
        set_gradient_division(True)
    assert len(used) == (2 if weighted else 1)
    for module, _, params in used:
        assert module.startswith("torchrec_tpu"), module
        assert {sharding.sharding_type for sharding in params.values()} == {placement}


def run_cases(
    rank: int, world_size: int, cases: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Found:
    torch.use_deterministic_algorithms(True)  # as the harness has it
    found: Found = {}
    for (placement, name), arguments in cases.items():
        random.seed(0)
        try:
            run_case(rank, world_size, placement, **copy.deepcopy(dict(arguments)))
            found[placement, name] = None
        except Exception:
            found[placement, name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[Found]:
    cases = {
        (placement, name): arguments
        for placement in PLACEMENTS
        for name, arguments in {**CASES, **CONTROLS}.items()
    }
    return run_world(run_cases, 2, cases, deadline=250)


@pytest.fixture(scope="module")
def three_ranks() -> list[Found]:
    cases = {(placement, name): CASES[name] for placement in PLACEMENTS for name in OF_THREE_RANKS}
    return run_world(run_cases, 3, cases, deadline=250)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_ranks(two_ranks: list[Found], placement: str, name: str) -> None:
    for rank in two_ranks:
        assert rank[placement, name] is None, rank[placement, name]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THREE_RANKS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_three_ranks(three_ranks: list[Found], placement: str, name: str) -> None:
    for rank in three_ranks:
        assert rank[placement, name] is None, rank[placement, name]


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_harness_notices_what_is_wrong(two_ranks: list[Found], placement: str, name: str) -> None:
    for rank in two_ranks:
        error = rank[placement, name]
        assert error is not None
        assert "Tensor-likes are not close" in error, error
