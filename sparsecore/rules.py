"""One optimizer, declared once: a pure function of one row, traced to NumPy, C++ and StableHLO.

A rule is written against an `Ops` namespace and Python's arithmetic. Called with `NUMPY` it is the
oracle; called with a tracer it becomes the functor of the CPU kernel or the update computation of
the SparseCore call. The three agree because each runs the same operations in the same order.

The C++ is csrc/include/trtpu/optimizer_rules.inc; after a change regenerate it with
`python -m torchrec_tpu.sparsecore.rules --write`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

# Shape suffixes: N rows, D elements of a row.

NUM_LANES: Final = 16
"""Partial sums of a row-wise mean: lane k takes elements k, k + 16, ... on every machine."""

Width = Literal["row", "scalar"]
"""What one row of an array holds: as many elements as the embedding row, or one number."""


class Ops(Protocol):
    """The functions that a rule may use beside + - * / and unary minus."""

    def sqrt(self, x: Any, /) -> Any:
        """Square root, correctly rounded."""

    def power(self, x: Any, y: Any, /) -> Any:
        """`x` to the power `y`, rounded from double precision. Slow: lane by lane on a CPU."""

    def clamp(self, low: Any, x: Any, high: Any, /) -> Any:
        """`x`, but not below `low` and not above `high`; NaN stays NaN."""

    def where_equal(self, a: Any, b: Any, then: Any, otherwise: Any, /) -> Any:
        """`then` where `a == b`, else `otherwise`."""

    def mean_row(self, x: Any, /) -> Any:
        """Mean over the logical elements of each row; at most one per rule."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One array of optimizer state.

    Attributes:
        name: key in state dicts; torch.optim's word for the same quantity.
        width: "row" for shape (num_embeddings, embedding_dim), "scalar" for (num_embeddings,).
        init: first value, or the name of the hyperparameter that holds it.
    """

    name: str
    width: Width = "row"
    init: float | str = 0.0

    def shape(self, num_embeddings: int, embedding_dim: int) -> tuple[int, ...]:
        """Shape of the array for one table.

        >>> Slot(name="sum", width="scalar").shape(100, 16)
        (100,)
        """
        return (num_embeddings, embedding_dim) if self.width == "row" else (num_embeddings,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """A row-wise optimizer.

    Attributes:
        name: key in RULES, and the `rule` argument of the update op.
        slots: state arrays, in the order in which `update` takes and returns them.
        hyper: the user's hyperparameters and their defaults.
        operands: names of the float32 scalars that `update` takes after the slots. They are
            arguments of the compiled program: a new value never recompiles.
        prepare: (step, hyper) -> values of `operands`. Runs on the host in double precision, once
            per step; `step` counts updates from 1. Arithmetic between operands belongs here.
        update: (ops, grad, row, *slots, *operands) -> (row, *slots), for one row or a batch of
            rows: grad, row and row slots (N, D), scalar slots (N, 1), operands scalars.
        is_literal: whether `update` follows another library's computation to the letter, with the
            arithmetic between operands that other rules leave to `prepare`.
    """

    name: str
    slots: tuple[Slot, ...] = ()
    hyper: Mapping[str, float]
    operands: tuple[str, ...]
    prepare: Callable[[int, Mapping[str, float]], tuple[float, ...]]
    update: Callable[..., tuple[Any, ...]]
    is_literal: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hyper", MappingProxyType(dict(self.hyper)))


# ------------------------------------------------------------------------------------------ NumPy


class NumpyOps:
    """float32 arrays (N, D) and (N, 1). Sums run in the kernels' order, so that bits agree."""

    def sqrt(self, x: Any, /) -> Any:
        """See `Ops`."""
        return np.sqrt(x)

    def power(self, x: Any, y: Any, /) -> Any:
        """See `Ops`."""
        return np.power(np.float64(x), np.float64(y)).astype(np.float32)

    def clamp(self, low: Any, x: Any, high: Any, /) -> Any:
        """See `Ops`."""
        return np.minimum(np.maximum(low, x), high)

    def where_equal(self, a: Any, b: Any, then: Any, otherwise: Any, /) -> Any:
        """See `Ops`."""
        return np.where(a == b, then, otherwise)

    def mean_row(self, x_ND: NDArray[np.float32], /) -> NDArray[np.float32]:
        """See `Ops`."""
        num_rows, dim = x_ND.shape
        lanes = np.zeros((num_rows, NUM_LANES), np.float32)
        for start in range(0, dim, NUM_LANES):
            chunk = x_ND[:, start : start + NUM_LANES]
            lanes[:, : chunk.shape[1]] += chunk
        half = NUM_LANES // 2
        while half:
            lanes = lanes[:, :half] + lanes[:, half : 2 * half]
            half //= 2
        return lanes / np.float32(dim)


