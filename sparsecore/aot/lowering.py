"""The SparseCore calls and collectives of a step, written in StableHLO.

The calls are those of jax-tpu-embedding: same targets, operands, configuration and called
computation, for any optimizer rule. Compilers recognise them by name.

Legend: S cores of a device, P cores of all devices, N slots of a device's buffers, B rows of its
activations, R rows of its table, D row width.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore.aot.adapter import Mlir
from torchrec_tpu.sparsecore.batch import PAD_ID
from torchrec_tpu.sparsecore.errors import ProgramError
from torchrec_tpu.sparsecore.rules import Rule, stablehlo

Value = Any
"""A value of the MLIR module under construction."""

LOOKUP: Final = "SparseDenseMatmulOp"
LOOKUP_MINIBATCHED: Final = "SparseDenseMatmulWithMinibatchingOp"
UPDATE: Final = "SparseDenseMatmulGradOpWithOptimizerUpdate"
UPDATE_MINIBATCHED: Final = "SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp"
LOCAL_LOOKUP: Final = "SparseDenseMatmulLocalOp"
RAGGED_ALL_TO_ALL: Final = "ragged_all_to_all"

LOOKUPS: Final = (LOOKUP, LOOKUP_MINIBATCHED)
UPDATES: Final = (UPDATE, UPDATE_MINIBATCHED)
COLLECTIVES: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    RAGGED_ALL_TO_ALL,
)

_MOD_SHARDING: Final = 1
_ORIGINAL_API: Final = 1  # version of the custom call interface without a status
_TYPED_API: Final = 4
_DEVICE_TO_DEVICE: Final = 1  # kind of a channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """One stack's ids of one device, as values.

    Attributes:
        row_pointers: s32 (S * max(P, 8),), with minibatches 64 times as long.
        embedding_ids, sample_ids: s32 (N,).
        gains: f32 (N,).
        num_minibatches: s32 scalar; None for buffers without minibatches.
    """

    row_pointers: Value
    embedding_ids: Value
    sample_ids: Value
    gains: Value
    num_minibatches: Value | None = None

    @property
    def operands(self) -> list[Value]:
        """The four arrays in the order of every call."""
        return [self.row_pointers, self.embedding_ids, self.sample_ids, self.gains]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Static limits of one (core, partition): ids, and distinct rows among them."""

    max_ids: int
    max_unique_ids: int

    def config(self, **more: int) -> str:
        """The backend configuration of a call, as JSON."""
        limits = {
            "max_ids_per_partition": self.max_ids,
            "max_unique_ids_per_partition": self.max_unique_ids,
            "pad_value": PAD_ID,
            "sharding_strategy": _MOD_SHARDING,
        }
        return json.dumps(
            {"sparse_dense_matmul_config": limits | more, "device_type": "DEVICE_TYPE_SPARSECORE"}
        )


def lookup(mlir: Mlir, buffers: Buffers, table: Value, *, samples: int, limits: Limits) -> Value:
    """Activations (B, D) of one stack at the insertion point: sums of gain * row.

    Args:
        mlir: bindings, inside their context.
        buffers: of the stack.
        table: f32 (R, D).
        samples: B.
        limits: of the stack.
    """
    ir, hlo = mlir.ir, mlir.hlo
    dim = ir.RankedTensorType(table.type).get_dim_size(1)
    zero = hlo.constant(ir.DenseElementsAttr.get(np.float32(0)))
    zeros = hlo.broadcast(zero, ir.DenseI64ArrayAttr.get([samples, dim]))
    minibatches = [] if buffers.num_minibatches is None else [buffers.num_minibatches]
    call = _custom_call(
        mlir,
        LOOKUP_MINIBATCHED if minibatches else LOOKUP,
        [*buffers.operands, *minibatches, table, zeros],
        ir.RankedTensorType.get([samples, dim], ir.F32Type.get()),
        config=limits.config(),
    )
    return call.results[0]


