"""Lookup and fused update with our own StableHLO in the SparseCore's generic calls: every rule.

The computation of a row is the rule's StableHLO, and all its operands are arguments of the program:
a new learning rate, or Adam's bias correction of every step, compiles nothing. torch_tpu takes the
call as a JAX function, so jax must be installed; nothing runs in jax itself.
"""

# No `from __future__ import annotations`: torch_tpu reads those of the functions below.

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.backends.tpu import (
    StackCall,
    TpuBackend,
    has_mean,
    logical_dim,
    why_no_tpu,
)
from torchrec_tpu.sparsecore.geometry import StackLimits
from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.rules import Rule


class XlaBackend(TpuBackend):
    """As `TpuBackend`, but no call is one of torch.tpu.ops; forced by name."""

    name = "xla"

    def why_unavailable(self) -> str | None:
        """What is missing and how to get it; None when a TPU can be used."""
        return why_no_tpu() or adapter.why_unavailable("jax", "jaxlib")

    def lookup_stack(self, call: StackCall, table: Tensor) -> Tensor:
        """Activations (S * n, D) of one stack."""
        activations: Tensor = torch_ops()[0](list(call.buffers), table, *call.sizes)
        return activations

    def update_stack(
        self,
        call: StackCall,
        grad: Tensor,
        state: Sequence[Tensor],
        scalars: Tensor,
        constants: Sequence[float] | None,  # noqa: ARG002
        rule: Rule,
    ) -> Sequence[Tensor]:
        """New (table, *slots) of one stack; the old ones may not be read again."""
        return update_stack(call, grad, state, scalars, rule)


def update_stack(
    call: StackCall, grad: Tensor, state: Sequence[Tensor], scalars: Tensor, rule: Rule
) -> Sequence[Tensor]:
    """`rule` on every row of a stack that the batch looked up; see TpuBackend.update_stack.

    Raises:
        NotImplementedError: jax is missing or was never tested.
    """
    if why := adapter.why_unavailable("jax", "jaxlib"):
        raise NotImplementedError(f"rule {rule.name!r} runs on a TPU through jax: {why}")
    dim = state[0].shape[1]
    results: Sequence[Tensor] = torch_ops()[1](
        list(call.buffers),
        grad,
        list(state),
        [scalars[index] for index in range(len(rule.operands))],
        rule.name,
        logical_dim(call) if has_mean(rule) else dim,
        *call.sizes,
    )
    return results


@cache
def torch_ops() -> tuple[Any, Any]:
    """The lookup and the update as torch ops."""
    lookup, update = functions()
    return (
        adapter.torch_op("torchrec_tpu_xla::lookup", lookup),
        adapter.torch_op("torchrec_tpu_xla::update", update, donated=(2,)),
    )


@cache
def functions() -> tuple[Any, Any]:
    """The lookup and the update as JAX functions; whatever is no array is static."""
    import jax

    def lookup(
        buffers: list[jax.Array],
        table: jax.Array,
        samples: int,
        max_ids: int,
        max_unique_ids: int,
    ) -> jax.Array:
        limits = StackLimits(max_ids, max_unique_ids)
        (activations,) = adapter.call_stablehlo(
            _lookup, [*buffers, table], [(samples, table.shape[1])], static=(samples, limits)
        )
        return activations

    def update(
        buffers: list[jax.Array],
        grad: jax.Array,
        state: list[jax.Array],
        operands: list[jax.Array],
        rule: str,
        mean_dim: int,
        samples: int,
        max_ids: int,
        max_unique_ids: int,
    ) -> list[jax.Array]:
        assert grad.shape[0] == samples
        return adapter.call_stablehlo(
            _update,
            [*buffers, grad, *state, *operands],
            [array.shape for array in state],
            static=(rule, mean_dim, StackLimits(max_ids, max_unique_ids)),
        )

    return lookup, update


def _lookup(
    mlir: adapter.Mlir,
    module: Any,  # noqa: ARG001
    values: Sequence[Any],
    samples: int,
    limits: StackLimits,
) -> list[Any]:
    *buffers, table = values
    return [
        lowering.lookup(mlir, _buffers(buffers), table, samples=samples, limits=_limits(limits))
    ]


def _update(
    mlir: adapter.Mlir,
    module: Any,
    values: Sequence[Any],
    rule_name: str,
    mean_dim: int,
    limits: StackLimits,
) -> list[Any]:
    rule = RULES[rule_name]
    buffers, (grad, table), rest = values[:4], values[4:6], values[6:]
    dim = mlir.ir.RankedTensorType(table.type).get_dim_size(1)
    return lowering.update(
        mlir,
        module,
        _buffers(buffers),
        grad,
        table,
        rest[: len(rule.slots)],
        rest[len(rule.slots) :],
        rule=rule,
        limits=_limits(limits),
        # One name for one computation: calls of several stacks may end up in one module.
        name=f"{rule_name}_{dim}_mean_{mean_dim}",
        logical_dim=mean_dim,
    )


def _buffers(values: Sequence[Any]) -> lowering.Buffers:
    row_pointers, embedding_ids, sample_ids, gains = values
    return lowering.Buffers(
        row_pointers=row_pointers,
        embedding_ids=embedding_ids,
        sample_ids=sample_ids,
        gains=gains,
    )


def _limits(limits: StackLimits) -> lowering.Limits:
    return lowering.Limits(max_ids=limits.max_ids, max_unique_ids=limits.max_unique_ids)