NUMPY: Final[Ops] = NumpyOps()


def apply(
    rule: Rule,
    grad_ND: NDArray[np.float32],
    row_ND: NDArray[np.float32],
    slots: Sequence[NDArray[np.float32]],
    operands: NDArray[np.float32],
    functions: Ops = NUMPY,
) -> tuple[NDArray[np.float32], ...]:
    """New (row, *slots) of N rows, by NumPy in float32; the arguments stay as they are.

    Row slots are (N, D), scalar slots (N,), operands (num_operands,); `functions` are those that
    the rule calls.

    >>> from torchrec_tpu.sparsecore.optimizers import RULES
    >>> one = np.ones((1, 2), np.float32)
    >>> apply(RULES["sgd"], one, one, [], np.float32([0.25]))
    (array([[0.75, 0.75]], dtype=float32),)
    """
    state = [
        array if slot.width == "row" else array[:, None]
        for slot, array in zip(rule.slots, slots, strict=True)
    ]
    row, *new = rule.update(functions, grad_ND, row_ND, *state, *operands)
    state = [
        array if slot.width == "row" else array[:, 0]
        for slot, array in zip(rule.slots, new, strict=True)
    ]
    assert all(array.dtype == np.float32 for array in (row, *state)), rule.name
    return (row, *state)


# ---------------------------------------------------------------------------------------- tracing


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Value:
    """A traced value: an input (no arguments) or the result of one operation.

    `width` is "uniform" for what is the same in every row: operands and constants.
    """

    name: str
    width: Literal["row", "scalar", "uniform"]
    op: str = "input"
    args: tuple[_Value, ...] = ()

    def __add__(self, other: _Value | float) -> _Value:
        return _combine("add", self, other)

    def __radd__(self, other: float) -> _Value:
        return _combine("add", other, self)

    def __sub__(self, other: _Value | float) -> _Value:
        return _combine("subtract", self, other)

    def __rsub__(self, other: float) -> _Value:
        return _combine("subtract", other, self)

    def __mul__(self, other: _Value | float) -> _Value:
        return _combine("multiply", self, other)

    def __rmul__(self, other: float) -> _Value:
        return _combine("multiply", other, self)

    def __truediv__(self, other: _Value | float) -> _Value:
        return _combine("divide", self, other)

    def __rtruediv__(self, other: float) -> _Value:
        return _combine("divide", other, self)

    def __neg__(self) -> _Value:
        return _combine("negate", self)


def _combine(op: str, *args: _Value | float) -> _Value:
    values = tuple(
        arg if isinstance(arg, _Value) else _Value(repr(float(np.float32(arg))), "uniform", "const")
        for arg in args
    )
    widths = {value.width for value in values}
    width: Literal["row", "scalar", "uniform"] = (
        "row" if "row" in widths else "scalar" if "scalar" in widths else "uniform"
    )
    return _Value("", width, op, values)


class _TraceOps:
    """Records the functions of `Ops`."""

    def sqrt(self, x: _Value, /) -> _Value:
        return _combine("sqrt", x)

    def power(self, x: _Value | float, y: _Value | float, /) -> _Value:
        return _combine("power", x, y)

    def clamp(self, low: _Value | float, x: _Value, high: _Value | float, /) -> _Value:
        return _combine("clamp", low, x, high)

    def where_equal(
        self,
        a: _Value | float,
        b: _Value | float,
        then: _Value | float,
        otherwise: _Value | float,
        /,
    ) -> _Value:
        return _combine("where_equal", a, b, then, otherwise)

    def mean_row(self, x: _Value, /) -> _Value:
        if x.width != "row":
            raise TypeError(f"mean_row wants a value as wide as the row, got a {x.width} one")
        return _Value("mean", "scalar", "mean", (x,))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """A rule as a graph: its inputs, and its outputs in the order (row, *slots)."""

    rule: Rule
    grad: _Value
    row: _Value
    slots: tuple[_Value, ...]
    operands: tuple[_Value, ...]
    outputs: tuple[_Value, ...]

    @property
    def means(self) -> list[_Value]:
        return [value for value in _in_order(self.outputs) if value.op == "mean"]


