"""A folder of checkpoints on disk: written beside, checked, published by one rename.

    <folder>/000007-step-42/          published: whole, and listed in its manifest.json
    <folder>/000008-step-84.draft/    being written, or torn by a crash; never read

The first number counts publications, so that names never clash and sort by age, also when a run
goes back to an earlier step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchrec_tpu.sparsecore.errors import CheckpointError, DamagedCheckpointError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_NAME: Final = re.compile(r"(\d{6,})-step-(\d+)")
_DRAFT: Final = ".draft"
_REMOVED: Final = ".removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be."""

    name: str  # within the checkpoint
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One checkpoint of a folder."""

    path: Path
    sequence: int
    step: int


def published(folder: Path) -> list[Published]:
    """The checkpoints of a folder, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append(Published(path=path, sequence=int(match[1]), step=int(match[2])))
    return sorted(found, key=lambda checkpoint: checkpoint.sequence)


def torn(folder: Path) -> list[Path]:
    """Drafts that were never published."""
    return sorted(folder.glob(f"*{_DRAFT}")) if folder.is_dir() else []


def new_draft(folder: Path, step: int) -> Path:
    """An empty draft; what crashed saves have left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (_DRAFT, _REMOVED):
        for path in folder.glob(f"*{pattern}"):
            shutil.rmtree(path)
    newest = published(folder)[-1:]
    sequence = newest[0].sequence + 1 if newest else 1
    draft = folder / f"{sequence:06d}-step-{step}{_DRAFT}"
    draft.mkdir()
    return draft


def publish(
    draft: Path, files: Iterable[FileRecord], facts: Mapping[str, Any], *, keep: int
) -> Path:
    """Writes the manifest, renames the draft, and removes all but the newest `keep`.

    Args:
        draft: its files are on disk already, synced.
        files: all files of the draft.
        facts: what else the manifest says.
        keep: checkpoints to keep, at least 1.

    Raises:
        CheckpointError: a file is not there as its writer says; nothing is published.
    """
    records = sorted(files, key=lambda file: file.name)
    for file in records:
        path = draft / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.num_bytes:
            raise CheckpointError(
                f"{path}: {'absent' if size is None else f'{size:,} bytes'} on rank 0, its writer "
                f"has written {file.num_bytes:,}; the folder must be one that all ranks share"
            )
    content = {
        **facts,
        "format": FORMAT,
        "files": {f.name: {"bytes": f.num_bytes, "sha256": f.sha256} for f in records},
    }
    write_synced(draft / MANIFEST, json.dumps(content | {"sha256": _checksum(content)}, indent=1))
    sync_directory(draft)
    final = draft.with_name(draft.name.removesuffix(_DRAFT))
    draft.rename(final)
    sync_directory(final.parent)
    for old in published(final.parent)[:-keep]:
        removed = old.path.with_name(old.path.name + _REMOVED)  # at once no longer published
        old.path.rename(removed)
        shutil.rmtree(removed)
    return final


def discard(draft: Path) -> None:
    """Removes a draft after a failure, as far as that is possible."""
    shutil.rmtree(draft, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing or altered.
    """
    manifest = path / MANIFEST
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        is_sound = content.pop("sha256") == _checksum(content)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{manifest}: the file is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{manifest}: unreadable ({error})") from error
    if not is_sound:
        raise DamagedCheckpointError(f"{manifest}: altered, its checksum does not fit its content")
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"{manifest}: format {content['format']}, this version reads up to {FORMAT}; install a "
            "newer torchrec_tpu"
        )
    return dict(content)


def records(manifest: Mapping[str, Any]) -> list[FileRecord]:
    """The files that a manifest lists."""
    return [
        FileRecord(name=name, num_bytes=entry["bytes"], sha256=entry["sha256"])
        for name, entry in manifest["files"].items()
    ]


def damage(path: Path, file: FileRecord) -> str | None:
    """What is wrong with a file, or None."""
    try:
        size = (path / file.name).stat().st_size
        if size != file.num_bytes:
            return f"cut off or overwritten: {size:,} bytes, written were {file.num_bytes:,}"
        with (path / file.name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return "the file is missing"
    except OSError as error:
        return f"unreadable ({error})"
    return None if digest == file.sha256 else "altered: its SHA-256 is not the manifest's"


def write_synced(path: Path, text: str) -> None:
    """Writes a small file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes new names in a directory last through a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
