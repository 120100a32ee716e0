"""The SparseCore calls against those that jax-tpu-embedding lowers, and the collectives."""

import json
from functools import partial

import numpy as np
import pytest

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.rules import Rule, Slot

jax = pytest.importorskip("jax", reason="pip install torchrec_tpu[aot]")
core = pytest.importorskip(
    "jax_tpu_embedding.sparsecore.lib.core", reason="pip install --no-deps jax_tpu_embedding==0.1.0"
)
if reason := adapter.why_unavailable("jax", "jaxlib"):
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.oracle

MAX_IDS, MAX_UNIQUE, SAMPLES, ROWS, DIM = 64, 32, 24, 40, 16
ARRAYS = [((16,), np.int32), ((128,), np.int32), ((128,), np.int32), ((128,), np.float32)]


def _jax_adagrad(ops, grad, row, total, lr):
    """Without the eps that ours has: there a zero gradient on an empty accumulator gives 0 / 0."""
    total = total + grad * grad
    return row - lr * grad / ops.sqrt(total), total


def _jax_adam(ops, grad, row, momentum, velocity, alpha_t, beta1, beta2, eps):
    """Ours takes 1 - beta from the host, in double: in float32 1 - 0.999 is off by 1.7e-5."""
    momentum = momentum + (1.0 - beta1) * (grad - momentum)
    velocity = velocity + (1.0 - beta2) * (grad * grad - velocity)
    return row - alpha_t * momentum / (ops.sqrt(velocity) + eps), momentum, velocity


def _rule(name, slots, operands, update):
    return Rule(
        name=name,
        slots=tuple(Slot(name=slot) for slot in slots),
        hyper=dict.fromkeys(operands, 0.5),
        operands=tuple(operands),
        prepare=lambda _, hyper: tuple(hyper.values()),
        update=update,
        is_literal=True,
    )


RULES_BY_PRIMITIVE = {
    "sgd": RULES["sgd"],
    "adagrad": _rule("adagrad", ["sum"], ["lr"], _jax_adagrad),
    "adam": _rule("adam", ["m", "v"], ["alpha_t", "beta1", "beta2", "eps"], _jax_adam),
    "ftrl": RULES["ftrl"],
    "laprop": RULES["laprop"],
}


def _shapes(rule):
    """(shape, dtype) of buffers, minibatches, table, slots, gradient and operands."""
    table = ((ROWS, DIM), np.float32)
    return [
        *ARRAYS,
        ((), np.int32),
        table,
        *[table] * len(rule.slots),
        ((SAMPLES, DIM), np.float32),
        *[((), np.float32)] * len(rule.operands),
    ]


def _lowered_by_jax(name, rule, *, enable_minibatching):
    from importlib import import_module

    primitives = "jax_tpu_embedding.sparsecore.lib.core.primitives"
    forward = import_module(f"{primitives}.sparse_dense_matmul_csr")
    backward = import_module(f"{primitives}.sparse_dense_matmul_grad_with_{name}")
    limits = {
        "max_ids_per_partition": MAX_IDS,
        "max_unique_ids_per_partition": MAX_UNIQUE,
        "sharding_strategy": 1,
        "enable_minibatching": enable_minibatching,
    }
    extra = {"multiply_linear_by_learning_rate": False} if name == "ftrl" else {}
    update = getattr(backward, f"tpu_sparse_dense_matmul_grad_with_{name}_primitive")

    def step(*arguments):
        activations = forward.tpu_sparse_dense_matmul_csr_primitive.bind(
            *arguments[:6], device_batch_size=SAMPLES, **limits
        )
        return activations, update.bind(
            *arguments, **limits, **extra, computation_name="jax_update"
        )

    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _shapes(rule)]
    lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.as_text(dialect="stablehlo")


