"""AUC against its definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_tpu.metrics import roc_auc


def by_definition(labels: list[int], scores: list[float]) -> float:
    """Share of (positive, negative) pairs in the right order; a tie is half right."""
    positive = [s for label, s in zip(labels, scores, strict=True) if label]
    negative = [s for label, s in zip(labels, scores, strict=True) if not label]
    if not positive or not negative:
        return math.nan
    right = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
    return right / (len(positive) * len(negative))


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([-1.5, 0.0, -0.0, 2.0, 1e-30]))))
def test_auc_with_ties_is_that_of_all_pairs(samples: list[tuple[int, float]]) -> None:
    labels, scores = ([s[i] for s in samples] for i in (0, 1))
    assert roc_auc(labels, scores) == pytest.approx(by_definition(labels, scores), nan_ok=True)


def test_auc_of_a_large_batch_is_exact() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    scores = np.round(rng.standard_normal(600) + labels, 1).astype(np.float32)
    assert roc_auc(labels, scores) == pytest.approx(by_definition(labels, scores), abs=1e-12)


def test_auc_refuses_nan_and_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="NaN"):
        roc_auc([0, 1], [0.5, math.nan])
    with pytest.raises(ValueError, match="one length"):
        roc_auc([0, 1], [0.5])
