"""Values of a model on the devices of a program; the program itself never runs here."""

import copy
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from program_twin import (
    BATCH_SIZE,
    CORES_PER_DEVICE,
    SEQUENCE_IDS,
    Batch,
    Dlrm,
    WithSequences,
    batches,
)
from torch import nn

from torchrec_tpu import aot, load_checkpoint, save_checkpoint
from torchrec_tpu.placement import Placement
from torchrec_tpu.sharding.embeddings import collections_in
from torchrec_tpu.sharding.swap import swap_embeddings
from torchrec_tpu.sparsecore.aot.program import Argument, Expected, Program, StackFacts
from torchrec_tpu.sparsecore.aot.tracing import Shape
from torchrec_tpu.sparsecore.errors import BatchSizeError, CapacityError, ProgramError
from torchrec_tpu.sparsecore.layout import Layout, round_up
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad, adam

NUM_DEVICES = 2


def program(
    model: nn.Module, layouts: dict[str, Layout], dense: OptimizerSpec, *, max_ids: int = 64
) -> Program:
    """The facts of a program that `aot.trace` would give, without its text."""
    stacks, arguments = [], []
    for fqn, collection in collections_in(model):
        layout = layouts[fqn]
        shape = Shape.of(layout, batch_size=BATCH_SIZE, sequence_ids=SEQUENCE_IDS)
        for stack in layout.stacks:
            spec = collection.table_optimizers[stack.tables[0].table.name]
            stacks.append(
                StackFacts(
                    name=stack.name,
                    collection=fqn,
                    tables=tuple(t.table.name for t in stack.tables),
                    rows=CORES_PER_DEVICE * stack.rows_per_core,
                    dim=stack.dim,
                    samples=shape.samples(stack),
                    slots_per_device=CORES_PER_DEVICE * layout.num_cores * round_up(max_ids, 8),
                    max_ids=max_ids,
                    max_unique_ids=max_ids,
                    rule=spec.rule.name if spec else None,
                )
            )
    for name, parameter in model.named_parameters():
        if ".embedding" in name:
            continue
        shape_ = tuple(parameter.shape)
        arguments.append((f"dense/{name}", "dense", shape_))
        arguments += [
            (f"dense_slot/{slot.name}/{name}", "dense_slot", shape_) for slot in dense.rule.slots
        ]
    return Program(
        text="",
        arguments=tuple(
            Argument(name=n, kind=k, shape=s, dtype="f32", donated=True, sharded=False)
            for n, k, s in arguments
        ),
        results=(),
        stacks=tuple(stacks),
        num_devices=NUM_DEVICES,
        cores_per_device=CORES_PER_DEVICE,
        mode="exact",
        expected=Expected(num_lookups=0, num_updates=0, collectives=(), alias_bytes=0),
    )


class Placed:
    def __init__(self, model: nn.Module, spec: OptimizerSpec, dense: OptimizerSpec) -> None:
        swap_embeddings(model, optimizer=spec)
        self.model = model
        self.dense = dense
        self.layouts = aot.layouts(
            model,
            num_devices=NUM_DEVICES,
            cores_per_device=CORES_PER_DEVICE,
            batch_size=BATCH_SIZE,
        )
        self.program = program(model, self.layouts, dense)

    def placement(self, **changes: object) -> Placement:
        arguments = {
            "model": self.model,
            "program": self.program,
            "layouts": self.layouts,
            "dense_optimizer": self.dense,
            "batch_size": BATCH_SIZE,
            "sequence_ids": SEQUENCE_IDS,
        }
        return Placement(**(arguments | changes))  # type: ignore[arg-type]


@pytest.fixture
def placed() -> Placed:
    return Placed(Dlrm(), adam(lr=0.1), adagrad(lr=0.2, initial_accumulator_value=0.5))


def test_rows_are_where_their_layout_says(placed: Placed) -> None:
    state = placed.placement().state()
    layout = placed.layouts["ebc"]
    for stack in layout.stacks:
        packed = state[f"ebc/{stack.name}/table"]
        cores = packed.reshape(layout.num_cores, stack.rows_per_core, stack.dim)
        for table in stack.tables:
            weight = placed.model.ebc.fused_optimizer.weight(table.table.name).detach().numpy()
            for row_id in (0, 1, 4, len(weight) - 1):
                core, row = layout.home_of(table.table.name, row_id)
                np.testing.assert_array_equal(
                    cores[core, row, : table.table.embedding_dim], weight[row_id]
                )


