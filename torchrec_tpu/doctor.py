"""What is installed, what runs here, what is missing and how to get it.

Looks without loading what it looks at, except torch and TorchRec: torch_tpu and jax are never
imported, only their versions are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["Diagnosis", "Finding", "add_arguments", "command", "diagnose"]

TESTED: Final[Mapping[str, str]] = MappingProxyType(
    {"torch": "2.13.0", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.8.0", "torch_tpu": "0.2.0"}
)
"""Versions that this release is tested with."""

INSTALL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "torch": f"pip install torch=={TESTED['torch']} (the CPU build from PyTorch's own index)",
        "torchrec": f"pip install --no-deps torchrec=={TESTED['torchrec']} tensordict torchmetrics"
        " pyre-extensions tqdm (its own requirements bring the CUDA build of FBGEMM)",
        "fbgemm-gpu-cpu": f"pip install fbgemm-gpu-cpu=={TESTED['fbgemm-gpu-cpu']}",
        "torch_tpu": 'pip install "torchrec_tpu[tpu]"',
        "jax": 'pip install "torchrec_tpu[aot]"',
        "libtpu": 'pip install "torchrec_tpu[aot]"',
        "numpy": "pip install numpy",
    }
)

PACKAGES: Final = (
    "torchrec_tpu",
    "numpy",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "torch_tpu",
    "jax",
    "libtpu",
)
OPTIONAL: Final = {
    "fbgemm-gpu": "the CUDA build of FBGEMM; not wanted here",
    "torch_tpu": "for training on a TPU",
    "jax": "for ahead-of-time compiling",
    "libtpu": "for ahead-of-time compiling",
}

# Operators of FBGEMM that TorchRec calls in every lookup; a build for another torch lacks them.
_FBGEMM_OPERATORS = ("asynchronous_complete_cumsum", "jagged_2d_to_dense", "permute_2D_sparse_data")

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        level: "problem" keeps the cpu backend from training; "note" is worth knowing.
        subject: what was looked at.
        text: what was found.
        remedy: what to do, or "".
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The whole of it.

    Attributes:
        system: operating system, processor architecture, Python.
        versions: package -> version, None when it is not installed.
        backends: backend -> why it cannot run here, None when it can.
        findings: in the order in which they were made.
    """

    system: dict[str, str]
    versions: dict[str, str | None]
    backends: dict[str, str | None]
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether models train on the cpu backend."""
        return not any(finding.level == "problem" for finding in self.findings)


def diagnose() -> Diagnosis:
    """Looks at this interpreter and what is installed in it."""
    versions = {name: _version(name) for name in PACKAGES}
    findings = [*_pairings(versions), *_imports(versions)]
    native, backends = _native_and_backends()
    findings += native
    if not any(finding.level == "problem" for finding in findings):
        findings.append(_training_step())
    return Diagnosis(
        system={
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        versions=versions,
        backends=backends,
        findings=tuple(findings),
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _pairings(versions: Mapping[str, str | None]) -> list[Finding]:
    """Combinations of packages that are known to fail, seen from their versions alone."""
    findings = []
    if versions["fbgemm-gpu"] and versions["fbgemm-gpu-cpu"]:
        findings.append(
            Finding(
                level="note",
                subject="fbgemm",
                text="fbgemm-gpu (CUDA) and fbgemm-gpu-cpu are both installed, in one folder: each "
                "overwrote files of the other",
                remedy="pip uninstall fbgemm-gpu fbgemm-gpu-cpu; " + INSTALL["fbgemm-gpu-cpu"],
            )
        )
    differing = [
        f"{name} {found} (tested {tested})"
        for name, tested in TESTED.items()
        if (found := versions[name]) and found.partition("+")[0] != tested
    ]
    if differing:
        findings.append(
            Finding(
                level="note",
                subject="versions",
                text="other versions than those tested together: " + ", ".join(differing),
                remedy="an FBGEMM release loads only beside the torch that it was built for; when "
                "something below fails, install the tested versions",
            )
        )
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    if versions["torch_tpu"] and versions["torchrec"] and autoload:
        findings.append(
            Finding(
                level="note",
                subject="torch_tpu",
                text="torch_tpu loads itself at `import torch`. torchrec 1.9.2 then asks "
                "torch.tpu.is_available() in every exchange between processes, on CPU too, and "
                "torch_tpu 0.2.0 answers with a RuntimeError",
                remedy="`import torchrec_tpu.sharding` mends it; for plain TorchRec set "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            )
        )
    return findings


def _imports(versions: Mapping[str, str | None]) -> list[Finding]:
    """Imports torch, TorchRec and FBGEMM, each only if the one before it works."""
    # Loading a device plug-in is none of our business here, and libtpu locks the machine.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    findings = []
    for module, package in (
        ("torch", "torch"),
        ("fbgemm_gpu", "fbgemm-gpu-cpu"),
        ("torchrec", "torchrec"),
    ):
        finding = _import(module, package, versions[package])
        findings.append(finding)
        if finding.level == "problem":
            return findings
        if module == "fbgemm_gpu":
            findings.append(_fbgemm_operators())
    return findings


def _import(module: str, package: str, version: str | None) -> Finding:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        absent = version is None and (error.name or "").partition(".")[0] == module
        text = "not installed" if absent else f"does not import: {error}"
        return Finding(level="problem", subject=package, text=text, remedy=INSTALL[package])
    except Exception as error:  # whatever a broken build raises is the finding
        text = f"does not import: {type(error).__name__}: {error}"
        return Finding(level="problem", subject=package, text=text, remedy=INSTALL[package])
    return Finding(level="ok", subject=package, text=f"{version or 'a source build'} imports")


def _fbgemm_operators() -> Finding:
    import torch

    missing = [name for name in _FBGEMM_OPERATORS if not hasattr(torch.ops.fbgemm, name)]
    if missing:
        return Finding(
            level="problem",
            subject="fbgemm operators",
            text=f"not registered: {', '.join(missing)}; this FBGEMM was built for another torch, "
            "or is the CUDA build on a machine without CUDA",
            remedy=f"pip uninstall fbgemm-gpu fbgemm-gpu-cpu; {INSTALL['fbgemm-gpu-cpu']}; "
            f"{INSTALL['torch']}",
        )
    return Finding(level="ok", subject="fbgemm operators", text="registered")


def _native_and_backends() -> tuple[list[Finding], dict[str, str | None]]:
    reinstall = "pip install --force-reinstall --no-deps torchrec_tpu"
    try:
        _native = importlib.import_module("torchrec_tpu.sparsecore._native")
        from torchrec_tpu.sparsecore import backends
    except ImportError as error:
        text = f"does not import: {error}"
        return [
            Finding(level="problem", subject="native extension", text=text, remedy=reinstall)
        ], {}
    others = [name for name in _native.instruction_sets() if name != _native.instruction_set()]
    findings = [
        Finding(
            level="ok",
            subject="native extension",
            text=f"uses {_native.instruction_set()}"
            + (f" (also runs: {', '.join(others)})" if others else ""),
        )
    ]
    status = {name: backends.why_unavailable(name) for name in backends.BACKENDS}
    if status["cpu"] is not None:
        findings.append(
            Finding(level="problem", subject="cpu backend", text=status["cpu"], remedy=reinstall)
        )
    return findings, status


def _training_step() -> Finding:
    """One step of a two-row table through the whole path: lookup, backward, fused update."""
    try:
        import torch
        from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

        from torchrec_tpu.sharding.embeddings import SparseCoreEmbeddingBagCollection
        from torchrec_tpu.sparsecore.optimizers import sgd

        config = EmbeddingBagConfig(
            name="t", num_embeddings=2, embedding_dim=8, feature_names=["f"]
        )
        module = SparseCoreEmbeddingBagCollection([config], optimizer=sgd(lr=1.0))
        (weight,) = module.parameters()
        before = weight.detach().clone()
        kjt = KeyedJaggedTensor(["f"], torch.tensor([1, 1]), lengths=torch.tensor([2]))
        module(kjt).values().sum().backward()
        expected = torch.stack([before[0], before[1] - 2])
        worked = torch.equal(weight.detach(), expected)
    except Exception as error:  # whatever it is, it is the finding
        text = f"failed: {type(error).__name__}: {error}"
        return Finding(level="problem", subject="training step", text=text)
    if not worked:
        text = "ran, but the weights are not what they must be"
        return Finding(level="problem", subject="training step", text=text)
    return Finding(level="ok", subject="training step", text="runs on the cpu backend")


# ------------------------------------------------------------------------------------------- output


def to_text(diagnosis: Diagnosis) -> str:
    """The diagnosis for people."""
    lines = ["  ".join(f"{name} {value}" for name, value in diagnosis.system.items()), ""]
    width = max(map(len, diagnosis.versions))
    for name, version in diagnosis.versions.items():
        absent = f"not installed; {OPTIONAL.get(name, 'required')}"
        if name in INSTALL:
            absent += f": {INSTALL[name]}"
        elif name == "torchrec_tpu":
            absent = "a source tree, not installed"
        lines.append(f"  {name:{width}}  {version or absent}")
    lines += ["", "backends"]
    for name, why in diagnosis.backends.items():
        lines.append(f"  {name:{width}}  {'available' if why is None else f'unavailable: {why}'}")
    lines += ["", "checks"]
    for finding in diagnosis.findings:
        lines.append(f"  {finding.level:7}  {finding.subject}: {finding.text}")
        if finding.remedy:
            lines.append(f"           -> {finding.remedy}")
    verdict = "models train" if diagnosis.is_healthy else "models do not train"
    lines += ["", f"{verdict} on the cpu backend"]
    return "\n".join(lines)


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis for programs."""
    return json.dumps({**dataclasses.asdict(diagnosis), "healthy": diagnosis.is_healthy}, indent=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torchrec-tpu doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def command(args: argparse.Namespace) -> int:
    """Prints the diagnosis; 0 when models train on the cpu backend, else 1."""
    diagnosis = diagnose()
    sys.stdout.write((to_json(diagnosis) if args.json else to_text(diagnosis)) + "\n")
    return 0 if diagnosis.is_healthy else 1