def local_lookup(
    mlir: Mlir, table: Value, rows: Value, samples: Value, gains: Value, init: Value
) -> Value:
    """`init`, and gain * row of each id added to its sample, all on the same core.

    Every array is split into S equal parts, one a core, whose ids count from the part's own begin.
    The result takes over the memory of `init`: it may be an array of any size that is donated.

    Args:
        mlir: bindings, inside their context.
        table: f32 (S * R, D).
        rows: s32 (N,), of the core's part of the table.
        samples: s32 (N,), ascending on each core; of the core's part of `init`.
        gains: f32 (N,).
        init: f32 (B, D).
    """
    return _custom_call(
        mlir,
        LOCAL_LOOKUP,
        [table, rows, samples, gains, init],
        init.type,
        config=json.dumps({"device_type": "DEVICE_TYPE_SPARSECORE"}),
    ).results[0]


def update(
    mlir: Mlir,
    module: Any,
    buffers: Buffers,
    grad: Value,
    table: Value,
    slots: Sequence[Value],
    operands: Sequence[Value],
    *,
    rule: Rule,
    limits: Limits,
    name: str,
    logical_dim: int | None = None,
) -> list[Value]:
    """New table and slots of one stack: `rule` on every row that the batch looked up.

    Args:
        mlir: bindings, inside their context.
        module: in which the rule's computation is defined as a private function.
        buffers: of the lookup.
        grad: f32 (B, D), gradient of the activations.
        table: f32 (R, D).
        slots: in rule order, f32 (R, D) or (R,).
        operands: in rule order, f32 scalars.
        rule: what updates a row.
        limits: of the stack.
        name: symbol of the computation, unique in the module.
        logical_dim: elements that a mean over the row counts; D unless given.
    """
    ir, hlo = mlir.ir, mlir.hlo
    dim = ir.RankedTensorType(table.type).get_dim_size(1)
    computation = ir.Module.parse(stablehlo(rule, dim=dim, logical_dim=logical_dim, name=name))
    module.body.append(computation.body.operations[0])
    if buffers.num_minibatches is None:
        target, inputs = UPDATE, [grad, table, *slots]
    else:
        target, inputs = UPDATE_MINIBATCHED, [buffers.num_minibatches, table, *slots, grad]
    types = [value.type for value in (table, *slots)]
    call = _custom_call(
        mlir,
        target,
        [*buffers.operands, *inputs, *operands],
        ir.TupleType.get_tuple(types),
        config=limits.config(
            num_slot_variables=len(slots),
            num_hyperparameters=len(operands),
        ),
        computation=name,
    )
    parts = [hlo.GetTupleElementOp(call.results[0], index) for index in range(len(types))]
    for part in parts:
        part.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
            {"_xla_compute_type": ir.StringAttr.get("sparse")}
        )
    return [part.results[0] for part in parts]


def apply_rule(mlir: Mlir, function: str, rows: int, values: Sequence[Value]) -> list[Value]:
    """The computation of an update on many rows at once: its body, with axis 0 made longer.

    That is how the SparseCore compiler runs it, too.

    Args:
        mlir: bindings, inside their context.
        function: text of a function from `rules.stablehlo`.
        rows: of every value but the scalars.
        values: gradient, row and slots as the function takes them, and scalars for the operands.

    Returns:
        New rows and slots.

    Raises:
        ProgramError: the computation works on one row only.
    """
    ir, hlo = mlir.ir, mlir.hlo
    longer = re.sub(r"tensor<1x(?=[\dfi])", f"tensor<{rows}x", function)
    try:
        module = ir.Module.parse(longer)  # owns the function
    except ir.MLIRError as error:
        raise ProgramError(
            f"this computation does not work on many rows at once: {error}\n{function}"
        ) from None
    computation = module.body.operations[0]
    arguments = [
        value
        if value.type == type_
        else hlo.broadcast_in_dim(type_, value, ir.DenseI64ArrayAttr.get([]))
        for value, type_ in zip(values, computation.type.inputs, strict=True)
    ]
    (result,) = inline(computation, arguments)
    new = list(result.owner.operands)
    result.owner.erase()
    return new


