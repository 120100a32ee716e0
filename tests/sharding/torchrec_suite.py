"""Run by test_torchrec_suite.py: python torchrec_suite.py -> JSON of outcomes on the last line.

TorchRec's own state-dict tests (ModelParallelStateDictBase, which its gloo suite runs on one rank),
as the wheel has them, with our sharders where they ask for those of TorchRec.
"""

import json
import sys
import unittest
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from test_torchrec_harness import import_harness

import torchrec_tpu
from torchrec_tpu.sharding.sharders import SparseCoreSharder

import_harness()

from torchrec.distributed.test_utils import test_model_parallel_base as suite  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingBagCollection  # noqa: E402

ASKED: list[tuple[str, str]] = []
"""Sharding type and kernel of each sharder that the suite asked for."""


class OnePlacement(SparseCoreSharder[EmbeddingBagCollection]):
    """Ours for pooled collections, restricted as the suite's sharders are."""

    def __init__(self, sharding_type: str, kernel: str, fused_params: Mapping[str, Any]) -> None:
        super().__init__(EmbeddingBagCollection, fused_params)
        self._sharding_type, self._kernel = sharding_type, kernel

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._sharding_type]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [self._kernel]


def create_test_sharder(
    sharder_type: str,
    sharding_type: str,
    kernel_type: str,
    fused_params: Mapping[str, Any] | None = None,
) -> OnePlacement:
    ASKED.append((sharding_type, kernel_type))
    return OnePlacement(sharding_type, kernel_type, {"learning_rate": 0.1, **(fused_params or {})})


suite.create_test_sharder = create_test_sharder  # type: ignore[assignment]
suite.get_default_sharders = lambda: torchrec_tpu.sharders(fused_params={"learning_rate": 0.1})


class StateDicts(suite.ModelParallelStateDictBase):
    backend = "gloo"


def main() -> None:
    settings.register_profile(
        "suite", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("suite")
    loader = unittest.TestLoader()
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2)
    outcomes = {}
    for name in loader.getTestCaseNames(StateDicts):
        ASKED.clear()
        found = result.run(StateDicts(name))
        problems = [text for _, text in (*found.failures, *found.errors)]
        outcomes[name] = {
            "outcome": "skipped" if found.skipped else "failed" if problems else "passed",
            "problems": problems,
            "asked": sorted({*ASKED}),
        }
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
