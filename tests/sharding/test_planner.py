"""The search, and the planners that DistributedModelParallel can ask."""

import dataclasses
import itertools
import time
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from planned import load_of, loads_of_sizes
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from world import run_world

import torchrec_tpu
from torchrec_tpu.sharding.cost import Step, Way
from torchrec_tpu.sharding.estimators import TpuShardEstimator, TpuStorageReservation
from torchrec_tpu.sharding.lookups import Lookups
from torchrec_tpu.sharding.plan import SparseCorePlan
from torchrec_tpu.sharding.planner import TpuEmbeddingShardingPlanner
from torchrec_tpu.sharding.search import PlanError, make_plan
from torchrec_tpu.sharding.topology import Slice, TpuTopology
from torchrec_tpu.sparsecore.errors import TorchrecTpuError
from torchrec_tpu.sparsecore.stacking import make_layout

with warnings.catch_warnings():  # torch's own use of torch.jit
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import (
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )

TARGET = "tpu7x:2x2x1"


def bags(
    sizes: dict[str, tuple[int, int]], *, features: int = 1, requires_grad: bool = True
) -> EmbeddingBagCollection:
    collection = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[f"{name}_{i}" for i in range(features)],
            )
            for name, (rows, dim) in sizes.items()
        ],
    )
    return collection.requires_grad_(requires_grad)


SHARDERS: list[Any] = [
    EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_adagrad"}),
    EmbeddingCollectionSharder(fused_params={"optimizer": "exact_adagrad"}),
]


def assert_every_element_is_placed_once(plan: SparseCorePlan) -> None:
    for planned in plan.tables:
        shards = planned.placement.shards
        area = sum(shard.num_rows * shard.num_columns for shard in shards)
        size = planned.num_embeddings * planned.embedding_dim
        assert area == (0 if planned.chosen.way is Way.REPLICATED else size)
        assert all(0 <= shard.rank < plan.num_devices for shard in shards)
    of_ways = Counter(planned.chosen.way for planned in plan.tables)
    assert sum(len(stack.tables) for stack in plan.stacks) == of_ways[Way.ROWS]
    in_slots = {s.table for group in plan.groups for mine in group.devices for s in mine}
    assert len(in_slots) == of_ways[Way.POOLED]


# ------------------------------------------------------------------------------------------ search


def test_many_ids_a_bag_are_pooled_and_single_ids_are_not() -> None:
    loads = [
        load_of("many", 1_000_000, 64, ids=[50.0], samples_per_core=256),
        load_of("single", 1_000_000, 64, ids=[1.0], samples_per_core=256),
        load_of("tiny", 3, 64, ids=[1.0], samples_per_core=256),
    ]
    plan = make_plan(loads, Step(global_batch_size=4096), TARGET)
    assert plan["many"].chosen.way is Way.POOLED
    assert plan["single"].chosen.way is Way.ROWS
    assert plan["tiny"].chosen.way is not Way.POOLED
    assert plan.cost.exchanged_bytes < plan.all_rows.exchanged_bytes / 4
    assert plan.cost.bound_ms < plan.all_rows.bound_ms / 3
    assert_every_element_is_placed_once(plan)


def test_a_replica_is_taken_where_links_bind_and_its_gradient_is_small() -> None:
    load = load_of("t", 100, 128, ids=[1.0], samples_per_core=512)
    plan = make_plan([load], Step(global_batch_size=8192), TARGET)
    replica = next(o for o in plan["t"].considered if o.way is Way.REPLICATED)
    assert replica.exchanged_bytes < plan.all_rows.exchanged_bytes
    fixed = {load.key: [Way.REPLICATED]}
    alone = make_plan([load], Step(global_batch_size=8192), TARGET, fixed=fixed)
    assert alone["t"].placement.shards == ()
    assert alone.cost.exchanged_bytes == round(replica.exchanged_bytes)


def test_a_replica_that_moves_more_than_rows_is_out() -> None:
    load = load_of("t", 60_000, 128, ids=[1.0], samples_per_core=16)
    plan = make_plan([load], Step(global_batch_size=256), TARGET)
    assert all(option.way is not Way.REPLICATED for option in plan["t"].considered)
    assert any(text.startswith("replicated: gradients of") for text in plan["t"].excluded)