def _trace(rule: Rule) -> _Trace:
    grad, row = _Value("grad", "row"), _Value("row", "row")
    slots = tuple(_Value(slot.name, slot.width) for slot in rule.slots)
    operands = tuple(_Value(name, "uniform") for name in rule.operands)
    outputs = rule.update(_TraceOps(), grad, row, *slots, *operands)
    for value in _in_order(outputs):
        if value.width == "uniform" and value.args and not rule.is_literal:
            raise TypeError(
                f"{value.op} of {', '.join(arg.name for arg in value.args)} is the same for every "
                "row: compute it once per step in the rule's prepare()"
            )
    want = ["row", *(slot.width for slot in rule.slots)]
    got = [value.width for value in outputs]
    if got != want:
        raise TypeError(f"rule {rule.name!r} returns {got}, its row and slots are {want}")
    trace = _Trace(
        rule=rule, grad=grad, row=row, slots=slots, operands=operands, outputs=tuple(outputs)
    )
    if len(trace.means) > 1:
        raise TypeError(f"rule {rule.name!r} takes {len(trace.means)} means; one pass allows one")
    return trace


def _in_order(
    wanted: Iterable[_Value], stop: Callable[[_Value], bool] | None = None
) -> list[_Value]:
    """Every value that `wanted` needs, arguments first; `stop` ends the walk at a value."""
    seen: dict[_Value, None] = {}

    def visit(value: _Value) -> None:
        if value not in seen:
            if not (stop and stop(value)):
                for arg in value.args:
                    visit(arg)
            seen[value] = None

    for value in wanted:
        visit(value)
    return list(seen)


# -------------------------------------------------------------------------------------------- C++

_MAX_COLUMNS: Final = 100
_CPP: Final = MappingProxyType(
    {
        "add": "{} + {}",
        "subtract": "{} - {}",
        "multiply": "{} * {}",
        "divide": "{} / {}",
        "negate": "-{}",
        "sqrt": "Sqrt({})",
        "power": "Pow({}, {})",
        "clamp": "Min({2}, Max({0}, {1}))",
        "where_equal": "WhereEqual({}, {}, {}, {})",
    }
)

_CPP_SCALAR: Final = _CPP | {
    "sqrt": "std::sqrt({})",
    "power": "static_cast<float>(std::pow(static_cast<double>({}), static_cast<double>({})))",
    "clamp": "({2} < ({0} > {1} ? {0} : {1}) ? {2} : ({0} > {1} ? {0} : {1}))",
    "where_equal": "({} == {} ? {} : {})",
}

_CPP_HEADER = """\
// Generated by `python -m torchrec_tpu.sparsecore.rules --write` from sparsecore/optimizers.py: do
// not edit.
//
// One struct per optimizer rule. V is a vector of 16 floats with + - * /, unary minus, V(float) to
// broadcast, and functions Sqrt(V), Pow(V, V), WhereEqual(V, V, V, V), Min(V, V) and Max(V, V); the
// last two give their second argument when one is NaN. `row_slots` and `scalar_slots` are a rule's
// row-wide and one-number-per-row state, each in rule order; `operands` are its float scalars.
//   MeanTerm  only if kHasMean: 16 elements of what the rule averages over the row. Elements past
//             the end of the row count as zero.
//   Scalar    only if kHasMean: once per row, with the mean over the logical row; updates the
//             scalar slots and leaves in `scalars` what Row needs.
//   Row       16 elements of the row and of its row slots, updated in place.
// Everything is inlined: a file compiled for a wider instruction set must not leave a copy behind
// that the linker could choose for all.
#ifndef TRTPU_OPTIMIZER_RULES_INC_
#define TRTPU_OPTIMIZER_RULES_INC_

#include <cmath>

namespace trtpu::rules {
"""


