"""The tracer: one function of a row as NumPy, C++ and StableHLO."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.rules import (
    NUM_LANES,
    NUMPY,
    Rule,
    Slot,
    apply,
    cpp,
    stablehlo,
    struct_name,
)


def make_rule(update, *, name="made_up", slots=(), operands=("lr",)):
    return Rule(
        name=name,
        slots=tuple(slots),
        hyper=dict.fromkeys(operands, 0.5),
        operands=tuple(operands),
        prepare=lambda _, hyper: tuple(hyper.values()),
        update=update,
    )


def _everything(ops, grad, row, momentum, total, count, lr, eps):
    """Every operation, constants on both sides, both widths of slots, and values used twice."""
    half = 0.5 * grad + 0.25
    step = 1.0 / (ops.sqrt(total) + eps)
    total = total + ops.mean_row(half * half - momentum / 3.0)
    count = (1 - count) * lr + 2
    momentum = -momentum * lr - half + (3 - row) / 7
    return row - step * momentum / (count + ops.sqrt(momentum * momentum)), momentum, total, count


EVERYTHING = make_rule(
    _everything,
    name="everything",
    slots=[
        Slot(name="momentum"),
        Slot(name="total", width="scalar", init=1.0),
        Slot(name="count", width="scalar"),
    ],
    operands=("lr", "eps"),
)


def _literally(ops, grad, row, total, lr, power):
    """The functions of literal rules, on both widths, and arithmetic between operands."""
    lr = 1.0 - ops.power(lr, 2.0) / lr
    total = total + ops.power(ops.mean_row(grad * grad) + 0.5, power)
    total = ops.where_equal(power, 0.5, ops.clamp(-lr, total, lr * 4.0), total)
    step = ops.clamp(-0.1, grad / ops.power(total, power), ops.sqrt(lr))
    return row - ops.where_equal(grad, 0.0, lr, step * lr), total


LITERALLY = Rule(
    name="literally",
    slots=(Slot(name="total", width="scalar"),),
    hyper={"lr": 0.5, "power": 0.5},
    operands=("lr", "power"),
    prepare=lambda _, hyper: (hyper["lr"], hyper["power"]),
    update=_literally,
    is_literal=True,
)
ALL = [*RULES.values(), EVERYTHING, LITERALLY]


def draw(rule, num_rows, dim, seed=0):
    """(grad, row, slots, operands) of `num_rows` rows in the middle of a training."""
    rng = np.random.default_rng(seed)
    grad, row = rng.standard_normal((2, num_rows, dim)).astype(np.float32)
    grad[0] = 0
    slots = [
        rng.random(slot.shape(num_rows, dim)).astype(np.float32) + np.float32(0.1)
        for slot in rule.slots
    ]
    hyper = {**rule.hyper, "weight_decay": 0.1}
    return grad, row, slots, np.array(rule.prepare(3, hyper)[: len(rule.operands)], np.float32)


# ------------------------------------------------------------------------------------------ NumPy


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_a_mean_adds_16_lanes_and_then_halves(dim, seed):
    x = np.random.default_rng(seed).standard_normal((3, dim)).astype(np.float32)
    for row, mean in zip(x, NUMPY.mean_row(x)[:, 0], strict=True):
        lanes = [np.float32(0)] * NUM_LANES
        for k, value in enumerate(row):
            lanes[k % NUM_LANES] += value
        for width in (8, 4, 2, 1):
            lanes = [lanes[k] + lanes[k + width] for k in range(width)]
        assert mean == lanes[0] / np.float32(dim)
        assert mean.dtype == np.float32


@pytest.mark.parametrize("rule", ALL, ids=attrgetter("name"))
def test_rows_do_not_see_each_other_and_arguments_stay(rule):
    grad, row, slots, operands = draw(rule, 5, 19)
    copies = [a.copy() for a in (grad, row, *slots, operands)]
    together = apply(rule, grad, row, slots, operands)
    for i in range(5):
        one = slice(i, i + 1)
        alone = apply(rule, grad[one], row[one], [s[one] for s in slots], operands)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a[one], b)
    for array, copy in zip((grad, row, *slots, operands), copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert all(array.dtype == np.float32 for array in together)


# ---------------------------------------------------------------------------------------- tracing


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (make_rule(lambda _, g, w, lr: (w - lr * 2.0 * g,)), "multiply of lr, 2.0.*prepare"),
        (make_rule(lambda ops, g, w, lr: (w - ops.sqrt(lr) * g,)), "sqrt of lr.*prepare"),
        (make_rule(lambda ops, g, w, lr: (w - ops.mean_row(lr) * g,)), "got a uniform one"),
        (make_rule(lambda ops, g, w, lr: (ops.mean_row(g),)), r"\['scalar'\].*\['row'\]"),
        (make_rule(lambda ops, g, w, lr: (w, g)), r"\['row', 'row'\].*\['row'\]"),
        (
            make_rule(lambda ops, g, w, lr: (w - ops.mean_row(g) * ops.mean_row(w),)),
            "2 means; one pass allows one",
        ),
        (
            make_rule(
                lambda _, g, w, n, lr: (w - g, n + 1), slots=[Slot(name="n", width="scalar")]
            ),
            "no mean that would drive it",
        ),
        (
            make_rule(
                lambda ops, g, w, n, lr: (w - g, n + ops.mean_row(g * n)),
                slots=[Slot(name="n", width="scalar")],
            ),
            r"MeanTerm\(\) needs 'n', which is not known before the mean is",
        ),
    ],
)
def test_a_rule_that_no_kernel_could_run_is_refused(rule, message):
    with pytest.raises(TypeError, match=message):
        cpp([rule])


# -------------------------------------------------------------------------------------------- C++

HARNESS = """
#include "rules.inc"
struct V {
  float lane[16];
  V() = default;
  explicit V(float x) { for (float& v : lane) v = x; }
};
template <class F> V Each(F f) {
  V result;
  for (int i = 0; i < 16; ++i) result.lane[i] = f(i);
  return result;
}
V operator+(V a, V b) { return Each([&](int i) { return a.lane[i] + b.lane[i]; }); }
V operator-(V a, V b) { return Each([&](int i) { return a.lane[i] - b.lane[i]; }); }
V operator*(V a, V b) { return Each([&](int i) { return a.lane[i] * b.lane[i]; }); }
V operator/(V a, V b) { return Each([&](int i) { return a.lane[i] / b.lane[i]; }); }
V operator-(V a) { return Each([&](int i) { return -a.lane[i]; }); }
V Sqrt(V a) { return Each([&](int i) { return std::sqrt(a.lane[i]); }); }
V Max(V a, V b) {
  return Each([&](int i) { float x = a.lane[i], y = b.lane[i]; return x > y ? x : y; });
}
V Min(V a, V b) {
  return Each([&](int i) { float x = a.lane[i], y = b.lane[i]; return x < y ? x : y; });
}
V WhereEqual(V a, V b, V c, V d) {
  return Each([&](int i) { return a.lane[i] == b.lane[i] ? c.lane[i] : d.lane[i]; });
}
V Pow(V a, V b) {
  return Each([&](int i) {
    return static_cast<float>(std::pow(static_cast<double>(a.lane[i]),
                                       static_cast<double>(b.lane[i])));
  });
}
V Load(const float* p, int n) { return Each([&](int i) { return i < n ? p[i] : 0.0f; }); }
void Store(V v, float* p, int n) { for (int i = 0; i < n; ++i) p[i] = v.lane[i]; }

