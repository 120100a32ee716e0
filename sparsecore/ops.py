"""The torch ops of one chip, and the autograd function that joins the lookup to its fused update.

    torchrec_tpu::sparse_dense_matmul(buffers, tables, geometry, out_shape) -> activations
    torchrec_tpu::sparse_dense_matmul_update_(grad, buffers, tables!, slots!, operands, geometry,
                                              rule, max_gradient)
    torchrec_tpu::ragged_all_to_all(values, send, receive, group) -> received

`buffers` holds four tensors a stack (row_pointers, embedding_ids, sample_ids, gains; see
`StackBuffers`). On the CPU tables and slots are logical, row-major arrays in the order of the
geometry's tables, float32 but for tables of float16 (see `Backend`); they are read and written
where they lie, never copied. On a TPU each stack is one tensor in device form, the geometry has
limits, and backends/tpu.py runs the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch import Tensor

from torchrec_tpu.sparsecore import backends
from torchrec_tpu.sparsecore.batch import SparseBatch, StackBuffers
from torchrec_tpu.sparsecore.errors import BackwardError
from torchrec_tpu.sparsecore.geometry import Geometry

if TYPE_CHECKING:
    from torchrec_tpu.sparsecore.backends.tpu import TpuBackend

BUFFERS_PER_STACK: Final = 4


@torch.library.custom_op("torchrec_tpu::sparse_dense_matmul", mutates_args=())
def sparse_dense_matmul(
    buffers: Sequence[Tensor],
    tables: Sequence[Tensor],
    geometry: Sequence[int],
    out_shape: Sequence[int],
) -> Tensor:
    """Sums gain * row of every id into its sample; samples without ids are zero.

    Args:
        buffers: 4 a stack: row_pointers, embedding_ids, sample_ids i32, gains f32.
        tables: (V, D) each, float32 or float16, in the order of the geometry's tables.
        geometry: `Geometry.encode()`.
        out_shape: shape of the result; the geometry addresses its elements as one flat array.

    Returns:
        float32 activations.
    """
    if (device := _device_backend(tables)) is not None:
        return device.lookup(buffers, tables, Geometry.decode(geometry), out_shape)
    out = torch.empty(tuple(out_shape), dtype=torch.float32)
    backends.choose("cpu").lookup(
        _stacks(buffers),
        [table.detach().numpy() for table in tables],
        Geometry.decode(geometry),
        out.view(-1).numpy(),
    )
    return out


@sparse_dense_matmul.register_fake
def _(
    buffers: Sequence[Tensor],  # noqa: ARG001
    tables: Sequence[Tensor],
    geometry: Sequence[int],  # noqa: ARG001
    out_shape: Sequence[int],
) -> Tensor:
    return tables[0].new_empty(tuple(out_shape), dtype=torch.float32)


@torch.library.custom_op(
    "torchrec_tpu::sparse_dense_matmul_update_", mutates_args=("tables", "slots")
)
def sparse_dense_matmul_update_(
    grad: Tensor,
    buffers: Sequence[Tensor],
    tables: Sequence[Tensor],
    slots: Sequence[Tensor],
    operands: Tensor,
    geometry: Sequence[int],
    rule: str,
    max_gradient: float,
) -> None:
    """Updates in place, once, every row that the batch looked up: the lookup's backward.

    Args:
        grad: gradient of `sparse_dense_matmul`'s result, float32, contiguous.
        buffers: as in the lookup.
        tables: T tables to update, (V, D) each, float32 or float16.
        slots: optimizer state, table by table, each table's in the rule's order: (V, D) or (V,).
        operands: (T, number of operands) float32, one line a table.
        geometry: `Geometry.encode()` with the tables to update.
        rule: key in RULES.
        max_gradient: limit of each gradient element's magnitude, before gains; <= 0 for none.
    """
    limit = max_gradient if max_gradient > 0 else None
    if (device := _device_backend(tables)) is not None:
        device.update(
            grad, buffers, tables, slots, operands, Geometry.decode(geometry), rule, limit
        )
        return
    num_slots = len(slots) // len(tables)
    arrays = [slot.detach().numpy() for slot in slots]
    backends.choose("cpu").update(
        grad.detach().view(-1).numpy(),
        _stacks(buffers),
        [table.detach().numpy() for table in tables],
        [arrays[at : at + num_slots] for at in range(0, len(tables) * num_slots, num_slots)]
        if num_slots
        else [[] for _ in tables],
        operands.numpy(),
        Geometry.decode(geometry),
        rule,
        limit,
    )


@sparse_dense_matmul_update_.register_fake
def _(*_args: object) -> None:
    """Makes nothing: the op returns none."""


def _device_backend(tables: Sequence[Tensor]) -> TpuBackend | None:
    """What runs a call on tables of a device; None on the CPU."""
    device_type = tables[0].device.type
    return None if device_type == "cpu" else cast("TpuBackend", backends.choose(device_type))


def _stacks(buffers: Sequence[Tensor]) -> list[StackBuffers]:
    arrays = [buffer.numpy() for buffer in buffers]
    return [
        StackBuffers(
            row_pointers=arrays[at],
            embedding_ids=arrays[at + 1],
            sample_ids=arrays[at + 2],
            gains=arrays[at + 3],
        )
        for at in range(0, len(arrays), BUFFERS_PER_STACK)
    ]


def as_tensors(batch: SparseBatch) -> list[Tensor]:
    """The ops' `buffers` of a batch: tensors that share its memory."""
    return [
        torch.from_numpy(array)
        for stack in batch.stacks
        for array in (stack.row_pointers, stack.embedding_ids, stack.sample_ids, stack.gains)
    ]


