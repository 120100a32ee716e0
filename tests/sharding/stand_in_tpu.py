"""A torch device "tpu" for a machine without one: its tensors hold CPU tensors.

`install()` registers it in this process, for good. Everything that a model does runs on it,
autograd included. What torch_tpu adds is here by its definition: the SparseCore calls, in NumPy, on
nothing but their arguments; and streams, whose copies happen as late as they may: when somebody
synchronises. The calls themselves are made by the same backends as on a TPU.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.rules import apply

CORES = 2
CPU = torch.device("cpu")

calls: list[str] = []
"""Names of the SparseCore calls that were made."""

# ------------------------------------------------------------------------------------------ tensors


class DeviceTensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "DeviceTensor":
        tensor = torch._C._acc.create_empty_tensor(tuple(raw.shape), raw.dtype)
        tensor.__class__ = cls
        return tensor

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = _raw_of_storage[self.untyped_storage()._cdata] = raw


_raw_of_storage: dict[int, torch.Tensor] = {}
"""For tensors that torch copies without asking: they keep the storage, but not the class."""


def is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"


def raw(value: Any) -> Any:
    """The CPU's view of an argument."""
    if isinstance(value, torch.device):
        return CPU
    if not is_here(value):
        return value
    if not isinstance(value, DeviceTensor):
        value.__class__ = DeviceTensor
        value.raw = _raw_of_storage[value.untyped_storage()._cdata]
    return value.raw


