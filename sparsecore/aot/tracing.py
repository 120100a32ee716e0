"""The torch half of tracing: forward, backward and dense optimizer of a model as aten graphs.

The model runs on fake CPU tensors, so nothing of a table's size is allocated. In every collection
the lookup is replaced by its stacks' activations, which are inputs of the graph; their gradients
are outputs.

Legend: S cores of a device, B samples of a device, D row width, n samples of a feature on a core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from torchrec_tpu.sparsecore.aot.adapter import Graph, graph_of
from torchrec_tpu.sparsecore.aot.pooled import PooledStack
from torchrec_tpu.sparsecore.errors import ProgramError
from torchrec_tpu.sparsecore.layout import Combiner, Layout, Stack, Table, round_up
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.sparsecore.rules import Ops

Loss = Callable[[nn.Module, Any], Any]
"""(model, batch) -> mean loss of the device's samples, or a tuple of it and anything else."""


class Collection(Protocol):
    """What tracing needs of an embedding collection."""

    @property
    def layout(self) -> Layout:
        """Its tables, in config order."""

    @property
    def table_optimizers(self) -> Mapping[str, OptimizerSpec | None]:
        """The optimizer of each table; None for a frozen one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its tables."""

    def replaced_lookup(
        self,
        lookup: Callable[[Sequence[int]], Tensor],
        *,
        batch_size: int,
        num_samples: tuple[int, ...],
        lengths: Tensor | None,
    ) -> AbstractContextManager[None]:
        """A block in which forward reads no batch and takes activations from `lookup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One collection's static shape on a device.

    Attributes:
        layout: on all devices of the program; one device is local.
        batch_size: B.
        num_samples: (F,) stack order: B, or the most ids of a sequence feature.
        samples_per_core: (F,) stack order: n, with padding.
        pooled: stacks of the tables that are not in the layout.
        order: (table, feature) of all features in config order; those of the layout unless given.
    """

    layout: Layout
    batch_size: int
    num_samples: tuple[int, ...]
    samples_per_core: tuple[int, ...]
    pooled: tuple[PooledStack, ...] = ()
    order: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        batch_size: int,
        sequence_ids: Mapping[str, int],
        pooled: Sequence[PooledStack] = (),
        order: Sequence[tuple[str, str]] = (),
    ) -> Shape:
        """The shape for batches of up to `batch_size` samples and `sequence_ids[key]` ids.

        Raises:
            ProgramError: a sequence feature has no entry in `sequence_ids`.
        """
        cores = layout.num_local_cores
        num_samples = []
        for feature in layout.stack_order_features:
            if feature.combiner is not Combiner.NONE:
                num_samples.append(batch_size)
            elif feature.key in sequence_ids:
                num_samples.append(sequence_ids[feature.key])
            else:
                raise ProgramError(
                    f"feature {feature.key!r} is a sequence: a compiled program needs its largest "
                    f"number of ids of a device; pass sequence_ids={{{feature.key!r}: ...}}"
                )
        return cls(
            layout=layout,
            batch_size=batch_size,
            num_samples=tuple(num_samples),
            samples_per_core=tuple(round_up(n, cores) // cores for n in num_samples),
            pooled=tuple(pooled),
            order=tuple(order) or tuple((f.table, f.key) for f in layout.features),
        )

    @property
    def has_sequences(self) -> bool:
        """Whether forward needs the batch's lengths."""
        return any(f.combiner is Combiner.NONE for f in self.layout.features)

    def activations(self) -> dict[str, tuple[int, int]]:
        """Shape of each stack's activations on a device, by name."""
        shapes = {stack.name: (self.samples(stack), stack.dim) for stack in self.layout.stacks}
        return shapes | {
            stack.name: (len(stack.blocks), self.batch_size * stack.core_width)
            for stack in self.pooled
        }

    def tables_of(self) -> dict[str, tuple[Table, ...]]:
        """Tables of each stack, by name."""
        tables = {s.name: tuple(t.table for t in s.tables) for s in self.layout.stacks}
        return tables | {stack.name: stack.tables for stack in self.pooled}

    def of_stack(self, stack: Stack) -> tuple[int, ...]:
        """N of each feature of a stack."""
        first = self.layout.stack_order_features.index(stack.features[0])
        return self.samples_per_core[first : first + len(stack.features)]

    def samples(self, stack: Stack) -> int:
        """Rows of one device's activations of a stack."""
        return self.layout.num_local_cores * sum(self.of_stack(stack))

    def output(self, activations: Mapping[str, Tensor], out_shape: Sequence[int]) -> Tensor:
        """The collection's flat output from the activations (S * sum of n, D) of its stacks.

        Views and concatenations only: their gradients are a concatenation in stack order.
        """
        layout = self.layout
        cores = layout.num_local_cores
        rows: dict[tuple[str, str], Tensor] = {}  # by (table, feature)
        num_samples = iter(self.num_samples)
        for stack in layout.stacks:
            by_core = activations[stack.name].view(cores, -1, stack.dim)
            parts = torch.split(by_core, list(self.of_stack(stack)), dim=1)
            for feature, part in zip(stack.features, parts, strict=True):
                dim = layout.stacked_table(feature.table).table.embedding_dim
                samples = part.reshape(-1, stack.dim)
                count = next(num_samples)
                rows[feature.table, feature.key] = _narrow(_narrow(samples, 0, count), 1, dim)
        rows |= self._pooled_rows(activations)
        in_order = [rows[pair] for pair in self.order]
        return torch.cat(in_order, dim=0 if self.has_sequences else 1).view(tuple(out_shape))

    def _pooled_rows(self, activations: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
        """(table, feature) -> (B, D) from the blocks of pooled stacks."""
        parts: dict[tuple[str, str], dict[int, list[Tensor]]] = {}  # by first column
        for stack in self.pooled:
            blocks = activations[stack.name].view(-1, self.batch_size, stack.core_width).unbind(0)
            for (slot, feature, core), tensor in zip(stack.blocks, blocks, strict=True):
                if count := stack.columns(slot, core):
                    columns = parts.setdefault((slot.table, feature), {})
                    first = slot.column + core * stack.core_width
                    columns.setdefault(first, []).append(_narrow(tensor, 1, count))
        return {
            pair: torch.cat([sum(columns[c][1:], columns[c][0]) for c in sorted(columns)], dim=1)
            for pair, columns in parts.items()
        }


def _narrow(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor if tensor.shape[dim] == size else tensor.narrow(dim, 0, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Two graphs: `gradients`, and the dense optimizer's `update`.

    gradients: (trained, frozen, inputs, lengths, activations) ->
        (loss, outputs, gradients of trained, gradients of the activations of trained stacks)
    update: (sums of all devices' gradients, trained, slots by parameter, operands[, active]) ->
        (trained, slots by parameter)

    Attributes:
        update: None when nothing outside the tables is trained.
        trained: FQN -> fake tensor of each dense parameter that the loss depends on.
        frozen: FQN -> fake tensor of all other dense parameters and buffers.
        inputs: name -> fake tensor of the batch.
        lengths: collection -> fake (F, B), where it has sequences.
        activations: (collection, stack) in order.
        outputs: names of what the loss function returns beside the loss.
        slots: (slot name, shape) of each trained parameter.
    """

    gradients: Graph
    update: Graph | None
    trained: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    lengths: Mapping[str, Tensor]
    activations: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    slots: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]]


@dataclass(slots=True)
class _Inputs:
    """The tensors of a batch by name, and the batch with other tensors in their place."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def collect(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            self.tensors[name] = value
        else:
            for key, item in _items(value):
                self.collect(item, f"{name}.{key}" if name else str(key))

    def replace(self, value: Any, tensors: Mapping[str, Tensor], name: str = "") -> Any:
        if isinstance(value, Tensor):
            return tensors[name]
        new = {
            key: self.replace(item, tensors, f"{name}.{key}" if name else str(key))
            for key, item in _items(value)
        }
        if not new:
            return value
        if isinstance(value, dict):
            return new
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*new.values())
        if isinstance(value, (list, tuple)):
            return type(value)(new.values())
        return dataclasses.replace(value, **new)


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What a batch's container holds; nothing for leaves such as a KeyedJaggedTensor."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    return []


def tensors_in(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by the names that `Traced.inputs` gives them."""
    found = _Inputs()
    found.collect(batch, "")
    return found.tensors


class _WithLoss(nn.Module):
    """The model and its loss as one module, so that parameters can be passed in."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Any:
        return self._loss(self.model, batch)


def trace(
    model: nn.Module,
    collections: Mapping[str, Collection],
    shapes: Mapping[str, Shape],
    example: Any,
    *,
    loss: Loss,
    num_devices: int,
    dense_optimizer: OptimizerSpec,
    gradient_division: bool,
    is_conditional: bool,
) -> Traced:
    """Traces one step of `model`.

    Args:
        model: see `trace_step`, as all but the following.
        collections: FQN -> collection.
        shapes: of each collection.
        example: batch of one device.
        loss: of (model, batch).
        num_devices: that gradients are averaged over.
        dense_optimizer: of all other parameters.
        gradient_division: whether the tables' gradients are averaged too.
        is_conditional: whether `update` takes a last operand, 0 to leave everything as it is.

    Raises:
        ProgramError: says what of the model cannot be traced.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tables = {id(weight) for c in collections.values() for weight in c.parameters()}
    dense = {name: p for name, p in model.named_parameters() if id(p) not in tables}
    buffers = dict(model.named_buffers())
    batch = _Inputs(tensors_in(example))
    optimizers = {  # of the stacks that are trained
        (name, stack): spec
        for name, collection in collections.items()
        for stack, members in shapes[name].tables_of().items()
        for spec in [collection.table_optimizers[members[0].name]]
        if spec is not None
    }

    with mode:

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

        parameters = {name: fake(p) for name, p in dense.items()}
        constants = {name: fake(b) for name, b in buffers.items()}
        inputs = {name: fake(t) for name, t in batch.tensors.items()}
        lengths = {
            name: torch.empty(len(shape.layout.features), shape.batch_size, dtype=torch.int32)
            for name, shape in shapes.items()
            if shape.has_sequences
        }
        activations = {
            (name, stack): torch.empty(of_stack)
            for name, shape in shapes.items()
            for stack, of_stack in shape.activations().items()
        }

    def differentiate(
        parameters: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        lengths: Mapping[str, Tensor],
        activations: Mapping[tuple[str, str], Tensor],
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor | None], list[Tensor | None]]:
        parameters = {
            name: p.detach().requires_grad_(dense[name].requires_grad)
            for name, p in parameters.items()
        }
        activations = {
            key: a.detach().requires_grad_(key in optimizers) for key, a in activations.items()
        }
        versions = {name: constant._version for name, constant in constants.items()}
        with ExitStack() as stack:
            for name, collection in collections.items():
                stack.enter_context(
                    _replaced(collection, shapes[name], name, activations, lengths.get(name))
                )
            value, *outputs = _as_tuple(
                functional_call(
                    _WithLoss(model, loss),
                    {f"model.{name}": t for name, t in {**parameters, **constants}.items()},
                    (batch.replace(example, inputs),),
                )
            )
        if changed := [n for n, c in constants.items() if c._version != versions[n]]:
            raise ProgramError(
                f"forward changes buffers {changed}: their replicas would drift apart. Call eval() "
                "on these modules, or use ones without running statistics"
            )
        if value.shape != ():
            raise ProgramError(
                f"the loss has shape {tuple(value.shape)}, expected a scalar: its mean over samples"
            )
        # Divided here, all gradients are divided at the price of one scalar.
        divided = value / num_devices if gradient_division else value
        wanted = {name: p for name, p in parameters.items() if p.requires_grad}
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            divided,
            [*wanted.values(), *(activations[key] for key in optimizers)],
            allow_unused=True,
        )
        of_activations = [
            gradient if gradient is None else _clipped(gradient, spec.max_gradient)
            for spec, gradient in zip(optimizers.values(), gradients[len(wanted) :], strict=True)
        ]
        return (
            value.detach(),
            [t.detach() for t in tree_leaves(outputs) if isinstance(t, Tensor)],
            dict(zip(wanted, gradients, strict=False)),
            of_activations,
        )

    # Which parameters the loss depends on decides the signature, so that comes first.
    try:
        with mode:
            _, outputs, found, reached = differentiate(
                parameters, constants, inputs, lengths, activations
            )
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            "forward and backward cannot be traced: they run on tensors without values, of the "
            f"batch's shapes, and on one device. {type(error).__name__}: {error}"
        ) from error
    if missing := [key for key, g in zip(optimizers, reached, strict=True) if g is None]:
        raise ProgramError(
            f"the loss does not depend on the lookups of stacks {missing}; no update would run"
        )
    trained = {name: parameters[name] for name, g in found.items() if g is not None}
    frozen = {n: p for n, p in parameters.items() if n not in trained} | constants
    if wrong := {n: p.dtype for n, p in trained.items() if p.dtype != torch.float32}:
        raise ProgramError(f"dense parameters must be float32, found {wrong}")

    groups: list[Mapping[Any, Tensor]] = [trained, frozen, inputs, lengths, activations]

    def gradients_of(*flat: Tensor) -> tuple[Tensor, ...]:
        rest = iter(flat)
        new = [{key: next(rest) for key in group} for group in groups]
        all_parameters = {name: {**new[0], **new[1]}[name] for name in parameters}
        loss, outputs, dense_gradients, of_activations = differentiate(
            all_parameters, {name: new[1][name] for name in constants}, *new[2:]
        )
        wanted = [dense_gradients[name] for name in trained]
        return (loss, *outputs, *(g for g in (*wanted, *of_activations) if g is not None))

    rule = dense_optimizer.rule
    slots = {
        name: tuple(
            (slot.name, tuple(p.shape) if slot.width == "row" else (_rows_of(p)[0],))
            for slot in rule.slots
        )
        for name, p in trained.items()
    }

    def updated(*flat: Tensor) -> tuple[Tensor, ...]:
        rest = iter(flat)
        gradients = [next(rest) for _ in trained]
        weights = [next(rest) for _ in trained]
        state = [[next(rest) for _ in shapes] for shapes in slots.values()]
        operands = [next(rest) for _ in rule.operands]
        is_active = next(rest) != 0 if is_conditional else None
        new: list[list[Tensor]] = []
        for gradient, weight, old in zip(gradients, weights, state, strict=True):
            mean = gradient if gradient_division else gradient / num_devices
            mean = _clipped(mean, dense_optimizer.max_gradient)
            view = [t.view(_rows_of(weight)) for t in (mean, weight)]
            state_views = [
                t.view(_rows_of(weight)) if slot.width == "row" else t.unsqueeze(1)
                for slot, t in zip(rule.slots, old, strict=True)
            ]
            results = rule.update(TORCH, *view, *state_views, *operands)
            shapes = [weight.shape, *(t.shape for t in old)]
            new.append([t.reshape(s) for t, s in zip(results, shapes, strict=True)])
            if is_active is not None:
                new[-1] = [
                    torch.where(is_active, t, before)
                    for t, before in zip(new[-1], (weight, *old), strict=True)
                ]
        return (*(parts[0] for parts in new), *(t for parts in new for t in parts[1:]))

    with mode:
        sums = [torch.empty(p.shape) for p in trained.values()]
        state = [torch.empty(shape) for shapes in slots.values() for _, shape in shapes]
        scalars = [torch.empty(()) for _ in range(len(rule.operands) + is_conditional)]
    flat = [tensor for group in groups for tensor in group.values()]
    update = None
    if trained:
        update = _graph(mode, updated, [*sums, *trained.values(), *state, *scalars])
    if update and (unused := update.unused_inputs):
        raise ProgramError(f"{dense_optimizer} does not use inputs {unused} of its update")
    return Traced(
        gradients=_graph(mode, gradients_of, flat),
        update=update,
        trained=trained,
        frozen=frozen,
        inputs=inputs,
        lengths=lengths,
        activations=tuple(activations),
        outputs=tuple(f"output.{index}" for index in range(len(outputs))),
        slots=slots,
    )


def _replaced(
    collection: Collection,
    shape: Shape,
    name: str,
    activations: Mapping[tuple[str, str], Tensor],
    lengths: Tensor | None,
) -> AbstractContextManager[None]:
    stacks = {stack: activations[name, stack] for stack in shape.activations()}
    return collection.replaced_lookup(
        lambda out_shape: shape.output(stacks, out_shape),
        batch_size=shape.batch_size,
        num_samples=shape.num_samples,
        lengths=lengths,
    )


def _graph(
    mode: FakeTensorMode, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> Graph:
    with mode:
        module = make_fx(
            function,
            decomposition_table=_DECOMPOSITIONS,
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*inputs)
    module.graph.eliminate_dead_code()
    return graph_of(module)


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch.cumsum in log2(n) additions of shifted copies."""
    if x.dim() == 0:
        return x if dtype is None else x.to(dtype)
    if dtype is None and not x.is_floating_point():
        dtype = torch.int64
    total = x if dtype is None else x.to(dtype)
    dim, shift = dim % x.dim(), 1
    while shift < x.shape[dim]:
        shifted = total.narrow(dim, 0, x.shape[dim] - shift)
        gap = torch.zeros_like(total.narrow(dim, 0, shift))
        total = total + torch.cat([gap, shifted], dim)
        shift *= 2
    return total


# torch_tpu lowers it to an operation outside StableHLO, which not every compiler takes.
_DECOMPOSITIONS: Final = {torch.ops.aten.cumsum.default: _cumsum}


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _clipped(gradient: Tensor, limit: float | None) -> Tensor:
    return gradient if limit is None else gradient.clamp(-limit, limit)


def _rows_of(parameter: Tensor) -> tuple[int, int]:
    """A dense parameter as rows: those of its first dimension, a vector as one row."""
    if parameter.dim() < 2:
        return 1, parameter.numel()
    return parameter.shape[0], parameter[0].numel()


class _TorchOps:
    """The functions of `Ops` on tensors."""

    def sqrt(self, x: Any, /) -> Any:
        return torch.sqrt(x)

    def power(self, x: Any, y: Any, /) -> Any:
        return torch.pow(x, y)

    def clamp(self, low: Any, x: Any, high: Any, /) -> Any:
        return torch.clamp(x, _tensor(low, x), _tensor(high, x))

    def where_equal(self, a: Any, b: Any, then: Any, otherwise: Any, /) -> Any:
        return torch.where(torch.eq(a, b), then, otherwise)

    def mean_row(self, x: Any, /) -> Any:
        return x.mean(1, keepdim=True)


def _tensor(value: Any, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype)


TORCH: Final[Ops] = _TorchOps()
