"""Backends that execute lookups and fused updates: one class each behind one protocol.

To add one: write `<name>.py` with a class that satisfies `Backend` (reference.py is the skeleton),
add a line to `BACKENDS` and to `FOR_DEVICE`. tests/sparsecore/test_backends.py then runs it against
the reference on every rule.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final, Protocol

from torchrec_tpu.sparsecore.batch import Float32Array, StackBuffers, TableArray
from torchrec_tpu.sparsecore.geometry import Geometry

# Shape legend: V num_embeddings, D embedding_dim, T tables, O operands of the rule. "Stack order"
# as in Layout; the flat output and gradient are described in geometry.py.


class Backend(Protocol):
    """What executes lookups and updates on the host; those of a TPU satisfy `tpu.TpuBackend`.

    Tables and slots are logical: row i is id i, (V, D) or (V,), nothing padded. A table may be
    float16: its elements become float32 when read and are rounded to nearest even when written; all
    else is float32. All lists are in stack order. Arguments that contradict each other raise
    ValueError, and a case that the backend does not cover NotImplementedError; both before anything
    is written.
    """

    @property
    def name(self) -> str:
        """Key in BACKENDS."""

    def why_unavailable(self) -> str | None:
        """What is missing and how to get it; None when the backend runs here."""

    def lookup(
        self,
        buffers: Sequence[StackBuffers],
        tables: Sequence[TableArray],
        geometry: Geometry,
        out: Float32Array,
    ) -> None:
        """Write the vector of every sample: the sum of gain * row over its ids.

        A sample without ids becomes zeros. Terms are added to 0 in buffer order.

        Args:
            buffers: one per stack.
            tables: (V, D) weights, one per table.
            geometry: shapes and places of this batch.
            out: flat output; only the floats of samples are written.
        """

    def update(
        self,
        grad: Float32Array,
        buffers: Sequence[StackBuffers],
        tables: Sequence[TableArray],
        slots: Sequence[Sequence[Float32Array]],
        operands: Float32Array,
        geometry: Geometry,
        rule: str,
        max_gradient: float | None,
    ) -> None:
        """Run one optimizer step in place, once for every row that the buffers name.

        The gradient of a row is the sum of gain * gradient of its samples, over all source cores
        in their order, within a core in buffer order. Other rows are not read.

        Args:
            grad: flat gradient of `lookup`'s output.
            buffers: the same as in `lookup`.
            tables: (V, D) weights, one per table.
            slots: per table the arrays of the rule's slots, (V, D) or (V,), in rule order.
            operands: (T, O).
            geometry: the same as in `lookup`.
            rule: name in RULES.
            max_gradient: every element of `grad` is first clipped to +- this; None for no limit.
        """


BACKENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cpu": "torchrec_tpu.sparsecore.backends.cpu:CpuBackend",
        "reference": "torchrec_tpu.sparsecore.backends.reference:ReferenceBackend",
        "tpu": "torchrec_tpu.sparsecore.backends.tpu:TpuBackend",
        "xla": "torchrec_tpu.sparsecore.backends.xla:XlaBackend",
    }
)
"""Name -> "module:class"; the module is imported at first use."""

FOR_DEVICE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": ("cpu", "reference"), "tpu": ("tpu", "xla")}
)
"""Device type of the tables -> backends that can work on them. The first is used unless another is
forced: a slower one never steps in silently."""

FORCE_VARIABLE: Final = "TORCHREC_TPU_BACKEND"
"""Environment variable that forces a backend by name."""


@cache
def load(name: str) -> Backend:
    """The one instance of a backend.

    Raises:
        ValueError: no backend has that name.
        ImportError: its module needs a package that is not installed.

    >>> load("reference").name
    'reference'
    """
    if name not in BACKENDS:
        raise ValueError(f"no backend is named {name!r}; there are {', '.join(BACKENDS)}")
    module, _, class_name = BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), class_name)()
    return backend


def why_unavailable(name: str) -> str | None:
    """What keeps a backend from running here; None when it runs.

    >>> why_unavailable("reference") is None
    True
    """
    try:
        return load(name).why_unavailable()
    except ImportError as error:
        return str(error)


def choose(device_type: str, *, name: str | None = None) -> Backend:
    """The backend for tables on one type of device.

    Args:
        device_type: as in torch.device.type.
        name: forces a backend; else the environment variable TORCHREC_TPU_BACKEND does; else it is
            the first of FOR_DEVICE.

    Raises:
        NotImplementedError: no backend works on that type of device, the one that was forced does
            not, or what it needs is missing.
        ValueError: no backend has the forced name.

    >>> choose("cpu", name="reference").name
    'reference'
    """
    able = FOR_DEVICE.get(device_type, ())
    if not able:
        raise NotImplementedError(
            f"no backend works on tables on device {device_type!r}; move the module to "
            f"{' or '.join(FOR_DEVICE)}"
        )
    name = name or os.environ.get(FORCE_VARIABLE) or able[0]
    if name in BACKENDS and name not in able:
        raise NotImplementedError(
            f"backend {name!r} does not work on tables on device {device_type!r}; use "
            f"{' or '.join(able)}"
        )
    if why := why_unavailable(name):
        raise NotImplementedError(f"backend {name!r} cannot run here: {why}")
    return load(name)


def describe() -> str:
    """Every backend on one line: its name, and whether it runs here or why it does not.

    >>> print(describe())  # doctest: +ELLIPSIS
    cpu        ...
    reference  available
    tpu        ...
    xla        ...
    """
    width = max(map(len, BACKENDS))
    return "\n".join(
        f"{name:{width}}  "
        + (f"unavailable: {why}" if (why := why_unavailable(name)) else "available")
        for name in BACKENDS
    )