def lookup(
    buffers: Sequence[Tensor],
    tables: Sequence[Tensor],
    geometry: Geometry,
    out_shape: Iterable[int],
    *,
    update: Callable[[Tensor], None] | None,
) -> Tensor:
    """Activations whose backward calls `update(grad)` once instead of computing a table gradient.

    The tables are no inputs of the autograd graph: nothing of their size is saved or created, and
    their `.grad` stays None. A token that requires a gradient makes sure that backward runs. Every
    lookup has its own backward, so two of them before one `loss.backward()` make two updates.

    Args:
        buffers: from `as_tensors`.
        tables: (V, D) each, float32 or float16, in the order of the geometry's tables.
        geometry: of the batch.
        out_shape: shape of the activations.
        update: called with the contiguous gradient of the activations; None for frozen tables.

    Raises:
        BackwardError: from `backward()`, when one lookup is differentiated twice.
    """
    arguments = ([table.detach() for table in tables], geometry.encode(), list(out_shape))

    def compute() -> Tensor:
        activations: Tensor = sparse_dense_matmul(buffers, *arguments)
        return activations

    return compute() if update is None else updated_in_backward(compute, update)


def updated_in_backward(compute: Callable[[], Tensor], update: Callable[[Tensor], None]) -> Tensor:
    """The result of `compute`, for which backward calls `update(grad)` once.

    Args:
        compute: runs without autograd.
        update: called with the contiguous gradient of the result.

    Raises:
        BackwardError: from `backward()`, when one result is differentiated twice.
    """
    token = torch.empty(0, requires_grad=True)
    result: Tensor = _Updated.apply(token, update, compute)  # type: ignore[no-untyped-call]
    return result


class _Updated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,  # noqa: ARG004
        update: Callable[[Tensor], None],
        compute: Callable[[], Tensor],
    ) -> Tensor:
        ctx.update = update
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise BackwardError(
                "backward(create_graph=True) reached an embedding lookup: its fused update has no "
                "second derivative. Exclude the embeddings, or compute the penalty on detached ones"
            )
        update, ctx.update = ctx.update, None
        if update is None:
            raise BackwardError(
                "backward ran twice through one embedding lookup: the first run has already "
                "updated the tables. Sum the losses and call backward once, or run the lookup again"
            )
        (grad,) = grads
        update(grad.contiguous())
        return None, None, None


# ---------------------------------------------------------------------------------- between ranks


class Awaitable(Protocol):
    """A collective that was started."""

    def wait(self) -> Tensor:
        """Its result."""


_exchanges: dict[str, Callable[[Tensor, Sequence[int], Sequence[int]], Awaitable]] = {}


def set_exchange(
    group: str, exchange: Callable[[Tensor, Sequence[int], Sequence[int]], Awaitable]
) -> None:
    """Says how `ragged_all_to_all` reaches the other ranks of the process group of that name."""
    _exchanges[group] = exchange


@torch.library.custom_op("torchrec_tpu::ragged_all_to_all", mutates_args=())
def ragged_all_to_all(
    values: Tensor, send: Sequence[int], receive: Sequence[int], group: str
) -> Tensor:
    """A part of the values to each rank, and a part from each; the gradient goes the way back.

    Args:
        values: (N,) or (N, width): rank 0's part first.
        send: items for each rank, N in all.
        receive: items from each rank, M in all.
        group: name of a process group that an `Exchange` was made for.

    Returns:
        (M,) or (M, width): rank 0's part first.
    """
    if group not in _exchanges:
        raise ValueError(
            f"there is no Exchange over the process group {group!r}, only over {list(_exchanges)}"
        )
    received = _exchanges[group](values, send, receive).wait()
    return received.clone() if received.data_ptr() == values.data_ptr() else received


@ragged_all_to_all.register_fake
def _(
    values: Tensor,
    send: Sequence[int],  # noqa: ARG001
    receive: Sequence[int],
    group: str,  # noqa: ARG001
) -> Tensor:
    return values.new_empty((sum(receive), *values.shape[1:]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, ctx.send, ctx.receive, ctx.group = inputs


def _send_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return ragged_all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


ragged_all_to_all.register_autograd(_send_back, setup_context=_remember)


def ragged_all_to_all_on_device(
    values: Tensor, send: Sequence[int], receive: Sequence[int], group: str
) -> Tensor:
    """The same for tensors on a device, without autograd.

    Raises:
        NotImplementedError: nothing exchanges tensors on that type of device, or not here.
    """
    backends.choose(values.device.type)
    from torchrec_tpu.sparsecore.backends import tpu

    return tpu.ragged_all_to_all(values, send, receive, group)
