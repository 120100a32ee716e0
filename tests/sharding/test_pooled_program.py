"""Tables that stay with owners, in the traced step: it trains as torch does on the CPU."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from torchrec_tpu.sparsecore.aot import adapter, lowering

if reason := adapter.why_unavailable("jax", "jaxlib", "torch_tpu"):
    pytest.skip(reason, allow_module_level=True)

from program_twin import CORES_PER_DEVICE, Run, Twin, assert_equal

from torchrec_tpu.sparsecore.aot.emulate import Emulator
from torchrec_tpu.sparsecore.aot.pooled import PooledSlot, PooledStack
from torchrec_tpu.sparsecore.aot.program import Program
from torchrec_tpu.sparsecore.errors import CapacityError, ProgramError
from torchrec_tpu.sparsecore.layout import Layout
from torchrec_tpu.sparsecore.optimizers import adagrad, adam, rowwise_adagrad, sgd

OPTIMIZERS = {
    "sgd": sgd(lr=0.5),
    "adagrad": adagrad(lr=0.05),
    "rowwise_adagrad": rowwise_adagrad(lr=0.05),
    "adam": adam(lr=0.05, eps=1e-4),  # with 1e-8, gradients that are rounding errors move weights
}

Rectangle = tuple[str, int, int, int, int]  # table, device, first row, rows, first column
Pooled = Callable[[Layout, int], Sequence[PooledStack]]


def stack_of(
    layout: Layout, num_devices: int, width: int, rectangles: Sequence[Rectangle]
) -> PooledStack:
    """Devices count around, so that any number of them will do."""
    slots = [
        PooledSlot(table=t, device=d % num_devices, row=row, num_rows=rows, column=column)
        for t, d, row, rows, column in rectangles
    ]
    owners = {slot.device for slot in slots}
    return PooledStack(
        name=f"pooled {width}",
        tables=tuple(t for t in layout.tables if t.name in {slot.table for slot in slots}),
        slots=tuple(slots),
        width=width,
        num_devices=num_devices,
        cores_per_device=CORES_PER_DEVICE,
        max_ids=tuple(int(device in owners) for device in range(num_devices)),
        is_weighted=True,
    )


def rectangles(layout: Layout, num_devices: int) -> list[PooledStack]:
    """Rows of a table on two devices, columns of another, two features; three tables are MOD."""
    return [
        stack_of(
            layout,
            num_devices,
            16,
            [
                ("user", 0, 0, 100, 0),
                ("user", 1, 100, 233, 0),
                ("shared", 1, 0, 90, 0),
                ("alone", 1, 0, 61, 0),
                ("alone", 0, 0, 61, 16),
            ],
        )
    ]


def whole_tables(layout: Layout, num_devices: int) -> list[PooledStack]:
    """All tables, by their width: no table is left for a layout."""
    dims = {table.name: table.embedding_dim for table in layout.tables}
    return [
        stack_of(
            layout,
            num_devices,
            width,
            [
                (table.name, index, 0, table.num_embeddings, 0)
                for index, table in enumerate(layout.tables)
                if dims[table.name] == dim
            ],
        )
        for dim, width in ((6, 16), (16, 32), (24, 48))
    ]


@pytest.fixture(scope="module")
def twin() -> Twin:
    return Twin(OPTIMIZERS["adagrad"], num_devices=2, num_steps=3, pooled=rectangles)


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


def test_three_steps_of_both_kinds_equal_the_cpu(
    twin: Twin, program: Program, emulator: Emulator, trained: Run
) -> None:
    assert {table for facts in program.stacks for table in facts.tables} == {
        "small",
        "item",
        "city",
    }
    assert [facts.tables for facts in program.pooled] == [("shared", "user", "alone")]
    assert_equal(twin.run(program, emulator), trained)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_twenty_steps_equal_the_cpu(num_devices: int, optimizer: str) -> None:
    """Losses, logits, tables, optimizer state, dense parameters and theirs."""
    pooled: Pooled = whole_tables if optimizer == "rowwise_adagrad" else rectangles
    twin = Twin(OPTIMIZERS[optimizer], num_devices=num_devices, num_steps=20, pooled=pooled)
    program = twin.program()
    with Emulator(program) as emulator:
        differences = assert_equal(twin.run(program, emulator), twin.train())
    print(f"{num_devices} devices, {optimizer}: largest difference", max(differences.values()))


def sums(layout: Layout, num_devices: int) -> list[PooledStack]:
    """Tables whose ids travel without gains."""
    halves: list[Rectangle] = [("user", 1, 0, 333, 0), ("city", 0, 0, 40, 0)]
    return [dataclasses.replace(stack_of(layout, num_devices, 16, halves), is_weighted=False)]


@pytest.mark.slow
def test_ids_that_a_bag_has_twice_count_twice_without_gains_too() -> None:
    twin = Twin(OPTIMIZERS["adagrad"], num_devices=2, num_steps=4, pooled=sums, is_weighted=False)
    cities = [batch.sparse["city"] for step in twin.steps for batch in step]
    bags = [bag for kjt in cities for bag in torch.split(kjt.values(), kjt.lengths().tolist())]
    assert any(len(bag) > len(set(bag.tolist())) for bag in bags)
    program = twin.program()
    assert twin.pooled["ebc"][0].words_per_id == 2
    with Emulator(program) as emulator:
        assert_equal(twin.run(program, emulator), twin.train())


@pytest.mark.slow
def test_a_program_of_pooled_tables_only_equals_the_cpu() -> None:
    twin = Twin(OPTIMIZERS["sgd"], num_devices=2, num_steps=3, pooled=whole_tables)
    program = twin.program()
    assert not program.stacks
    assert [facts.tables for facts in program.pooled] == [
        ("small", "shared"),
        ("user", "item", "city"),
        ("alone",),
    ]
    with Emulator(program) as emulator:
        assert_equal(twin.run(program, emulator), twin.train())


def test_owners_get_and_send_what_they_must(twin: Twin, program: Program) -> None:
    (facts,) = program.pooled
    (stack,) = twin.pooled["ebc"]
    assert (facts.slots, facts.dim) == (5, 8)
    assert facts.blocks == CORES_PER_DEVICE * (2 + 4)  # features of the slots of both devices
    kinds = [kind for kind, _ in program.expected.collectives]
    assert kinds.count(lowering.RAGGED_ALL_TO_ALL) == 3
    assert kinds.count("all_to_all") == 1
    lines = 4 * 3 * 128  # bytes: row, sample, gain
    assert facts.id_bytes == sum(stack.lines) * lines
    assert facts.block_bytes == facts.blocks * 5 * 8 * 4
    assert "mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1" in program.text


def test_a_mean_over_columns_of_several_devices_is_refused() -> None:
    def halves(layout: Layout, num_devices: int) -> list[PooledStack]:
        columns: list[Rectangle] = [("alone", 1, 0, 61, 0), ("alone", 0, 0, 61, 16)]
        return [stack_of(layout, num_devices, 16, columns)]

    twin = Twin(OPTIMIZERS["rowwise_adagrad"], num_devices=2, num_steps=1, pooled=halves)
    with pytest.raises(ProgramError, match=r"columns of \['alone'\] are on several devices"):
        twin.program()


def test_a_pipelined_step_is_refused(twin: Twin) -> None:
    with pytest.raises(ProgramError, match=r"\['pooled 16'\].*use mode='exact'"):
        twin.program("pipelined")


def test_tables_without_a_place_are_refused(twin: Twin) -> None:
    other = Twin(OPTIMIZERS["sgd"], num_devices=2, num_steps=1, pooled=rectangles)
    other.pooled = {}
    with pytest.raises(ProgramError, match="each in one of them"):
        other.program()


def test_stacks_of_another_number_of_devices_are_refused() -> None:
    other = Twin(OPTIMIZERS["sgd"], num_devices=2, num_steps=1, pooled=rectangles)
    (stack,) = other.pooled["ebc"]
    wide = dataclasses.replace(stack, num_devices=4, max_ids=(*stack.max_ids, 0, 0))
    other.pooled = {"ebc": (wide,)}
    with pytest.raises(ProgramError, match="is for 4 devices of 2 cores, the program for 2 of 2"):
        other.program()


def test_more_ids_than_an_owner_has_room_for_are_refused(twin: Twin, program: Program) -> None:
    tight = dataclasses.replace(twin.pooled["ebc"][0], max_ids=(1, 1))
    placement = twin.placement(twin.model, program)
    placement._pooled = {"ebc/pooled 16": ("ebc", tight)}
    with pytest.raises(CapacityError, match=r"partition 0->0 needs \d+ ids, capacity is 1"):
        placement.feed(twin.steps[0])


# ------------------------------------------------------------------------------------------ faults
# Each must be seen, by the checks or by the comparison.


def changed(program: Program, pattern: str, new: str, *, count: int = 1) -> Program:
    text, found = re.subn(pattern, new, program.text, count=count)
    assert found == count
    return dataclasses.replace(program, text=text)


def differs(twin: Twin, fault: Program, trained: Run) -> None:
    with Emulator(fault) as emulator, pytest.raises((AssertionError, ProgramError), match="differ"):
        assert_equal(twin.run(fault, emulator), trained)


def test_ids_that_are_not_merged_are_seen(twin: Twin, program: Program, trained: Run) -> None:
    """Every id updates its row with its own gradient: Adagrad's state shows it."""
    differs(twin, changed(program, r"stablehlo\.compare  ?NE", "stablehlo.compare GE"), trained)