def test_the_baseline_has_every_table_row_sharded() -> None:
    loads = loads_of_sizes([(1000, 16), (50_000, 64), (3, 8)], ids=[30.0])
    plan = make_plan(loads, Step(global_batch_size=512), TARGET, ways=[Way.ROWS])
    assert {planned.chosen.way for planned in plan.tables} == {Way.ROWS}
    assert plan.all_rows.exchanged_bytes == plan.cost.exchanged_bytes
    assert plan.all_rows.bound_ms == plan.cost.bound_ms
    assert not plan.groups


def test_no_assignment_of_all_has_a_bound_much_below_the_one_that_was_found() -> None:
    """Against every combination of ways and widths of four tables, priced exactly."""
    target = Slice.named(TARGET)
    loads = [
        load_of("a", 400_000, 32, ids=[60.0], samples_per_core=128),
        load_of("b", 3000, 16, ids=[9.0], samples_per_core=128),
        load_of("c", 40, 32, ids=[1.0], samples_per_core=128),
        load_of("d", 90_000, 32, ids=[20.0], samples_per_core=128),
    ]
    step = Step(global_batch_size=2048, dense_parameters=1000)
    plan = make_plan(loads, step, target)
    of_tables = [plan[load.table.name].considered for load in loads]
    bounds = []
    for options in itertools.product(*of_tables):
        widths = {option.width for option in options if option.width}
        if len(widths) > 1:
            continue
        fixed = {load.key: [option.way] for load, option in zip(loads, options, strict=True)}
        bounds.append(make_plan(loads, step, target, fixed=fixed).cost.bound_ms)
        if len(bounds) >= 60:
            break
    assert len(bounds) > 20
    assert plan.cost.bound_ms <= 1.08 * min(bounds)