template <class R>
void Run(int dim, const float* grad, float* row, float** row_slots, float** scalar_slots,
         const float* operands) {
  V slots[R::kNumRowSlots + 1];
  float scalars[R::kNumScalars + 1];
  auto load = [&](int k, int n) {
    for (int s = 0; s < R::kNumRowSlots; ++s) slots[s] = Load(row_slots[s] + k, n);
  };
  if constexpr (R::kHasMean) {
    V sum(0.f);
    for (int k = 0; k < dim; k += 16) {
      const int n = dim - k < 16 ? dim - k : 16;
      load(k, n);
      sum = sum + Load(R::MeanTerm(Load(grad + k, n), Load(row + k, n), slots, operands).lane, n);
    }
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; ++i) sum.lane[i] += sum.lane[i + half];
    float state[R::kNumScalarSlots + 1];
    for (int s = 0; s < R::kNumScalarSlots; ++s) state[s] = *scalar_slots[s];
    R::Scalar(sum.lane[0] / static_cast<float>(dim), state, operands, scalars);
    for (int s = 0; s < R::kNumScalarSlots; ++s) *scalar_slots[s] = state[s];
  }
  for (int k = 0; k < dim; k += 16) {
    const int n = dim - k < 16 ? dim - k : 16;
    load(k, n);
    V v = Load(row + k, n);
    R::Row(Load(grad + k, n), v, slots, operands, scalars);
    Store(v, row + k, n);
    for (int s = 0; s < R::kNumRowSlots; ++s) Store(slots[s], row_slots[s] + k, n);
  }
}
#define RUN(Name) extern "C" void Name(int dim, const float* grad, float* row, float** row_slots, \\
    float** scalar_slots, const float* operands) { \\
  Run<trtpu::rules::Name##Rule>(dim, grad, row, row_slots, scalar_slots, operands); }
TRTPU_FOR_EACH_RULE(RUN)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The functors of ALL as a library; every warning is an error."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler: set CXX")
    folder = tmp_path_factory.mktemp("rules")
    (folder / "rules.inc").write_text(cpp(ALL))
    (folder / "harness.cc").write_text(HARNESS)
    flags = "-std=c++20 -O1 -ffp-contract=off -Wall -Wextra -Wconversion -Wshadow -Werror"
    subprocess.run(
        [compiler, *flags.split(), "-shared", "-fPIC", "harness.cc", "-o", "rules.so"],
        cwd=folder,
        check=True,
    )
    return ctypes.CDLL(str(folder / "rules.so"))


