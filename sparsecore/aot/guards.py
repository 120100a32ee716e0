"""Checks of a program's text that make a silent failure impossible.

Each is of something that can go wrong without an error: an update that disappears because nothing
was differentiated, collectives that a stand-in process group drops, a gradient that is all zero
because an op has no derivative, a table that is copied because nothing reuses its memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.errors import ProgramError

if TYPE_CHECKING:
    from torchrec_tpu.sparsecore.aot.program import Program

_TABLE_OPERAND: Final = 5
_GRADIENT_OPERAND: Final = 4  # without minibatches; with them it follows the slots
_INIT_OPERAND: Final = 4  # of a local lookup

# Operations whose result is zero when ...
_IF_FIRST: Final = frozenset(
    "stablehlo." + name
    for name in (
        "abs", "broadcast", "broadcast_in_dim", "convert", "divide", "dynamic_slice", "gather",
        "negate", "reduce", "reshape", "reverse", "sign", "slice", "sqrt", "transpose",
    )
)  # fmt: skip
_IF_ANY: Final = frozenset(("stablehlo.multiply", "stablehlo.dot_general", "stablehlo.and"))
_IF_ALL: Final = frozenset(
    "stablehlo." + name
    for name in (
        "add", "all_reduce", "concatenate", "dynamic_update_slice", "maximum", "minimum", "or",
        "pad", "subtract",
    )
)  # fmt: skip


def check(program: Program) -> None:
    """See `Program.check`.

    Raises:
        ProgramError: names what the text lacks or has too much.
    """
    with adapter.mlir() as mlir:
        try:
            module = mlir.ir.Module.parse(program.text)
        except mlir.ir.MLIRError as error:
            raise ProgramError(f"the program's text is not valid StableHLO: {error}") from None
        main = lowering.public_function(module)
        block = main.regions[0].blocks[0]
        calls = list(lowering.walk(block))
        results = next(list(c.operands) for c in calls if c.name == "func.return")
        arguments = list(block.arguments)
        _check_signature(program, arguments, results)
        updates = [call for call in calls if _target(call) in lowering.UPDATES]
        _compare(
            "SparseCore lookups",
            sum(_target(call) in lowering.LOOKUPS for call in calls),
            program.expected.num_lookups,
        )
        _compare("SparseCore updates", len(updates), program.expected.num_updates)
        _compare(
            "lookups of pooled stacks",
            sum(_target(call) == lowering.LOCAL_LOOKUP for call in calls),
            program.expected.num_local_lookups,
        )
        _compare("collectives", _collectives(mlir, calls), Counter(program.expected.collectives))
        _check_aliases(program, main.arg_attrs)
        _check_in_place(program, arguments, results)
        gradients = {f"update {index}": _gradient(call) for index, call in enumerate(updates)} | {
            result.name: value
            for result, value in zip(program.results, results, strict=True)
            if result.kind == "carry" and result.name.endswith(":gradients")
        }
        exchanges = [call for call in calls if _target(call) == lowering.RAGGED_ALL_TO_ALL]
        gradients |= {f"exchange {i}": call.operands[0] for i, call in enumerate(exchanges)}
        zeros = _Zeros(mlir)
        if dead := [name for name, value in gradients.items() if zeros.is_zero(value)]:
            raise ProgramError(
                f"the gradient of {', '.join(dead)} is constant zero: the tables would never learn"
            )


def _compare(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ProgramError(f"the program has {found} {what}, expected {expected}")


def _check_signature(program: Program, arguments: Sequence[Any], results: Sequence[Any]) -> None:
    for what, facts, values in (
        ("arguments", program.arguments, arguments),
        ("results", program.results, results),
    ):
        shapes = [tuple(value.type.shape) for value in values]
        _compare(f"{what} of shapes", shapes, [fact.shape for fact in facts])


def _collectives(mlir: adapter.Mlir, calls: Sequence[Any]) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for call in calls:
        kind = _target(call) or call.name.removeprefix("stablehlo.")
        if kind in lowering.COLLECTIVES:
            found[kind, sum(_num_bytes(mlir, value.type) for value in call.results)] += 1
    return found


def _num_bytes(mlir: adapter.Mlir, type_: Any) -> int:
    tensor = mlir.ir.RankedTensorType(type_)
    return int(math.prod(tensor.shape) * tensor.element_type.width // 8)


def _check_aliases(program: Program, attributes: Any) -> None:
    """Every donated argument is the memory of the result that replaces it."""
    total = 0
    for index, argument in enumerate(program.arguments):
        attribute = attributes[index]
        target = (
            attribute["tf.aliasing_output"].value if "tf.aliasing_output" in attribute else None
        )
        wanted = next((r for r, x in enumerate(program.results) if x.aliases == index), None)
        if target != wanted or argument.donated != (target is not None):
            raise ProgramError(
                f"argument {argument.name!r} lends its memory to result {target}, expected {wanted}"
            )
        total += argument.num_bytes if argument.donated else 0
    _compare("bytes of arguments that are updated in place", total, program.expected.alias_bytes)


def _check_in_place(program: Program, arguments: Sequence[Any], results: Sequence[Any]) -> None:
    """New tables and slots are results of the update that takes the old ones."""
    for result, value in zip(program.results, results, strict=True):
        if result.aliases is None:
            continue
        old = arguments[result.aliases]
        if value == old:
            raise ProgramError(f"{result.name!r} is returned as it came: nothing updates it")
        if result.kind not in ("table", "slot"):
            continue
        if not (_is_updated(value, old) or _is_added_to(value, old)):
            raise ProgramError(f"{result.name!r} is not the result of a SparseCore update of it")


def _is_updated(value: Any, old: Any) -> bool:
    """Whether `value` is a part of the result of an update of `old`."""
    call = value.owner.operands[0].owner if hasattr(value.owner, "operands") else None
    return call is not None and _target(call) in lowering.UPDATES and old in call.operands


def _is_added_to(value: Any, old: Any) -> bool:
    """Whether `value` is `old` with changes added to it, as a pooled stack is updated."""

    def without_reshape(value: Any) -> Any:
        is_reshaped = getattr(value.owner, "name", None) == "stablehlo.reshape"
        return value.owner.operands[0] if is_reshaped else value

    call = without_reshape(value).owner
    if not hasattr(call, "operands") or _target(call) != lowering.LOCAL_LOOKUP:
        return False
    return bool(without_reshape(call.operands[_INIT_OPERAND]) == old)


def _target(operation: Any) -> str | None:
    """The target of a custom call; None for any other operation."""
    if operation.name != "stablehlo.custom_call":
        return None
    target: str = operation.attributes["call_target_name"].value
    return target


def _gradient(call: Any) -> Any:
    if _target(call) == lowering.UPDATE:
        return call.operands[_GRADIENT_OPERAND]
    num_arrays = call.results[0].type.num_types
    return call.operands[_TABLE_OPERAND + num_arrays]


class _Zeros:
    """Finds values that are zero whatever the arguments are."""

    def __init__(self, mlir: adapter.Mlir) -> None:
        self._mlir = mlir
        self._known: dict[Any, bool] = {}

    def is_zero(self, value: Any) -> bool:
        """Whether every element is 0, as far as it follows from constants."""
        pending = [value]
        while pending:  # depth first, without recursion: graphs are thousands of operations deep
            current = pending[-1]
            if current in self._known:
                pending.pop()
                continue
            operation = self._operation(current)
            operands = [] if operation is None else list(operation.operands)
            if unknown := [operand for operand in operands if operand not in self._known]:
                pending += unknown
                continue
            self._known[current] = operation is not None and self._of(operation, operands)
            pending.pop()
        return self._known[value]

    def _operation(self, value: Any) -> Any | None:
        """What computes a value; None for arguments."""
        owner = value.owner
        return None if isinstance(owner, self._mlir.ir.Block) else owner

    def _of(self, operation: Any, operands: Sequence[Any]) -> bool:
        name = operation.name
        if name == "stablehlo.constant":
            value = operation.attributes["value"]
            return not np.any(np.asarray(value))
        if name in _IF_FIRST:
            return self._known[operands[0]]
        if name in _IF_ANY:
            return any(self._known[operand] for operand in operands)
        if name in _IF_ALL:
            return all(self._known[operand] for operand in operands)
        if name == "stablehlo.select":
            return all(self._known[operand] for operand in operands[1:])
        if name == "stablehlo.clamp":
            return self._known[operands[1]]
        return False