def test_every_device_has_as_many_slots_and_no_device_much_more_work() -> None:
    loads = [
        load_of(f"t{i}", 10_000 + 500 * i, 64, ids=[20.0 + i], samples_per_core=64)
        for i in range(40)
    ]
    plan = make_plan(loads, Step(global_batch_size=1024), TARGET, ways=[Way.POOLED])
    (group,) = plan.groups
    assert len(group.devices) == 8
    assert group.num_slots == -(-group.num_shards // 8)
    work = np.array([device.time_ms["SparseCore: pooled"] for device in plan.cost.devices])
    assert work.max() <= 1.15 * work.mean()
    assert_every_element_is_placed_once(plan)


def test_tables_of_different_optimizers_or_pooling_share_no_group() -> None:
    loads = [
        load_of("a", 10_000, 32, ids=[40.0]),
        load_of("b", 10_000, 32, ids=[40.0], combiner="mean"),
    ]
    plan = make_plan(loads, Step(global_batch_size=512), TARGET, ways=[Way.POOLED])
    assert sorted(group.has_gains for group in plan.groups) == [False, True]


def test_columns_that_fill_no_whole_slot_are_placed_too() -> None:
    loads = [load_of("a", 10_000, 20, ids=[40.0]), load_of("b", 10_000, 1, ids=[40.0])]
    plan = make_plan(loads, Step(global_batch_size=512), TARGET, ways=[Way.POOLED])
    assert_every_element_is_placed_once(plan)
    assert sum(shard.num_columns for shard in plan["a"].placement.shards) == 20


def test_blocks_of_rows_are_on_devices_in_a_row_and_no_wider_than_the_table() -> None:
    """A table whose columns are too few to share out: many ids, 16 columns."""
    load = load_of("t", 200_000, 16, ids=[256.0], samples_per_core=128, exponent=0.0)
    plan = make_plan([load], Step(global_batch_size=2048), TARGET, ways=[Way.POOLED])
    planned = plan["t"]
    assert planned.chosen.num_blocks > 1
    assert planned.placement.kind == "row_wise"
    ranks = [shard.rank for shard in planned.placement.shards]
    assert ranks == list(range(ranks[0], ranks[0] + planned.chosen.num_blocks))
    assert planned.chosen.largest_share == pytest.approx(1 / planned.chosen.num_blocks, rel=0.1)
    whole = next(o for o in planned.considered if o.num_shards == 1)
    assert planned.chosen.shard_ms < whole.shard_ms
    assert planned.chosen.id_bytes == whole.id_bytes  # an id travels to one block only
    assert planned.chosen.forward_bytes == planned.chosen.num_blocks * whole.forward_bytes
    assert_every_element_is_placed_once(plan)


def test_rows_whose_popular_ones_lie_together_are_not_cut_there() -> None:
    ids = np.random.default_rng(0).integers(0, 100, 4096)  # of 200,000
    lookups = Lookups.observed(
        200_000, [(ids, np.repeat(np.arange(64), 64))], samples=64, cores=2, num_cores=16
    )
    assert lookups.largest_share(8) == 1.0
    load = load_of("t", 200_000, 16, lookups=lookups)
    plan = make_plan([load], Step(global_batch_size=512), TARGET, ways=[Way.POOLED])
    assert plan["t"].chosen.num_blocks == 1


def test_rows_are_not_cut_where_the_optimizer_takes_their_mean() -> None:
    load = load_of("t", 10_000, 64, ids=[40.0])
    load = dataclasses.replace(load, rule="rowwise_adagrad")
    plan = make_plan([load], Step(global_batch_size=512), TARGET, ways=[Way.POOLED])
    assert all(option.width == 64 for option in plan["t"].considered)
    assert any("mean over the row" in text for text in plan["t"].excluded)


def test_a_sequence_is_never_pooled_and_says_why() -> None:
    load = load_of("s", 10_000, 32, ids=[40.0], combiner="none")
    plan = make_plan([load], Step(global_batch_size=512), TARGET)
    assert plan["s"].chosen.way is Way.ROWS
    assert any("sequence" in text for text in plan["s"].excluded)


def test_limits_of_stacks_are_named_as_the_layout_names_them() -> None:
    loads = loads_of_sizes([(1000 + i, 16) for i in range(30)])
    plan = make_plan(loads, Step(global_batch_size=512), TARGET, ways=[Way.ROWS])
    layout = make_layout(
        [load.table for load in loads],
        num_devices=8,
        cores_per_device=2,
        num_local_devices=1,
        stacks=plan.stacks_of("ebc"),
    )
    assert {stack.name for stack in layout.stacks} == plan.capacities()["ebc"].keys()


def test_the_same_tables_get_the_same_plan() -> None:
    loads = loads_of_sizes([(1000 * (i + 1), 16) for i in range(12)], ids=[7.0])
    step = Step(global_batch_size=512)
    assert make_plan(loads, step, TARGET) == make_plan(loads, step, TARGET)


def test_996_tables_with_dim_1_among_them_are_planned_without_help() -> None:
    rng = np.random.default_rng(0)
    sizes = [
        (int(10 ** rng.uniform(0.5, 7)), int(rng.choice([1, 8, 16, 64, 128]))) for _ in range(996)
    ]
    loads = loads_of_sizes(sizes, ids=[3.0])
    plan = make_plan(loads, Step(global_batch_size=512), TARGET)
    assert len(plan.tables) == 996
    assert plan.cost.hbm_bytes < plan.hbm_bytes
    assert_every_element_is_placed_once(plan)
    assert SparseCorePlan.from_json(plan.to_json()) == plan


def test_a_thousand_tables_on_256_chips_take_less_than_a_minute() -> None:
    target = Slice.named("tpu7x:8x8x4")
    assert (target.num_chips, target.num_devices) == (256, 512)
    rng = np.random.default_rng(1)
    start = time.perf_counter()
    loads = [
        load_of(
            f"t{i}",
            int(10 ** rng.uniform(1, 7.5)),
            int(rng.choice([16, 32, 64, 128])),
            ids=[float(rng.integers(1, 40))],
            samples_per_core=128,
            num_cores=target.num_cores,
        )
        for i in range(1000)
    ]
    plan = make_plan(loads, Step(global_batch_size=131_072, dense_parameters=10**7), target)
    seconds = time.perf_counter() - start
    assert_every_element_is_placed_once(plan)
    assert plan.cost.exchanged_bytes < plan.all_rows.exchanged_bytes
    assert seconds < 60


# ----------------------------------------------------------------------------------------- refusal


def test_four_tables_of_256_gb_on_four_devices_of_32_gb_are_refused_by_name_and_bytes() -> None:
    model = bags({f"t{i}": (500_000_000, 128) for i in range(4)})
    topology = TpuTopology(world_size=4, chip="v6e", compute_device="cpu")
    planner = TpuEmbeddingShardingPlanner(topology=topology, batch_size=4096)
    with pytest.raises(PlannerError) as caught:
        planner.plan(model, [EmbeddingBagCollectionSharder()])
    assert isinstance(caught.value, PlanError | TorchrecTpuError)
    message = str(caught.value)
    assert "'t0' 256.0 GB" in message
    assert "a device has 34.4 GB" in message
    assert "table 't0' alone needs 64.0 GB on each of 4 devices" in message
    assert "all devices have 137.4 GB" in message


def test_a_plan_of_nothing_and_a_batch_that_does_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="no tables"):
        make_plan([], Step(global_batch_size=512), TARGET)
    with pytest.raises(PlanError, match="100 does not divide by the 8 devices"):
        make_plan(loads_of_sizes([(10, 8)]), Step(global_batch_size=100), TARGET)


