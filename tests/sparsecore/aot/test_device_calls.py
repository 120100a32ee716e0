"""The device backends without a TPU: what torch_tpu makes of their calls, run by the emulator."""

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stack_program import ROLES, Case, make

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.aot.emulate import Emulator
from torchrec_tpu.sparsecore.aot.pipeline import unpack_stack
from torchrec_tpu.sparsecore.aot.program import Argument, Expected, Program, Result
from torchrec_tpu.sparsecore.backends.reference import ReferenceBackend
from torchrec_tpu.sparsecore.geometry import StackLimits
from torchrec_tpu.sparsecore.optimizers import RULES, adagrad, rowwise_adagrad, sgd
from torchrec_tpu.sparsecore.rules import stablehlo

if reason := adapter.why_unavailable("torch_tpu", "jax", "jaxlib"):
    pytest.skip(reason, allow_module_level=True)

CORES = 2
MAX_GRADIENT = 0.3
# A row-wise mean counts the row as it is stored: with padding it is the XLA backend's.
CASES = {
    "sgd": Case.of(make(1, CORES), sgd(lr=0.1, max_gradient=MAX_GRADIENT)),
    "adagrad": Case.of(make(1, CORES), adagrad(lr=0.1, eps=1e-3)),
    "rowwise_adagrad": Case.of(make(1, CORES, dim=8), rowwise_adagrad(lr=0.1, eps=1e-3)),
}
XLA_RULES = ("sgd", "rowwise_adagrad", "adam", "adam_l2", "ftrl", "laprop")
ONE_STACK = {
    "table": (80, 16), "pointers": 16, "slots": 64, "samples": 14, "mean_dim": 12,
    "max_ids": 32, "max_unique_ids": 16,
}  # fmt: skip


def geometry_of(case: Case) -> Any:
    limits = [case.limits[stack.name] for stack in case.layout.stacks]
    return replace(
        case.layout.geometry(case.batch),
        limits=tuple(StackLimits(one.max_ids, one.max_unique_ids) for one in limits),
    )


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    """Every input of a trace by name, with a first axis of one device."""
    layout, rule = case.layout, case.spec.rule
    packed = case.arguments()
    names = [f"{s.name}/{role}" for s in layout.stacks for role in ROLES]
    names += [f"{s.name}/table" for s in layout.stacks]
    names += [f"{s.name}/slot:{slot.name}" for s in layout.stacks for slot in rule.slots]
    grad = case._by_sample([g.reshape(layout.num_cores, -1, g.shape[-1]) for g in case.grads])
    # Other operands for each stack, so that a mix-up shows.
    operands = np.asarray(case.spec.operands(3), np.float32)
    lines = np.stack([operands, operands])
    lines[1, 0] *= 2
    return {name: packed[name] for name in names} | {
        "grad": grad[None].astype(np.float32),
        "operands": lines[None],
    }


def request_of(case: Case) -> dict[str, Any]:
    inputs = inputs_of(case)
    return {
        "rule": case.spec.rule.name,
        "geometry": geometry_of(case).encode(),
        "out_shape": list(inputs["grad"].shape[1:]),
        "inputs": [(a.shape[1:], "i" if a.dtype == np.int32 else "f") for a in inputs.values()],
        "constants": list(case.spec.operands(3)),
        "max_gradient": case.spec.max_gradient,
    }


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("traces")
    request, answer = directory / "request", directory / "answer"
    asked = {
        "cases": {name: request_of(case) for name, case in CASES.items()},
        "xla": ONE_STACK,
        "xla_rules": XLA_RULES,
    }
    request.write_bytes(pickle.dumps(asked))
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("device_traces.py"), request, answer],
        env={
            **os.environ,
            **adapter.ENVIRONMENT,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=300,
    )
    assert answer.exists(), child.stderr[-4000:]
    return dict(pickle.loads(answer.read_bytes()))


# ----------------------------------------------------------------------- what torch.tpu.ops becomes


