"""Lookup and fused update on the SparseCores of one TPU device, by torch_tpu's public ops.

Tables are in device form here, one tensor a stack: f32 (S * rows_per_core, D), core after core;
slots alike, (S * rows_per_core,) where a row has one number. `Geometry.limits` must be there.
Activations of a stack are (S * n, D), core after core, within a core feature after feature.

torch.tpu.ops compiles every number but the learning rate into the program. So a rule goes there
only when its other operands are constants; all others, Adam with its eps_t of every step among
them, run through the same SparseCore call with our own computation (xla.py).

Legend: S cores of the device, P cores of all devices, n samples of a stack on a core, N of a
feature, D row width of a stack, d of a table, O operands of the rule.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor

from torchrec_tpu.sparsecore.batch import pointers_per_core
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, StackLimits, TableGeometry
from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.rules import Rule

TESTED: Final = ("0.2.0",)
"""Versions of torch_tpu whose ops this module was tested with."""

_BUFFERS_PER_STACK: Final = 4


def why_no_tpu() -> str | None:
    """What keeps torch from computing on a TPU, and what to do; None when it can."""
    try:
        found = importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        return "torch_tpu is not installed; pip install 'torchrec_tpu[tpu]' on a TPU machine"
    if found not in TESTED:
        return (
            f"torch_tpu {found} is installed, tested is {' or '.join(TESTED)}; "
            "pip install 'torchrec_tpu[tpu]' gets it"
        )
    if "torch_tpu" not in sys.modules and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return (
            f"torch_tpu {found} is installed but was not loaded: TORCH_DEVICE_BACKEND_AUTOLOAD=0 "
            "keeps `import torch` from doing that; unset it"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "tpu":
        return (
            f"torch_tpu {found} is installed, but torch sees "
            f"{'no accelerator' if accelerator is None else f'the accelerator {accelerator}'}: "
            "this machine has no TPU device, or another process holds it"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCall:
    """One stack of a batch, checked: what each of its calls needs.

    Attributes:
        index: of the stack.
        tables: on it, in order.
        features: of these tables, in order.
        samples: S * n, rows of the activations.
        limits: static limits of the program.
        buffers: row_pointers, embedding_ids, sample_ids, gains.
    """

    index: int
    tables: tuple[TableGeometry, ...]
    features: tuple[FeatureGeometry, ...]
    samples: int
    limits: StackLimits
    buffers: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The three sizes at the end of torch_tpu's signatures."""
        return self.samples, self.limits.max_ids, self.limits.max_unique_ids


