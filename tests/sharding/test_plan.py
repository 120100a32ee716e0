import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import load_of
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from torchrec_tpu.sharding.cost import Step, Way
from torchrec_tpu.sharding.placements import PlacementKind
from torchrec_tpu.sharding.plan import SparseCorePlan
from torchrec_tpu.sharding.search import make_plan
from torchrec_tpu.sparsecore.aot.pooled import check_cover
from torchrec_tpu.sparsecore.errors import PlacementError

SIZES = {"rows": (2000, 16), "pooled": (50_000, 64), "replica": (3, 16)}


def _model(rows: int = 2000) -> torch.nn.Module:
    model = torch.nn.Module()
    model.ebc = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows if name == "rows" else shape[0],
                embedding_dim=shape[1],
                feature_names=[f"f_{name}_0"],
            )
            for name, shape in SIZES.items()
        ],
    )
    return model


@pytest.fixture(scope="module")
def plan() -> SparseCorePlan:
    """One table of each way on 8 devices."""
    loads = [
        load_of(name, *shape, ids=[40.0] if name == "pooled" else [1.0])
        for name, shape in SIZES.items()
    ]
    return make_plan(
        loads,
        Step(global_batch_size=512, dense_parameters=1000),
        "tpu7x:2x2x1",
        fixed={
            ("ebc", "rows"): [Way.ROWS],
            ("ebc", "pooled"): [Way.POOLED, Way.ROWS],
            ("ebc", "replica"): [Way.REPLICATED],
        },
    )


def test_json_and_back_is_the_same_plan(plan: SparseCorePlan) -> None:
    again = SparseCorePlan.from_json(plan.to_json())
    assert again == plan
    assert again["pooled"].placement == plan["pooled"].placement


def test_a_file_and_back_is_the_same_plan(plan: SparseCorePlan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.json")
    assert SparseCorePlan.load(tmp_path / "plan.json") == plan


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", to="something"), "not a torchrec_tpu plan"),
        (_set("version", to=99), "version 99; this release reads version 1"),
        (_set("tables", to=3), "plan.tables is 3, not a list"),
        (_set("num_devices", to="8"), "plan.num_devices is '8', not a value of type int"),
        (_set("num_devices", to=True), "plan.num_devices is True"),
        (_set("tables", 0, "chosen", "way", to="here"), r"plan.tables\[0\].chosen.way is 'here'"),
        (_set("surprise", to=1), r"unknown \['surprise'\]"),
        (_set("cost", "devices", 0, "hbm_bytes", to=[]), r"devices\[0\].hbm_bytes is \[\]"),
        (_set("tables", 0, "placement", "shards", to=[]), r"tables\[0\].placement: table 'rows'"),
        (lambda d: d.pop("groups"), r"plan lacks \['groups'\]"),
    ],
)
def test_a_damaged_plan_says_where(
    plan: SparseCorePlan, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = json.loads(plan.to_json())
    change(document)
    with pytest.raises(ValueError, match=message):
        SparseCorePlan.from_json(json.dumps(document))


def test_a_file_that_is_no_plan_is_named(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match=r"plan\.json: not a torchrec_tpu plan: no JSON"):
        SparseCorePlan.load(path)


def test_a_plan_prints_every_table_with_its_runner_up(plan: SparseCorePlan) -> None:
    text = repr(plan)
    for name in SIZES:
        assert f"\n{name} " in text
    assert "tpu7x:2x2x1" in text
    assert "rows over all cores" in text


def test_an_explanation_has_all_ways_with_their_costs(plan: SparseCorePlan) -> None:
    text = plan.explain("pooled")
    planned = plan["pooled"]
    assert planned.reason in text
    assert text.count(" a step, links ") == len(planned.considered) > 2
    assert text.count("<- chosen") == text.count("<- runner-up") == 1
    assert "not possible: replicated: not asked for" in text
    assert plan.explain(("ebc", "pooled")) == text


def test_a_table_that_is_not_planned_is_a_key_error(plan: SparseCorePlan) -> None:
    with pytest.raises(KeyError, match="names 0 tables of the plan"):
        plan["absent"]


def test_torchrec_gets_the_placements(plan: SparseCorePlan) -> None:
    sharding = plan.to_sharding_plan(_model(), device="cpu")
    kinds = {name: entry.sharding_type for name, entry in sharding.plan["ebc"].items()}
    assert kinds["rows"] == "row_wise"
    assert kinds["pooled"] in ("table_wise", "column_wise")
    assert kinds["replica"] == "data_parallel"
    for name, (num_rows, _) in SIZES.items():
        placement = plan[name].placement
        if placement.kind is PlacementKind.ROW_WISE:
            assert sum(shard.num_rows for shard in placement.shards) == num_rows


def test_pooled_tables_are_what_a_compiled_program_takes() -> None:
    """Every element of every pooled table once, and room for the ids that were looked up."""
    loads = [
        load_of("columns", 50_000, 64, ids=[40.0]),
        load_of("blocks", 60_000, 16, ids=[64.0]),
        load_of("rows", 50_000, 64),
    ]
    step = Step(global_batch_size=512)
    plan = make_plan(
        loads,
        step,
        "tpu7x:2x2x1",
        fixed={load.key: [Way.POOLED] for load in loads[:2]} | {loads[2].key: [Way.ROWS]},
    )
    (stack,) = plan.pooled_stacks()["ebc"]
    check_cover([stack])
    assert {table.name for table in stack.tables} == {"columns", "blocks"}
    assert stack.width == plan.groups[0].width
    for device, slots in enumerate(stack.of_device):
        wanted = sum(64 * plan[slot.table].ids_per_sample for slot in slots)
        assert (stack.max_ids[device] > 0) == bool(slots)
        assert stack.max_ids[device] <= 1.3 * wanted + 256
    assert {name for stack in plan.stacks_of("ebc") for name in stack} == {"rows"}


@pytest.mark.parametrize(
    ("model", "world_size", "message"),
    [
        (lambda: _model(rows=2001), None, r"table 'rows' of shape \(2000, 16\)"),
        (torch.nn.Module, None, "the model has there: no tables"),
        (_model, 4, "for 8 devices .*, not 4"),
    ],
)
def test_a_plan_of_other_tables_or_ranks_is_refused(
    plan: SparseCorePlan, model: Callable[[], Any], world_size: int | None, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        plan.to_sharding_plan(model(), world_size)