# ------------------------------------------------------------------------------ TorchRec's planner


class Model(nn.Module):
    """Bags and sequences below other modules, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"bags": bags({"a": (5000, 64), "b": (3, 16)}, features=2)})
        self.words = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(name="c", num_embeddings=700, embedding_dim=16, feature_names=["c"])
            ],
        )
        self.dense = nn.Linear(10, 20, device="meta")


def test_a_model_is_read_whole() -> None:
    topology = TpuTopology(world_size=8, chip="v7x", compute_device="cpu")
    planner = TpuEmbeddingShardingPlanner(
        topology=topology,
        batch_size=64,
        constraints={"a": ParameterConstraints(pooling_factors=[30.0, 10.0])},
    )
    sharding = planner.plan(Model(), SHARDERS)
    plan = planner.sparsecore_plan
    assert plan is not None
    assert sharding.plan.keys() == {"sparse.bags", "words"}
    assert [(planned.module, planned.table) for planned in plan.tables] == [
        ("sparse.bags", "a"),
        ("sparse.bags", "b"),
        ("words", "c"),
    ]
    assert plan["a"].ids_per_sample == 40
    assert plan["b"].ids_per_sample == 2  # one a feature
    assert {planned.rule for planned in plan.tables} == {"adagrad"}
    assert plan.dense_parameters == 10 * 20 + 20
    assert plan.global_batch_size == 64 * 8
    assert plan["c"].chosen.way is not Way.POOLED


def test_optimizers_are_found_where_torchrec_users_put_them() -> None:
    model = nn.ModuleDict(
        {
            "in_backward": bags({"a": (1000, 16)}),
            "frozen": bags({"b": (1000, 16)}, requires_grad=False),
        }
    )
    apply_optimizer_in_backward(torch.optim.Adam, model["in_backward"].parameters(), {"lr": 0.1})
    planner = TpuEmbeddingShardingPlanner(topology=TpuTopology(TARGET), batch_size=64)
    rules = {p.table: p.rule for p in planner.plan_tables(model, SHARDERS).tables}
    assert rules == {"a": "adam", "b": None}


def test_constraints_on_sharding_types_are_kept() -> None:
    planner = TpuEmbeddingShardingPlanner(
        topology=TpuTopology(TARGET),
        batch_size=64,
        constraints={
            "a": ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[90.0]),
            "b": ParameterConstraints(sharding_types=["column_wise", "table_wise"]),
        },
    )
    plan = planner.plan_tables(bags({"a": (5000, 64), "b": (3, 16)}), SHARDERS)
    assert plan["a"].chosen.way is Way.ROWS
    assert plan["b"].chosen.sharding_type in ("column_wise", "table_wise")
    assert {option.sharding_type for option in plan["a"].considered} == {"row_wise"}


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (ParameterConstraints(sharding_types=["grid_shard"]), "'grid_shard' has no equivalent"),
        (
            ParameterConstraints(sharding_types=["table_row_wise"], pooling_factors=[1.0]),
            "table 'a': no way is left",
        ),
        (ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0]), "3 pooling_factors for its 1"),
    ],
)
def test_constraints_that_cannot_be_kept_are_refused(
    constraint: ParameterConstraints, message: str
) -> None:
    planner = TpuEmbeddingShardingPlanner(
        topology=TpuTopology(TARGET), batch_size=64, constraints={"a": constraint}
    )
    with pytest.raises(PlanError, match=message):
        planner.plan_tables(bags({"a": (5000, 64)}), SHARDERS)


def test_a_model_without_sharded_modules_is_refused() -> None:
    planner = TpuEmbeddingShardingPlanner(topology=TpuTopology(TARGET), batch_size=64)
    with pytest.raises(PlanError, match="no module of the model has a sharder"):
        planner.plan_tables(nn.Linear(2, 2), SHARDERS)


def _plan_together(rank: int, world_size: int) -> tuple[dict[str, str], str, Tensor]:
    """Plans, shards and makes one step; the loss of every rank is that of one table lookup."""
    model = nn.ModuleDict({"bags": bags({"a": (5000, 64), "b": (300, 16), "c": (3, 16)})})
    model["bags"] = EmbeddingBagCollection(
        tables=model["bags"].embedding_bag_configs(), device=torch.device("meta")
    )
    sharders = torchrec_tpu.sharders(optimizer=torchrec_tpu.sgd(lr=1.0))
    planner = TpuEmbeddingShardingPlanner(
        TpuTopology(world_size=world_size, chip="v7x", compute_device="cpu"),
        batch_size=4,
        constraints={
            "a": ParameterConstraints(sharding_types=["column_wise"], pooling_factors=[30.0]),
            "b": ParameterConstraints(sharding_types=["row_wise"]),
            "c": ParameterConstraints(sharding_types=["data_parallel"]),
        },
    )
    sharding = planner.collective_plan(model, sharders)
    assert planner.sparsecore_plan is not None
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=sharding, sharders=sharders
    )
    ids = torch.tensor([7, 8, 9, 2, 1, 0]) + 0 * rank
    kjt = KeyedJaggedTensor(["a_0", "b_0", "c_0"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 1]))
    before = sharded.module["bags"](kjt).values()
    before.sum().backward()
    after = sharded.module["bags"](kjt).values().detach()
    kinds = {name: entry.sharding_type for name, entry in sharding.plan["bags"].items()}
    return kinds, planner.sparsecore_plan.to_json(), before.detach() - after


def test_all_ranks_get_the_plan_of_rank_0_and_train_with_it() -> None:
    (kinds, text, step), other = run_world(_plan_together, 2, deadline=280)
    assert (other[0], other[1]) == (kinds, text)
    assert kinds == {"a": "column_wise", "b": "row_wise", "c": "data_parallel"}
    plan = SparseCorePlan.from_json(text)
    assert plan.num_devices == 2
    assert {planned.rule for planned in plan.tables} == {"sgd"}
    # Each looked-up row had gradient 1 from both ranks, divided by the two: a step of 1 an id.
    wanted = torch.tensor([[2.0] * 64 + [1.0] * 32, [0.0] * 64 + [1.0] * 32])
    torch.testing.assert_close(step, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(other[2], wanted, rtol=0, atol=1e-5)


# -------------------------------------------------------------------------- TorchRec's own planner


def stock_planner(device: str) -> EmbeddingShardingPlanner:
    topology = TpuTopology(world_size=4, chip="v6e", compute_device=device)
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=4096,
        enumerator=EmbeddingEnumerator(
            topology, batch_size=4096, estimator=TpuShardEstimator(topology)
        ),
        storage_reservation=TpuStorageReservation(),
        debug=False,
        stats=[],
    )


def test_the_stock_planner_sees_the_memory_of_a_tpu() -> None:
    """Without our estimator, torchrec 1.9.2 counts no HBM on "tpu" and puts these tables."""
    model = bags({f"t{i}": (500_000_000, 128) for i in range(4)})
    with pytest.raises(PlannerError):
        stock_planner("cpu").plan(model, [EmbeddingBagCollectionSharder()])


def test_the_stock_planner_plans_what_fits() -> None:
    model = nn.ModuleDict({"bags": bags({"a": (100_000, 64), "b": (300, 16)})})
    sharding = stock_planner("cpu").plan(model, SHARDERS[:1])
    assert sharding.plan["bags"].keys() == {"a", "b"}


def test_a_reservation_takes_the_dense_part_of_every_device() -> None:
    topology = TpuTopology(TARGET, hbm_cap=10_000_000)
    reserved = TpuStorageReservation(share=1.0).reserve(topology, 64, Model(), SHARDERS)
    assert {device.storage.hbm for device in reserved.devices} == {10_000_000 - 4 * 220 * 3}
    assert {device.storage.hbm for device in topology.devices} == {10_000_000}
