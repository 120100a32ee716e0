"""Finding a place in a running job for every value of a checkpoint, before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_tpu.sharding.checkpoint.contents import Contents, dtype_of, some
from torchrec_tpu.sharding.checkpoint.state import Optimized, TableFacts
from torchrec_tpu.sharding.checkpoint.storage import Request, blocks_of
from torchrec_tpu.sparsecore.errors import CheckpointMismatchError

_SCHEDULED: Final = frozenset({"lr", "initial_lr", "weight_decay"})
"""Settings of fused optimizers that a checkpoint brings with it; others must be the same."""

_SAME_SLOT: Final = {  # names in FBGEMM's, TorchRec's and torch's optimizers -> ours
    "momentum_1": "momentum1",
    "sum": "momentum1",
    "exp_avg": "momentum1",
    "momentum_2": "exp_avg_sq",
    "momentum2": "exp_avg_sq",
}


@dataclass(slots=True, kw_only=True)
class Restoration:
    """What to read, and what to set when it has been read.

    Attributes:
        requests: memory to fill.
        extra: extra state of modules, for `load_state_dict`.
    """

    requests: list[Request] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    _states: list[tuple[Optimized, dict[str, Any]]] = field(default_factory=list)
    _settings: list[tuple[Optimized, dict[str, Any]]] = field(default_factory=list)
    _means: list[tuple[Tensor, list[tuple[float, Tensor]]]] = field(default_factory=list)

    def finish(self) -> None:
        """Sets what is not read in place: means, new optimizer state, settings."""
        for target, parts in self._means:
            target.zero_()
            for weight, part in parts:
                target.add_(part, alpha=weight)
        for entry, state in self._states:
            if entry.state:
                dict.update(entry.optimizer.state[entry.parameter], state)
            else:
                entry.optimizer.state[entry.parameter] = state
        optimizers: dict[int, KeyedOptimizer] = {}
        for entry, settings in self._settings:
            entry.group.update(settings)
            if isinstance(entry.optimizer, KeyedOptimizer):
                optimizers[id(entry.optimizer)] = entry.optimizer
        for optimizer in optimizers.values():
            optimizer.post_load_state_dict()


def plan_restoration(
    contents: Contents,
    metadata: Metadata,
    model: Mapping[str, Any],
    tables: Mapping[str, TableFacts],
    parameters: Mapping[str, Optimized],
    *,
    saved_tables: Mapping[str, Mapping[str, Any]],
    strict: bool,
    read_objects: Callable[[Sequence[str]], Mapping[str, Any]],
) -> Restoration:
    """Matches a checkpoint with a run.

    Args:
        contents: of the checkpoint.
        metadata: the same in DCP's form.
        model: its state.
        tables: of the model.
        parameters: what the optimizers know; none to load the model alone.
        saved_tables: facts of the checkpoint's manifest, by FQN.
        strict: see `load_checkpoint`.
        read_objects: small values of the checkpoint.

    Raises:
        CheckpointMismatchError: names what differs.
    """
    result = Restoration()
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    root = contents.root_of(tensors, within="model")
    for name, value in tensors.items():
        _request(result, contents, root + name, name, value)
    extras = {root + n: n for n in model if n not in tensors and root + n in contents.objects}
    for key, value in read_objects(list(extras)).items():
        result.extra[extras[key]] = value
    if strict:
        _check_unused(contents, root, tensors)
        _check_tables(root, tables, saved_tables)
    if parameters:
        _check_rules(root, tables, saved_tables)
        columns = {
            name: _Columns.of(tensors[name], root + name, contents, metadata) for name in tables
        }
        _match_optimizers(result, contents, metadata, root, parameters, columns, read_objects)
    return result


def _request(result: Restoration, contents: Contents, key: str, name: str, value: Tensor) -> None:
    stored = contents.tensors[key]
    if not stored.fits(value.size()):
        raise CheckpointMismatchError(
            f"{name!r} is {_shape(value.size())} here and {_shape(stored.size)} in the checkpoint"
        )
    for block in blocks_of(value):
        if block.tensor.numel():
            result.requests.extend(stored.requests(block.offsets, block.tensor))


def _request_rowwise(
    result: Restoration, contents: Contents, key: str, name: str, value: Tensor, columns: _Columns
) -> None:
    """State of one number per row, the mean over the columns of a shard.

    A table that is divided by columns has one for each block of columns, end to end. The new mean
    over some columns is that of the old ones, by how many columns each stands for: exact when
    blocks are joined, the best guess when they are cut.
    """
    stored = contents.tensors[key]
    num_rows = columns.num_rows
    if (value.size(0), stored.size[0]) != (
        len(columns.here) * num_rows,
        len(columns.there) * num_rows,
    ):
        raise CheckpointMismatchError(
            f"{name!r} is {_shape(value.size())} here and {_shape(stored.size)} in the checkpoint, "
            f"for {num_rows:,} rows in {len(columns.here)} and {len(columns.there)} blocks of "
            "columns"
        )
    for block in blocks_of(value):
        target = block.tensor.view(-1)
        if not len(target):
            continue  # a rank without rows, whose offset may be the end
        piece, row = divmod(block.offsets[0], num_rows)
        start, stop = columns.here[piece]
        parts = []
        for index, (low, high) in enumerate(columns.there):
            if (shared := min(stop, high) - max(start, low)) > 0:
                parts.append((shared / (stop - start), index * num_rows + row))
        if len(parts) == 1:
            result.requests.extend(stored.requests((parts[0][1],), target))
            continue
        weighted = [(weight, torch.empty_like(target)) for weight, _ in parts]
        result._means.append((target, weighted))
        for (_, offset), (_, memory) in zip(parts, weighted, strict=True):
            result.requests.extend(stored.requests((offset,), memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """How a table's columns are divided: (first, past the last) of each block."""

    num_rows: int
    here: list[tuple[int, int]]
    there: list[tuple[int, int]]

    @classmethod
    def of(cls, weight: Tensor, key: str, contents: Contents, metadata: Metadata) -> _Columns:
        """Those of a weight of the model, and of its like in the checkpoint."""
        here = [(0, weight.size(1))]
        if isinstance(weight, ShardedTensor):
            shards = weight.metadata().shards_metadata
            starts_and_widths = {(s.shard_offsets[1], s.shard_sizes[1]) for s in shards}
            here = sorted((start, start + width) for start, width in starts_and_widths)
        elif isinstance(weight, DTensor):
            blocks = blocks_of(weight)
            here = sorted({(b.offsets[1], b.offsets[1] + b.tensor.size(1)) for b in blocks})
        there = [(0, weight.size(1))]
        stored = metadata.state_dict_metadata.get(key)
        if contents.tensors[key].key == key and isinstance(stored, TensorStorageMetadata):
            there = sorted({(c.offsets[1], c.offsets[1] + c.sizes[1]) for c in stored.chunks})
        return cls(num_rows=weight.size(0), here=here, there=there)


