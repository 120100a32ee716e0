"""Every private name of torch_tpu, jax and jaxlib that ahead-of-time compiling leans on.

torch_tpu turns a traced graph into StableHLO only inside a process whose TPU device is registered,
which renames a torch backend and patches torch.compile, and it aborts the process when an op runs
eagerly. So that part runs in a child process (`python -m torchrec_tpu.sparsecore.aot.adapter`), and
torch_tpu is never imported into the caller's.

Of jax the MLIR bindings with their StableHLO dialect are used, and libtpu's compiler; only
programs on CPU devices start a backend.
"""

from __future__ import annotations

import importlib.metadata
import operator
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore.errors import DependencyError, ProgramError

if TYPE_CHECKING:
    import torch

TESTED: Final = {
    "torch_tpu": ("0.2.0",),
    "jax": ("0.10.2",),
    "jaxlib": ("0.10.2",),
    "libtpu": ("0.0.52",),
}
"""Versions whose private names this module was tested with."""

ENVIRONMENT: Final = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_tpu is brought up by hand, without a TPU
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server here
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process that loads libtpu aborts
}
"""What a process needs that loads torch_tpu or libtpu without a TPU."""

_CHILD_TIMEOUT_SECONDS: Final = 600


def why_unavailable(*packages: str) -> str | None:
    """What is missing of `packages` (all of TESTED by default), or None.

    Answers from the packages' metadata; nothing heavy is imported.
    """
    for package in packages or TESTED:
        tested = TESTED[package]
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found not in tested:
            return (
                f"ahead-of-time compiling needs {package} {' or '.join(tested)}, "
                + ("which is not installed" if found is None else f"{found} is installed")
                + "; pip install 'torchrec_tpu[aot]' gets the tested versions"
            )
    return None


def require(*packages: str) -> None:
    """Checks that packages (all of TESTED by default) are there in a version that was tested.

    Raises:
        DependencyError: names the package, what is installed, and how to get it.
    """
    if reason := why_unavailable(*packages):
        raise DependencyError(reason)


# ------------------------------------------------------------------------------------------- MLIR


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlir:
    """jaxlib's MLIR bindings: `ir`, and the dialects `hlo` (StableHLO) and `func`."""

    ir: Any
    hlo: Any
    func: Any


@contextmanager
def mlir() -> Iterator[Mlir]:
    """The bindings inside a fresh MLIR context, in which modules can be parsed and built.

    Raises:
        DependencyError: jax or jaxlib is missing or was never tested.
    """
    require("jax", "jaxlib")
    from jax._src.interpreters.mlir import make_ir_context
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import func
    from jax.extend.mlir.dialects import stablehlo as hlo

    with make_ir_context(), ir.Location.unknown():
        yield Mlir(ir=ir, hlo=hlo, func=func)


def simplify(module: Any) -> None:
    """Removes dead and repeated operations of a module, in place."""
    from jaxlib.mlir.passmanager import PassManager

    PassManager.parse("builtin.module(canonicalize,cse,canonicalize)").run(module.operation)


# ---------------------------------------------------------------------------------------- libtpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """What libtpu says about a program that it has compiled for one device of a slice.

    Attributes:
        memory: bytes of "argument", "output", "alias", "temp" and "code".
        cost: XLA's own estimates, e.g. "flops".
        device_kind: as the runtime reports it.
    """

    memory: dict[str, int]
    cost: dict[str, float]
    device_kind: str


class CompilerRefusal(Exception):
    """libtpu's own words, when it does not compile a program."""


def compile_with_libtpu(
    text: str, topology: str, *, options: dict[str, str | int | bool]
) -> Executable:
    """Compiles StableHLO for every device of a slice: a replica each, or a partition.

    A module of partitions is one device's program, as a module of replicas is. It has no shardings,
    so that every value stays what it is on its device.

    libtpu may end the process, and takes flags from the environment: call it in a child process.
    The scheduled program is not returned, for jaxlib cannot read libtpu's SparseCore instructions
    back; --xla_dump_to in XLA_FLAGS has it written to files.

    Args:
        text: of one module.
        topology: name of the slice.
        options: XLA's, by name.

    Raises:
        DependencyError: jax, jaxlib or libtpu is missing or was never tested.
        CompilerRefusal: the slice does not exist, or the program does not compile.
    """
    require("jax", "jaxlib", "libtpu")
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies
    from jaxlib import _jax

    try:
        devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
        with mlir() as bindings:
            try:
                module = bindings.ir.Module.parse(text)
            except bindings.ir.MLIRError as error:
                raise CompilerRefusal(str(error)) from None
            compile_options = _compile_options(module, len(devices))
            compile_options.env_option_overrides = list(options.items())
            executable = devices[0].client.compile(
                module, _jax.DeviceList(tuple(devices)), compile_options
            )
    except JaxRuntimeError as error:
        raise CompilerRefusal(str(error)) from error
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    sizes = {name: f"{name}_size_in_bytes" for name in ("argument", "output", "alias", "temp")}
    sizes["code"] = "generated_code_size_in_bytes"
    return Executable(
        memory={name: int(getattr(memory, size)) for name, size in sizes.items()},
        cost={name: float(cost[name]) for name in ("flops", "bytes accessed") if name in cost},
        device_kind=devices[0].device_kind,
    )