def _custom_call(
    mlir: Mlir,
    target: str,
    operands: Sequence[Value],
    result_type: Any,
    *,
    config: str,
    computation: str | None = None,
) -> Any:
    ir = mlir.ir
    computations = [] if computation is None else [ir.FlatSymbolRefAttr.get(computation)]
    return mlir.hlo.CustomCallOp(
        [result_type],
        list(operands),
        call_target_name=ir.StringAttr.get(target),
        has_side_effect=ir.BoolAttr.get(False),
        backend_config=ir.StringAttr.get(config),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _ORIGINAL_API),
        called_computations=ir.ArrayAttr.get(computations),
    )


# ------------------------------------------------------------------------------------- collectives
# All devices form one group. They are the replicas of a program, or its partitions: then every
# collective needs a channel of its own, a number from 1.


def all_reduce(
    mlir: Mlir, values: Sequence[Value], *, num_devices: int, channel: int | None = None
) -> list[Value]:
    """Sums of each value over all devices, in one operation: a bucket without copies."""
    call = mlir.hlo.AllReduceOp(
        [value.type for value in values],
        list(values),
        _groups(mlir, num_devices),
        channel_handle=_channel(mlir, channel),
        use_global_device_ids=channel is not None,
    )
    _fill_with_sum(mlir, call.regions[0])
    return list(call.results)


def reduce_scatter(
    mlir: Mlir, value: Value, *, dim: int, num_devices: int, channel: int | None = None
) -> Value:
    """Sum over all devices; each device keeps its part of dimension `dim`."""
    ir = mlir.ir
    shape = list(ir.RankedTensorType(value.type).shape)
    if shape[dim] % num_devices:
        raise ProgramError(f"reduce_scatter: {shape} in dimension {dim} over {num_devices} devices")
    shape[dim] //= num_devices
    call = mlir.hlo.ReduceScatterOp(
        ir.RankedTensorType.get(shape, ir.RankedTensorType(value.type).element_type),
        value,
        _int64(mlir, dim),
        _groups(mlir, num_devices),
        channel_handle=_channel(mlir, channel),
        use_global_device_ids=channel is not None,
    )
    _fill_with_sum(mlir, call.regions[0])
    return call.results[0]


def all_gather(
    mlir: Mlir, value: Value, *, dim: int, num_devices: int, channel: int | None = None
) -> Value:
    """The values of all devices, one behind the other in dimension `dim`."""
    ir = mlir.ir
    shape = list(ir.RankedTensorType(value.type).shape)
    shape[dim] *= num_devices
    result_type = ir.RankedTensorType.get(shape, ir.RankedTensorType(value.type).element_type)
    return mlir.hlo.AllGatherOp(
        [result_type],
        [value],
        _int64(mlir, dim),
        _groups(mlir, num_devices),
        channel_handle=_channel(mlir, channel),
        use_global_device_ids=channel is not None,
    ).results[0]


def all_to_all(
    mlir: Mlir, value: Value, *, dim: int, num_devices: int, channel: int | None = None
) -> Value:
    """Part d of dimension `dim` goes to device d; parts arrive in the order of their senders."""
    shape = list(mlir.ir.RankedTensorType(value.type).shape)
    if shape[dim] % num_devices:
        raise ProgramError(f"all_to_all: {shape} in dimension {dim} over {num_devices} devices")
    axis = _int64(mlir, dim)
    return mlir.hlo.AllToAllOp(
        [value],
        axis,
        axis,
        _int64(mlir, num_devices),
        _groups(mlir, num_devices),
        channel_handle=_channel(mlir, channel),
    ).results[0]


def ragged_all_to_all(
    mlir: Mlir,
    value: Value,
    init: Value,
    input_offsets: Value,
    send_sizes: Value,
    output_offsets: Value,
    receive_sizes: Value,
    *,
    num_devices: int,
    channel: int,
) -> Value:
    """`init` with runs of lines from all devices in it. For programs of partitions only.

    With k runs for each device, operands are s32 (k * G,), those of a device side by side. libtpu
    0.0.52 and XLA's CPU compiler die over programs of replicas that have one.

    Args:
        mlir: bindings, inside their context.
        value: (n, ...), where the runs are that this device sends.
        init: (m, ...).
        input_offsets: first line of each run in `value`.
        send_sizes: lines of it.
        output_offsets: where it goes on the device that gets it.
        receive_sizes: lines that come from each device.
        num_devices: G.
        channel: see above.
    """
    ir = mlir.ir
    return mlir.hlo.CustomCallOp(
        [init.type],
        [value, init, input_offsets, send_sizes, output_offsets, receive_sizes],
        call_target_name=ir.StringAttr.get(RAGGED_ALL_TO_ALL),
        has_side_effect=ir.BoolAttr.get(False),
        backend_config=ir.DictAttr.get(
            {"channel_id": _int64(mlir, channel), "replica_groups": _groups(mlir, num_devices)}
        ),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _TYPED_API),
        called_computations=ir.ArrayAttr.get([]),
    ).results[0]


