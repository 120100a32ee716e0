"""Makes TorchRec and what is installed beside it work together; says so when they cannot."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

KNOWN_GOOD: Final = {"torch": "2.13.0", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.8.0"}
"""Versions that are tested together."""

_GOOGLE_PCI_VENDOR: Final = "0x1ae0"

_FBGEMM_OPS: Final = (
    "asynchronous_complete_cumsum",
    "jagged_2d_to_dense",
    "permute_2D_sparse_data",
    "block_bucketize_sparse_features",
)


def require_torchrec() -> None:
    """Imports TorchRec, with an error that names the versions which belong together.

    torchrec and fbgemm-gpu are built for one torch each; a wrong pair shows as a missing operator
    somewhere deep in either.

    Raises:
        ImportError: TorchRec does not import, or FBGEMM lacks operators that it calls.
    """
    try:
        import torchrec  # noqa: F401
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise ImportError(f"torchrec does not import: {error}. {_advice()}") from error
    missing = [name for name in _FBGEMM_OPS if not hasattr(torch.ops.fbgemm, name)]
    if missing:
        raise ImportError(f"torch.ops.fbgemm lacks {', '.join(missing)}. {_advice()}")


def live_beside_torch_tpu() -> None:
    """Lets TorchRec and torch train on CPU when torch_tpu has loaded itself. Nothing without it.

    torchrec 1.9.2 calls `torch.tpu.is_available()` in every all-to-all, also on gloo and CPU, and
    torch_tpu 0.2.0 raises RuntimeError when anyone but torch asks. From here on the answer is that
    of the public `torch.accelerator` API.

    Any first `backward()` makes libtpu look for a TPU: on a machine without one it asks a metadata
    server for minutes, unless TPU_SKIP_MDS_QUERY is set. It is set here, if the user has not, when
    no PCI device is Google's, so that there can be no TPU.
    """
    tpu = getattr(torch, "tpu", None)
    if tpu is None:
        return
    if not _has_google_device():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        tpu.is_available()
    except RuntimeError:
        tpu.is_available = _tpu_is_available


def hush_torch_about_itself() -> None:
    """Takes back a warning that torch gives users of `is_fx_tracing`, once a process.

    In torch 2.13 torch itself is one, whenever a KeyedJaggedTensor is made. Nothing is filtered:
    the one time is spent here, where it is not heard.
    """
    warn = getattr(torch.fx._symbolic_trace, "is_fx_tracing_warning", None)
    if warn is None:
        return
    logger = torch.fx._symbolic_trace.log
    was_disabled, logger.disabled = logger.disabled, True
    try:
        warn()
    finally:
        logger.disabled = was_disabled


def _has_google_device() -> bool:
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == _GOOGLE_PCI_VENDOR for vendor in vendors)


def _tpu_is_available() -> bool:
    accelerator = torch.accelerator.current_accelerator()  # whether available is asked of us
    return (
        accelerator is not None
        and accelerator.type == "tpu"
        and torch.accelerator.device_count() > 0
    )


def _advice() -> str:
    found = ", ".join(f"{name} {_version(name)}" for name in (*KNOWN_GOOD, "fbgemm-gpu"))
    wanted = ", ".join(f"{name}=={version}" for name, version in KNOWN_GOOD.items())
    return (
        f"Found: {found}. Tested together: {wanted}; install torchrec with --no-deps, because its "
        "own requirements put the CUDA build of fbgemm-gpu over the CPU one"
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"
