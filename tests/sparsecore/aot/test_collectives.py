"""Collectives in StableHLO, run by XLA on CPU devices."""

import numpy as np
import pytest

from torchrec_tpu.sparsecore.aot import adapter, guards, lowering
from torchrec_tpu.sparsecore.aot.emulate import Emulator
from torchrec_tpu.sparsecore.aot.program import Argument, Expected, Program, Result
from torchrec_tpu.sparsecore.errors import ProgramError

if reason := adapter.why_unavailable("jax", "jaxlib"):
    pytest.skip(reason, allow_module_level=True)

DEVICES, SHAPE = 2, (4, 6)


def build(emit, *, num_devices=DEVICES, kind=None):
    """A program whose results are what `emit(mlir, x)` returns."""
    with adapter.mlir() as mlir:
        ir = mlir.ir
        x_type = ir.RankedTensorType.get(SHAPE, ir.F32Type.get())
        types = [x_type]
        module = ir.Module.parse(
            f"module attributes {{mhlo.num_replicas = {num_devices} : i32}} {{}}"
        )
        with ir.InsertionPoint(module.body):
            main = mlir.func.FuncOp("main", (types, []))
            block = main.add_entry_block()
        with ir.InsertionPoint(block):
            results = emit(mlir, block.arguments[0])
            mlir.func.ReturnOp(results)
        main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(types, [value.type for value in results])
        )
        assert module.operation.verify()
        shapes = [tuple(value.type.shape) for value in results]
        collectives = ((kind, sum(4 * int(np.prod(s)) for s in shapes)),) if kind else ()
        return Program(
            text=str(module),
            arguments=(
                Argument(
                    name="x", kind="input", shape=SHAPE, dtype="f32", donated=False, sharded=True
                ),
            ),
            results=tuple(
                Result(name=f"r{i}", kind="output", shape=s, dtype="f32", aliases=None)
                for i, s in enumerate(shapes)
            ),
            stacks=(),
            num_devices=num_devices,
            cores_per_device=2,
            mode="exact",
            expected=Expected(num_lookups=0, num_updates=0, collectives=collectives, alias_bytes=0),
        )


X = np.random.default_rng(0).standard_normal((DEVICES, *SHAPE)).astype(np.float32)


def one(name, **options):
    return lambda mlir, x: [getattr(lowering, name)(mlir, x, num_devices=DEVICES, **options)]


@pytest.mark.parametrize(
    ("emit", "kind", "expected"),
    [
        (
            lambda mlir, x: lowering.all_reduce(mlir, [x, x], num_devices=DEVICES),
            "all_reduce",
            np.broadcast_to(X.sum(0), X.shape),
        ),
        (
            one("reduce_scatter", dim=0),
            "reduce_scatter",
            np.stack(np.split(X.sum(0), DEVICES, axis=0)),
        ),
        (
            one("all_gather", dim=1),
            "all_gather",
            np.stack([np.concatenate(list(X), axis=1)] * DEVICES),
        ),
        (
            one("all_to_all", dim=0),
            "all_to_all",
            np.stack([np.concatenate([x[2 * d : 2 * d + 2] for x in X]) for d in range(DEVICES)]),
        ),
    ],
    ids=["all_reduce", "reduce_scatter", "all_gather", "all_to_all"],
)
def test_collectives_do_what_they_say(emit, kind, expected):
    program = build(emit, kind=kind)
    program.check()
    with Emulator(program) as emulator:
        results = emulator({"x": X})
    for value in results.values():
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_parts_that_do_not_divide_are_refused():
    for name in ("reduce_scatter", "all_to_all"):
        with pytest.raises(ProgramError, match=rf"{name}: .* in dimension 0 over 3 devices"):
            build(
                lambda mlir, x, name=name: [getattr(lowering, name)(mlir, x, dim=0, num_devices=3)]
            )


def test_a_collective_too_many_is_noticed():
    program = build(one("all_gather", dim=0))
    with pytest.raises(ProgramError, match=r"'all_gather'.*collectives, expected"):
        guards.check(program)
