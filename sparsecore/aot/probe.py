"""Which limits compile for a stack: tried on the compiler, for no formula is known.

Whether limits fit is not monotone. With libtpu 0.0.52 a lookup of 16,240 distinct rows of 128 in a
partition is refused on tpu7x and one of 65,536 is not; on v6e 32,768 compile and 65,536 do not. An
update has a bound of its own, by the memory of a tile. So the stack's lookup and update are
compiled alone (seconds), and the verdict is kept like every compiled program.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.aot.compile import compile_stablehlo
from torchrec_tpu.sparsecore.aot.program import StackFacts
from torchrec_tpu.sparsecore.aot.topology import Topology, topology
from torchrec_tpu.sparsecore.batch import pointers_per_core
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import LimitsError
from torchrec_tpu.sparsecore.layout import round_up
from torchrec_tpu.sparsecore.optimizers import RULES

DEADLINE_SECONDS: Final = 300.0

_FACTORS: Final = (1.25, 1.5, 2, 3, 4, 5, 6, 8)
"""What max_unique_ids is multiplied by, one after the other."""


def is_doubtful(stack: StackFacts, target: Topology) -> bool:
    """Whether limits are near some that were refused, so that a probe is worth its seconds.

    Refusals began at 36 B of a tile's memory for each distinct row (update), and at rows that fill
    all tiles of a core (lookup); half of that is doubtful.
    """
    chip = target.chip
    return (
        2 * 36 * stack.max_unique_ids > chip.tile_memory_bytes
        or 2 * 4 * (stack.dim + 1) * stack.max_unique_ids
        > chip.tiles_per_core * chip.tile_memory_bytes
    )


def why_infeasible(
    stack: StackFacts, target: Topology | str, *, deadline_seconds: float = DEADLINE_SECONDS
) -> LimitsError | None:
    """Why the SparseCore cannot hold a stack's limits, or None when it can.

    Raises:
        CompileError: the stack does not compile for another reason.
    """
    target = topology(target) if isinstance(target, str) else target
    try:
        compile_stablehlo(
            probe_text(stack, target), target, stacks=[stack], deadline_seconds=deadline_seconds
        )
    except LimitsError as error:
        return error
    return None


def suggest_feasible(
    capacity: Capacity,
    stack: StackFacts,
    target: Topology | str,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Capacity:
    """The capacity itself when it compiles for the stack, else the next larger one that does.

    Args:
        capacity: what batches need; it is never made smaller.
        stack: the facts; its own limits do not matter.
        target: the slice.
        deadline_seconds: of one probe.

    Raises:
        LimitsError: no larger one compiles either; the batch per device must become smaller, or the
            stack be split.
        CompileError: the stack does not compile for another reason.
    """
    target = topology(target) if isinstance(target, str) else target
    first: LimitsError | None = None
    for candidate in (capacity, *(_larger(capacity, factor) for factor in _FACTORS)):
        facts = dataclasses.replace(
            stack,
            max_ids=candidate.max_ids,
            max_unique_ids=candidate.max_unique_ids,
            slots_per_device=target.chip.cores_per_device
            * candidate.slots_per_core(target.num_cores),
        )
        error = why_infeasible(facts, target, deadline_seconds=deadline_seconds)
        if error is None:
            return candidate
        first = first or error
        if not error.larger_may_fit:
            break
    assert first is not None
    raise first


def _larger(capacity: Capacity, factor: float) -> Capacity:
    max_unique_ids = round_up(int(capacity.max_unique_ids * factor), 8)
    return dataclasses.replace(
        capacity,
        max_ids=max(capacity.max_ids, max_unique_ids),
        max_unique_ids=max_unique_ids,
    )


def probe_text(stack: StackFacts, target: Topology) -> str:
    """A step of one stack alone: its lookup, and its update if it has one."""
    cores = target.chip.cores_per_device
    with adapter.mlir() as mlir:
        ir = mlir.ir
        f32, s32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)

        def tensor(*shape: int, of: Any = f32) -> Any:
            return ir.RankedTensorType.get(list(shape), of)

        table, slots, operands = tensor(stack.rows, stack.dim), [], []
        rule = None if stack.rule is None else RULES[stack.rule]
        if rule is not None:
            slots = [tensor(*slot.shape(stack.rows, stack.dim)) for slot in rule.slots]
            operands = [tensor() for _ in rule.operands]
        num_slots = stack.slots_per_device
        buffers = [
            tensor(cores * pointers_per_core(target.num_cores), of=s32),
            tensor(num_slots, of=s32),
            tensor(num_slots, of=s32),
            tensor(num_slots),
        ]
        activations = tensor(stack.samples, stack.dim)
        trained = [table, *slots] if rule is not None else []
        arguments = [table, *slots, *operands, *buffers, *([activations] if trained else [])]
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            main = mlir.func.FuncOp("main", (arguments, [activations, *trained]))
            block = main.add_entry_block()
        limits = lowering.Limits(max_ids=stack.max_ids, max_unique_ids=stack.max_unique_ids)
        with ir.InsertionPoint(block):
            values = list(block.arguments)
            of_operands = 1 + len(slots)
            of_buffers = of_operands + len(operands)
            names = ("row_pointers", "embedding_ids", "sample_ids", "gains")
            packed = lowering.Buffers(**dict(zip(names, values[of_buffers:], strict=False)))
            results = [
                lowering.lookup(mlir, packed, values[0], samples=stack.samples, limits=limits)
            ]
            if rule is not None:
                results += lowering.update(
                    mlir,
                    module,
                    packed,
                    values[-1],
                    values[0],
                    values[1:of_operands],
                    values[of_operands:of_buffers],
                    rule=rule,
                    limits=limits,
                    name="rule",
                )
            mlir.func.ReturnOp(results)
        main.arg_attrs = ir.ArrayAttr.get(
            [
                ir.DictAttr.get(
                    {"tf.aliasing_output": ir.IntegerAttr.get(s32, index + 1)}
                    if index < len(trained)
                    else {}
                )
                for index in range(len(arguments))
            ]
        )
        return str(module)
