"""Hygiene of the repository: what is tracked, and what is in it."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1 << 20
# Written in pieces, so that this file does not match itself.
MACHINE_PATHS = re.compile(
    "|".join(f"(?<![\\w./~-])/{top}/" for top in ("home", "Users", "root", "work", "opt", "mnt"))
    + "|/tmp"
    + "/"
)
UNFINISHED = re.compile(
    r"\b(TO"
    r"DO|FIX"
    r"ME|X"
    r"XX)\b|NotImplementedError\("
    r"\)|pytest\.skip\("
    r"\)|^\s*pass\s*(#|$)"
)


def tracked() -> list[Path]:
    """Paths of the tracked files, relative to the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(name) for name in listing.stdout.split("\0") if name]


def lines() -> Iterator[tuple[str, str]]:
    """(place, text) of every line of every tracked text file."""
    for path in tracked():
        if (ROOT / path).is_symlink() or not (ROOT / path).is_file():
            continue
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            yield f"{path}:{number}", line


@pytest.mark.parametrize("floor", ["sharding", "sparsecore"])
def test_the_package_reaches_its_lower_floors_by_relative_links(floor: str) -> None:
    link = ROOT / "torchrec_tpu" / floor
    assert link.is_symlink()
    assert link.readlink() == Path("..") / floor


def test_no_tracked_file_is_larger_than_a_mebibyte() -> None:
    large = {path for path in tracked() if (ROOT / path).lstat().st_size > MAX_BYTES}
    assert not large


def test_no_file_names_a_path_of_one_machine() -> None:
    assert not [f"{place}: {line}" for place, line in lines() if MACHINE_PATHS.search(line)]


def test_nothing_is_marked_unfinished() -> None:
    assert not [f"{place}: {line}" for place, line in lines() if UNFINISHED.search(line)]


def test_nothing_built_is_tracked() -> None:
    assert not [path for path in tracked() if path.suffix in {".so", ".o", ".pyc", ".whl"}]