@pytest.mark.parametrize("dim", [1, 8, 16, 19, 128])
@pytest.mark.parametrize("rule", ALL, ids=attrgetter("name"))
def test_cpp_equals_numpy_bit_for_bit(compiled, rule, dim):
    grad, row, slots, operands = draw(rule, 6, dim, seed=dim)
    wanted = apply(rule, grad, row, slots, operands)

    def addresses(arrays):
        return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))

    for i in range(len(row)):
        of_width = {
            width: [s[i:] for s, slot in zip(slots, rule.slots, strict=True) if slot.width == width]
            for width in ("row", "scalar")
        }
        getattr(compiled, struct_name(rule.name))(
            dim,
            ctypes.c_void_p(grad[i].ctypes.data),
            ctypes.c_void_p(row[i].ctypes.data),
            addresses(of_width["row"]),
            addresses(of_width["scalar"]),
            ctypes.c_void_p(operands.ctypes.data),
        )
    for got, want in zip((row, *slots), wanted, strict=True):
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


# -------------------------------------------------------------------------------------- StableHLO


def run_by_xla(text, name, arrays):
    """Results of the private function `name` of `text`, compiled and run by XLA on the CPU."""
    jax = pytest.importorskip("jax", reason="pip install -r requirements/oracle.txt")
    from jax.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    inputs, result = re.search(rf"@{name}\((.*)\) -> (.*) {{", text).groups()
    inputs = re.findall(r"tensor<.*?>", inputs)
    outputs = re.findall(r"tensor<.*?>", result)
    call = ", ".join(f"%a{i}" for i in range(len(inputs)))
    lines = [
        "func.func public @main("
        + ", ".join(f"%a{i}: {type_}" for i, type_ in enumerate(inputs))
        + f") -> ({', '.join(outputs)}) {{",
        f"%t = func.call @{name}({call}) : ({', '.join(inputs)}) -> {result}",
    ]
    for i, type_ in enumerate(outputs):
        lines.append(f"%r{i} = stablehlo.get_tuple_element %t[{i}] : ({result}) -> {type_}")
    returned = ", ".join(f"%r{i}" for i in range(len(outputs)))
    lines.append(f"return {returned} : {', '.join(outputs)}\n}}")
    with mlir.make_ir_context():
        module = ir.Module.parse("\n".join(["module {", *lines, text, "}"]))
        assert module.operation.verify()
        (device,) = jax.devices("cpu")
        program = device.client.compile_and_load(
            module, xla_client.DeviceList((device,)), xla_client.CompileOptions()
        )
    results = program.execute_sharded([jax.device_put(array, device) for array in arrays])
    return [np.asarray(r[0]) for r in results.disassemble_into_single_device_arrays()]