def struct_name(rule: str) -> str:
    """Name of a rule in TRTPU_FOR_EACH_RULE; the struct is called that plus "Rule".

    >>> struct_name("rowwise_adagrad_l2")
    'RowwiseAdagradL2'
    """
    return "".join(word.capitalize() for word in rule.split("_"))


def cpp(rules: Iterable[Rule]) -> str:
    """The text of optimizer_rules.inc: one functor per rule, and their list as an X-macro."""
    rules = list(rules)
    *head, last = "#define TRTPU_FOR_EACH_RULE(X)", *(f"  X({struct_name(r.name)})" for r in rules)
    width = max(map(len, head)) + 1
    macro = "".join(f"{line:{width}}\\\n" for line in head) + last
    structs = "\n".join(map(_cpp_struct, rules))
    return (
        f"{_CPP_HEADER}\n{structs}\n}}  // namespace trtpu::rules\n\n"
        f"// X(Name) for every rule, where trtpu::rules::NameRule is its struct.\n{macro}\n\n"
        "#endif  // TRTPU_OPTIMIZER_RULES_INC_\n"
    )


def _cpp_struct(rule: Rule) -> str:
    trace = _trace(rule)
    row_slots = [v for v in trace.slots if v.width == "row"]
    scalar_slots = [v for v in trace.slots if v.width == "scalar"]
    outputs = dict(zip(trace.slots, trace.outputs[1:], strict=True))
    if scalar_slots and not trace.means:
        raise TypeError(f"rule {rule.name!r} has a scalar slot but no mean that would drive it")

    def is_scalar(value: _Value) -> bool:
        return value.width == "scalar"

    def terms(array: str, values: Sequence[_Value], template: str = "{}") -> dict[_Value, str]:
        return {v: template.format(f"{array}[{i}]") for i, v in enumerate(values)}

    row_outputs = {"row": trace.outputs[0]} | {
        f"row_slots[{i}]": outputs[v] for i, v in enumerate(row_slots)
    }
    # What Row takes from Scalar: scalar values that a row-wide operation reads.
    row_values = _in_order(row_outputs.values(), stop=is_scalar)
    scalars = [v for v in row_values if is_scalar(v)]
    inputs = (
        {trace.grad: "grad", trace.row: "row"}
        | terms("row_slots", row_slots)
        | terms("operands", trace.operands, "V({})")
    )
    functions = []
    if trace.means:
        (mean,) = trace.means
        functions.append(
            _cpp_function(
                "V MeanTerm",
                ["V grad", "V row", "const V* row_slots", "const float* operands"],
                inputs,
                {"return": mean.args[0]},
                is_template=True,
            )
        )
        functions.append(
            _cpp_function(
                "void Scalar",
                ["float mean", "float* scalar_slots", "const float* operands", "float* scalars"],
                {mean: "mean"}
                | terms("scalar_slots", scalar_slots)
                | terms("operands", trace.operands),
                {f"scalar_slots[{i}]": outputs[v] for i, v in enumerate(scalar_slots)}
                | {f"scalars[{i}]": v for i, v in enumerate(scalars)},
                is_template=False,
            )
        )
    functions.append(
        _cpp_function(
            "void Row",
            ["V grad", "V& row", "V* row_slots", "const float* operands", "const float* scalars"],
            inputs | terms("scalars", scalars, "V({})"),
            row_outputs,
            is_template=True,
        )
    )
    slots = ", ".join(slot.name for slot in rule.slots) or "none"
    facts = [
        f'const char* kName = "{rule.name}";',
        f"int kNumRowSlots = {len(row_slots)};",
        f"int kNumScalarSlots = {len(scalar_slots)};",
        f"int kNumOperands = {len(rule.operands)};",
        f"int kNumScalars = {len(scalars)};",
        f"bool kHasMean = {'true' if trace.means else 'false'};",
    ]
    return (
        f"// Slots: {slots}.\n// Operands: {', '.join(rule.operands)}.\n"
        f"struct {struct_name(rule.name)}Rule {{\n"
        + "".join(f"  static constexpr {fact}\n" for fact in facts)
        + "".join(f"\n{textwrap.indent(function, '  ')}" for function in functions)
        + "};\n"
    )