def _groups(mlir: Mlir, num_devices: int) -> Any:
    return mlir.ir.DenseElementsAttr.get(np.arange(num_devices, dtype=np.int64).reshape(1, -1))


def _channel(mlir: Mlir, channel: int | None) -> Any:
    if channel is None:
        return None
    return mlir.hlo.ChannelHandle.get(channel, _DEVICE_TO_DEVICE)


def _int64(mlir: Mlir, value: int) -> Any:
    return mlir.ir.IntegerAttr.get(mlir.ir.IntegerType.get_signless(64), value)


def _fill_with_sum(mlir: Mlir, region: Any) -> None:
    scalar = mlir.ir.RankedTensorType.get([], mlir.ir.F32Type.get())
    block = region.blocks.append(scalar, scalar)
    with mlir.ir.InsertionPoint(block):
        mlir.hlo.return_([mlir.hlo.add(*block.arguments)])


# ------------------------------------------------------------------------------------------- parts


def inline(function: Any, arguments: Sequence[Value]) -> list[Value]:
    """The body of a function of the same context, copied to the insertion point.

    Args:
        function: func.func with one block.
        arguments: what its parameters become.

    Returns:
        What the function returns.
    """
    block = function.regions[0].blocks[0]
    known = dict(zip(block.arguments, arguments, strict=True))

    def connect(operation: Any) -> None:
        for index, operand in enumerate(operation.operands):
            if operand in known:
                operation.operands[index] = known[operand]
        for region in operation.regions:
            for inner in region.blocks:
                for nested in inner.operations:
                    connect(nested.operation)

    for source in block.operations:
        if source.operation.name == "func.return":
            return [known[operand] for operand in source.operation.operands]
        copy = source.operation.clone()
        connect(copy)
        known.update(zip(source.operation.results, copy.results, strict=True))
    raise AssertionError(f"{function.name} does not return")


def flatten_concatenations(mlir: Mlir, block: Any) -> None:
    """Joins what is flattened right after joining as flat arrays, in place.

    (B, 1, D) and (B, n, D) become (B, (1 + n) * D) by way of (B, 1 + n, D), whose tiles are padded
    unless B is the minor dimension: libtpu then keeps all activations so, and copies the gradients
    of the lookups back. Joined as (B, D) and (B, n * D) they have nothing to pad.
    """
    for operation in list(block.operations):
        if operation.operation.name != "stablehlo.reshape":
            continue
        joined = operation.operation.operands[0]
        if isinstance(joined.owner, mlir.ir.Block) or joined.owner.name != (
            "stablehlo.concatenate"
        ):
            continue
        axis = int(joined.owner.attributes["dimension"])
        to = list(mlir.ir.RankedTensorType(operation.operation.results[0].type).shape)

        def flat(value: Value, axis: int = axis) -> list[int]:
            shape = list(mlir.ir.RankedTensorType(value.type).shape)
            return [*shape[:axis], math.prod(shape[axis : axis + 2]), *shape[axis + 2 :]]

        if len(to) != len(joined.type.shape) - 1 or flat(joined) != to:
            continue
        with mlir.ir.InsertionPoint(operation):
            element = mlir.ir.RankedTensorType(joined.type).element_type
            parts = [
                mlir.hlo.reshape(mlir.ir.RankedTensorType.get(flat(part), element), part)
                for part in joined.owner.operands
            ]
            new = mlir.hlo.concatenate(parts, axis)
        operation.operation.results[0].replace_all_uses_with(new)
        operation.operation.erase()