@pytest.mark.oracle
@pytest.mark.parametrize("rule", ALL, ids=attrgetter("name"))
def test_stablehlo_run_by_xla_equals_numpy(rule):
    dim, padded = 20, 24
    grad, row, slots, operands = draw(rule, 1, dim)
    grad[:] = draw(rule, 2, dim)[0][1]
    wanted = apply(rule, grad, row, slots, operands)

    def pad(array):
        return np.pad(array, ((0, 0), (0, padded - dim))) if array.ndim == 2 else array

    results = run_by_xla(
        stablehlo(rule, dim=padded, logical_dim=dim, name="update"),
        "update",
        [*map(pad, (grad, row, *slots)), *(np.full((1, padded), x, np.float32) for x in operands)],
    )
    for got, want in zip(results, wanted, strict=True):
        logical = got[:, :dim] if want.ndim == 2 else got
        np.testing.assert_allclose(logical, want, rtol=1e-6, atol=1e-6)


COMPILE_FOR_TPU = r"""
import json, sys
import numpy as np
from jax.experimental import topologies
from jax.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir
from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.rules import stablehlo

CORES, SAMPLES, SLOTS, ROWS, DIM, LOGICAL_DIM = 2, 512, 2048, 1024, 16, 12  # of one device

def module(rule):
    table, scalar = f"tensor<{ROWS}x{DIM}xf32>", f"tensor<{ROWS}xf32>"
    state = [table, *(table if slot.width == "row" else scalar for slot in rule.slots)]
    ids = f"tensor<{SLOTS}xi32>"
    inputs = [f"tensor<{8 * CORES}xi32>", ids, ids, f"tensor<{SLOTS}xf32>",
              f"tensor<{SAMPLES}x{DIM}xf32>", *state, *["tensor<f32>"] * len(rule.operands)]
    config = {"max_ids_per_partition": 64, "max_unique_ids_per_partition": 64,
              "pad_value": 2**31 - 1, "sharding_strategy": 1,
              "num_slot_variables": len(rule.slots), "num_hyperparameters": len(rule.operands)}
    config = json.dumps({"sparse_dense_matmul_config": config,
                         "device_type": "DEVICE_TYPE_SPARSECORE"}).replace('"', '\\"')
    result = f"tuple<{', '.join(state)}>"
    names = ", ".join(f"%a{i}" for i in range(len(inputs)))
    arguments = ", ".join(f"%a{i}: {type_}" for i, type_ in enumerate(inputs))
    return "\n".join([
        f"func.func public @main({arguments}) -> {table} {{",
        f"%t = stablehlo.custom_call @SparseDenseMatmulGradOpWithOptimizerUpdate({names}) "
        f'{{backend_config = "{config}", called_computations = [@update], api_version = 1 : i32}} '
        f": ({', '.join(inputs)}) -> {result}",
        '%r = stablehlo.get_tuple_element %t[0] '
        f'{{mhlo.frontend_attributes = {{_xla_compute_type = "sparse"}}}} : ({result}) -> {table}',
        f"return %r : {table}", "}",
        stablehlo(rule, dim=DIM, logical_dim=LOGICAL_DIM, name="update"),
    ])

devices = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu").devices
options = xla_client.CompileOptions()
build = options.executable_build_options
grid = xla_client.DeviceAssignment.create(np.arange(len(devices)).reshape(-1, 1))
for each in (options, build):
    each.num_replicas, each.num_partitions, each.device_assignment = len(devices), 1, grid
for name, rule in RULES.items():
    with mlir.make_ir_context():
        text = ir.Module.parse(module(rule))
    devices[0].client.compile(text, xla_client.DeviceList(tuple(devices)), options)
    print("compiled", name)
"""


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("topology", ["v6e:2x2", "tpu7x:2x2x1"])
def test_the_sparsecore_compiler_takes_every_rule(topology):
    """Inside the call target for user-defined updates, with a row that has padding; no TPU."""
    for package in ("jax", "libtpu"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install torchrec_tpu[aot]")
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_TPU, topology],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    compiled = [line.split()[1] for line in result.stdout.splitlines() if "compiled" in line]
    assert compiled == list(RULES), result.stderr[-2000:]


def test_stablehlo_takes_operands_as_arguments():
    """A learning rate that were a constant of the program would recompile it."""
    for rule in RULES.values():
        text = stablehlo(rule, dim=8)
        assert [f"%{name}: tensor<1x8xf32>" in text for name in rule.operands] == [True] * len(
            rule.operands
        )