class TpuBackend:
    """torch.tpu.ops for the lookup and for the rules of `FUSED`, the XLA backend for the others."""

    name = "tpu"

    def why_unavailable(self) -> str | None:
        """What is missing and how to get it; None when a TPU can be used."""
        return why_no_tpu()

    def lookup(
        self,
        buffers: Sequence[Tensor],
        tables: Sequence[Tensor],
        geometry: Geometry,
        out_shape: Sequence[int],
    ) -> Tensor:
        """The vector of every sample: the sum of gain * row over its ids.

        Args:
            buffers: 4 a stack, on the device.
            tables: one a stack, in device form.
            geometry: of the batch, with limits.
            out_shape: (B, sum of d) or (sum of N, d), as the geometry says.

        Raises:
            ValueError: arguments contradict each other.
        """
        calls = list(stack_calls(buffers, tables, geometry))
        activations = [
            self.lookup_stack(call, table) for call, table in zip(calls, tables, strict=True)
        ]
        return unstack(calls, activations, geometry.num_local_cores, out_shape)

    def update(
        self,
        grad: Tensor,
        buffers: Sequence[Tensor],
        tables: Sequence[Tensor],
        slots: Sequence[Tensor],
        operands: Tensor,
        geometry: Geometry,
        rule: str,
        max_gradient: float | None,
    ) -> None:
        """One optimizer step in place, once for every row that the buffers name.

        Args:
            grad: gradient of `lookup`'s result, on the device.
            buffers: the same as in `lookup`, of all stacks.
            tables: one for each stack that has a table in `geometry`, in device form.
            slots: their state, stack by stack in rule order.
            operands: (tables, O) on the host; or one line a stack on the device, for rules of which
                nothing is compiled in.
            geometry: with limits; of a stack either all tables or none.
            rule: name in RULES.
            max_gradient: every element of `grad` is first clipped to +- this; None for no limit.

        Raises:
            NotImplementedError: one call cannot do this: tables of a stack with other operands or
                row-wise means, a frozen table among trained ones.
            ValueError: arguments contradict each other. Nothing is written in either case.
        """
        if rule not in RULES:
            raise NotImplementedError(f"no rule is named {rule!r}; there are {', '.join(RULES)}")
        calls = list(stack_calls(buffers, tables, geometry))
        states = list(states_of(RULES[rule], calls, tables, slots))
        constants, scalars = operands_of_stacks(RULES[rule], operands, calls, grad.device)
        results = []
        for index, (call, state) in enumerate(zip(calls, states, strict=True)):
            stacked = stack_gradient(
                call, grad, geometry.num_local_cores, dim=state[0].shape[1], limit=max_gradient
            )
            new = self.update_stack(
                call, stacked, state, scalars[index], constants[index], RULES[rule]
            )
            shapes = [tensor.shape for tensor in new]
            assert shapes == [tensor.shape for tensor in state], f"{rule} returned {shapes}"
            results.append(new)
        for state, new in zip(states, results, strict=True):
            for tensor, value in zip(state, new, strict=True):
                tensor.copy_(value)

    def lookup_stack(self, call: StackCall, table: Tensor) -> Tensor:
        """Activations (S * n, D) of one stack."""
        activations: Tensor = _ops().sparse_dense_matmul(*call.buffers, table, *call.sizes)
        return activations

    def update_stack(
        self,
        call: StackCall,
        grad: Tensor,
        state: Sequence[Tensor],
        scalars: Tensor,
        constants: Sequence[float] | None,
        rule: Rule,
    ) -> Sequence[Tensor]:
        """New (table, *slots) of one stack; the old ones may not be read again.

        Args:
            call: of the stack.
            grad: (S * n, D), gradient of its activations.
            state: table and slots.
            scalars: (O,) on the device.
            constants: the same on the host, if known there.
            rule: what updates a row.
        """
        if rule.name not in FUSED or (has_mean(rule) and logical_dim(call) != state[0].shape[1]):
            from torchrec_tpu.sparsecore.backends.xla import update_stack

            return update_stack(call, grad, state, scalars, rule)
        # torch_tpu keeps the first of two computations of one name, whatever is in the second: so
        # the name says all that it depends on.
        name = f"{rule.name}_{state[0].shape[1]}"
        return FUSED[rule.name](call, grad, state, scalars, constants, name)


# --------------------------------------------------------------------------------- torch.tpu.ops


def _sgd(
    call: StackCall,
    grad: Tensor,
    state: Sequence[Tensor],
    scalars: Tensor,
    constants: Sequence[float] | None,  # noqa: ARG001
    name: str,
) -> Sequence[Tensor]:
    return [
        _ops().sparse_dense_matmul_grad_with_sgd(
            *call.buffers, *state, grad, scalars[0], *call.sizes, name
        )
    ]


def _adagrad(
    call: StackCall,
    grad: Tensor,
    state: Sequence[Tensor],
    scalars: Tensor,
    constants: Sequence[float] | None,
    name: str,
) -> Sequence[Tensor]:
    """By element or by row: the op tells them apart by the shape of the state."""
    if constants is None:
        raise ValueError(
            "torch.tpu.ops compiles adagrad's eps into the program: pass operands on the host"
        )
    _, eps = constants
    results: Sequence[Tensor] = _ops().sparse_dense_matmul_grad_with_adagrad(
        *call.buffers, *state, grad, scalars[0], eps, *call.sizes, name
    )
    return results


FUSED: Final[Mapping[str, Callable[..., Sequence[Tensor]]]] = MappingProxyType(
    {"sgd": _sgd, "adagrad": _adagrad, "rowwise_adagrad": _adagrad}
)
"""Rules that torch.tpu.ops computes as we do, operand by operand."""


