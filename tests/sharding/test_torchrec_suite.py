"""TorchRec's own state-dict tests on our sharders, unmodified: torchrec_suite.py runs them.

docs/torchrec-suite.md lists every test of TorchRec's gloo suite with its outcome.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from world import child_environment

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

PASSED = {
    "test_load_state_dict": "fused",
    "test_load_state_dict_cw_multiple_shards": "fused",
    "test_load_state_dict_dp": "dense",
    "test_load_state_dict_prefix": "fused",
    "test_meta_device_dmp_state_dict": None,
    "test_optimizer_load_state_dict": "fused",
    "test_parameter_init": None,
    "test_params_and_buffers": "fused",
}
"""Test -> the kernel of the sharders that it asks for."""

SKIPPED = (  # they need a GPU, and compare kernels of TorchRec
    "test_numerical_equivalence_between_kernel_types",
    "test_rowwise_adagrad_numerical_equivalence",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, object]]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("torchrec_suite.py"))],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, dict[str, object]] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_nothing_is_left_out(outcomes: dict[str, dict[str, object]]) -> None:
    assert outcomes.keys() == {*PASSED, *SKIPPED}


@pytest.mark.parametrize("name", PASSED)
def test_passes(outcomes: dict[str, dict[str, object]], name: str) -> None:
    found = outcomes[name]
    assert found["outcome"] == "passed", found["problems"]
    asked = found["asked"]
    assert isinstance(asked, list)
    assert {kernel for _, kernel in asked} == ({PASSED[name]} if PASSED[name] else set())


@pytest.mark.parametrize("name", SKIPPED)
def test_is_skipped(outcomes: dict[str, dict[str, object]], name: str) -> None:
    assert outcomes[name]["outcome"] == "skipped"
