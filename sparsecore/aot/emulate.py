"""A program on CPU devices: the very text that libtpu compiles, SparseCore calls spelled out.

Every SparseCore call is replaced by its definition: gather all tables, decode the buffers, add
gain * row into each sample; for an update gather all gradients, sum them per row, and run the
call's own computation once on each row that was looked up. Everything else stays as it is, the
collectives included, and runs on as many devices as the program has.

The devices live in a child process, for their number is fixed when jax is imported.

A `ragged_all_to_all` becomes gathers of all its operands, for XLA's CPU compiler has none.

Legend: G devices, S cores of a device, P cores in all, M slots of a device's buffers, B rows of a
device's activations, R rows of its table, D row width, U runs of slots, one a partition.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.aot.adapter import Mlir
from torchrec_tpu.sparsecore.aot.pipeline import NUMPY
from torchrec_tpu.sparsecore.aot.program import Argument, Program, Result
from torchrec_tpu.sparsecore.batch import pointers_per_core
from torchrec_tpu.sparsecore.errors import ProgramError

Array = npt.NDArray[Any]
JaxArray = Any

_LAYOUT: Final = "mhlo.layout_mode"  # of a TPU's memory
_ERROR_CHARACTERS: Final = 4000
_FIRST_CHANNEL: Final = 1_000_000  # above those of any program


# ------------------------------------------------------------------------------------ definitions
# In jax.numpy, of one device. Slots that break the format or exceed the limits become NaN.


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the definition of a SparseCore call needs beside its operands.

    Attributes:
        num_devices: G.
        cores_per_device: S.
        max_ids: the most ids of a run.
        max_unique_ids: the most distinct rows of a run.
        is_minibatched: whether buffers have minibatches.
    """

    num_devices: int
    cores_per_device: int
    max_ids: int
    max_unique_ids: int
    is_minibatched: bool

    @property
    def num_cores(self) -> int:
        """P."""
        return self.num_devices * self.cores_per_device


class Slots(NamedTuple):
    """The slots of one device's buffers, (M,) each; those that are padding have is_id False."""

    is_id: JaxArray
    partitions: JaxArray  # owner of the row
    rows: JaxArray  # on that core
    samples: JaxArray  # row of the device's activations
    gains: JaxArray  # NaN where a run or a slot breaks its bounds