def slice_sources(mlir: Mlir, block: Any) -> None:
    """Takes slices of slices that were joined in between from what those are slices of, in place.

    The gradients of a collection's features are slices of the dense part's gradient; a model that
    takes its features one by one has them joined, and the collection takes them apart again. libtpu
    writes what is joined to memory.
    """
    for operation in list(block.operations):
        outer = _minor_slice(mlir, operation.operation)
        if outer is None:
            continue
        reshaped = operation.operation.operands[0]
        shape = list(reshaped.type.shape)
        joined = reshaped
        if _is_made_by(mlir, joined, "stablehlo.reshape"):
            joined = joined.owner.operands[0]
        if not _is_made_by(mlir, joined, "stablehlo.concatenate"):
            continue
        axis = len(joined.type.shape) - 1
        if int(joined.owner.attributes["dimension"]) != axis or joined.type.shape[-1] != shape[-1]:
            continue
        end = 0
        for part in joined.owner.operands:
            start, end = end, end + part.type.shape[-1]
            if start <= outer[0] and outer[1] <= end:
                break
        else:
            continue
        inner = _minor_slice(mlir, part.owner) if _is_made_by(mlir, part, _SLICE) else None
        if inner is None:
            continue
        source = part.owner.operands[0]
        shape[-1] = source.type.shape[-1]
        with mlir.ir.InsertionPoint(operation):
            element = mlir.ir.RankedTensorType(source.type).element_type
            whole = mlir.hlo.reshape(mlir.ir.RankedTensorType.get(shape, element), source)
            first, last = (inner[0] + bound - start for bound in outer)
            new = mlir.hlo.slice(
                whole,
                mlir.ir.DenseI64ArrayAttr.get([*[0] * (len(shape) - 1), first]),
                mlir.ir.DenseI64ArrayAttr.get([*shape[:-1], last]),
                mlir.ir.DenseI64ArrayAttr.get([1] * len(shape)),
            )
        operation.operation.results[0].replace_all_uses_with(new)


_SLICE: Final = "stablehlo.slice"


def _is_made_by(mlir: Mlir, value: Value, name: str) -> bool:
    return not isinstance(value.owner, mlir.ir.Block) and value.owner.name == name


def _minor_slice(mlir: Mlir, operation: Any) -> tuple[int, int] | None:
    """Bounds of a slice that takes a range of the last dimension and all of the others."""
    if operation.name != _SLICE:
        return None
    shape = list(mlir.ir.RankedTensorType(operation.operands[0].type).shape)
    starts, limits, strides = (
        list(mlir.ir.DenseI64ArrayAttr(operation.attributes[name]))
        for name in ("start_indices", "limit_indices", "strides")
    )
    is_minor = not any(starts[:-1]) and limits[:-1] == shape[:-1] and set(strides) == {1}
    return (starts[-1], limits[-1]) if is_minor else None


def constants(mlir: Mlir, arrays: Sequence[npt.NDArray[Any]]) -> list[Value]:
    """Constant tensors with the values of `arrays`."""
    ir = mlir.ir

    def attribute(array: npt.NDArray[Any]) -> Any:
        if array.dtype != np.bool_:
            return ir.DenseElementsAttr.get(np.require(array, requirements="C"))
        # One by one: jaxlib 0.10.2 takes a single byte of packed bits for the value of all.
        type_ = ir.RankedTensorType.get(array.shape, ir.IntegerType.get_signless(1))
        return ir.DenseElementsAttr.get([ir.BoolAttr.get(bool(x)) for x in array.flat], type_)

    return [mlir.hlo.constant(attribute(array)) for array in arrays]


def public_function(module: Any) -> Any:
    """The function `main` of a module."""
    return next(
        f for f in module.body.operations if f.operation.attributes["sym_name"].value == "main"
    )


def walk(block: Any) -> Iterator[Any]:
    """All operations of a block and of the regions in it, in program order."""
    for operation in block.operations:
        yield operation.operation
        for region in operation.operation.regions:
            for inner in region.blocks:
                yield from walk(inner)