def _cpp_function(
    head: str,
    parameters: Sequence[str],
    inputs: Mapping[_Value, str],
    results: Mapping[str, _Value],
    *,
    is_template: bool,
) -> str:
    """One static function: `inputs` name what is given, `results` what is assigned or returned."""
    kind = "V" if is_template else "float"
    names = dict(inputs)
    body: list[str] = []
    for value in _in_order(results.values(), stop=lambda value: value in inputs):
        if value in names:
            continue
        if value.op == "const":
            names[value] = f"V({value.name}f)" if is_template else f"{value.name}f"
            continue
        if value.op not in _CPP:
            raise TypeError(f"{head}() needs {value.name!r}, which is not known before the mean is")
        names[value] = f"t{len(body)}"
        template = (_CPP if is_template else _CPP_SCALAR)[value.op]
        expression = template.format(*(names[arg] for arg in value.args))
        body.append(f"const {kind} {names[value]} = {expression};")
    body += [
        f"return {names[value]};" if target == "return" else f"{target} = {names[value]};"
        for target, value in results.items()
    ]
    text = "\n".join(body)
    # A parameter without a use is a warning, and so an error: comment its name out.
    arguments = [
        parameter if re.search(rf"\b{name}\b", text) else f"{type_} /*{name}*/"
        for parameter in parameters
        for type_, name in [parameter.rsplit(" ", 1)]
    ]
    # Broken as clang-format breaks it: between arguments, aligned with the first.
    opening = f"[[gnu::always_inline]] static {head}("
    arguments[-1] += ") {"
    unbroken = ", ".join(argument.replace(" ", "\0") for argument in arguments)
    lines = textwrap.wrap(unbroken, _MAX_COLUMNS - 2 - len(opening))
    line = opening + f"\n{' ' * len(opening)}".join(lines).replace("\0", " ")
    prefix = "template <class V>\n" if is_template else ""
    return f"{prefix}{line}\n{textwrap.indent(text, '  ')}\n}}\n"


# -------------------------------------------------------------------------------------- StableHLO