def _ops() -> Any:
    # An attribute of torch only once torch_tpu is loaded, so mypy does not know it.
    tpu: Any = getattr(torch, "tpu")  # noqa: B009
    return tpu.ops


def ragged_all_to_all(
    values: Tensor, send: Sequence[int], receive: Sequence[int], group: str
) -> Tensor:
    """A part of the values to each rank, and a part from each, on the device.

    Args:
        values: (N,) or (N, width), on the device: rank 0's part first.
        send: items for each rank.
        receive: items from each rank, M in all.
        group: name of a process group of the backend "tpu_dist", one rank a device.

    Returns:
        (M,) or (M, width).

    Raises:
        NotImplementedError: no TPU can be used here.
    """
    if why := why_no_tpu():
        raise NotImplementedError(f"no exchange on device {values.device}: {why}")
    from torch.distributed._functional_collectives import all_to_all_single

    begin_send, sent, begin_receive, received = torch.tensor(
        [_begins(send), send, _begins(receive), receive], dtype=torch.int32, device=values.device
    )
    # A sender says where its part goes in the receiver's tensor, which only the receiver knows.
    begin_there = all_to_all_single(begin_receive, None, None, cast(Any, group))
    out = values.new_empty((sum(receive), *values.shape[1:]))
    result: Tensor = _ops().ragged_all_to_all(
        values, out, begin_send, sent, begin_there, received, group
    )
    return result