def program(case: Case, text: str) -> Program:
    """A trace as the emulator takes it."""
    config = re.compile(
        r"\{_xla_compute_type = .sparse., _xla_max_ids_per_partition = .(\d+)., "
        r"_xla_max_unique_ids_per_partition = .(\d+)., [^}]*\}\}"
    )

    def as_config(match: re.Match[str]) -> str:
        limits = lowering.Limits(max_ids=int(match[1]), max_unique_ids=int(match[2]))
        return "{}, backend_config = " + json.dumps(limits.config()) + "}"

    text = config.sub(as_config, text.replace(" {jax.buffer_donor = true}", ""))
    # A row's one number, broadcast along axis 1 or axis 0 of (1, D): the same for one row, but only
    # the second can be run on many rows at once, as the emulator does.
    text = re.sub(r"dims = \[1\] : \(tensor<1xf32>\)", "dims = [0] : (tensor<1xf32>)", text)
    layout, rule = case.layout, case.spec.rule
    arguments = tuple(
        Argument(
            name=name,
            kind="buffer",
            shape=array.shape[1:],
            dtype="s32" if array.dtype == np.int32 else "f32",
            donated=False,
            sharded=True,
        )
        for name, array in inputs_of(case).items()
    )
    shapes = {argument.name: argument.shape for argument in arguments}
    if rule.slots and rule.name != "sgd":
        order = [
            name
            for s in layout.stacks
            for name in (f"{s.name}/table", *(f"{s.name}/slot:{x.name}" for x in rule.slots))
        ]
    else:
        order = [f"{s.name}/table" for s in layout.stacks]
    results = [("activations", shapes["grad"]), *((name, shapes[name]) for name in order)]
    return Program(
        text=text,
        arguments=arguments,
        results=tuple(
            Result(name=name, kind="output", shape=shape, dtype="f32", aliases=None)
            for name, shape in results
        ),
        stacks=(),
        num_devices=1,
        cores_per_device=CORES,
        mode="exact",
        expected=Expected(num_lookups=2, num_updates=2, collectives=(), alias_bytes=0),
    )


@pytest.mark.parametrize("name", CASES)
def test_lookup_and_update_compute_what_the_reference_does(
    traces: dict[str, Any], name: str
) -> None:
    case = CASES[name]
    with Emulator(program(case, traces["texts"][name])) as emulator:
        results = emulator(inputs_of(case))
    layout = case.layout
    wanted = expected(case)
    np.testing.assert_allclose(
        results["activations"][0], wanted["activations"], rtol=1e-5, atol=1e-6
    )
    for stack in layout.stacks:
        arrays = unpack_stack(layout, stack, results[f"{stack.name}/table"])
        for slot in case.spec.rule.slots:
            state = unpack_stack(layout, stack, results[f"{stack.name}/slot:{slot.name}"])
            arrays |= {f"{table}/{slot.name}": array for table, array in state.items()}
        for key, array in arrays.items():
            np.testing.assert_allclose(array, wanted[key], rtol=1e-5, atol=1e-6, err_msg=key)
            before = case.tables.get(key, np.nan)
            assert not np.array_equal(array, before), f"{key} was not updated"


def expected(case: Case) -> dict[str, np.ndarray]:
    """Activations and logical arrays, with the operands of `inputs_of`."""
    layout, batch, rule = case.layout, case.batch, case.spec.rule
    inputs = inputs_of(case)
    order = [t.table.name for t in layout.stack_order_tables]
    stack_of = {t.table.name: i for i, s in enumerate(layout.stacks) for t in s.tables}
    tables = [case.tables[name].copy() for name in order]
    slots = [[slot.copy() for slot in case.slots[name]] for name in order]
    geometry = layout.geometry(batch)
    out = np.zeros(inputs["grad"].shape[1:], np.float32)
    reference = ReferenceBackend()
    reference.lookup(batch.stacks, tables, geometry, out.reshape(-1))
    operands = np.stack([inputs["operands"][0, stack_of[name]] for name in order])
    reference.update(
        inputs["grad"].reshape(-1), batch.stacks, tables, slots, operands, geometry,
        rule.name, case.spec.max_gradient,
    )  # fmt: skip
    arrays = {"activations": out, **dict(zip(order, tables, strict=True))}
    for name, of_table in zip(order, slots, strict=True):
        arrays |= {f"{name}/{s.name}": array for s, array in zip(rule.slots, of_table, strict=True)}
    return arrays


@pytest.mark.parametrize("name", CASES)
def test_update_calls_are_those_of_our_lowering(traces: dict[str, Any], name: str) -> None:
    """Target, configuration, and which operand is what; the computation is run by the emulator."""
    case = CASES[name]
    with adapter.mlir() as mlir:
        ours, theirs = (
            [facts(operation) for operation in updates(module)]
            for module in map(mlir.ir.Module.parse, (case.program().text, traces["texts"][name]))
        )
    assert len(ours) == len(case.layout.stacks)
    assert theirs == ours