def decode(call: Call, buffers: Sequence[JaxArray], *, rows: int, samples: int) -> Slots:
    """The slots of one device's buffers.

    Args:
        call: shape and limits.
        buffers: row_pointers, embedding_ids, sample_ids, gains, and the number of minibatches where
            there are any.
        rows: R / S, of one core.
        samples: B / S, of one core.
    """
    import jax.numpy as jnp

    pointers, ids, sample_ids, gains, *minibatches = buffers
    num_slots, cores = len(ids), call.cores_per_device
    # A line has the ends of a core's runs, or of those of one of its minibatches.
    lines = pointers.reshape(-1, pointers_per_core(call.num_cores))[:, : call.num_cores]
    if call.is_minibatched:
        line = jnp.arange(len(lines))
        core_of_line = line // minibatches[0]
        ends = jnp.where(core_of_line < cores, lines.T, num_slots).T.ravel()
        starts = _aligned(jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]]))
    else:
        core_of_line = jnp.arange(cores)
        first = core_of_line[:, None] * (num_slots // cores)
        starts = jnp.pad(_aligned(lines[:, :-1]), ((0, 0), (1, 0)))
        starts, ends = (starts + first).ravel(), (lines + first).ravel()
    slot = jnp.arange(num_slots)
    run = jnp.searchsorted(starts, slot, side="right") - 1
    core = core_of_line[run // call.num_cores]
    is_id = (slot < ends[run]) & (core < cores)
    is_new = is_id & ((slot == starts[run]) | (ids != jnp.roll(ids, 1)))
    unique_ids = jnp.zeros(len(ends), jnp.int32).at[run].add(is_new)
    is_sound = (ends - starts <= call.max_ids) & (unique_ids <= call.max_unique_ids)
    is_inside = (ids >= 0) & (ids < rows) & (sample_ids >= 0) & (sample_ids < samples)
    return Slots(
        is_id=is_id,
        partitions=run % call.num_cores,
        rows=jnp.clip(ids, 0, rows - 1),
        samples=core * samples + jnp.clip(sample_ids, 0, samples - 1),
        gains=jnp.where(is_sound[run] & is_inside, gains, jnp.nan),
    )


def lookup(call: Call, buffers: Sequence[JaxArray], tables: JaxArray, init: JaxArray) -> JaxArray:
    """Activations (B, D): `init` (B, D), and gain * row of each id added to its sample.

    `tables` (P * R / S, D) are those of all devices.
    """
    import jax.numpy as jnp

    rows, samples = len(tables) // call.num_cores, len(init) // call.cores_per_device
    slots = decode(call, buffers, rows=rows, samples=samples)
    terms = slots.gains[:, None] * tables[slots.partitions * rows + slots.rows]
    return init.at[slots.samples].add(jnp.where(slots.is_id[:, None], terms, 0))


def row_gradients(
    call: Call, rows: int, device: JaxArray, buffers: Sequence[JaxArray], grad: JaxArray
) -> tuple[JaxArray, JaxArray]:
    """Gradients (R, D) of this device's rows, and which of them (R,) any device looked up.

    Args:
        call: shape and limits.
        rows: R.
        device: index of this one.
        buffers: of all devices, each with a first axis G.
        grad: (G, B, D), gradients of all devices' activations.
    """
    import jax
    import jax.numpy as jnp

    cores = call.cores_per_device
    samples = grad.shape[1] // cores
    slots = jax.vmap(partial(decode, call, rows=rows // cores, samples=samples))(buffers)
    core = slots.partitions - device * cores
    is_mine = slots.is_id & (core >= 0) & (core < cores)
    terms = slots.gains[..., None] * jax.vmap(lambda g, s: g[s])(grad, slots.samples)
    target = jnp.where(is_mine, core * (rows // cores) + slots.rows, rows)  # or out of the table
    total = jnp.zeros((rows, grad.shape[2]), grad.dtype).at[target].add(terms, mode="drop")
    return total, jnp.zeros(rows, bool).at[target].set(True, mode="drop")


def local_lookup(
    cores: int, table: JaxArray, rows: JaxArray, samples: JaxArray, gains: JaxArray, init: JaxArray
) -> JaxArray:
    """`init` (B, D), and gain * row of each id added to its sample; every core has its own part."""
    import jax
    import jax.numpy as jnp

    def of_core(
        table: JaxArray, rows: JaxArray, samples: JaxArray, gains: JaxArray, init: JaxArray
    ) -> JaxArray:
        is_ascending = jnp.all(samples[1:] >= samples[:-1])
        is_inside = (rows >= 0) & (rows < len(table)) & (samples >= 0) & (samples < len(init))
        rows, samples = jnp.clip(rows, 0, len(table) - 1), jnp.clip(samples, 0, len(init) - 1)
        gains = jnp.where(is_inside & is_ascending, gains, jnp.nan)
        return init.at[samples].add(gains[:, None] * table[rows])

    parts = [a.reshape(cores, -1, *a.shape[1:]) for a in (table, rows, samples, gains, init)]
    return jax.vmap(of_core)(*parts).reshape(init.shape)


def ragged_all_to_all(
    device: JaxArray,
    init: JaxArray,
    receive_sizes: JaxArray,
    value: JaxArray,
    input_offsets: JaxArray,
    send_sizes: JaxArray,
    output_offsets: JaxArray,
) -> JaxArray:
    """`init` (m, ...) with the runs that this device gets; all of -1 or NaN if a size is wrong.

    Args:
        device: index of this one.
        init: of this device, as what follows.
        receive_sizes: (k * G,).
        value: of all devices, a first axis G before (n, ...); as what follows, (G, k * G).
        input_offsets: first line of each run.
        send_sizes: its lines.
        output_offsets: where it goes.
    """
    import jax.numpy as jnp

    devices = len(value)
    line, result = jnp.arange(len(init)), init
    runs = len(receive_sizes) // devices
    for source in range(devices):
        for run in range(runs):
            at = device * runs + run
            start, size = output_offsets[source, at], send_sizes[source, at]
            is_mine = (line >= start) & (line < start + size)
            taken = value[source][
                jnp.clip(line - start + input_offsets[source, at], 0, value.shape[1] - 1)
            ]
            mask = is_mine.reshape(-1, *[1] * (init.ndim - 1))
            result = jnp.where(mask, taken, result)
    expected = send_sizes.reshape(devices, devices, runs)[:, device].reshape(-1)
    wrong = jnp.nan if jnp.issubdtype(init.dtype, jnp.floating) else -1
    return jnp.where(jnp.all(receive_sizes == expected), result, jnp.asarray(wrong, init.dtype))


def _aligned(pointers: JaxArray) -> JaxArray:
    """Row pointers rounded up to where the next run starts."""
    return (pointers + 7) // 8 * 8


# --------------------------------------------------------------------------------------- rewriting


def define(text: str, *, num_devices: int, cores_per_device: int) -> str:
    """A program's text with every SparseCore call replaced by its definition.

    Needs jax's CPU backend, which it starts.

    Args:
        text: of a program.
        num_devices: G.
        cores_per_device: S.

    Raises:
        ProgramError: the computation of an update cannot run on many rows at once.
    """
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(text)
        main = lowering.public_function(module)
        if main.arg_attrs is not None:
            main.arg_attrs = _without_layouts(mlir, main.arg_attrs)
        if "res_attrs" in main.attributes:
            main.attributes["res_attrs"] = _without_layouts(mlir, main.attributes["res_attrs"])
        rewriter = _Rewriter(
            mlir=mlir,
            module=module,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            is_partitioned=adapter.is_partitioned(module),
        )
        for operation in lowering.walk(main.regions[0].blocks[0]):
            if operation.name == "chlo.scan":  # XLA's CPU compiler fails on associative ones
                operation.attributes["is_associative"] = mlir.ir.BoolAttr.get(False)
        rules = set()
        for call, target in _sparse_calls(main):
            with mlir.ir.InsertionPoint(call):
                if target == lowering.LOCAL_LOOKUP:
                    rewriter.local_lookup(call)
                elif target == lowering.RAGGED_ALL_TO_ALL:
                    rewriter.ragged_all_to_all(call)
                elif target in lowering.LOOKUPS:
                    rewriter.lookup(call, target == lowering.LOOKUP_MINIBATCHED)
                else:
                    rules.add(call.attributes["called_computations"][0].value)
                    rewriter.update(call, target == lowering.UPDATE_MINIBATCHED)
        for function in list(module.body.operations):
            if function.operation.attributes["sym_name"].value in rules:
                function.operation.erase()
        return str(module)


def _sparse_calls(main: Any) -> list[tuple[Any, str]]:
    """The SparseCore calls of a function, and the target of each."""
    calls = [
        (operation, operation.attributes["call_target_name"].value)
        for operation in lowering.walk(main.regions[0].blocks[0])
        if operation.name == "stablehlo.custom_call"
    ]
    defined = (
        *lowering.LOOKUPS,
        *lowering.UPDATES,
        lowering.LOCAL_LOOKUP,
        lowering.RAGGED_ALL_TO_ALL,
    )
    return [(call, target) for call, target in calls if target in defined]


@dataclass(slots=True, kw_only=True)
class _Rewriter:
    """Replaces calls of a module, one by one, by operations at the insertion point."""

    mlir: Mlir
    module: Any
    num_devices: int
    cores_per_device: int
    is_partitioned: bool
    _num_functions: int = 0
    _channels: Iterator[int] = field(default_factory=lambda: itertools.count(_FIRST_CHANNEL))

    def lookup(self, operation: Any, is_minibatched: bool) -> None:
        """Replaces a lookup."""
        *buffers, table, init = operation.operands
        call = self._call(operation, is_minibatched)
        (activations,) = self._apply(
            lambda tables, init, *buffers: (lookup(call, buffers, tables, init),),
            [self._gathered(table), init, *buffers],
        )
        operation.results[0].replace_all_uses_with(activations)
        operation.erase()

    def local_lookup(self, operation: Any) -> None:
        """Replaces a lookup of a pooled stack."""
        cores = self.cores_per_device
        (result,) = self._apply(
            lambda *values: (local_lookup(cores, *values),), list(operation.operands)
        )
        operation.results[0].replace_all_uses_with(result)
        operation.erase()

    def ragged_all_to_all(self, operation: Any) -> None:
        """Replaces a ragged exchange."""
        value, init, input_offsets, send_sizes, output_offsets, receive_sizes = operation.operands
        count = self.num_devices

        def exchange(device: JaxArray, init: JaxArray, receive: JaxArray, *rest: JaxArray) -> Any:
            of_devices = [v.reshape(count, -1, *v.shape[1:]) for v in rest]
            return (ragged_all_to_all(device.astype("int32"), init, receive, *of_devices),)

        gathered = [self._gathered(v) for v in (value, input_offsets, send_sizes, output_offsets)]
        (result,) = self._apply(exchange, [self._device(), init, receive_sizes, *gathered])
        operation.results[0].replace_all_uses_with(result)
        operation.erase()

    def update(self, operation: Any, is_minibatched: bool) -> None:
        """Replaces an update and the operations that take its tuple apart."""
        ir, hlo = self.mlir.ir, self.mlir.hlo
        operands = list(operation.operands)
        num_arrays = operation.results[0].type.num_types
        if is_minibatched:
            buffers, arrays = operands[:5], operands[5:]
            grad = arrays.pop(num_arrays)
        else:
            buffers, (grad, *arrays) = operands[:4], operands[4:]
        old, scalars = arrays[:num_arrays], arrays[num_arrays:]
        rows = ir.RankedTensorType(old[0].type).get_dim_size(0)
        call = self._call(operation, is_minibatched)
        shapes = [tuple(ir.RankedTensorType(v.type).shape) for v in (*buffers, grad)]
        count = self.num_devices

        def gradients(device: JaxArray, *gathered: JaxArray) -> tuple[JaxArray, JaxArray]:
            *of_devices, grads = (
                value.reshape(count, *shape) for value, shape in zip(gathered, shapes, strict=True)
            )
            return row_gradients(call, rows, device.astype("int32"), of_devices, grads)

        total, is_touched = self._apply(
            gradients, [self._device(), *(self._gathered(v) for v in (*buffers, grad))]
        )
        new = self._rule(operation, rows, [total, *old, *scalars])
        for use in list(operation.results[0].uses):
            part = use.owner
            index = part.attributes["index"].value
            touched = is_touched
            if len(old[index].type.shape) == 2:
                touched = hlo.broadcast_in_dim(
                    ir.RankedTensorType.get(old[index].type.shape, ir.IntegerType.get_signless(1)),
                    is_touched,
                    ir.DenseI64ArrayAttr.get([0]),
                )
            part.results[0].replace_all_uses_with(hlo.select(touched, new[index], old[index]))
            part.erase()
        operation.erase()

    def _rule(self, operation: Any, rows: int, values: Sequence[Any]) -> list[Any]:
        """The call's computation on all rows."""
        (symbol,) = operation.attributes["called_computations"]
        original = next(
            f for f in self.module.body.operations
            if f.operation.attributes["sym_name"].value == symbol.value
        )  # fmt: skip
        return lowering.apply_rule(self.mlir, str(original), rows, values)

    def _call(self, operation: Any, is_minibatched: bool) -> Call:
        config = json.loads(operation.attributes["backend_config"].value)
        limits = config["sparse_dense_matmul_config"]
        return Call(
            num_devices=self.num_devices,
            cores_per_device=self.cores_per_device,
            max_ids=limits["max_ids_per_partition"],
            max_unique_ids=limits["max_unique_ids_per_partition"],
            is_minibatched=is_minibatched,
        )

    def _gathered(self, value: Any) -> Any:
        """The value of all devices, one behind the other; a scalar's as a vector."""
        ir, hlo = self.mlir.ir, self.mlir.hlo
        type_ = ir.RankedTensorType(value.type)
        if not type_.shape:
            value = hlo.reshape(ir.RankedTensorType.get([1], type_.element_type), value)
        return lowering.all_gather(
            self.mlir,
            value,
            dim=0,
            num_devices=self.num_devices,
            channel=next(self._channels) if self.is_partitioned else None,
        )

    def _device(self) -> Any:
        """The number of this device, u32."""
        ir, hlo = self.mlir.ir, self.mlir.hlo
        if not self.is_partitioned:
            return hlo.replica_id()
        # A program of partitions may not ask: device d is who gets part d of 0, 1, ...
        u32 = ir.IntegerType.get_unsigned(32)
        numbers = hlo.iota(
            ir.RankedTensorType.get([self.num_devices], u32),
            ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0),
        )
        mine = lowering.all_to_all(
            self.mlir,
            numbers,
            dim=0,
            num_devices=self.num_devices,
            channel=next(self._channels),
        )
        zero, one = (ir.DenseI64ArrayAttr.get([n]) for n in (0, 1))
        return hlo.reshape(ir.RankedTensorType.get([], u32), hlo.slice(mine, zero, one, one))

    def _apply(
        self, function: Callable[..., tuple[JaxArray, ...]], values: Sequence[Any]
    ) -> list[Any]:
        """Results of a jax function of `values`, which becomes functions of the module."""
        ir, func = self.mlir.ir, self.mlir.func
        prefix = f"definition_{self._num_functions}_"
        self._num_functions += 1
        text = re.sub(r"@(?=\w+\()", f"@{prefix}", adapter.lower(function, _shapes(values)))
        module = ir.Module.parse(text)  # owns its functions until they have moved
        functions = list(module.body.operations)
        for defined in functions:
            defined.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
            self.module.body.append(defined)
        main = functions[0]
        return list(func.CallOp(main, list(values)).results)


def _shapes(values: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """Shape and NumPy's word for the element type of each value."""
    words = {"f32": "float32", "i32": "int32", "ui32": "uint32"}
    return [(tuple(v.type.shape), words[str(v.type.element_type)]) for v in values]


def _without_layouts(mlir: Mlir, attributes: Any) -> Any:
    """Attributes of arguments or results, less what only a TPU understands."""
    ir = mlir.ir
    return ir.ArrayAttr.get(
        [ir.DictAttr.get({a.name: a.attr for a in one if a.name != _LAYOUT}) for one in attributes]
    )


# ---------------------------------------------------------------------------------------- emulator


class Emulator:
    """A program on CPU devices of a child process. Call it once a step; `Driver` can.

    Values are host arrays; those that differ per device begin with an axis of devices.

    Use it as a context manager, or `close` it; the process ends with this object in any case.

    Args:
        program: to run; exact or pipelined.
        timeout_seconds: for compiling, and for each step.

    Raises:
        DependencyError: jax or jaxlib is missing or was never tested.
        ProgramError: the program does not compile, with XLA's words; or not in time.
    """

    def __init__(self, program: Program, *, timeout_seconds: float = 300) -> None:
        adapter.require("jax", "jaxlib")
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  what the child prints
        self._connection, theirs = Pipe()
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env={
                    **os.environ,
                    **adapter.host_environment(program.num_devices),
                    "PYTHONPATH": os.pathsep.join(sys.path),
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
            )
        self._child = child
        self._finalize = weakref.finalize(self, _end, child, self._connection, self._errors)
        self._ask("compile", (program.text, program.num_devices, program.cores_per_device))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child process. A closed emulator cannot run."""
        self._finalize()

    def __call__(self, arguments: Mapping[str, Array], /) -> dict[str, Array]:
        """Runs one step.

        Args:
            arguments: name -> (G, *shape) for arguments that differ per device, else (*shape).

        Returns:
            Name -> value of every result, alike; outputs of the loss function differ per device.

        Raises:
            ProgramError: an argument is missing or of a wrong shape; what should be equal on all
                devices is not; memory was not given away as the program says; or the process died
                or took too long.
        """
        values = [self._value_of(a, arguments) for a in self._program.arguments]
        results, given_away = self._ask("run", values)
        donated = tuple(i for i, a in enumerate(self._program.arguments) if a.donated)
        if given_away != donated:
            names = [a.name for i, a in enumerate(self._program.arguments) if i in given_away]
            raise ProgramError(f"the program updates {names} in place, which is not what it says")
        pairs = zip(self._program.results, results, strict=True)
        return {result.name: self._result_of(result, value) for result, value in pairs}

    def _value_of(self, argument: Argument, arguments: Mapping[str, Array]) -> Array:
        """(G, *shape)."""
        if argument.name not in arguments:
            raise ProgramError(f"no value for argument {argument.name!r}")
        value, dtype = np.asarray(arguments[argument.name]), np.dtype(NUMPY[argument.dtype])
        shape = (self._program.num_devices, *argument.shape)
        expected = shape if argument.sharded else argument.shape
        if value.shape != expected or value.dtype != dtype:
            raise ProgramError(
                f"argument {argument.name!r} is {value.dtype} of shape {value.shape}, the program "
                f"takes {dtype} of shape {expected}"
            )
        return value if argument.sharded else np.broadcast_to(value, shape)

    def _result_of(self, result: Result, value: Array) -> Array:
        if result.aliases is None:
            is_sharded = result.kind != "loss"
        else:
            is_sharded = self._program.arguments[result.aliases].sharded
        if is_sharded:
            return value
        if any(one.tobytes() != value[0].tobytes() for one in value[1:]):
            raise ProgramError(
                f"{result.name!r} is not the same on all devices; is a collective missing?"
            )
        equal: Array = value[0]
        return equal

    def _ask(self, task: str, content: Any) -> Any:
        """The child's answer."""
        if not self._finalize.alive:
            raise ProgramError("the emulator is closed")
        try:
            self._connection.send((task, content))
            if not self._connection.poll(self._timeout_seconds):
                self.close()
                raise ProgramError(
                    f"the emulator did not {task} the program within {self._timeout_seconds} s"
                )
            error, answer = self._connection.recv()
        except (EOFError, OSError):
            code = self._child.wait()
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
            self.close()
            raise ProgramError(
                f"the emulator's process ended (exit code {code}):\n{words}"
            ) from None
        if error is not None:
            raise ProgramError(f"the emulator cannot {task} the program: {error}")
        return answer


def _end(child: subprocess.Popen[bytes], connection: Connection, errors: IO[bytes]) -> None:
    connection.close()
    child.kill()
    child.wait()
    errors.close()


def _serve(connection: Connection) -> None:
    """The main function of the child process: compiles one program, then runs it on demand."""
    executable: adapter.HostExecutable | None = None
    while True:
        try:
            task, content = connection.recv()
        except EOFError:  # the parent is done
            return
        answer, error = None, None
        try:
            if task == "compile":
                text, num_devices, cores_per_device = content
                text = define(text, num_devices=num_devices, cores_per_device=cores_per_device)
                executable = adapter.HostExecutable(text, num_devices=num_devices)
            else:
                assert executable is not None
                answer = executable(content)
        except Exception as exception:  # whatever it is, the parent reports it
            error = f"{type(exception).__name__}: {exception}"
        connection.send((error, answer))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
