"""The traced step, run as it goes to libtpu, trains as torch does on the CPU."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_tpu.sparsecore.aot import adapter, lowering

if reason := adapter.why_unavailable("jax", "jaxlib", "torch_tpu"):
    pytest.skip(reason, allow_module_level=True)

from program_twin import (
    BATCH_SIZE,
    CORES_PER_DEVICE,
    Run,
    Twin,
    WithSequences,
    assert_equal,
)
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

from torchrec_tpu.sparsecore.aot.emulate import Emulator
from torchrec_tpu.sparsecore.aot.program import Mode, Program
from torchrec_tpu.sparsecore.errors import CapacityError, ProgramError
from torchrec_tpu.sparsecore.optimizers import adagrad, adam, rowwise_adagrad, sgd
from torchrec_tpu.sparsecore.stacking import make_layout

OPTIMIZERS = {
    "sgd": sgd(lr=0.5),
    "adagrad": adagrad(lr=0.05),
    "rowwise_adagrad": rowwise_adagrad(lr=0.05),
    "adam": adam(lr=0.05, eps=1e-4),  # with 1e-8, gradients that are rounding errors move weights
}


@pytest.fixture(scope="module")
def twin() -> Twin:
    return Twin(OPTIMIZERS["sgd"], num_devices=2, num_steps=3)


@pytest.fixture(scope="module")
def program(twin: Twin) -> Program:
    return twin.program()


@pytest.fixture(scope="module")
def emulator(program: Program) -> Iterator[Emulator]:
    with Emulator(program) as emulator:
        yield emulator


@pytest.fixture(scope="module")
def trained(twin: Twin) -> Run:
    return twin.train()


def test_three_steps_on_two_devices_equal_the_cpu(
    twin: Twin, program: Program, emulator: Emulator, trained: Run
) -> None:
    assert len(program.stacks) == 3
    assert any(t.rotation for layout in twin.layouts.values() for t in layout.stack_order_tables)
    assert_equal(twin.run(program, emulator), trained)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "pipelined"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_twenty_steps_equal_the_cpu(num_devices: int, optimizer: str, mode: Mode) -> None:
    """Losses, logits, tables, optimizer state, dense parameters and theirs.

    The pipelined CPU run reads tables that miss the update of the batch before.
    """
    twin = Twin(OPTIMIZERS[optimizer], num_devices=num_devices, num_steps=20)
    program = twin.program(mode)
    with Emulator(program) as emulator:
        differences = assert_equal(twin.run(program, emulator), twin.train(mode))
    print(
        f"{num_devices} devices, {optimizer}, {mode}: largest difference", max(differences.values())
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "pipelined"])
def test_sequences_and_frozen_tables_equal_the_cpu(mode: Mode) -> None:
    twin = Twin(OPTIMIZERS["adagrad"], num_devices=2, num_steps=4, model=WithSequences())
    program = twin.program(mode)
    assert {facts.rule for facts in program.stacks} == {"adagrad", None}
    with Emulator(program) as emulator:
        run = twin.run(program, emulator)
    assert_equal(run, twin.train(mode))
    frozen = twin.model.state_dict()["bags.embedding_bags.frozen.weight"]
    np.testing.assert_array_equal(run.values["bags.embedding_bags.frozen.weight"], frozen)


@pytest.mark.slow
def test_pipelined_is_not_exact() -> None:
    """Else the comparison of pipelined runs would prove nothing about staleness."""
    twin = Twin(OPTIMIZERS["sgd"], num_devices=1, num_steps=3)
    with pytest.raises(AssertionError, match=r"differ: .*embedding_bags"):
        assert_equal(twin.train("pipelined"), twin.train("exact"))


def test_the_documented_example_trains() -> None:
    page = Path(__file__).parents[2] / "docs" / "emulator.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(code, str(page), "exec"), names)
    assert len(names["losses"]) == 5
    assert np.isfinite(names["losses"]).all()
    state = names["model"].bags.fused_optimizer.state_dict()["state"]
    assert state["embedding_bags.t_item.weight"]["t_item.momentum1"].count_nonzero() > 0


# ------------------------------------------------------------------------------------------ faults
# Each must be seen by the comparison.


def test_sparse_gradients_that_are_not_divided_are_seen(twin: Twin, trained: Run) -> None:
    divides = get_gradient_division()
    set_gradient_division(not divides)
    try:
        program = twin.program()
    finally:
        set_gradient_division(divides)
    with (
        Emulator(program) as emulator,
        pytest.raises(AssertionError, match=r"differ: .*embedding_bags"),
    ):
        assert_equal(twin.run(program, emulator), trained)


def test_tables_of_another_rotation_are_seen(
    twin: Twin, program: Program, emulator: Emulator, trained: Run
) -> None:
    (fqn, layout) = next(iter(twin.layouts.items()))
    other = make_layout(
        layout.tables,
        num_devices=2,
        cores_per_device=CORES_PER_DEVICE,
        num_local_devices=1,
        batch_size=BATCH_SIZE,
        rotation=1,
    )
    assert [s.name for s in other.stacks] == [s.name for s in layout.stacks]
    try:
        run = twin.run(program, emulator, feed_layouts={fqn: other})
    except CapacityError:
        pytest.fail("the limits are too tight to plant this fault")
    with pytest.raises(AssertionError, match=r"differ: .*embedding_bags"):
        assert_equal(run, trained)


def test_a_gradient_of_zero_is_seen(twin: Twin, program: Program, trained: Run) -> None:
    fault = dataclasses.replace(program, text=_without_gradient(program.text))
    with pytest.raises(ProgramError, match="constant zero"):
        fault.check()
    with (
        Emulator(fault) as emulator,
        pytest.raises(AssertionError, match=r"differ: .*embedding_bags"),
    ):
        assert_equal(twin.run(fault, emulator), trained)


def test_dense_gradients_that_are_not_summed_are_seen(twin: Twin, program: Program) -> None:
    (groups,) = re.findall(r"replica_groups = dense<[^>]*> : tensor<1x2xi64>", program.text)
    alone = "replica_groups = dense<[[0], [1]]> : tensor<2x1xi64>"
    fault = dataclasses.replace(program, text=program.text.replace(groups, alone))
    with (
        Emulator(fault) as emulator,
        pytest.raises(ProgramError, match="not the same on all devices"),
    ):
        twin.run(fault, emulator)


def _without_gradient(text: str) -> str:
    """The text with the gradient of the last update replaced by zeros."""
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(text)
        main = lowering.public_function(module)
        call = [
            operation
            for operation in lowering.walk(main.regions[0].blocks[0])
            if operation.name == "stablehlo.custom_call"
            and operation.attributes["call_target_name"].value == lowering.UPDATE
        ][-1]
        shape = tuple(call.operands[4].type.shape)
        with mlir.ir.InsertionPoint(call):
            zeros = mlir.ir.DenseElementsAttr.get(np.zeros(shape, np.float32))
            call.operands[4] = mlir.hlo.constant(zeros)
        return str(module)
