"""Which limits compile, asked of libtpu itself."""

import dataclasses
from pathlib import Path

import pytest

from torchrec_tpu.sparsecore.aot import adapter, probe
from torchrec_tpu.sparsecore.aot.compile import CACHE_VARIABLE
from torchrec_tpu.sparsecore.aot.probe import is_doubtful, suggest_feasible, why_infeasible
from torchrec_tpu.sparsecore.aot.program import StackFacts
from torchrec_tpu.sparsecore.aot.topology import topology
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import LimitsError

TARGET = topology("tpu7x:2x2x1")
needs_libtpu = pytest.mark.skipif(
    adapter.why_unavailable("jax", "jaxlib", "libtpu") is not None,
    reason=adapter.why_unavailable("jax", "jaxlib", "libtpu") or "",
)


def stack(max_unique_ids: int, *, rule: str | None, dim: int = 128) -> StackFacts:
    return StackFacts(
        name="s",
        collection="ebc",
        tables=("t",),
        rows=65_536,
        dim=dim,
        samples=512,
        slots_per_device=2 * 16 * max_unique_ids,
        max_ids=max_unique_ids,
        max_unique_ids=max_unique_ids,
        rule=rule,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def test_usual_limits_are_not_doubtful_and_refused_ones_are() -> None:
    assert not is_doubtful(stack(1024, rule="adagrad"), TARGET)
    assert is_doubtful(stack(14_336, rule="adagrad", dim=8), TARGET)
    assert is_doubtful(stack(16_240, rule=None), TARGET)
    assert is_doubtful(stack(8_192, rule="adagrad"), topology("v6e:2x2"))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam_l2", None])
def test_small_limits_compile_for_every_kind_of_state(rule: str | None) -> None:
    assert why_infeasible(stack(32, rule=rule, dim=16), TARGET) is None


@needs_libtpu
@pytest.mark.slow
def test_feasibility_is_not_monotone_and_the_next_feasible_limit_is_found() -> None:
    """A lookup of 16,240 rows is refused; one of 81,200 is not."""
    error = why_infeasible(stack(16_240, rule=None), TARGET)
    assert error is not None
    assert error.larger_may_fit
    assert error.stacks == ("s",)
    wanted = Capacity(max_ids=16_240, max_unique_ids=16_240)
    found = suggest_feasible(wanted, stack(8, rule=None), TARGET)
    assert found.max_unique_ids > wanted.max_unique_ids
    assert found.max_ids >= found.max_unique_ids


@needs_libtpu
@pytest.mark.slow
def test_limits_that_compile_stay_as_they_are() -> None:
    wanted = Capacity(max_ids=40, max_unique_ids=24, buffer_ids=320)
    assert suggest_feasible(wanted, stack(8, rule="adagrad", dim=16), TARGET) == wanted


@needs_libtpu
def test_the_bound_of_an_update_is_not_passed_by_larger_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(
        probe, "why_infeasible", lambda s, *a, **k: asked.append(s) or why_infeasible(s, *a, **k)
    )
    with pytest.raises(LimitsError, match="stack 's': max_ids=16,384") as error:
        suggest_feasible(
            Capacity(max_ids=16_384, max_unique_ids=16_384), stack(8, rule="adagrad"), TARGET
        )
    assert not error.value.larger_may_fit
    assert [s.max_unique_ids for s in asked] == [16_384]  # one probe, for more cannot help


@needs_libtpu
def test_a_probe_is_the_lookup_and_the_update_of_one_stack() -> None:
    text = probe.probe_text(stack(32, rule="rowwise_adagrad"), TARGET)
    assert text.count("@SparseDenseMatmulOp(") == 1
    assert text.count("@SparseDenseMatmulGradOpWithOptimizerUpdate(") == 1
    assert text.count("tf.aliasing_output") == 2
    frozen = probe.probe_text(dataclasses.replace(stack(32, rule="sgd"), rule=None), TARGET)
    assert "GradOp" not in frozen