def _check_unused(contents: Contents, root: str, tensors: Mapping[str, Tensor]) -> None:
    """Under the root of a whole model there is nothing that the model lacks."""
    unused = [
        name.removeprefix(root)
        for name in contents.tensors
        if name.startswith(root) and name.removeprefix(root) not in tensors
    ]
    if root and unused:
        raise CheckpointMismatchError(
            f"the checkpoint has {some(unused)}, which the model lacks; strict=False ignores them"
        )


def _check_tables(
    root: str, tables: Mapping[str, TableFacts], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Catches tables that were reordered under positional names: their features tell."""
    prefix = root.removeprefix("model.")
    changed = []
    for name, table in tables.items():
        before = saved.get(prefix + name, {}).get("features")
        if table.features is not None and before is not None and list(table.features) != before:
            changed.append(f"{name!r} from {before} to {list(table.features)}")
    if changed:
        raise CheckpointMismatchError(
            f"tables are looked up by other features than when they were saved: {some(changed)}: "
            "reordered or renamed? strict=False loads them by name"
        )


def _check_rules(
    root: str, tables: Mapping[str, TableFacts], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Slots of the same names may mean other things to another rule."""
    prefix = root.removeprefix("model.")
    for name, table in tables.items():
        before = saved.get(prefix + name, {}).get("optimizer")
        if table.optimizer is not None and before is not None and table.optimizer != before:
            raise CheckpointMismatchError(
                f"{name!r} was trained by {before}, here it is by {table.optimizer}; "
                "with_optimizer=False loads the tables alone"
            )


def _match_optimizers(
    result: Restoration,
    contents: Contents,
    metadata: Metadata,
    root: str,
    parameters: Mapping[str, Optimized],
    columns: Mapping[str, _Columns],
    read_objects: Callable[[Sequence[str]], Mapping[str, Any]],
) -> None:
    states, groups = _optimizer_names(contents, root, parameters)
    objects = read_objects(
        [key for name in parameters for key in states[name].values() if key in contents.objects]
        + list(groups.values())
    )
    for name, entry in parameters.items():
        _match_state(result, contents, metadata, name, entry, states[name], objects, columns)
    settings: dict[tuple[int, str], tuple[str, Any]] = {}
    for name, key in groups.items():
        entry, saved = parameters[name], dict(objects[key])
        for setting, value in saved.items():
            before = settings.setdefault((id(entry.group), setting), (name, value))
            if not _equal(before[1], value):
                raise CheckpointMismatchError(
                    f"{setting} is {before[1]} for {before[0]!r} and {value} for {name!r} in the "
                    "checkpoint, and they share one param_group here"
                )
            is_fixed = entry.is_fused and setting not in _SCHEDULED and setting in entry.hyper
            if is_fixed and not _equal(entry.hyper[setting], value):
                raise CheckpointMismatchError(
                    f"{name!r}: {setting} is {entry.hyper[setting]} here and {value} in the "
                    "checkpoint; with_optimizer=False loads the tables alone"
                )
        saved = {s: v for s, v in saved.items() if s in entry.group or s == "initial_lr"}
        result._settings.append((entry, saved))


def _optimizer_names(
    contents: Contents, root: str, parameters: Mapping[str, Optimized]
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """By parameter: its state's names -> keys; and by parameter: key of its settings.

    A parameter of a part of the saved model has a prefix there, which is the end of `root`.
    """
    parts = root.split(".")
    for prefix in (".".join(parts[start:]) for start in range(len(parts))):
        states, tops = _states_under(contents, {prefix + name: name for name in parameters})
        if tops:
            break
    if len(tops) > 1:
        raise CheckpointMismatchError(
            f"the checkpoint holds state of several such optimizers, under {sorted(tops)}"
        )
    top = next(iter(tops), "optimizer.")
    groups = {
        name: key
        for name in parameters
        if (key := f"{top}param_groups.{prefix}{name}") in contents.objects
    }
    return states, groups


def _states_under(
    contents: Contents, names: Mapping[str, str]
) -> tuple[dict[str, dict[str, str]], set[str]]:
    """State of parameters by their name there -> here, and what precedes `state.` in its keys."""
    states: dict[str, dict[str, str]] = {name: {} for name in names.values()}
    tops: set[str] = set()
    for key in (*contents.tensors, *contents.objects):
        parts = key.split(".")
        for start in (index for index, part in enumerate(parts) if part == "state"):
            for end in range(start + 2, len(parts)):
                name = names.get(".".join(parts[start + 1 : end]))
                if name is not None:
                    states[name][".".join(parts[end:])] = key
                    tops.add("".join(f"{part}." for part in parts[:start]))
                    break
    return states, tops


def _match_state(
    result: Restoration,
    contents: Contents,
    metadata: Metadata,
    name: str,
    entry: Optimized,
    stored: Mapping[str, str],
    objects: Mapping[str, Any],
    columns: Mapping[str, _Columns],
) -> None:
    here = entry.state
    by_slot = {_slot(state, entry.table): key for state, key in stored.items()}
    missing = [s for s in here if s not in stored and _slot(s, entry.table) not in by_slot]
    steps = [s for s in missing if _slot(s, entry.table) == "step"]
    if entry.is_fused and steps:
        warnings.warn(
            f"{name!r}: the checkpoint has no step, so the bias correction goes on from step "
            f"{int(here[steps[0]])}; set_optimizer_step(n) changes that",
            stacklevel=6,
        )
    if missing != steps:
        raise CheckpointMismatchError(
            f"{name!r}: the checkpoint has optimizer state {sorted(stored)}, the optimizer here "
            f"needs {sorted(here)}; with_optimizer=False loads the model alone"
        )
    known = {_slot(state, entry.table) for state in here}
    if entry.is_fused and (extra := by_slot.keys() - known - {"step"}):
        raise CheckpointMismatchError(
            f"{name!r}: the checkpoint has optimizer state {sorted(extra)}, which the optimizer "
            f"here does not have; with_optimizer=False loads the model alone"
        )
    new: dict[str, Any] = {}
    for state, value in here.items():
        if state in missing:
            continue
        key = stored.get(state) or by_slot[_slot(state, entry.table)]
        if isinstance(value, Tensor) and key in contents.tensors:
            label = f"{name}: {state}"
            if entry.table is not None and _is_rowwise(value):
                _request_rowwise(result, contents, key, label, value, columns[name])
            else:
                _request(result, contents, key, label, value)
        elif key in objects:
            new[state] = objects[key]
        else:
            new[state] = _allocate(result, contents, metadata, key, state, entry.parameter)
    if not here and not entry.is_fused:
        for state, key in stored.items():
            local = _eager_name(state, entry.table, by_slot)
            if key in objects:
                new[local] = objects[key]
            else:
                new[local] = _allocate(result, contents, metadata, key, local, entry.parameter)
    if new:
        result._states.append((entry, new))


def _is_rowwise(state: Tensor) -> bool:
    return state.dim() == 1 or (state.dim() == 2 and state.size(1) == 1)


def _allocate(
    result: Restoration,
    contents: Contents,
    metadata: Metadata,
    key: str,
    state: str,
    parameter: Tensor,
) -> Tensor:
    """New memory for state that an optimizer makes in its first step."""
    stored = contents.tensors[key]
    if state == "step":
        value = torch.empty(stored.size, dtype=torch.float32)  # on the CPU, as torch has it
    else:
        dtype = dtype_of(metadata, stored.key)
        value = torch.empty(stored.size, dtype=dtype, device=parameter.device)
    result.requests.extend(stored.requests((0,) * value.dim(), value))
    return value


def _slot(state: str, table: str | None) -> str:
    """One name for the same slot in different optimizers of a table."""
    if table is None:
        return state
    base = state.removeprefix(f"{table}.").removeprefix("weight.")
    return _SAME_SLOT.get(base, base)


def _eager_name(state: str, table: str | None, slots: Mapping[str, str]) -> str:
    """The name in an optimizer of torch of a fused optimizer's slot."""
    slot = _slot(state, table)
    if table is None or (state == slot and slot != "momentum1" and "." not in state):
        return state
    if slot == "momentum1":
        return "exp_avg" if "exp_avg_sq" in slots else "sum"
    return slot


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return bool(torch.equal(torch.as_tensor(left), torch.as_tensor(right)))
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return list(left) == list(right)
    return bool(left == right)


def _shape(size: Sequence[int]) -> str:
    return " x ".join(f"{length:,}" for length in size) or "a scalar"