def updates(module: Any) -> list[Any]:
    """The update calls of a module, which must outlive them."""
    block = lowering.public_function(module).regions[0].blocks[0]
    return [
        operation
        for operation in list(lowering.walk(block))
        if operation.name == "stablehlo.custom_call"
        and operation.attributes["call_target_name"].value in lowering.UPDATES
    ]


def facts(operation: Any) -> dict[str, Any]:
    config = json.loads(operation.attributes["backend_config"].value)
    return {
        "target": operation.attributes["call_target_name"].value,
        "config": config,
        "operands": [str(value.type) for value in operation.operands],
        "results": str(operation.results[0].type),
        "has_side_effect": "has_side_effect" in operation.attributes
        and operation.attributes["has_side_effect"].value,
        "computations": len(operation.attributes["called_computations"]),
    }


# ------------------------------------------------------------------------------- our own StableHLO


@pytest.mark.parametrize("name", XLA_RULES)
def test_the_xla_backend_exports_the_call_of_our_lowering(
    traces: dict[str, Any], name: str
) -> None:
    """Every operand of the rule is an argument, Adam's lr_t and eps_t of each step among them."""
    rule, one = RULES[name], ONE_STACK
    rows, dim = one["table"]
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(traces["exported"][name])
        (call,) = updates(module)
        indices = [source_of(value) for value in call.operands]
        num_arrays = 1 + len(rule.slots)
        assert indices == list(range(4 + 1 + num_arrays + len(rule.operands)))
        assert facts(call) == {
            "target": lowering.UPDATE,
            "config": json.loads(
                lowering.Limits(max_ids=32, max_unique_ids=16).config(
                    num_slot_variables=len(rule.slots), num_hyperparameters=len(rule.operands)
                )
            ),
            "operands": [
                "tensor<16xi32>", "tensor<64xi32>", "tensor<64xi32>", "tensor<64xf32>",
                "tensor<14x16xf32>", "tensor<80x16xf32>",
                *(f"tensor<{'x'.join(map(str, s.shape(rows, dim)))}xf32>" for s in rule.slots),
                *["tensor<f32>"] * len(rule.operands),
            ],
            "results": str(call.results[0].type),
            "has_side_effect": False,
            "computations": 1,
        }  # fmt: skip
        symbol = call.attributes["called_computations"][0].value
        text = stablehlo(rule, dim=dim, logical_dim=one["mean_dim"], name=symbol)
        definition = mlir.ir.Module.parse(text)
        for one in (definition, module):
            adapter.simplify(one)  # constants move to the top
        wanted = str(definition.body.operations[0])
        (found,) = [
            str(f)
            for f in module.body.operations
            if f.operation.attributes["sym_name"].value == symbol
        ]
        assert found == wanted


def source_of(value: Any) -> int:
    """Index of the argument that a value is."""
    return int(value.arg_number) if hasattr(value, "arg_number") else -1


def test_the_xla_backend_exports_the_lookup_of_our_lowering(traces: dict[str, Any]) -> None:
    text = traces["exported_lookup"]
    assert text.count(f"@{lowering.LOOKUP}(%arg0, %arg1, %arg2, %arg3, %arg4, %") == 1
    assert (
        json.dumps(lowering.Limits(max_ids=32, max_unique_ids=16).config())[1:-1].replace(
            '\\"', "\\22"
        )
        in text
    )


def test_torch_tpu_takes_the_update_as_a_torch_op(traces: dict[str, Any]) -> None:
    assert traces["fake"] == [ONE_STACK["table"]] * 3


# ------------------------------------------------------------------------------ beside a TPU device


def test_both_backends_are_available_where_torch_sees_a_tpu(traces: dict[str, Any]) -> None:
    lines = dict(line.split(maxsplit=1) for line in traces["backends"].splitlines())
    assert (lines["tpu"], lines["xla"]) == ("available", "available")


def test_torch_can_be_asked_for_a_tpu_where_there_is_one(traces: dict[str, Any]) -> None:
    """Our answer for TorchRec's question once asked torch, which asked us, and so on."""
    assert traces["is_available"] is True


def test_functions_are_marked_where_torch_sees_a_tpu(traces: dict[str, Any]) -> None:
    assert traces["spmd_safe"] == (True, 7)