def _begins(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


# ---------------------------------------------------------------------------------------- checking


def stack_calls(
    buffers: Sequence[Tensor], tables: Sequence[Tensor], geometry: Geometry
) -> Iterator[StackCall]:
    """The stacks that have a table in `geometry`, each checked against its tensors.

    On a device a wrong size is no error but wrong numbers, so that all of them are checked here.

    Args:
        buffers: 4 a stack, of all stacks.
        tables: of the stacks that are yielded.
        geometry: with limits.

    Raises:
        NotImplementedError: some tables of a stack are not in `geometry`, or lie in blocks.
        ValueError: sizes, types or devices contradict each other.
    """
    cores = geometry.num_local_cores
    if len(geometry.limits) != geometry.num_stacks:
        raise ValueError(
            f"the geometry has limits of {len(geometry.limits)} stacks, expected "
            f"{geometry.num_stacks}: tables on a device need a static capacity, see calibrate()"
        )
    if len(buffers) != _BUFFERS_PER_STACK * geometry.num_stacks:
        raise ValueError(
            f"{len(buffers)} buffers for {geometry.num_stacks} stacks, expected 4 each"
        )
    present = sorted({table.stack for table in geometry.tables})
    if len(tables) != len(present):
        raise ValueError(
            f"{len(tables)} tables for stacks {present}: on a device each stack is one tensor"
        )
    for index, weights in zip(present, tables, strict=True):
        members = tuple(table for table in geometry.tables if table.stack == index)
        features = tuple(
            feature
            for table in members
            for feature in geometry.features[table.first_feature :][: table.num_features]
        )
        where = f"stack {index}"
        if geometry.num_cores > 1 and any(table.block_rows for table in members):
            raise NotImplementedError(
                f"{where}: its tables lie in blocks of rows, which only the CPU looks up; on TPUs "
                "a core holds every num_cores-th row: make the layout without blocks"
            )
        row = 0
        for table in members:
            if table.row_offset != row:
                break
            row += table.rows_per_core(geometry.num_cores)
        if weights.dim() != 2 or weights.shape[0] % cores:
            raise ValueError(
                f"{where}: table has shape {tuple(weights.shape)}, expected (rows on {cores} "
                "cores, dim)"
            )
        if row * cores != weights.shape[0]:
            raise NotImplementedError(
                f"{where}: tables {members} do not fill the {weights.shape[0] // cores} rows of a "
                "core; one call updates all tables of a stack, so that a frozen table, or one with "
                "another optimizer, must be in a stack of its own"
            )
        if (widest := max(table.dim for table in members)) > weights.shape[1]:
            raise ValueError(f"{where}: dim {widest} is wider than the stack, {weights.shape[1]}")
        offset = 0
        for feature in features:
            if feature.sample_offset != offset:
                raise ValueError(
                    f"{where}: a feature's samples start at {feature.sample_offset}, expected "
                    f"{offset}"
                )
            if feature.num_samples > cores * feature.samples_per_core:
                raise ValueError(
                    f"{where}: {feature.num_samples} samples are more than {cores} cores x "
                    f"{feature.samples_per_core}"
                )
            offset += feature.samples_per_core
        of_stack = tuple(buffers[_BUFFERS_PER_STACK * index :][:_BUFFERS_PER_STACK])
        _check_buffers(where, of_stack, weights, geometry)
        yield StackCall(
            index=index,
            tables=members,
            features=features,
            samples=offset * cores,
            limits=geometry.limits[index],
            buffers=of_stack,
        )


def _check_buffers(
    where: str, buffers: Sequence[Tensor], table: Tensor, geometry: Geometry
) -> None:
    cores = geometry.num_local_cores
    pointers = cores * pointers_per_core(geometry.num_cores)
    slots = buffers[1].numel()
    wanted = [((pointers,), torch.int32), *[((slots,), torch.int32)] * 2, ((slots,), torch.float32)]
    found = [(tuple(buffer.shape), buffer.dtype) for buffer in buffers]
    if found != wanted or slots % cores:
        raise ValueError(f"{where}: buffers are {found}, expected {wanted} for {cores} cores")
    devices = {str(tensor.device) for tensor in (*buffers, table)}
    if len(devices) > 1 or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(
            f"{where}: expected a contiguous float32 table and its buffers on one device, got "
            f"{table.dtype} and {sorted(devices)}"
        )


def states_of(
    rule: Rule, calls: Sequence[StackCall], tables: Sequence[Tensor], slots: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """(table, *slots) of each stack."""
    if len(slots) != len(calls) * len(rule.slots):
        raise ValueError(
            f"{len(slots)} slots for {len(calls)} stacks, rule {rule.name!r} has {len(rule.slots)}"
        )
    rest = iter(slots)
    for call, table in zip(calls, tables, strict=True):
        state = [table, *(next(rest) for _ in rule.slots)]
        rows, dim = table.shape
        wanted = [(rows, dim), *(slot.shape(rows, dim) for slot in rule.slots)]
        if [tuple(tensor.shape) for tensor in state] != wanted:
            raise ValueError(
                f"stack {call.index}: table and slots of rule {rule.name!r} are "
                f"{[tuple(tensor.shape) for tensor in state]}, expected {wanted}"
            )
        if any(t.device != table.device or t.dtype != torch.float32 for t in state):
            raise ValueError(f"stack {call.index}: expected float32 slots on {table.device}")
        if has_mean(rule):
            logical_dim(call)
        yield state


def operands_of_stacks(
    rule: Rule, operands: Tensor, calls: Sequence[StackCall], device: torch.device
) -> tuple[list[list[float]] | list[None], Tensor]:
    """(host values, if known; device tensor), one line a stack."""
    if operands.device == device:
        if operands.shape != (len(calls), len(rule.operands)):
            raise ValueError(
                f"operands on {device} have shape {tuple(operands.shape)}, expected one line of "
                f"{rule.operands} for each of {len(calls)} stacks"
            )
        return [None] * len(calls), operands
    num_tables = sum(len(call.tables) for call in calls)
    if operands.shape != (num_tables, len(rule.operands)):
        raise ValueError(
            f"operands have shape {tuple(operands.shape)}, rule {rule.name!r} wants "
            f"{rule.operands} for each of {num_tables} tables"
        )
    lines = iter(operands.tolist())
    constants: list[list[float]] = []
    for call in calls:
        of_stack = [next(lines) for _ in call.tables]
        if any(line != of_stack[0] for line in of_stack):
            raise NotImplementedError(
                f"stack {call.index}: its tables have different values of {rule.operands}: "
                f"{of_stack}; one call takes one of each, so put these tables into stacks of "
                "their own"
            )
        constants.append(of_stack[0])
    return constants, torch.tensor(constants, dtype=torch.float32).to(device, non_blocking=True)


def has_mean(rule: Rule) -> bool:
    """Whether a rule averages over the row: only these have one number of state a row."""
    return any(slot.width == "scalar" for slot in rule.slots)


def logical_dim(call: StackCall) -> int:
    """Row width of all tables of a stack: what a mean over the row counts.

    Raises:
        NotImplementedError: they differ.
    """
    dims = {table.dim for table in call.tables}
    if len(dims) > 1:
        raise NotImplementedError(
            f"stack {call.index}: a row-wise mean over tables of dims {sorted(dims)}; one call "
            "counts one number of elements, so put them into different stacks"
        )
    return dims.pop()


# ------------------------------------------------------------------------------- (un)stacking
# Views, padding and concatenation: the order of the vendor's own (un)stacking calls, which libtpu
# 0.0.52 does not compile.


def unstack(
    calls: Sequence[StackCall],
    activations: Sequence[Tensor],
    num_cores: int,
    out_shape: Sequence[int],
) -> Tensor:
    """The lookup's result from its stacks' activations.

    Args:
        calls: the stacks.
        activations: (S * n, D) each.
        num_cores: S.
        out_shape: shape of the result.

    Raises:
        ValueError: the features do not fill a result of that shape.
    """
    parts: list[tuple[FeatureGeometry, int, Tensor]] = []
    for call, rows in zip(calls, activations, strict=True):
        by_core = rows.view(num_cores, -1, rows.shape[1])
        for table, feature in _members(call):
            samples = by_core.narrow(1, feature.sample_offset, feature.samples_per_core)
            vectors = samples.reshape(-1, rows.shape[1])[: feature.num_samples, : table.dim]
            parts.append((feature, table.dim, vectors))
    parts.sort(key=lambda part: part[0].out_offset)
    width = out_shape[-1]
    is_pooled = sum(dim for _, dim, _ in parts) == width
    offset = 0
    for feature, dim, vectors in parts:
        if (feature.out_offset, feature.out_stride) != (offset, width):
            raise ValueError(
                f"a feature's output starts at {feature.out_offset} with stride "
                f"{feature.out_stride}, expected {offset} and {width}"
            )
        offset += dim if is_pooled else vectors.numel()
    size = offset * out_shape[0] if is_pooled else offset
    out = torch.cat([vectors for *_, vectors in parts], dim=1 if is_pooled else 0)
    if tuple(out.shape) != tuple(out_shape) or size != out.numel():
        raise ValueError(f"the features make {tuple(out.shape)}, expected {tuple(out_shape)}")
    return out


def stack_gradient(
    call: StackCall, grad: Tensor, num_cores: int, *, dim: int, limit: float | None
) -> Tensor:
    """Gradient (S * n, D) of one stack's activations; zero in padding.

    Args:
        call: the stack.
        grad: gradient of `unstack`'s result.
        num_cores: S.
        dim: D.
        limit: of the magnitude of each element, if any.

    Raises:
        ValueError: the gradient is too small for a feature.
    """
    parts = []
    for table, feature in _members(call):
        if feature.out_stride == table.dim:
            vectors = grad.reshape(-1)[feature.out_offset :][: feature.num_samples * table.dim]
            vectors = vectors.view(-1, table.dim)
        else:
            vectors = grad.reshape(-1, feature.out_stride)[:, feature.out_offset :][:, : table.dim]
        if tuple(vectors.shape) != (feature.num_samples, table.dim):
            raise ValueError(
                f"stack {call.index}: gradient {tuple(grad.shape)} has {tuple(vectors.shape)} for "
                f"a feature, expected {(feature.num_samples, table.dim)}"
            )
        missing = num_cores * feature.samples_per_core - feature.num_samples
        vectors = torch.nn.functional.pad(vectors, (0, dim - table.dim, 0, missing))
        parts.append(vectors.view(num_cores, feature.samples_per_core, dim))
    stacked = torch.cat(parts, dim=1).view(call.samples, dim)
    return stacked if limit is None else stacked.clamp(-limit, limit)


def _members(call: StackCall) -> Iterator[tuple[TableGeometry, FeatureGeometry]]:
    features = iter(call.features)
    for table in call.tables:
        for _ in range(table.num_features):
            yield table, next(features)
