"""The floors of the house: who may import whom. The contracts are in pyproject.toml."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="pip install -r requirements/lint.txt")

ROOT = Path(__file__).parents[2]
FLOORS = ("torchrec_tpu", "sharding", "sparsecore")

# The files under the working directory are checked, not those of an editable install elsewhere.
PROGRAM = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in type(finder).__name__
                 and "Redirecting" not in type(finder).__name__]
from importlinter.cli import lint_imports
sys.exit(lint_imports(no_cache=True))
"""


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the package in `directory`, with its contracts."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its contracts, free to be broken."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for floor in FLOORS:
        shutil.copytree(
            ROOT / floor, tmp_path / floor, symlinks=True, ignore=shutil.ignore_patterns("*.so")
        )
    return tmp_path


def test_every_floor_imports_only_lower_ones() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("sparsecore/errors.py", "import torchrec_tpu.sharding", "front door"),
        ("sparsecore/errors.py", "import torch", "sparsecore needs only numpy"),
        ("sharding/__init__.py", "import jax", "jax only"),
        ("sharding/__init__.py", "import torch_tpu", "torch_tpu only"),
        ("torchrec_tpu/unplaced.py", "", "front door"),
    ],
)
def test_the_contracts_catch_a_wrong_import(
    copy: Path, module: str, line: str, broken: str
) -> None:
    with (copy / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode != 0, result.stdout
    verdicts = result.stdout.splitlines()
    assert [text for text in verdicts if text.startswith(broken) and " BROKEN" in text], (
        result.stdout
    )


def test_the_lower_floors_do_not_import_the_front_door() -> None:
    """The root package is no layer of the contract: its name is a prefix of every floor's."""
    front_door = re.compile(
        r"^\s*(import torchrec_tpu\s*(as .*)?$|from torchrec_tpu import )", re.M
    )
    sources = [
        path for floor in ("sparsecore", "sharding") for path in (ROOT / floor).rglob("*.py")
    ]
    assert sources
    assert not [path for path in sources if front_door.search(path.read_text())]