def test_state_is_a_copy_that_write_puts_into_another_model(placed: Placed) -> None:
    model = placed.model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("user", "shared"):
            for slot in model.ebc.fused_optimizer.slots(name):
                slot.uniform_(generator=generator)
    fresh = Placed(Dlrm(), adam(lr=0.1), placed.dense)
    with torch.no_grad():
        for parameter in fresh.model.parameters():
            parameter.zero_()
    old = copy.deepcopy(fresh.model.state_dict())
    placement = fresh.placement()
    placement.state()["dense/over.0.weight"][:] = 7
    for name, value in fresh.model.state_dict().items():
        torch.testing.assert_close(value, old[name], rtol=0, atol=0)

    placement.write(placed.placement().state(), num_steps=3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(fresh.model.state_dict()[name], value, rtol=0, atol=0)
    ours, theirs = (m.ebc.fused_optimizer.state_dict()["state"] for m in (fresh.model, model))
    for key, state in theirs.items():
        for name, value in state.items():
            expected = value + 3 if name.endswith(".step") else value
            torch.testing.assert_close(ours[key][name], expected, rtol=0, atol=0)
    np.testing.assert_array_equal(placement.state()["dense_slot/sum/over.0.weight"], 0.5)


def test_operands_follow_learning_rates_and_count_steps(placed: Placed) -> None:
    placement = placed.placement()
    prefix = f"ebc/{placed.layouts['ebc'].stacks[0].name}/operand"

    def learning_rates(step: int, lr: float) -> np.ndarray:
        return adam(lr=lr).operands(step)[0]

    assert placement.operands(2)[f"{prefix}:lr_t"] == pytest.approx(learning_rates(2, 0.1))
    for group in placed.model.ebc.fused_optimizer.param_groups:
        group["lr"] = 0.3
    assert placement.operands(2)[f"{prefix}:lr_t"] == pytest.approx(learning_rates(2, 0.3))
    placement.write(placement.state(), num_steps=4)
    assert placement.operands(2)[f"{prefix}:lr_t"] == pytest.approx(learning_rates(6, 0.3))
    assert placement.operands(1)["dense_operand/lr"] == pytest.approx(0.2)
    placement.dense_optimizer = adagrad(lr=0.9)
    assert placement.operands(1)["dense_operand/lr"] == pytest.approx(0.9)


def test_a_stack_whose_tables_count_differently_has_no_operands(placed: Placed) -> None:
    optimizer = placed.model.ebc.fused_optimizer
    optimizer.state[optimizer.weight("small")]["small.step"].fill_(9)
    with pytest.raises(ProgramError, match="different numbers of steps"):
        placed.placement().operands(1)


def test_feeds_have_every_device_and_the_static_sizes(placed: Placed) -> None:
    (step,) = batches(NUM_DEVICES, num_steps=1)
    feed = placed.placement().feed(step)
    for facts in placed.program.stacks:
        ids = feed.buffers[f"ebc/{facts.name}/buffer:embedding_ids"]
        assert ids.shape == (NUM_DEVICES, facts.slots_per_device)
    np.testing.assert_array_equal(
        feed.inputs["input/dense"], np.stack([batch.dense.numpy() for batch in step])
    )
    assert feed.inputs["input/labels"].dtype == np.int64


def test_frozen_tables_have_no_slots_and_sequences_carry_lengths() -> None:
    placed = Placed(WithSequences(), adagrad(lr=0.1), adagrad(lr=0.2))
    placement = placed.placement()
    names = placement.state().keys()
    assert "bags/frozen/table" in names
    assert not any(name.startswith("bags/frozen/slot") for name in names)
    assert not any(name.startswith("bags/") for name in placement.operands(1))
    (step,) = batches(NUM_DEVICES, num_steps=1)
    lengths = placement.feed(step).inputs["history/lengths"]
    assert lengths.shape == (NUM_DEVICES, 1, BATCH_SIZE)
    assert lengths.sum() == sum(b.sparse["history"].lengths().sum().item() for b in step)


def _without_last_sample(batch: Batch) -> Batch:
    sparse = batch.sparse
    lengths = sparse.lengths().view(len(sparse.keys()), -1)
    is_kept = torch.ones_like(lengths, dtype=torch.bool)
    is_kept[:, -1] = False
    is_kept = is_kept.view(-1).repeat_interleave(lengths.view(-1))
    return Batch(
        dense=batch.dense[:-1],
        sparse=type(sparse)(
            keys=sparse.keys(),
            values=sparse.values()[is_kept],
            lengths=lengths[:, :-1].reshape(-1),
            weights=sparse.weights()[is_kept],
        ),
        labels=batch.labels[:-1],
    )


def test_batches_that_the_program_does_not_take_are_refused(placed: Placed) -> None:
    (step,) = batches(NUM_DEVICES, num_steps=1)
    with pytest.raises(ProgramError, match="1 batches for 2 devices"):
        placed.placement().feed(step[:1])
    with pytest.raises(ProgramError, match="4 samples, the program 5"):
        placed.placement().feed([step[0], _without_last_sample(step[1])])
    tight = program(placed.model, placed.layouts, placed.dense, max_ids=1)
    with pytest.raises(CapacityError, match="capacity is 1"):
        placed.placement(program=tight).feed(step)


def test_another_layout_or_batch_size_than_the_programs_is_refused(placed: Placed) -> None:
    with pytest.raises(ProgramError, match=r"batch_size=9, in the program"):
        placed.placement(batch_size=9)
    other = Placed(WithSequences(), adagrad(), adagrad())
    with pytest.raises(ProgramError, match="pass the layouts that it was traced with"):
        placed.placement(model=other.model, layouts=other.layouts)


def test_more_ids_of_a_sequence_than_the_program_has_room_for_are_refused() -> None:
    placed = Placed(WithSequences(), adagrad(lr=0.1), adagrad(lr=0.2))
    (step,) = batches(NUM_DEVICES, num_steps=1)
    sparse = step[0].sparse
    many = torch.full_like(sparse.lengths(), 6)
    step[0].sparse = type(sparse)(
        keys=sparse.keys(),
        values=torch.zeros(int(many.sum()), dtype=torch.int64),
        lengths=many,
        weights=torch.ones(int(many.sum())),
    )
    with pytest.raises(BatchSizeError, match="sequence_ids allows 21"):
        placed.placement().feed(step)


def test_a_checkpoint_goes_from_one_slice_to_another(
    placed: Placed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2 devices of 2 cores to 4 of 4, every row and slot, and the step that Adam counts."""
    placement = placed.placement()
    generator = np.random.default_rng(0)
    state = {
        name: generator.standard_normal(value.shape, np.float32)
        for name, value in placement.state().items()
    }
    placement.write(state, num_steps=3)
    placement.dense_optimizer = dataclasses.replace(placed.dense, lr=0.3)
    placement.dense_slots.param_groups[0]["lr"] = 0.3
    save_checkpoint(tmp_path, placed.model, step=3, optimizers=placement.dense_slots)

    monkeypatch.setattr(sys.modules[__name__], "NUM_DEVICES", 4)
    monkeypatch.setattr(sys.modules[__name__], "CORES_PER_DEVICE", 4)
    other = Placed(Dlrm(), adam(lr=0.1), placed.dense)
    found = other.placement()
    load_checkpoint(tmp_path, other.model, optimizers=found.dense_slots)
    rows = {}
    for layout, values in (
        (placed.layouts["ebc"], state),
        (other.layouts["ebc"], found.state()),
    ):
        for stack in layout.stacks:
            for name in ("table", "slot:exp_avg", "slot:exp_avg_sq"):
                packed = values[f"ebc/{stack.name}/{name}"]
                cores = packed.reshape(layout.num_cores, stack.rows_per_core, stack.dim)
                for table in (t.table for t in stack.tables):
                    homes = [layout.home_of(table.name, i) for i in range(table.num_embeddings)]
                    logical = np.stack([cores[home][: table.embedding_dim] for home in homes])
                    rows.setdefault((table.name, name), []).append(logical)
    assert {len(pair) for pair in rows.values()} == {2}
    for place, (before, after) in rows.items():
        np.testing.assert_array_equal(before, after, err_msg=str(place))
    for name, value in found.state().items():
        if name.startswith("dense"):
            np.testing.assert_array_equal(value, state[name], err_msg=name)
    expected = placement.operands(1)
    for name, value in found.operands(1).items():
        if name.startswith("dense"):
            assert value == expected[name]
        else:  # stacks have other names
            assert value in [v for n, v in expected.items() if not n.startswith("dense")], name

    eager = torch.optim.Adagrad((p for n, p in placed.model.named_parameters() if "ebc" not in n))
    load_checkpoint(tmp_path, placed.model, optimizers=eager)
    assert eager.param_groups[0]["lr"] == 0.3
    name, parameter = next((n, p) for n, p in placed.model.named_parameters() if "ebc" not in n)
    np.testing.assert_array_equal(eager.state[parameter]["sum"], state[f"dense_slot/sum/{name}"])
    assert eager.state[parameter]["step"] == 3
