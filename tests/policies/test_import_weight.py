"""What an import costs: the heavy packages stay out until they are used."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "torch_tpu", "jax", "jaxlib", "libtpu", "matplotlib")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in `sys.modules` of a new interpreter after `statement`."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["torchrec_tpu", "torchrec_tpu.sparsecore"])
def test_import_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


def test_import_of_the_front_door_loads_not_even_numpy() -> None:
    assert "numpy" not in loaded_by("import torchrec_tpu")


def test_the_check_sees_a_heavy_import() -> None:
    assert "torch" in loaded_by("import torch")
