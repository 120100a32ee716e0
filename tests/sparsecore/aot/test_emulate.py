"""SparseCore calls by their definition on CPU devices, against the reference backend."""

import numpy as np
import pytest
from stack_program import Case, make

from torchrec_tpu.sparsecore.aot import adapter
from torchrec_tpu.sparsecore.aot.emulate import Emulator
from torchrec_tpu.sparsecore.optimizers import adagrad, adam, rowwise_adagrad, sgd

if reason := adapter.why_unavailable("jax", "jaxlib"):
    pytest.skip(reason, allow_module_level=True)

SPECS = [
    sgd(lr=0.1),
    adagrad(lr=0.1, weight_decay=0.1),
    rowwise_adagrad(lr=0.1),
    adam(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled"),
]


def assert_equal(case: Case, results: dict[str, np.ndarray]) -> None:
    expected = case.expected()
    actual = case.logical(results)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("num_devices", "cores_per_device", "spec"),
    [(1, 2, SPECS[0]), (2, 2, SPECS[1]), (3, 4, SPECS[2]), (2, 4, SPECS[3])],
    ids=lambda value: value.rule.name if hasattr(value, "rule") else str(value),
)
def test_lookup_and_update_equal_the_reference(num_devices, cores_per_device, spec):
    case = Case.of(make(num_devices, cores_per_device), spec)
    with Emulator(case.program()) as emulator:
        assert_equal(case, emulator(case.arguments()))
