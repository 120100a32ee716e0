"""SparseCore calls by their definition on CPU devices, against the reference backend."""

import dataclasses
import gc
import os
import re
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from stack_program import Case, make

from torchrec_tpu.sparsecore.aot import adapter
from torchrec_tpu.sparsecore.aot.emulate import Emulator
from torchrec_tpu.sparsecore.aot.program import Argument, Expected, Program, Result
from torchrec_tpu.sparsecore.batch import PAD_ID
from torchrec_tpu.sparsecore.errors import DependencyError, ProgramError
from torchrec_tpu.sparsecore.optimizers import (
    adagrad,
    adam,
    ftrl,
    laprop,
    rowwise_adagrad,
    sgd,
)

if reason := adapter.why_unavailable("jax", "jaxlib"):
    pytest.skip(reason, allow_module_level=True)

SPECS = {
    "sgd": sgd(lr=0.1),
    "adagrad_l2": adagrad(lr=0.1, weight_decay=0.1),
    "rowwise_adagrad": rowwise_adagrad(lr=0.1),
    "ftrl": ftrl(lr=0.1),
    "laprop": laprop(lr=0.1),
    "adam_decoupled": adam(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled"),
}


def assert_equal(case: Case, results: dict[str, np.ndarray]) -> None:
    expected, actual = case.expected(), case.logical(results)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(make(2, 2), SPECS["adagrad_l2"])


@pytest.fixture(scope="module")
def emulator(case: Case) -> Iterator[Emulator]:
    with Emulator(case.program()) as emulator:
        yield emulator


def test_lookup_and_update_equal_the_reference(case: Case, emulator: Emulator) -> None:
    assert_equal(case, emulator(case.arguments()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "cores_per_device", "rule"),
    [
        (1, 2, "sgd"),
        (3, 4, "rowwise_adagrad"),
        (2, 4, "adam_decoupled"),
        (1, 1, "adagrad_l2"),
        (1, 4, "ftrl"),
        (2, 2, "laprop"),
    ],
)
def test_any_number_of_cores_and_any_rule_equal_the_reference(
    num_devices: int, cores_per_device: int, rule: str
) -> None:
    case = Case.of(make(num_devices, cores_per_device), SPECS[rule])
    with Emulator(case.program()) as emulator:
        assert_equal(case, emulator(case.arguments()))


@pytest.mark.parametrize(
    ("num_devices", "cores_per_device", "rule"),
    [
        (2, 2, "adam_decoupled"),
        pytest.param(1, 4, "sgd", marks=pytest.mark.slow),
        pytest.param(3, 4, "rowwise_adagrad", marks=pytest.mark.slow),
    ],
)
def test_minibatches_give_what_one_batch_gives(
    num_devices: int, cores_per_device: int, rule: str
) -> None:
    case = Case.of(make(num_devices, cores_per_device), SPECS[rule])
    with Emulator(case.program(is_minibatched=True)) as emulator:
        for num_minibatches in (1, 2, 5):
            assert_equal(case, emulator(case.arguments(num_minibatches=num_minibatches)))


def test_rows_that_nobody_looked_up_keep_their_bits(case: Case, emulator: Emulator) -> None:
    arguments = case.arguments()
    expected = case.expected()
    for name in [name for name in arguments if name.endswith(("/table", "/slot:sum"))]:
        arguments[name] = arguments[name].copy()
    untouched = {name: (expected[name] == case.tables[name]).all(1) for name in case.tables}
    assert all(0 < mask.sum() < len(mask) for mask in untouched.values())
    marked = dataclasses.replace(
        case,
        tables={n: np.where(untouched[n][:, None], np.nan, t) for n, t in case.tables.items()},
        slots={
            n: [np.where(untouched[n][:, None], -1, s).astype(np.float32) for s in slots]
            for n, slots in case.slots.items()
        },
    )
    results = marked.logical(emulator(marked.arguments()))
    for name, mask in untouched.items():
        assert np.isnan(results[name][mask]).all()
        assert (results[f"{name}/sum"][mask] == -1).all()
        np.testing.assert_allclose(results[name][~mask], expected[name][~mask], rtol=1e-5)
    np.testing.assert_allclose(results["activations"], expected["activations"], rtol=1e-5)


def test_what_is_behind_the_last_partition_is_never_read(case: Case, emulator: Emulator) -> None:
    arguments = case.arguments()
    for stack in case.layout.stacks:
        pointers = arguments[f"{stack.name}/row_pointers"].reshape(case.layout.num_cores, -1)
        ends = (pointers[:, case.layout.num_cores - 1] + 7) // 8 * 8
        for role in ("embedding_ids", "sample_ids", "gains"):
            values = arguments[f"{stack.name}/{role}"].copy()
            lines = values.reshape(case.layout.num_cores, -1)
            for line, end in zip(lines, ends, strict=True):
                line[end:] = 3  # a row and a sample that exist
            arguments[f"{stack.name}/{role}"] = values
    assert_equal(case, emulator(arguments))


@pytest.mark.parametrize("role", ["embedding_ids", "sample_ids"])
@pytest.mark.parametrize("wrong", [-1, 10_000, PAD_ID])
def test_an_id_outside_its_bounds_gives_nan(
    case: Case, emulator: Emulator, role: str, wrong: int
) -> None:
    arguments = case.arguments()
    stack = case.layout.stacks[0]
    values = arguments[f"{stack.name}/{role}"].copy()
    assert arguments[f"{stack.name}/row_pointers"][1, 0] > 0
    values[1, 0] = wrong  # the first id of device 1
    results = emulator(arguments | {f"{stack.name}/{role}": values})
    activations = results[f"{stack.name}/activations"]
    assert np.isnan(activations[1]).any()
    assert not np.isnan(activations[0]).any()
    assert np.isnan(results[f"{stack.name}/table"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_ids", "max_unique_ids"])
def test_more_ids_than_the_limits_give_nan(case: Case, limit: str) -> None:
    """The compiled program would drop them, or worse."""
    largest = getattr(case.batch.stats, limit)
    for slack, is_nan in ((0, False), (1, True)):
        limits = {
            stack.name: dataclasses.replace(
                case.limits[stack.name], **{limit: int(largest[index].max()) - slack}
            )
            for index, stack in enumerate(case.layout.stacks)
        }
        tight = dataclasses.replace(case, limits=limits)
        with Emulator(tight.program()) as emulator:
            results = emulator(tight.arguments())
        for stack in case.layout.stacks:
            assert np.isnan(results[f"{stack.name}/activations"]).any() == is_nan
            assert np.isnan(results[f"{stack.name}/table"]).any() == is_nan


# -------------------------------------------------------------------------------- what is refused


def tiny(body: str, *, donated: bool = False, aliases: int | None = None) -> Program:
    """A program on two devices: a replicated argument (4,), one result that `body` returns."""
    attribute = " {tf.aliasing_output = 0 : i32}" if aliases == 0 else ""
    return Program(
        text="module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {\n"
        f"func.func @main(%x: tensor<4xf32>{attribute}) -> tensor<4xf32> {{\n{body}\n}}\n}}",
        arguments=(
            Argument(
                name="x", kind="dense", shape=(4,), dtype="f32", donated=donated, sharded=False
            ),
        ),
        results=(Result(name="x", kind="dense", shape=(4,), dtype="f32", aliases=0),),
        stacks=(),
        num_devices=2,
        cores_per_device=1,
        mode="exact",
        expected=Expected(num_lookups=0, num_updates=0, collectives=(), alias_bytes=0),
    )


DOUBLE = "%0 = stablehlo.add %x, %x : tensor<4xf32>\nreturn %0 : tensor<4xf32>"
PLUS_DEVICE = """
    %d = stablehlo.replica_id : tensor<ui32>
    %f = stablehlo.convert %d : (tensor<ui32>) -> tensor<f32>
    %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4xf32>
    %0 = stablehlo.add %x, %b : tensor<4xf32>
"""
SUM = """
    %1 = "stablehlo.all_reduce"(%0) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
      ^bb0(%p: tensor<f32>, %q: tensor<f32>):
        %s = stablehlo.add %p, %q : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }) : (tensor<4xf32>) -> tensor<4xf32>
"""
ENDLESS = """
    %0 = stablehlo.while(%i = %x) : tensor<4xf32>
      cond {
        %t = stablehlo.constant dense<true> : tensor<i1>
        stablehlo.return %t : tensor<i1>
      } do {
        %j = stablehlo.add %i, %x : tensor<4xf32>
        stablehlo.return %j : tensor<4xf32>
      }
    return %0 : tensor<4xf32>
"""
X = {"x": np.arange(4, dtype=np.float32)}


def test_a_sum_over_devices_is_real() -> None:
    program = tiny(PLUS_DEVICE + SUM + "return %1 : tensor<4xf32>", donated=True, aliases=0)
    with Emulator(program) as emulator:
        np.testing.assert_array_equal(emulator(X)["x"], 2 * X["x"] + 1)


def test_devices_that_drift_apart_are_found() -> None:
    program = tiny(PLUS_DEVICE + "return %0 : tensor<4xf32>", donated=True, aliases=0)
    with (
        Emulator(program) as emulator,
        pytest.raises(ProgramError, match="'x' is not the same on all devices"),
    ):
        emulator(X)


@pytest.mark.parametrize(("donated", "aliases"), [(True, None), (False, 0)])
def test_memory_that_is_not_reused_as_the_program_says_is_found(
    donated: bool, aliases: int | None
) -> None:
    with (
        Emulator(tiny(DOUBLE, donated=donated, aliases=aliases)) as emulator,
        pytest.raises(ProgramError, match="in place, which is not what it says"),
    ):
        emulator(X)


def test_arguments_are_checked_and_the_emulator_goes_on() -> None:
    with Emulator(tiny(DOUBLE)) as emulator:
        with pytest.raises(ProgramError, match="no value for argument 'x'"):
            emulator({})
        with pytest.raises(ProgramError, match=re.escape("float32 of shape (4,)")):
            emulator({"x": np.zeros((2, 4), np.float32)})
        with pytest.raises(ProgramError, match="is float64 of shape"):
            emulator({"x": np.zeros(4)})
        np.testing.assert_array_equal(emulator(X)["x"], 2 * X["x"])


def test_a_step_that_does_not_end_is_ended() -> None:
    emulator = Emulator(tiny(ENDLESS), timeout_seconds=20)
    emulator._timeout_seconds = 0.5  # compiling may take longer
    with pytest.raises(ProgramError, match=re.escape("did not run the program within 0.5 s")):
        emulator(X)
    with pytest.raises(ProgramError, match="closed"):
        emulator(X)
    assert emulator._child.poll() is not None


def test_a_process_that_dies_is_reported() -> None:
    with Emulator(tiny(DOUBLE)) as emulator:
        os.kill(emulator._child.pid, signal.SIGKILL)
        with pytest.raises(ProgramError, match=re.escape("ended (exit code -9)")):
            emulator(X)


def test_a_program_that_does_not_compile_is_refused_in_the_compilers_words() -> None:
    with pytest.raises(ProgramError, match=r"(?s)cannot compile the program: .*undeclared SSA"):
        Emulator(tiny("return %nothing : tensor<4xf32>"))
    body = "stablehlo.custom_call @SomethingElse(%x) : (tensor<4xf32>) -> tensor<4xf32>"
    with pytest.raises(ProgramError, match="SomethingElse"):
        Emulator(tiny(f"%0 = {body}\nreturn %0 : tensor<4xf32>"))


def test_a_computation_of_single_rows_only_is_refused(case: Case) -> None:
    program = case.program()
    (signature,) = re.findall(r"func.func private @rule_0.*\n", program.text)
    row = f"stablehlo.constant dense<[[{', '.join(f'{i}.0' for i in range(8))}]]>"
    text = program.text.replace(signature, f"{signature}%row8 = {row} : tensor<1x8xf32>\n")
    with pytest.raises(ProgramError, match="does not work on many rows at once"):
        Emulator(dataclasses.replace(program, text=text))


def test_the_process_ends_with_the_emulator() -> None:
    emulator = Emulator(tiny(DOUBLE))
    child = emulator._child
    del emulator
    gc.collect()
    assert child.poll() is not None


def test_without_jax_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "TESTED", {"jax": ("0.0.1",), "jaxlib": ("0.0.1",)})
    with pytest.raises(DependencyError, match=r"needs jax 0\.0\.1"):
        Emulator(tiny(DOUBLE))
