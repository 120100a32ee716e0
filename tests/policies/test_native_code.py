"""Rules that the compiled core must keep on processors other than this one."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDE = sorted((ROOT / "build").glob("cp*/**/*_avx*.o"))


@pytest.mark.skipif(not WIDE, reason="not built from this checkout by `make`")
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")
def test_code_for_wide_vectors_is_shared_with_no_other_file() -> None:
    """The linker keeps one copy of an inline function: a wide one would crash older processors."""
    shared = {
        object_file.name: weak
        for object_file in WIDE
        if (weak := [line for line in symbols(object_file) if line.split()[-2] in "WVu"])
    }
    assert not shared


def symbols(object_file: Path) -> list[str]:
    """The symbols that an object file defines, as nm prints them."""
    listing = subprocess.run(
        ["nm", "--defined-only", object_file], capture_output=True, text=True, check=True
    )
    return listing.stdout.splitlines()
