"""The public names. torchrec_tpu/__init__.pyi is the one list; all else must agree with it."""

import ast
import inspect
from pathlib import Path

import pytest

import torchrec_tpu

ROOT = Path(__file__).parents[2]


def listed_names() -> list[str]:
    """What the stub exports, in its order."""
    names: list[str] = []
    for node in ast.parse((ROOT / "torchrec_tpu" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return [name for name in names if not name.startswith("_")]


NAMES = listed_names()


def test_the_list_has_no_name_twice() -> None:
    assert NAMES
    assert len(set(NAMES)) == len(NAMES)


def test_the_package_offers_exactly_the_listed_names() -> None:
    assert {name for name in dir(torchrec_tpu) if not name.startswith("_")} >= set(NAMES)
    assert set(torchrec_tpu.__all__) - {"__version__"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_listed_name_exists_and_is_explained(name: str) -> None:
    value = getattr(torchrec_tpu, name)
    assert inspect.getdoc(value)
    assert f"`{name}" in (ROOT / "docs" / "which-api.md").read_text()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        torchrec_tpu.no_such_name  # noqa: B018