def test_ids_that_are_not_sorted_are_seen(twin: Twin, program: Program, trained: Run) -> None:
    fault = _edited(program, "stablehlo.sort", lambda sort: sort.operands)
    differs(twin, fault, trained)


def test_gradients_that_do_not_travel_are_seen(twin: Twin, program: Program, trained: Run) -> None:
    """The owner's own activations in their place."""
    fault = _edited(program, lowering.RAGGED_ALL_TO_ALL, lambda call: [call.operands[1]], index=-1)
    with pytest.raises(ProgramError, match="collectives"):
        fault.check()
    differs(twin, fault, trained)


def test_a_gradient_of_zero_is_seen(program: Program) -> None:
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(program.text)
        call = _calls(module, lowering.RAGGED_ALL_TO_ALL)[-1]
        with mlir.ir.InsertionPoint(call):
            shape = tuple(call.operands[0].type.shape)
            zeros = mlir.ir.DenseElementsAttr.get(np.zeros(shape, np.float32))
            call.operands[0] = mlir.hlo.constant(zeros)
        fault = dataclasses.replace(program, text=str(module))
    with pytest.raises(ProgramError, match="exchange 2 is constant zero"):
        fault.check()


def test_a_table_that_is_not_the_one_to_update_is_seen(program: Program) -> None:
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(program.text)
        table, slot = _calls(module, lowering.LOCAL_LOOKUP)[-2:]
        table.operands[4], slot.operands[4] = slot.operands[4], table.operands[4]
        fault = dataclasses.replace(program, text=str(module))
    with pytest.raises(ProgramError, match="not the result of a SparseCore update of it"):
        fault.check()


def test_a_missing_local_lookup_is_seen(program: Program) -> None:
    fault = _edited(program, lowering.LOCAL_LOOKUP, lambda call: [call.operands[4]])
    with pytest.raises(ProgramError, match="lookups of pooled stacks, expected"):
        fault.check()


def _calls(module: object, name: str) -> list:
    main = lowering.public_function(module)
    return [
        operation
        for operation in lowering.walk(main.regions[0].blocks[0])
        if operation.name == name
        or (
            operation.name == "stablehlo.custom_call"
            and operation.attributes["call_target_name"].value == name
        )
    ]


def _edited(program: Program, name: str, operands: Callable, *, index: int = 0) -> Program:
    """The program with some operands of an operation in the place of its results."""
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(program.text)
        operation = _calls(module, name)[index]
        for result, operand in zip(operation.results, operands(operation), strict=True):
            result.replace_all_uses_with(operand)
        operation.erase()
        return dataclasses.replace(program, text=str(module))
