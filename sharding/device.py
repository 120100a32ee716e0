"""The tables of a collection on an accelerator, in the form that its SparseCores read.

A stack is one tensor, float32 (S * R, D), core after core: row r of table t on core c has the id
r * S + (c - rotation of t) mod S. Optimizer state is laid out alike. Logical arrays, (V, d) or
(V,), exist only while they are read or written; padding is zero.

Legend: S cores of the device, R rows of a stack on one core, D its row width, V num_embeddings, d
embedding_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchrec_tpu.sharding.transfer import Copier, DeviceBatch, Pending
from torchrec_tpu.sparsecore import backends
from torchrec_tpu.sparsecore.batch import SparseBatch
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import TableError
from torchrec_tpu.sparsecore.geometry import Geometry, StackLimits
from torchrec_tpu.sparsecore.layout import Layout, Stack
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec


def takes_stacks(device: torch.device) -> bool:
    """Whether tables on that device are in this form; on "cpu" and "meta" they are logical."""
    return device.type != "cpu" and device.type in backends.FOR_DEVICE


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a table is."""

    stack: int
    row_offset: int
    num_rows: int  # of one core


class DeviceTables:
    """Tables and optimizer state of one collection on one device.

    Args:
        layout: of all tables, on one device.
        optimizers: of each table; None for a frozen one.
        specs: of each table, frozen or not: what state it has.
        capacity: static limits of every stack.
        device: where the tables go. They are zero at first, and their state is new.

    Raises:
        TableError: the device's programs cannot hold these tables; says why.
        NotImplementedError: no backend runs there.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        optimizers: Mapping[str, OptimizerSpec | None],
        specs: Mapping[str, OptimizerSpec],
        capacity: Mapping[str, Capacity] | None,
        device: torch.device,
    ) -> None:
        backends.choose(device.type)
        if layout.num_devices != 1:
            raise TableError(
                f"tables {[t.name for t in layout.tables]} are laid out on {layout.num_devices} "
                f"devices, and a process computes on one: make the collection with num_devices=1"
            )
        self._layout = layout
        self.capacity = capacity
        for stack in layout.stacks:
            _check_stack(stack, optimizers, specs)
        self._places = {
            table.table.name: _Place(index, table.row_offset, table.rows_per_core)
            for index, stack in enumerate(layout.stacks)
            for table in stack.tables
        }
        self._stacks = [
            [
                torch.zeros(layout.num_cores * stack.rows_per_core, stack.dim, device=device),
                *(
                    torch.full(
                        slot.shape(layout.num_cores * stack.rows_per_core, stack.dim),
                        spec.initial_value(slot),
                        dtype=torch.float32,
                        device=device,
                    )
                    for slot in spec.rule.slots
                ),
            ]
            for stack in layout.stacks
            for spec in [specs[stack.tables[0].table.name]]
        ]
        self._copier: Copier | None = None

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._stacks[0][0].device

    @property
    def capacity(self) -> Mapping[str, Capacity]:
        """Static limits by stack name: what programs reserve, so every stack has some."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: Mapping[str, Capacity] | None) -> None:
        capacity = {} if capacity is None else dict(capacity)
        if missing := [s.name for s in self._layout.stacks if s.name not in capacity]:
            raise TableError(
                f"stacks {missing} have no capacity, and a device's programs have static shapes: "
                "calibrate(model, batches) suggests one; set it as the collection's `capacity` "
                "before the tables go to a device"
            )
        self._capacity = capacity
        self._limits = tuple(
            StackLimits(capacity[stack.name].max_ids, capacity[stack.name].max_unique_ids)
            for stack in self._layout.stacks
        )

    # ------------------------------------------------------------------------------- computing

    def start(self, batch: SparseBatch) -> Pending:
        """Starts the copy of a batch to the device."""
        if self._copier is None:
            self._copier = Copier(self.device)
        return self._copier.start(batch)

    def inputs(
        self, batch: SparseBatch | DeviceBatch
    ) -> tuple[list[Tensor], list[Tensor], Geometry]:
        """(buffers, tables, geometry) of a lookup, as the ops take them."""
        if isinstance(batch, SparseBatch):
            batch = self.start(batch).wait()
        geometry = replace(self._layout.geometry(batch.batch), limits=self._limits)
        return batch.buffers, [table for table, *_ in self._stacks], geometry

    def arrays(self, tables: Collection[str]) -> tuple[list[Tensor], list[Tensor]]:
        """(tables, slots) of an update of all tables of some stacks, stack by stack."""
        chosen = [self._stacks[index] for index in sorted({self._places[t].stack for t in tables})]
        return [stack[0] for stack in chosen], [slot for stack in chosen for slot in stack[1:]]

    # -------------------------------------------------------------------------- logical arrays

    def read(self, table: str, array: int = 0) -> Tensor:
        """A copy of a table on the CPU, (V, d); or of its state.

        Args:
            table: name.
            array: 0 for the weights, 1 for the first slot of the table's rule, and so on.
        """
        block = self._block(table, array).cpu()
        return torch.from_numpy(self._layout.unpack_table(table, block.numpy()))

    def write(self, table: str, value: Tensor, array: int = 0) -> None:
        """Overwrites a table, or its state, with logical values; the other way round of `read`.

        Raises:
            LayoutError: `value` has another shape.
        """
        logical = value.detach().to(device="cpu", dtype=torch.float32).numpy()
        packed = self._layout.pack_table(table, logical)
        self._block(table, array).copy_(torch.from_numpy(packed))

    def fill(self, arrays: Mapping[str, Sequence[Tensor]]) -> None:
        """Writes weights and slots of every table; what is on "meta" has no values and is left."""
        for table, values in arrays.items():
            for array, value in enumerate(values):
                if not value.is_meta:
                    self.write(table, value, array)

    def _block(self, table: str, array: int) -> Tensor:
        """The rows of a table, (S, rows, D) or (S, rows): a view of its stack."""
        place = self._places[table]
        stack = self._stacks[place.stack][array]
        by_core = stack.view(self._layout.num_cores, -1, *stack.shape[1:])
        return by_core.narrow(1, place.row_offset, place.num_rows)

    def __getstate__(self) -> dict[str, Any]:
        """All but the copier, whose streams cannot be copied."""
        return {**self.__dict__, "_copier": None}


def _check_stack(
    stack: Stack,
    optimizers: Mapping[str, OptimizerSpec | None],
    specs: Mapping[str, OptimizerSpec],
) -> None:
    """One call updates all tables of a stack by one rule: refuses stacks that need more."""
    names = [table.table.name for table in stack.tables]
    frozen = [name for name in names if optimizers[name] is None]
    if 0 < len(frozen) < len(names):
        raise TableError(
            f"stack {stack.name!r}: tables {frozen} are frozen and the others are not, but on a "
            "device one call updates them all; give `stacks` that part them"
        )
    rule = specs[names[0]].rule
    dims = {table.table.embedding_dim for table in stack.tables}
    if len(dims) > 1 and any(slot.width == "scalar" for slot in rule.slots):
        raise TableError(
            f"stack {stack.name!r}: {rule.name} takes a mean over the row, and rows of tables "
            f"{names} have {sorted(dims)} elements; give `stacks` that part them"
        )