def _lowered_by_us(rule, *, enable_minibatching):
    with adapter.mlir() as mlir:
        ir = mlir.ir
        element = {np.int32: ir.IntegerType.get_signless(32), np.float32: ir.F32Type.get()}
        types = [ir.RankedTensorType.get(shape, element[dtype]) for shape, dtype in _shapes(rule)]
        module = ir.Module.parse("module {}")
        with ir.InsertionPoint(module.body):
            main = mlir.func.FuncOp("main", (types, []))
            block = main.add_entry_block()
        with ir.InsertionPoint(block):
            pointers, ids, samples, gains, minibatches, table, *rest = block.arguments
            slots, grad = rest[: len(rule.slots)], rest[len(rule.slots)]
            buffers = lowering.Buffers(
                row_pointers=pointers,
                embedding_ids=ids,
                sample_ids=samples,
                gains=gains,
                num_minibatches=minibatches if enable_minibatching else None,
            )
            limits = lowering.Limits(max_ids=MAX_IDS, max_unique_ids=MAX_UNIQUE)
            activations = lowering.lookup(mlir, buffers, table, samples=SAMPLES, limits=limits)
            new = lowering.update(
                mlir,
                module,
                buffers,
                grad,
                table,
                slots,
                rest[len(rule.slots) + 1 :],
                rule=rule,
                limits=limits,
                name="our_update",
            )
            results = [activations, *new]
            mlir.func.ReturnOp(results)
        main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(types, [value.type for value in results])
        )
        assert module.operation.verify()
        return str(module)


COMMUTATIVE = ("stablehlo.add", "stablehlo.multiply")


def _expression(value, ir, *, names):
    """What a value is, as nested tuples over the function's arguments, whatever it is called.

    Operands of additions and multiplications are sorted; a factor of one is dropped.
    """
    owner = value.owner
    if isinstance(owner, ir.Block):
        return f"argument {list(owner.arguments).index(value)}"
    name = owner.name
    if name == "stablehlo.constant":
        array = np.asarray(owner.attributes["value"])
        return f"constant {array.reshape(-1)[0]} of {value.type}" if array.size else ""
    operands = [_expression(operand, ir, names=names) for operand in owner.operands]
    if name in COMMUTATIVE:
        operands.sort(key=repr)
    if name == "stablehlo.multiply":
        kept = [o for o in operands if not repr(o).startswith("'constant 1.0")]
        if len(kept) == 1:
            return kept[0]
    details = {key: str(owner.attributes[key]) for key in names if key in owner.attributes}
    if name == "stablehlo.custom_call":
        details["backend_config"] = json.loads(owner.attributes["backend_config"].value)
        has_effect = "has_side_effect" in owner.attributes
        details["has_side_effect"] = has_effect and owner.attributes["has_side_effect"].value
    return (name, *details.items(), [str(r.type) for r in owner.results], operands)


ATTRIBUTES = (
    "call_target_name", "api_version", "index", "mhlo.frontend_attributes", "sizes",
    "comparison_direction",
)  # fmt: skip


def _summary(text):
    """The calls of the main function, and the update computation, as comparable values."""
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(text)
        functions = {
            f.operation.attributes["sym_name"].value: f.regions[0].blocks[0]
            for f in module.body.operations
        }
        of_block = partial(_expression, ir=mlir.ir, names=ATTRIBUTES)
        (update,) = (block for name, block in functions.items() if name.endswith("_update"))
        returned = {
            name: [
                of_block(operand)
                for operation in block.operations
                if operation.operation.name == "func.return"
                for operand in operation.operands
            ]
            for name, block in (("main", functions["main"]), ("update", update))
        }
        return returned | {"types": [str(argument.type) for argument in update.arguments]}


@pytest.mark.parametrize("enable_minibatching", [False, True], ids=["plain", "minibatches"])
@pytest.mark.parametrize("name", RULES_BY_PRIMITIVE)
def test_calls_equal_those_of_jax_tpu_embedding(name, enable_minibatching):
    rule = RULES_BY_PRIMITIVE[name]
    theirs = _summary(_lowered_by_jax(name, rule, enable_minibatching=enable_minibatching))
    ours = _summary(_lowered_by_us(rule, enable_minibatching=enable_minibatching))
    assert ours == theirs
    forward, *_ = ours["main"]
    assert ("call_target_name", f'"{lowering.LOOKUPS[enable_minibatching]}"') in forward
    assert f'"{lowering.UPDATES[enable_minibatching]}"' in repr(ours["main"][1])


def test_the_comparison_sees_swapped_operands_and_another_formula():
    plain = _summary(_lowered_by_us(RULES["ftrl"], enable_minibatching=False))
    text = _lowered_by_us(RULES["ftrl"], enable_minibatching=False)
    swapped = text.replace("(%arg0, %arg1, %arg2,", "(%arg0, %arg2, %arg1,", 1)
    assert swapped != text
    assert _summary(swapped) != plain
    wrong = _rule(
        "ftrl", ["n", "z"], RULES["ftrl"].operands, lambda _, g, w, n, z, *rest: (w - g, n, z)
    )
    assert _summary(_lowered_by_us(wrong, enable_minibatching=False)) != plain