def run_on_cpu(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation, with the CPU's kernel."""
    wrapped: dict[int, torch.Tensor] = {}

    def unwrap(value: Any) -> Any:
        here = raw(value)
        if is_here(value):
            wrapped[id(here)] = value
        return here

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return wrapped.get(id(value)) if id(value) in wrapped else DeviceTensor(value)

    arguments = tree_map(unwrap, (args, kwargs))
    return tree_map(wrap, operation(*arguments[0], **arguments[1]))


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    copy = lambda: raw(target).copy_(raw(source))  # noqa: E731
    stream = Stream.current
    if stream is not None and non_blocking:
        stream.waiting.append(copy)
    else:
        copy()
    return target


# ------------------------------------------------------------------------------------------ streams


class Stream:
    """Copies that are asked for on it read and write memory when it is synchronised."""

    current: "Stream | None" = None

    def __init__(self, device: Any = None) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def synchronize(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


# --------------------------------------------------------------------------------- SparseCore calls


def entries(
    buffers: Sequence[torch.Tensor], rows: int, samples: int, max_ids: int, max_unique_ids: int
) -> tuple[Any, Any, Any]:
    """(row of the table, row of the activations, gain) of every id, in buffer order."""
    pointers, ids, sample_ids, gains = (raw(buffer).numpy() for buffer in buffers)
    slots = len(ids) // CORES
    found = []
    for core, ends in enumerate(pointers.reshape(CORES, -1)[:, :CORES]):
        start = 0
        for partition, end in enumerate(ends.tolist()):
            run = core * slots + np.arange(start, end)
            assert len(run) <= max_ids, (core, partition, len(run), max_ids)
            assert len(np.unique(ids[run])) <= max_unique_ids, (core, partition)
            assert (ids[run] < rows // CORES).all()
            assert (sample_ids[run] < samples // CORES).all()
            found.append(
                (
                    partition * (rows // CORES) + ids[run],
                    core * (samples // CORES) + sample_ids[run],
                    gains[run],
                )
            )
            start = -(-end // 8) * 8
    row, sample, gain = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return row, sample, gain


def lookup(buffers: Sequence[torch.Tensor], table: torch.Tensor, *sizes: int) -> torch.Tensor:
    calls.append("lookup")
    weights = raw(table).numpy()
    row, sample, gain = entries(buffers, len(weights), *sizes)
    out = np.zeros((sizes[0], weights.shape[1]), np.float32)
    np.add.at(out, sample, gain[:, None] * weights[row])
    return DeviceTensor(torch.from_numpy(out))


def update(
    buffers: Sequence[torch.Tensor],
    grad: torch.Tensor,
    state: Sequence[torch.Tensor],
    operands: Sequence[float],
    rule: str,
    mean_dim: int,
    *sizes: int,
) -> list[torch.Tensor]:
    """New arrays; the old ones are as good as freed, so that nobody may read them again."""
    calls.append(rule)
    arrays = [raw(tensor).numpy().copy() for tensor in state]
    for tensor in state:
        raw(tensor).fill_(torch.nan)
    row, sample, gain = entries(buffers, len(arrays[0]), *sizes)
    rows, index = np.unique(row, return_inverse=True)
    of_rows = np.zeros((len(rows), arrays[0].shape[1]), np.float32)
    np.add.at(of_rows, index, gain[:, None] * raw(grad).numpy()[sample])
    inside = [array[rows][:, :mean_dim] if array.ndim == 2 else array[rows] for array in arrays]
    with np.errstate(invalid="ignore", divide="ignore"):  # in columns that pad narrow tables
        new = apply(RULES[rule], of_rows[:, :mean_dim], inside[0], inside[1:], np.float32(operands))
    for array, values in zip(arrays, new, strict=True):
        if array.ndim == 2:
            array[rows, :mean_dim] = values
        else:
            array[rows] = values
    return [DeviceTensor(torch.from_numpy(array)) for array in arrays]


def sparse_dense_matmul(*args: Any) -> torch.Tensor:
    *buffers, table = args[:5]
    return lookup(buffers, table, *args[5:])


def grad_with_sgd(*args: Any) -> torch.Tensor:
    buffers, (table, grad, lr, *sizes) = args[:4], args[4:-1]
    (new,) = update(buffers, grad, [table], [lr.item()], "sgd", table.shape[1], *sizes)
    return new


def grad_with_adagrad(*args: Any) -> Any:
    buffers, (table, accumulator, grad, lr, eps, *sizes) = args[:4], args[4:-1]
    rule = "adagrad" if accumulator.dim() == 2 else "rowwise_adagrad"
    operands = [lr.item(), eps]
    return update(buffers, grad, [table, accumulator], operands, rule, table.shape[1], *sizes)


def jax_op(name: str, function: Any, **options: Any) -> Callable[..., Any]:
    """Our own two calls; what they lower to is tested beside libtpu."""
    if name.endswith("::lookup"):
        return lookup

    def call(buffers: Any, grad: Any, state: Any, operands: Any, *rest: Any) -> Any:
        return update(buffers, grad, state, [operand.item() for operand in operands], *rest)

    return call


# ------------------------------------------------------------------------------------------ install


def spmd_safe(function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        calls.append("spmd_safe")
        return function(*args, **kwargs)

    return marked


def topology_aware_mesh(shape: tuple[int, ...]) -> torch.Tensor:
    """Columns first: another order than 0, 1, 2."""
    return torch.arange(int(np.prod(shape))).reshape(shape[::-1]).T.reshape(shape)


class _Module:
    """torch.tpu, as far as torch and this package use it."""

    Stream = Stream
    stream = staticmethod(use_stream)
    ops = types.SimpleNamespace(
        sparse_dense_matmul=sparse_dense_matmul,
        sparse_dense_matmul_grad_with_sgd=grad_with_sgd,
        sparse_dense_matmul_grad_with_adagrad=grad_with_adagrad,
    )
    pallas = types.SimpleNamespace(jax_op=jax_op)
    distributed = types.SimpleNamespace(
        spmd_safe=spmd_safe, topology_aware_mesh=topology_aware_mesh
    )

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing here is random."""


VIEWS = (
    "alias", "detach", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor",
    "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "t", "transpose.int",
    "unsqueeze", "view.dtype",
)  # fmt: skip
"""Torch would make these itself, from the strides of a tensor, and ours do not know their own."""

_libraries: list[torch.library.Library] = []  # which undo themselves when they are collected


def install() -> None:
    _setup_privateuseone_for_python_backend("tpu", backend_module=_Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run_on_cpu, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    aten.impl("_local_scalar_dense", lambda tensor: raw(tensor).item(), "PrivateUse1")
    for name in VIEWS:
        operation = getattr(torch.ops.aten, name.partition(".")[0])
        overload = getattr(operation, name.partition(".")[2] or "default")
        aten.impl(name, functools.partial(run_on_cpu, overload), "PrivateUse1")
    aten.impl("view", lambda tensor, size: DeviceTensor(raw(tensor).reshape(size)), "PrivateUse1")
    _libraries.extend([everything, aten])
    versions = {"torch_tpu": "0.2.0"}
    sys.modules["torch_tpu"] = types.ModuleType("torch_tpu")
    if importlib.util.find_spec("jax") is None:  # nothing of it runs: `jax_op` has our definitions
        versions |= {"jax": "0.10.2", "jaxlib": "0.10.2"}
        sys.modules["jax"] = types.ModuleType("jax")
        sys.modules["jax"].Array = object
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: versions.get(name) or version(name)
