"""Crash-safe files of a run's state: written whole or not at all, checked before they are used.

A snapshot is `step-<n>.pt` (tensors and plain values) and `step-<n>.json`, its manifest with size
and SHA-256. The manifest is written last: a snapshot without one never happened. The two newest are
kept, so that a damaged file costs some steps, not the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from torchrec_tpu.sparsecore.errors import TorchrecTpuError

__all__ = ["SnapshotError", "Snapshots"]


class SnapshotError(TorchrecTpuError, RuntimeError):
    """No usable snapshot; names each file and what is wrong with it."""


class Snapshots:
    """The snapshots of one run, in a folder of their own.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     snapshots = Snapshots(folder)
    ...     snapshots.save({"weights": torch.ones(2)}, step=7)
    ...     step, state = snapshots.load()
    >>> step, state
    (7, {'weights': tensor([1., 1.])})
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def save(self, state: dict[str, Any], *, step: int) -> None:
        """Writes a snapshot, then removes those that are no longer kept.

        Args:
            state: nested dicts and lists of tensors and plain values.
            step: steps done; names the files.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        data, manifest = self._files(step)
        draft = data.with_suffix(".pt.new")
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        entry = {"bytes": draft.stat().st_size, "sha256": _sha256(draft)}
        draft.replace(data)
        draft = manifest.with_suffix(".json.new")
        with draft.open("w") as text:
            json.dump(entry, text)
            text.flush()
            os.fsync(text.fileno())
        draft.replace(manifest)
        _sync_folder(self.folder)
        for old in self._steps()[: -self.keep]:
            for path in reversed(self._files(old)):  # the manifest first
                path.unlink(missing_ok=True)

    def load(self) -> tuple[int, dict[str, Any]]:
        """(step, state) of the newest sound snapshot; warns of damaged ones that it passes over.

        Raises:
            SnapshotError: there is none.
        """
        problems: list[str] = []
        for step in reversed(self._steps()):
            data, manifest = self._files(step)
            problem = _damage(data, manifest)
            if problem is None:
                for text in problems:
                    warnings.warn(f"{text}; going on from {data.name}", stacklevel=2)
                state: dict[str, Any] = torch.load(data, map_location="cpu", weights_only=True)
                return step, state
            problems.append(f"{data.name}: {problem}")
        raise SnapshotError(
            f"{self.folder}: no usable snapshot"
            + (" (" + "; ".join(problems) + ")" if problems else ", nothing was saved here")
        )

    def clear(self) -> None:
        """Removes all snapshots, whole or not."""
        for path in self.folder.glob("step-*"):
            path.unlink()

    def _files(self, step: int) -> tuple[Path, Path]:
        stem = f"step-{step:09d}"
        return self.folder / f"{stem}.pt", self.folder / f"{stem}.json"

    def _steps(self) -> list[int]:
        names = (path.stem.removeprefix("step-") for path in self.folder.glob("step-*.json"))
        return sorted(int(name) for name in names if name.isdigit())


def _damage(data: Path, manifest: Path) -> str | None:
    """What is wrong with a snapshot, or None."""
    try:
        entry = json.loads(manifest.read_text())
        num_bytes, sha256 = entry["bytes"], entry["sha256"]
    except (ValueError, KeyError, TypeError):
        return f"its manifest {manifest.name} cannot be read"
    if not data.is_file():
        return "the file is missing"
    if data.stat().st_size != num_bytes:
        return f"torn: {data.stat().st_size:,} bytes, written were {num_bytes:,}"
    return None if _sha256(data) == sha256 else "corrupt: its SHA-256 differs from the manifest's"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Makes renames last through a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