def is_partitioned(module: Any) -> bool:
    """Whether the devices of a module are its partitions, not its replicas."""
    attributes, name = module.operation.attributes, "mhlo.num_partitions"
    return bool(name in attributes and attributes[name].value > 1)


def _compile_options(module: Any, num_devices: int) -> Any:
    """For as many replicas or partitions as the module says it has."""
    from jaxlib import xla_client

    partitioned = is_partitioned(module)
    options = xla_client.CompileOptions()
    for target in (options, options.executable_build_options):
        target.num_replicas = 1 if partitioned else num_devices
        target.num_partitions = num_devices if partitioned else 1
        target.device_assignment = xla_client.DeviceAssignment.create(
            np.arange(num_devices).reshape((1, -1) if partitioned else (-1, 1))
        )
    options.executable_build_options.use_spmd_partitioning = partitioned
    return options


# ------------------------------------------------------------------------------------ CPU devices


def host_environment(num_devices: int) -> dict[str, str]:
    """What must be in the environment of a process that runs programs on CPU devices.

    jax reads it when it is imported, so the process is a child.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "true",  # else 64-bit arguments would be cut
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices} "
        "--xla_backend_optimization_level=0",  # compiling takes longer than the few steps
    }


def lower(
    function: Callable[..., tuple[Any, ...]], arguments: Sequence[tuple[tuple[int, ...], str]]
) -> str:
    """StableHLO text of a jax function; its first function is the public `main`.

    Args:
        function: of arrays, returns a tuple of arrays.
        arguments: shape and NumPy's word for the type of each.
    """
    import jax

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
    # An argument that a result does not depend on stays an argument.
    text: str = jax.jit(function, keep_unused=True).lower(*shapes).as_text()
    return text


class HostExecutable:
    """A program, compiled for the CPU devices of this process; see `host_environment`.

    Args:
        text: StableHLO of one module, num_replicas or num_partitions = num_devices.
        num_devices: that it runs on.

    Raises:
        CompilerRefusal: XLA does not compile it.
    """

    def __init__(self, text: str, *, num_devices: int) -> None:
        import jax
        from jax.errors import JaxRuntimeError
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from jaxlib import _jax

        self._devices = jax.devices("cpu")[:num_devices]
        assert len(self._devices) == num_devices, "set host_environment() before jax is imported"
        try:
            with mlir() as bindings:
                module = bindings.ir.Module.parse(text)
                self._executable = self._devices[0].client.compile_and_load(
                    module,
                    _jax.DeviceList(tuple(self._devices)),
                    _compile_options(module, num_devices),
                )
        except JaxRuntimeError as error:
            raise CompilerRefusal(str(error)) from error
        # Called replicated so that a global array has the shape of a device's; values may differ.
        self._sharding = NamedSharding(Mesh(np.array(self._devices), ("devices",)), PartitionSpec())

    def __call__(self, arguments: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
        """Runs the program once.

        Args:
            arguments: NumPy arrays with a first axis of devices.

        Returns:
            The results, alike, and the indices of the arguments whose memory was given away.
        """
        import jax

        arrays = [
            jax.make_array_from_single_device_arrays(
                argument.shape[1:],
                self._sharding,
                [jax.device_put(v, d) for v, d in zip(argument, self._devices, strict=True)],
            )
            for argument in arguments
        ]
        results = self._executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
        values = [np.stack([np.asarray(part) for part in parts]) for parts in results]
        return values, tuple(index for index, array in enumerate(arrays) if array.is_deleted())


# ------------------------------------------------------------------------------- jax inside torch


def call_stablehlo(
    build: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    *,
    static: tuple[Hashable, ...] = (),
) -> list[Any]:
    """Results of StableHLO that `build` writes, inside a jax function that is being traced.

    Args:
        build: (mlir, module, values, *static) -> values, at the insertion point. A function of a
            module, for jax tells calls apart by it.
        arguments: jax arrays.
        shapes: of the float32 results.
        static: hashable values that `build` needs.
    """
    import jax.numpy as jnp
    from jax.core import ShapedArray

    results = tuple(ShapedArray(tuple(shape), jnp.float32) for shape in shapes)
    values: list[Any] = _stablehlo_primitive().bind(
        *arguments, build=build, results=results, static=static
    )
    return values


@cache
def _stablehlo_primitive() -> Any:
    """A jax operation whose lowering is any function of the MLIR bindings."""
    from jax.extend.core import Primitive
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import func
    from jax.extend.mlir.dialects import stablehlo as hlo
    from jax.interpreters import mlir

    primitive = Primitive("torchrec_tpu_stablehlo")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: list(results))

    def lower_call(context: Any, *values: Any, build: Any, static: Any, **_: Any) -> Any:
        module = context.module_context.module
        return build(Mlir(ir=ir, hlo=hlo, func=func), module, values, *static)

    mlir.register_lowering(primitive, lower_call)
    return primitive


def torch_op(name: str, function: Callable[..., Any], *, donated: Sequence[int] = ()) -> Any:
    """A jax function as a torch op that runs on tensors of device "tpu".

    Needs torch_tpu loaded, which the caller has seen to. Donated arguments must be overwritten
    after the call.

    Args:
        name: "namespace::name".
        function: annotated; arguments that are no arrays are static.
        donated: indices of arguments whose memory the results take over.
    """
    import torch

    require("torch_tpu", "jax", "jaxlib")
    tpu: Any = getattr(torch, "tpu")  # noqa: B009  # unknown to mypy
    return tpu.pallas.jax_op(name, function, donate_argnums=tuple(donated) or None)


# ------------------------------------------------------------------------------------- torch -> HLO


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier instruction of a graph."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """An aten graph as plain data, which survives pickling as it is.

    torch.fx's own pickle traces the graph anew and folds what has no tensor input into constants.

    Attributes:
        inputs: shape and torch dtype of each input; those of the constants come last.
        calls: operation ("aten.add.Tensor"), arguments and keyword arguments; `Ref(i)` is input i,
            or the result of call i - len(inputs).
        outputs: what the graph returns.
        constants: values of the last inputs: tensors that the traced function made or found.
    """

    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    calls: tuple[tuple[str, Any, Any], ...]
    outputs: tuple[Ref, ...]
    constants: tuple[npt.NDArray[Any], ...] = ()

    @property
    def unused_inputs(self) -> tuple[int, ...]:
        """Inputs that neither a call nor an output reads."""
        from torch.utils._pytree import tree_leaves

        used = {leaf for leaf in tree_leaves([self.calls, self.outputs]) if isinstance(leaf, Ref)}
        return tuple(i for i in range(len(self.inputs)) if Ref(i) not in used)


def graph_of(module: torch.fx.GraphModule) -> Graph:
    """The graph of a module that make_fx traced on fake tensors.

    Raises:
        ProgramError: the graph returns something else than tensors.
    """
    import torch
    from torch.fx.node import map_arg

    nodes = module.graph.nodes
    inputs = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    names = dict.fromkeys(node.target for node in nodes if node.op == "get_attr")
    constants = {name: getattr(module, name) for name in names}
    place = {name: len(inputs) + index for index, name in enumerate(constants)}
    refs: dict[torch.fx.Node, Ref] = {}
    calls: list[tuple[str, Any, Any]] = []
    outputs: tuple[Any, ...] = ()

    def ref_of(node: torch.fx.Node) -> Any:
        return refs[node]

    for node in nodes:
        args, kwargs = (map_arg(part, ref_of) for part in (node.args, node.kwargs))
        if node.op == "placeholder":
            refs[node] = Ref(len(refs))
        elif node.op == "get_attr":
            refs[node] = Ref(place[node.target])
        elif node.target is torch.ops.aten.lift_fresh_copy.default:
            refs[node] = args[0]  # a constant's copy is as constant
        elif node.op == "call_function":
            is_aten = isinstance(node.target, torch._ops.OpOverload)
            name = str(node.target) if is_aten else f"operator.{node.target.__name__}"
            refs[node] = Ref(len(inputs) + len(constants) + len(calls))
            calls.append((name, args, kwargs))
        else:
            outputs = tuple(args[0])
    if not all(isinstance(output, Ref) for output in outputs):
        raise ProgramError(f"the step returns {outputs}, expected tensors only")
    return Graph(
        inputs=tuple((tuple(t.shape), t.dtype) for t in (*inputs, *constants.values())),
        calls=tuple(calls),
        outputs=outputs,
        constants=tuple(t.detach().numpy() for t in constants.values()),
    )


def to_stablehlo(graphs: Sequence[Graph]) -> list[str]:
    """StableHLO text of each graph; every module has one public function `main`.

    Args:
        graphs: from `graph_of`.

    Raises:
        DependencyError: torch_tpu is missing or was never tested.
        ProgramError: torch_tpu cannot lower a graph.
    """
    require("torch_tpu")
    with tempfile.TemporaryDirectory(prefix="torchrec_tpu_") as directory:
        source, target = Path(directory, "graphs.pickle"), Path(directory, "texts.pickle")
        with source.open("wb") as file:
            _Pickler(file).dump(list(graphs))
        try:
            child = subprocess.run(
                [sys.executable, "-m", __name__, str(source), str(target)],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CHILD_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProgramError(
                f"torch_tpu did not lower the step within {_CHILD_TIMEOUT_SECONDS} s"
            ) from None
        if child.returncode != 0 or not target.exists():
            raise ProgramError(
                "torch_tpu cannot lower the step (exit code "
                f"{child.returncode}):\n{child.stderr.strip()[-4000:]}"
            )
        result: list[str] | ProgramError = pickle.loads(target.read_bytes())
    if isinstance(result, ProgramError):
        raise result
    return result


class _Pickler(pickle.Pickler):
    """Names torch's constants in torch.

    By themselves they are pickled under the first loaded module that has an attribute `torch`: any
    script of the user, which the child may not be able to import.
    """

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if isinstance(obj, torch.memory_format | torch.layout | torch.dtype):
            return _torch_constant, (str(obj).removeprefix("torch."),)
        return NotImplemented


def _torch_constant(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _replay(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a graph on inputs of device "tpu"; tensors that it makes come to that device too."""
    import torch
    from torch.utils._pytree import tree_map

    values: list[Any] = list(inputs)

    def value_of(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("tpu")
        return values[argument.index] if isinstance(argument, Ref) else argument

    for name, *arguments in graph.calls:
        args, kwargs = tree_map(value_of, arguments)
        namespace, *path = name.split(".")
        target: Any = operator if namespace == "operator" else getattr(torch.ops, namespace)
        try:
            for attribute in path:
                target = getattr(target, attribute)
            values.append(target(*args, **kwargs))
        except Exception as error:
            message = str(error).strip().split("\n", 1)[0]
            raise ProgramError(
                f"the model calls {name}, which torch_tpu cannot lower: {message}"
            ) from None
    return [values[output.index] for output in graph.outputs]


def register_device() -> None:
    """Registers torch's device "tpu" in this process although there is none.

    For child processes: it patches torch. No runtime is ever started, so nothing can be computed.
    """
    require("torch_tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch  # noqa: F401
        from torch_tpu._internal.utils import hardware

        hardware.get_tpu_device_count = lambda: 1
        import torch_tpu  # noqa: F401
        from torch_tpu import _loader

        _loader._init_device("tpu")


def trace(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> str:
    """StableHLO text of what a function does to tensors of device "tpu"; see `register_device`.

    Args:
        function: of a list of tensors that have no values; writes to none of them.
        inputs: shape and type of each.
    """
    import torch
    from torch_tpu._internal import execution_mode
    from torch_tpu._internal.compile import tpu_torch_compile

    fx_mode = execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH
    with warnings.catch_warnings(), execution_mode.set_eager_mode(fx_mode), torch.no_grad():
        warnings.simplefilter("ignore")
        arguments = [
            tpu_torch_compile.placeholder(list(shape), dtype, False) for shape, dtype in inputs
        ]
        built = tpu_torch_compile.build_mlir(list(function(arguments)), arguments)
    text: str = tpu_torch_compile.serialize_mlir_text(built)
    return text


def _child(source: Path, target: Path) -> None:
    """Lowers pickled graphs; the main function of the child process."""
    register_device()
    result: list[str] | ProgramError
    try:
        result = [
            trace(partial(_replay, graph), graph.inputs)
            for graph in pickle.loads(source.read_bytes())
        ]
    except ProgramError as error:
        result = error
    target.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    # Not this module but the one whose classes were pickled.
    from torchrec_tpu.sparsecore.aot import adapter

    adapter._child(Path(sys.argv[1]), Path(sys.argv[2]))
