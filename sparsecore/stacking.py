"""Which tables share a stack, and the layout that follows. Pure functions of their arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from torchrec_tpu.sparsecore.errors import LayoutError
from torchrec_tpu.sparsecore.layout import (
    MAX_ROWS_PER_CORE,
    Block,
    Layout,
    Stack,
    StackedFeature,
    StackedTable,
    Table,
    round_up,
)


def make_layout(
    tables: Sequence[Table],
    *,
    num_devices: int = 1,
    cores_per_device: int = 2,
    num_local_devices: int | None = None,
    first_local_device: int = 0,
    stacks: Literal["auto", "none"] | Sequence[Sequence[str]] = "auto",
    rotation: int | None = None,
    activation_limit_bytes: int = 2 << 20,
    batch_size: int | None = None,
    blocks: Mapping[str, Block] | None = None,
) -> Layout:
    """Tables, laid out over the SparseCores of all devices.

    Args:
        tables: in config order, which is the order of outputs.
        num_devices: devices in all.
        cores_per_device: SparseCores of one device (`chips.py`).
        num_local_devices: devices that this process feeds; all of them when None.
        first_local_device: global index of the first of them.
        stacks: "auto" as `auto_stacks`, "none" for one table each, or lists of table names; tables
            that no list names stay alone.
        rotation: cores by which each further table of a stack is moved; cores_per_device when None.
        activation_limit_bytes: bound of one stack's activations on one core, for "auto".
        batch_size: samples of one process, for "auto"; 4096 when None.
        blocks: by table name, for tables whose cores hold contiguous rows; all others are dealt out
            row by row. Several processes that look up one table on CPUs want blocks.

    Raises:
        LayoutError: names that are not unique, stacks that mix groups or sequences with bags,
            device counts that contradict each other, more rows than int32 can index, blocks that
            do not hold their table.

    >>> a = Table(name="a", num_embeddings=10, embedding_dim=8, combiner="sum", features=("f",))
    >>> b = Table(name="b", num_embeddings=99, embedding_dim=5, combiner="mean", features=("g",))
    >>> layout = make_layout([a, b])
    >>> [stack.name for stack in layout.stacks], layout.home_of("b", 7)
    (['a+b'], (1, 11))
    """
    tables = tuple(tables)
    if num_local_devices is None:
        num_local_devices = num_devices
    if min(num_devices, cores_per_device, num_local_devices) < 1 or not (
        0 <= first_local_device <= num_devices - num_local_devices
    ):
        raise LayoutError(
            f"num_devices={num_devices}, cores_per_device={cores_per_device}, "
            f"num_local_devices={num_local_devices}, first_local_device={first_local_device}: "
            "counts must be >= 1 and the local devices must be some of all devices"
        )
    if not tables:
        raise LayoutError("no tables; a layout needs at least one")
    names = [table.name for table in tables]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise LayoutError(f"table names must be unique, repeated: {repeated}")

    num_cores = num_devices * cores_per_device
    blocks = dict(blocks or {})
    _check_blocks(tables, blocks, num_cores)
    num_local_cores = num_local_devices * cores_per_device
    if stacks == "auto":
        groups = auto_stacks(
            tables,
            samples_per_core=-(-(4096 if batch_size is None else batch_size) // num_local_cores),
            limit_bytes=activation_limit_bytes,
        )
    elif stacks == "none":
        groups = [[table] for table in tables]
    elif isinstance(stacks, str):
        raise LayoutError(f"stacks={stacks!r} is not 'auto', 'none' or lists of table names")
    else:
        groups = _named_stacks(tables, stacks)

    shared = Counter(key for table in tables for key in table.features)
    order = {
        pair: index
        for index, pair in enumerate(
            (table.name, key) for table in tables for key in table.features
        )
    }
    step = cores_per_device if rotation is None else rotation

    def stack_of(index: int, group: Sequence[Table]) -> Stack:
        stacked: list[StackedTable] = []
        rows = 0
        for position, table in enumerate(group):
            block = blocks.get(table.name)
            stacked.append(
                StackedTable(
                    table=table,
                    row_offset=rows,
                    rotation=block.first_core if block else position * step % num_cores,
                    rows_per_core=round_up(block.rows, 8)
                    if block
                    else table.rows_per_core(num_cores),
                    block_rows=block.rows if block else 0,
                )
            )
            rows += stacked[-1].rows_per_core
        if rows > MAX_ROWS_PER_CORE:
            raise LayoutError(
                f"stack {_stack_name(group)!r} needs {rows:,} rows on each of {num_cores} cores, "
                f"more than int32 can index; use more devices or smaller stacks"
            )
        return Stack(
            name=_stack_name(group),
            tables=tuple(stacked),
            features=tuple(
                StackedFeature(
                    key=key,
                    table=table.name,
                    output_name=f"{key}@{table.name}" if shared[key] > 1 else key,
                    combiner=table.combiner,
                    stack=index,
                    config_index=order[table.name, key],
                )
                for table in group
                for key in table.features
            ),
            dim=max(table.dim for table in group),
            rows_per_core=rows,
        )

    return Layout(
        tables=tables,
        stacks=tuple(stack_of(index, group) for index, group in enumerate(groups)),
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        num_local_devices=num_local_devices,
        first_local_device=first_local_device,
    )


def auto_stacks(
    tables: Sequence[Table], *, samples_per_core: int, limit_bytes: int
) -> list[list[Table]]:
    """Tables gathered into stacks, first fit in config order.

    Tables that agree in padded dim, group and kind (bags or sequences) share a stack while its
    activations on one core, samples * padded dim * 4 bytes over all its features, stay within
    `limit_bytes`. A table above the limit stays alone. A sequence counts one id per sample.

    >>> t = [Table(name=n, num_embeddings=9, embedding_dim=d, combiner="sum", features=(n,))
    ...      for n, d in (("a", 8), ("b", 16), ("c", 8), ("d", 8))]
    >>> [[table.name for table in s] for s in auto_stacks(t, samples_per_core=4, limit_bytes=256)]
    [['a', 'c'], ['d'], ['b']]
    """
    kinds: dict[tuple[int, str, bool], list[list[Table]]] = {}

    def activation_bytes(table: Table) -> int:
        return len(table.features) * samples_per_core * table.dim * 4

    for table in tables:
        stacks = kinds.setdefault((table.dim, table.group, table.is_sequence), [])
        for stack in stacks:
            if sum(map(activation_bytes, stack)) + activation_bytes(table) <= limit_bytes:
                stack.append(table)
                break
        else:
            stacks.append([table])
    return [stack for stacks in kinds.values() for stack in stacks]


def _check_blocks(tables: Sequence[Table], blocks: Mapping[str, Block], num_cores: int) -> None:
    if unknown := blocks.keys() - {table.name for table in tables}:
        raise LayoutError(
            f"blocks name unknown tables {sorted(unknown)}; tables: {[t.name for t in tables]}"
        )
    for table in tables:
        block = blocks.get(table.name)
        if block and not (
            block.rows > 0
            and table.num_embeddings <= block.rows * num_cores
            and 0 <= block.first_core < num_cores
        ):
            raise LayoutError(
                f"table {table.name!r}: {block} does not hold {table.num_embeddings:,} rows on "
                f"{num_cores} cores; blocks have at least "
                f"{-(-table.num_embeddings // num_cores):,} rows and start on one of the cores"
            )


def _named_stacks(tables: Sequence[Table], stacks: Sequence[Sequence[str]]) -> list[list[Table]]:
    by_name = {table.name: table for table in tables}
    named = Counter(name for stack in stacks for name in stack)
    if unknown := [name for name in named if name not in by_name]:
        raise LayoutError(f"stacks name unknown tables {unknown}; tables: {list(by_name)}")
    if repeated := [name for name, count in named.items() if count > 1]:
        raise LayoutError(f"stacks name these tables more than once: {repeated}")
    groups = [[by_name[name] for name in stack] for stack in stacks if stack]
    for group in groups:
        if len({(table.group, table.is_sequence) for table in group}) > 1:
            raise LayoutError(
                f"stack {_stack_name(group)!r} mixes optimizer groups, or sequences with bags: "
                f"{[(table.name, table.group, str(table.combiner)) for table in group]}"
            )
    return groups + [[table] for table in tables if table.name not in named]


def _stack_name(group: Sequence[Table]) -> str:
    """A readable name; the first table makes it unique."""
    names = [table.name for table in group]
    if len(names) > 4:
        return f"{names[0]}+{names[1]}+..+{names[-1]} ({len(names)} tables)"
    return "+".join(names)