def stablehlo(rule: Rule, *, dim: int, logical_dim: int | None = None, name: str = "") -> str:
    """The update of one row as a private StableHLO function.

    It is the computation that the call target SparseDenseMatmulGradOpWithOptimizerUpdate wants:
    arguments (grad, row, *slots, *operands), operands already broadcast to the row; result a
    tuple (row, *slots). Row-wide arguments are tensor<1 x dim>; a scalar slot, which the call takes
    as an array (rows,), is tensor<1>.

    Args:
        rule: the rule.
        dim: elements of a stored row, padding included.
        logical_dim: elements that a mean counts; `dim` unless given.
        name: symbol; "<rule>_<dim>" unless given.

    A compiler may fuse multiplications into additions and choose the order of the mean's sum: the
    result agrees with NumPy and C++ to rounding, not to the bit.

    >>> from torchrec_tpu.sparsecore.optimizers import RULES
    >>> print(stablehlo(RULES["sgd"], dim=8))
    func.func private @sgd_8(%grad: tensor<1x8xf32>, %row: tensor<1x8xf32>, %lr: tensor<1x8xf32>) \
-> tuple<tensor<1x8xf32>> {
      %0 = stablehlo.multiply %lr, %grad : tensor<1x8xf32>
      %1 = stablehlo.subtract %row, %0 : tensor<1x8xf32>
      %2 = stablehlo.tuple %1 : tuple<tensor<1x8xf32>>
      return %2 : tuple<tensor<1x8xf32>>
    }
    """
    # The SparseCore compiler runs the function on many rows at once by making axis 0 longer. So
    # nothing may slice, reshape or index axis 0, nor reduce an operand to one number (libtpu 0.0.52
    # refuses all three): arithmetic between scalars and operands happens at the width of the row.
    trace = _trace(rule)
    row_type, scalar_type, count = f"tensor<1x{dim}xf32>", "tensor<1xf32>", logical_dim or dim
    body: list[str] = []

    def emit(text: str) -> str:
        body.append(f"  %{len(body)} = stablehlo.{text}")
        return f"%{len(body) - 1}"

    def reduce(row: str, op: str, start: str) -> str:
        """One number a row."""
        init = emit(f"constant dense<{start}> : tensor<f32>")
        return emit(
            f"reduce({row} init: {init}) applies stablehlo.{op} across dimensions = [1] : "
            f"({row_type}, tensor<f32>) -> {scalar_type}"
        )

    inputs = (trace.grad, trace.row, *trace.slots, *trace.operands)
    names = {value: f"%{value.name}" for value in inputs}
    types = {v: scalar_type if v.width == "scalar" else row_type for v in inputs}

    def as_type(value: _Value, type_: str) -> str:
        """The name of `value` as a tensor of `type_`."""
        if value.op == "const":
            return emit(f"constant dense<{float(value.name):.9e}> : {type_}")
        if types[value] == type_:
            return names[value]
        if type_ == row_type:
            return emit(
                f"broadcast_in_dim {names[value]}, dims = [0] : ({scalar_type}) -> {row_type}"
            )
        return reduce(names[value], "maximum", "0xFF800000")  # of equal elements, from -inf

    def mean(terms: str) -> str:
        if count < dim:
            ones = ", ".join(["1.0"] * count + ["0.0"] * (dim - count))
            mask = emit(f"constant dense<[{ones}]> : tensor<{dim}xf32>")
            mask = emit(f"broadcast_in_dim {mask}, dims = [1] : (tensor<{dim}xf32>) -> {row_type}")
            terms = emit(f"multiply {terms}, {mask} : {row_type}")
        total = reduce(terms, "add", "0.0")
        divisor = emit(f"constant dense<{count:.9e}> : {scalar_type}")
        return emit(f"divide {total}, {divisor} : {scalar_type}")

    for value in _in_order(trace.outputs):
        if value.op in ("input", "const"):
            continue
        if value.op == "mean":
            types[value] = scalar_type
            names[value] = mean(as_type(value.args[0], row_type))
            continue
        is_scalar = all(arg.op == "const" or types[arg] == scalar_type for arg in value.args)
        types[value] = scalar_type if is_scalar else row_type
        args = [as_type(arg, types[value]) for arg in value.args]
        if value.op == "where_equal":
            type_ = types[value]
            bits = type_.replace("f32", "i1")
            is_equal = emit(f"compare EQ, {args[0]}, {args[1]} : ({type_}, {type_}) -> {bits}")
            names[value] = emit(f"select {is_equal}, {args[2]}, {args[3]} : {bits}, {type_}")
        else:
            names[value] = emit(f"{value.op} {', '.join(args)} : {types[value]}")

    signature = ", ".join(f"{names[v]}: {types[v]}" for v in inputs)
    result_types = [types[v] for v in (trace.row, *trace.slots)]
    outputs = [as_type(v, type_) for v, type_ in zip(trace.outputs, result_types, strict=True)]
    tuple_type = f"tuple<{', '.join(result_types)}>"
    result = emit(f"tuple {', '.join(outputs)} : {tuple_type}")
    return "\n".join(
        [
            f"func.func private @{name or f'{rule.name}_{dim}'}({signature}) -> {tuple_type} {{",
            *body,
            f"  return {result} : {tuple_type}",
            "}",
        ]
    )


# ------------------------------------------------------------------------------------ command line

GENERATED: Final = Path("csrc/include/trtpu/optimizer_rules.inc")


def main(argv: Sequence[str] | None = None, *, root: Path | None = None) -> int:
    """Write or check the generated C++ file of a checkout (`root`); 1 when it is stale."""
    from torchrec_tpu.sparsecore.optimizers import RULES

    parser = argparse.ArgumentParser(prog="python -m torchrec_tpu.sparsecore.rules")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help=f"write {GENERATED}")
    mode.add_argument("--check", action="store_true", help=f"fail when {GENERATED} is stale")
    mode.add_argument("--stablehlo", metavar="RULE", choices=RULES, help="print one rule's update")
    parser.add_argument("--dim", type=int, default=128, help="row length for --stablehlo")
    args = parser.parse_args(argv)
    if args.stablehlo:
        print(stablehlo(RULES[args.stablehlo], dim=args.dim))
        return 0
    path = (root or Path(__file__).resolve().parent.parent) / GENERATED
    if not path.parent.is_dir():
        parser.error(f"{path.parent} does not exist: run this from a checkout, not from a wheel")
    text = cpp(RULES.values())
    if args.write:
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        print(f"{GENERATED} is stale: run python -m torchrec_tpu.sparsecore.rules --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
