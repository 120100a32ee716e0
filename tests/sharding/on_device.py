"""Tests of collections on a device, for a process of its own; run by test_device.py."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_in_tpu
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from twin import (
    NUM_IDS,
    assert_same_bits,
    outputs,
    pooled,
    random_kjt,
    sequence,
    sequence_configs,
    train,
)

from torchrec_tpu import load_checkpoint, save_checkpoint
from torchrec_tpu.aot import recipe_batches
from torchrec_tpu.api import calibrate, prepare
from torchrec_tpu.placement import Placement
from torchrec_tpu.recipes import capped, dlrm_v2_ml_100k
from torchrec_tpu.sharding.embeddings import SparseCoreCollection, SparseCoreEmbeddingCollection
from torchrec_tpu.sparsecore import backends
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import (
    CapacityError,
    KjtError,
    ProgramError,
    StateDictError,
    TableError,
)
from torchrec_tpu.sparsecore.optimizers import (
    OptimizerSpec,
    adagrad,
    adam,
    ftrl,
    rowwise_adagrad,
    sgd,
)
from torchrec_tpu.streams import Copier, device_mesh, on_device, rank_order, spmd_safe
from torchrec_tpu.training.sides import build_model, our_side

stand_in_tpu.install()

KJTS = [random_kjt(seed) for seed in range(5)]
SPECS = {
    "sgd": sgd(lr=0.1),
    "adagrad": adagrad(lr=0.1, eps=1e-3, initial_accumulator_value=0.1),
    "rowwise_adagrad": rowwise_adagrad(lr=0.1),
    "adam": adam(lr=0.02, eps=1e-3),
    "ftrl": ftrl(lr=0.1),
    "adagrad_clipped": adagrad(lr=0.1, max_gradient=0.3),
}


def stacks_of(spec: OptimizerSpec) -> Any:
    """Tables of 4 and 8 share a stack, unless the rule takes means."""
    return "none" if spec.name == "rowwise_adagrad" else "auto"


def collection(
    kind: Callable[..., SparseCoreCollection], spec: OptimizerSpec, **options: Any
) -> SparseCoreCollection:
    """With a capacity that all of KJTS fit."""
    made = kind(optimizer=spec, stacks=stacks_of(spec), **options)
    made.capacity = calibrate(made, KJTS)[""]
    return made


def contents(made: SparseCoreCollection) -> dict[str, torch.Tensor]:
    """All weights and state, logical, on the CPU."""
    found = {name: value.cpu().clone() for name, value in made.state_dict().items()}
    for state in made.fused_optimizer.state_dict()["state"].values():
        found |= {name: value.cpu().clone() for name, value in state.items()}
    return found


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def train_here(made: nn.Module, kjts: Any) -> list[torch.Tensor]:
    """As twin.train, with gradients and results that cross between the devices."""
    seen = []
    for seed, kjt in enumerate(kjts):
        output = outputs(made, kjt)
        assert output.device.type == "tpu"
        seen.append(output.detach().cpu().clone())
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
        output.backward(grad.to("tpu"))
    return seen


@pytest.mark.parametrize("kind", [pooled, sequence])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_training_is_that_of_the_cpu(kind: Any, spec: OptimizerSpec) -> None:
    here, there = collection(kind, spec), collection(kind, spec)
    before = contents(here)
    assert here.to("tpu") is here
    assert_same_bits(contents(here), before)
    stand_in_tpu.calls.clear()
    found = train_here(here, KJTS)
    assert stand_in_tpu.calls == len(KJTS) * (
        ["lookup"] * len(here.layout.stacks) + [spec.rule.name] * len(here.layout.stacks)
    )
    wanted = train(there, KJTS)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    after = contents(here)
    assert_close(after, contents(there))
    assert not any(torch.equal(after[name], before[name]) for name in before)
    here.to("cpu")
    assert_same_bits(contents(here), after)
    train(here, KJTS[:2])
    train(there, KJTS[:2])
    assert_close(contents(here), contents(there))


def test_weights_of_ids_come_along() -> None:
    kjts = [random_kjt(seed, weighted=True) for seed in range(3)]
    here, there = (pooled(optimizer=sgd(lr=0.1), is_weighted=True) for _ in range(2))
    for made in (here, there):
        made.capacity = calibrate(made, kjts)[""]
    found, wanted = train_here(here.to("tpu"), kjts), train(there, kjts)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_form_is_one_tensor_a_stack_and_every_id_is_where_the_layout_says() -> None:
    here = collection(pooled, adagrad())
    weights = {name: p.detach().clone() for name, p in here._weights().items()}
    here.to("tpu")
    tables, slots = here._on_device.arrays(list(weights))
    layout = here.layout
    assert len(tables) == len(slots) == len(layout.stacks) == 2
    for stack, tensor, slot in zip(layout.stacks, tables, slots, strict=True):
        assert tensor.shape == slot.shape == (2 * stack.rows_per_core, stack.dim)
        assert tensor.device == torch.device("tpu:0")
        for table in stack.tables:
            logical = weights[table.table.name]
            for index, row in enumerate(logical):
                core, local = layout.home_of(table.table.name, index)
                there = tensor[core * stack.rows_per_core + local].cpu()
                assert torch.equal(there[: len(row)], row)
                assert not there[len(row) :].any()
    for name, parameter in here.named_parameters():
        assert parameter.is_meta, name


def test_state_dicts_are_logical_and_are_loaded_on_either_side() -> None:
    trained = collection(pooled, adam(lr=0.02, eps=1e-3)).to("tpu")
    train_here(trained, KJTS)
    file = io.BytesIO()
    torch.save([trained.state_dict(), trained.fused_optimizer.state_dict()], file)
    wanted = contents(trained)
    for device in ("tpu", "cpu"):
        file.seek(0)
        tables, state = torch.load(file)
        other = nn.Sequential(collection(pooled, adam(lr=0.02, eps=1e-3))).to(device)
        prefixed = {f"0.{name}": value for name, value in tables.items()}
        assert other.load_state_dict(prefixed).missing_keys == []
        other[0].fused_optimizer.load_state_dict(state)
        assert_same_bits(contents(other[0]), wanted)
    again = copy.deepcopy(trained)
    train_here(again, KJTS[:1])
    assert_same_bits(contents(trained), wanted)
    assert not torch.equal(contents(again)["embedding_bags.users.weight"],
                           wanted["embedding_bags.users.weight"])  # fmt: skip


@pytest.mark.parametrize("kind", [pooled, sequence])
def test_checkpoints_go_between_devices(kind: Any, tmp_path: Path) -> None:
    spec = SPECS["adagrad"]
    trained = collection(kind, spec).to("tpu")
    train_here(trained, KJTS)
    save_checkpoint(tmp_path, nn.Sequential(trained), step=1)
    for device in ("tpu", "cpu"):
        other = nn.Sequential(collection(kind, spec)).to(device)
        load_checkpoint(tmp_path, other)
        assert_same_bits(contents(other[0]), contents(trained))


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    here = collection(pooled, adagrad()).to("tpu")
    tables, state = here.state_dict(), here.fused_optimizer.state_dict()
    before = contents(here)
    key = "embedding_bags.users.weight"
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding_bags\.users\.weight"):
        here.load_state_dict({**tables, key: torch.zeros(2, 4)})
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.users\.weight"):
        here.load_state_dict({name: value for name, value in tables.items() if name != key})
    wrong = {**state["state"], key: {"users.momentum1": torch.zeros(3, 4)}}
    with pytest.raises(StateDictError, match=r"users.*shape"):
        here.fused_optimizer.load_state_dict({**state, "state": wrong})
    assert_same_bits(contents(here), before)


def test_a_collection_without_capacity_says_that_it_must_be_calibrated() -> None:
    made = pooled()
    before = contents(made)
    with pytest.raises(TableError, match=r"have no capacity.*calibrate"):
        made.to("tpu")
    one = made.layout.stacks[0].name
    made.capacity = {one: Capacity(max_ids=64, max_unique_ids=64)}
    with pytest.raises(TableError, match=made.layout.stacks[1].name):
        made.to("tpu")
    assert made.device.type == "cpu"
    assert_same_bits(contents(made), before)
    train(made, KJTS[:1])
    made.capacity = calibrate(made, KJTS)[""]
    made.to("tpu")
    with pytest.raises(TableError, match="calibrate"):
        made.capacity = None
    train_here(made, KJTS[:1])
    made.capacity = {name: Capacity(max_ids=8, max_unique_ids=8) for name in made.capacity}
    with pytest.raises(CapacityError):
        made(random_kjt(0, 200))


def test_tables_that_one_program_cannot_hold_are_refused() -> None:
    limits = Capacity(max_ids=64, max_unique_ids=64)
    frozen = pooled()
    frozen.get_parameter("embedding_bags.users.weight").requires_grad_(False)
    means = pooled(optimizer=rowwise_adagrad())
    spread = pooled(num_devices=2)
    for made, message in (
        (frozen, r"\['users'\] are frozen and the others are not"),
        (means, r"mean over the row, and rows of tables .* have \[4, 8\] elements"),
        (spread, "laid out on 2 devices"),
    ):
        made.capacity = {stack.name: limits for stack in made.layout.stacks}
        with pytest.raises(TableError, match=message):
            made.to("tpu")


def test_a_frozen_stack_is_looked_up_and_left_alone() -> None:
    here = collection(pooled, adagrad())
    here.get_parameter("embedding_bags.goods.weight").requires_grad_(False)
    here.to("tpu")
    before = contents(here)
    stand_in_tpu.calls.clear()
    train_here(here, KJTS)
    assert stand_in_tpu.calls == ["lookup", "lookup", "adagrad"] * len(KJTS)
    after = contents(here)
    for name, value in before.items():
        assert torch.equal(after[name], value) is ("goods" in name), name


def test_learning_rates_are_read_at_each_update() -> None:
    here, there = (collection(pooled, adam(lr=0.02, eps=1e-3)) for _ in range(2))
    here.to("tpu")
    for rate in (0.02, 0.5, 0.0):
        for made in (here, there):
            made.fused_optimizer.param_groups[0]["lr"] = rate
        train_here(here, KJTS[:2])
        train(there, KJTS[:2])
    assert_close(contents(here), contents(there))


def test_tables_on_meta_are_allocated_on_the_device_and_started() -> None:
    here = collection(pooled, adagrad(initial_accumulator_value=0.1))
    meta = pooled(
        device="meta", optimizer=adagrad(initial_accumulator_value=0.1), capacity=here.capacity
    )
    with pytest.raises(NotImplementedError, match="meta tensor"):
        meta.to("tpu")
    meta.to_empty(device="tpu")
    torch.manual_seed(7)
    meta.reset_parameters()
    torch.manual_seed(7)
    here.reset_parameters()
    assert_same_bits(contents(meta), contents(here))
    train(here, KJTS)
    train_here(meta, KJTS)
    assert_close(contents(meta), contents(here))


def test_float16_tables_stay_on_the_cpu() -> None:
    configs = sequence_configs()
    configs[1].data_type = DataType.FP16
    made = SparseCoreEmbeddingCollection(configs)
    made.capacity = calibrate(made, KJTS)[""]
    before = contents(made)
    with pytest.raises(TableError, match=r"\['goods'\] are float16, and SparseCores .* float32"):
        made.to("tpu")
    assert made.device.type == "cpu"
    assert_same_bits(contents(made), before)
    train(made, KJTS[:1])


def test_moves_that_change_nothing_leave_the_tables_where_they_are() -> None:
    here = collection(pooled, adagrad()).to("tpu")
    before = here._on_device
    assert here.float() is here
    assert here.to(device="tpu", dtype=torch.float32)._on_device is before
    with pytest.raises(TableError, match="cannot become"):
        here.half()
    assert here.device == torch.device("tpu:0")


def test_a_model_trains_on_the_device_as_on_the_cpu() -> None:
    """Tables, dense layers, loss and both optimizers; batches prepared and copied ahead."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = collection(pooled, adagrad(lr=0.1))
            self.over = nn.Linear(36, 1)

        def forward(self, kjt: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.over(self.tables(kjt).values()).squeeze(1)
            return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    losses = {}
    for device in ("cpu", "tpu"):
        torch.manual_seed(3)
        model = Model().to(device)
        optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
        seen = losses[device] = []
        # New objects each time: a batch hangs on its KJT.
        for index, kjt in enumerate(prepare([random_kjt(seed) for seed in range(8)], model)):
            optimizer.zero_grad()
            loss = model(kjt, (torch.arange(9) % 2 == index % 2).float().to(device))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses[f"{device} tables"] = contents(model.tables)
    np.testing.assert_allclose(losses["tpu"], losses["cpu"], rtol=1e-5)
    assert_close(losses["tpu tables"], losses["cpu tables"])


def test_the_prefetch_thread_starts_the_copy_and_forward_waits_for_it() -> None:
    made = collection(pooled, adagrad()).to("tpu")
    (kjt,) = prepare([random_kjt(1)], made)
    attached = made._attached(kjt)
    assert attached.pending is not None
    stream = attached.pending._stream._stream
    assert len(stream.waiting) == 1  # late as can be
    made(kjt)
    assert stream.waiting == []
    assert made._attached(kjt).pending.wait() is attached.pending.wait()


def test_batches_that_were_copied_by_hand_are_looked_up() -> None:
    made = collection(pooled, adagrad()).to("tpu")
    with torch.no_grad():
        wanted = [made(kjt).values().cpu() for kjt in KJTS]
        batches = [made.preprocess(kjt) for kjt in KJTS]
        found = [made(item).values().cpu() for item in on_device(batches, "tpu", ahead=2)]
        found += [made(batch).values().cpu() for batch in batches]
    assert all(torch.equal(*pair) for pair in zip(found, wanted * 2, strict=True))


def test_a_batch_goes_as_one_copy() -> None:
    made = collection(pooled, adagrad())
    batch = made.preprocess(KJTS[0])
    item = Copier("tpu").start(batch).wait()
    assert item.block.device.type == "tpu"
    assert torch.equal(item.block.cpu(), torch.from_numpy(batch.block))
    for view, array in zip(
        item.buffers, [getattr(s, n) for s in batch.stacks for n in (
            "row_pointers", "embedding_ids", "sample_ids", "gains")], strict=True
    ):  # fmt: skip
        assert np.array_equal(view.cpu().numpy(), array, equal_nan=array.dtype == np.float32)


def test_ids_stay_on_the_host() -> None:
    made = collection(pooled, adagrad()).to("tpu")
    with pytest.raises(KjtError, match=r"are on tpu:0.*pass kjt.to\('cpu'\)"):
        made(KJTS[0].to(torch.device("tpu")))


def test_sequences_come_back_whole() -> None:
    torch.manual_seed(7)
    made = SparseCoreEmbeddingCollection(sequence_configs(), need_indices=True)
    made.capacity = calibrate(made, KJTS)[""]
    wanted = made(KJTS[2])
    for key, jagged in made.to("tpu")(KJTS[2]).items():
        for part in ("values", "lengths", "weights"):
            tensor = getattr(jagged, part)()
            assert tensor.device.type == "tpu", (key, part)
            assert torch.equal(tensor.cpu(), getattr(wanted[key], part)()), (key, part)
    assert set(NUM_IDS) > {"user", "item"}


def test_a_placement_wants_tables_on_the_cpu() -> None:
    made = collection(pooled, adagrad()).to("tpu")
    with pytest.raises(ProgramError, match=r"collections are on \{'': 'tpu:0'\}"):
        Placement(made, None, layouts={}, dense_optimizer=sgd(lr=0.1), batch_size=9)  # type: ignore


def test_the_step_of_the_training_loop_is_marked() -> None:
    recipe = capped(dlrm_v2_ml_100k(), max_rows=50)
    side = our_side(recipe, build_model(recipe))
    batch = next(iter(recipe_batches(recipe, batch_size=4)))
    stand_in_tpu.calls.clear()
    side.step(batch)
    assert stand_in_tpu.calls == ["spmd_safe"]


def test_backends_are_found() -> None:
    assert backends.choose("tpu").name == "tpu"


def test_functions_are_marked_and_ranks_ordered_where_torch_tpu_can() -> None:
    stand_in_tpu.calls.clear()
    assert spmd_safe(lambda: 3)() == 3
    assert stand_in_tpu.calls == ["spmd_safe"]
    assert rank_order([2, 3]) == [0, 2, 4, 1, 3, 5]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    try:
        mesh = device_mesh([2, 3], ["hosts", "chips"])
        assert mesh.device_type == "tpu"
        assert mesh.mesh.tolist() == [[0, 2, 4], [1, 3, 5]]
    finally:
        torch.distributed.destroy_process_group()
