"""The optimizers against torch and TorchRec, and the specs that choose them."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from torchrec_tpu.sparsecore.errors import OptimizerError
from torchrec_tpu.sparsecore.optimizers import (
    OPTIMIZERS,
    RULES,
    OptimizerSpec,
    adagrad,
    adam,
    ftrl,
    laprop,
    rowwise_adagrad,
    sgd,
)
from torchrec_tpu.sparsecore.rules import apply

NUM_STEPS = 25


@dataclasses.dataclass(frozen=True)
class Case:
    """A spec and its twin: a torch optimizer class with its arguments."""

    spec: OptimizerSpec
    twin: Callable[[], type]  # imported late: this floor has tests that run without torch
    arguments: dict[str, Any]
    decay: float = 0.0  # of the twin's weights before its step, where torch has no such mode

    @property
    def id(self) -> str:
        return repr(self.spec)


def _torch(name: str) -> Callable[[], type]:
    return lambda: getattr(pytest.importorskip("torch").optim, name)


def _torchrec_rowwise_adagrad() -> type:
    pytest.importorskip("torchrec", reason="pip install -r requirements/cpu.txt")
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    return RowWiseAdagrad


def _twin(name: str, state: dict[str, float], update: Callable[..., Any]) -> Callable[[], type]:
    """An optimizer class that neither torch nor TorchRec has, written from its definition."""

    def make() -> type:
        torch = pytest.importorskip("torch", reason="pip install -r requirements/cpu.txt")

        def step(self: Any) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    slots = self.state[parameter]
                    for slot, first in state.items():
                        slots.setdefault(slot, torch.full_like(parameter, first))
                    with torch.no_grad():
                        grad = parameter.grad + group["weight_decay"] * parameter
                        update(parameter, grad, slots, group)

        def __init__(self: Any, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
            defaults = {"lr": lr, "weight_decay": weight_decay}
            torch.optim.Optimizer.__init__(self, parameters, defaults)

        members = {"__init__": __init__, "step": step}
        return type(name, (torch.optim.Optimizer,), members)

    return make


def _ftrl_step(weight: Any, grad: Any, state: Any, group: Any) -> None:
    """Algorithm 1 of McMahan et al., with alpha = lr, lambda1 = 0.2, lambda2 = 2 * 0.3, beta = 0.5.

    On the first line of the paper the weight follows from z; here it is stored, as sigma needs it.
    """
    total, linear = state["sum"], state["linear"]
    sigma = ((total + grad**2).sqrt() - total.sqrt()) / group["lr"]
    linear += grad - sigma * weight
    total += grad**2
    weight.copy_(-(linear - linear.sign() * 0.2) / ((0.5 + total.sqrt()) / group["lr"] + 2 * 0.3))
    weight[linear.abs() <= 0.2] = 0


def _laprop_step(weight: Any, grad: Any, state: Any, group: Any) -> None:
    state["nu"].mul_(0.9).add_(0.1 * (grad**2 + 1e-6))
    state["mu"].mul_(0.8).add_(0.6 * grad / state["nu"].sqrt())
    weight -= group["lr"] * state["mu"]


FTRL = {"l1": 0.2, "l2": 0.3, "beta": 0.5, "initial_accumulator_value": 0.1}
FTRL_TWIN = _twin("Ftrl", {"sum": 0.1, "linear": 0.0}, _ftrl_step)
LAPROP = {"betas": (0.8, 0.9), "eps": 1e-6}
LAPROP_TWIN = _twin("LaProp", {"mu": 0.0, "nu": 0.0}, _laprop_step)

L2 = {"weight_decay": 0.3}
DECOUPLED = {"weight_decay": 0.3, "weight_decay_mode": "decoupled"}
START = {"initial_accumulator_value": 0.1}
CASES = [
    Case(sgd(lr=0.1), _torch("SGD"), {"lr": 0.1}),
    Case(sgd(lr=0.1, **L2), _torch("SGD"), {"lr": 0.1, **L2}),
    Case(sgd(lr=0.1, **DECOUPLED), _torch("SGD"), {"lr": 0.1}, decay=0.3),
    Case(adagrad(), _torch("Adagrad"), {}),
    Case(adagrad(lr=0.1, **START), _torch("Adagrad"), {"lr": 0.1, **START}),
    Case(adagrad(lr=0.1, eps=0.5, **L2), _torch("Adagrad"), {"lr": 0.1, "eps": 0.5, **L2}),
    Case(adagrad(lr=0.1, **DECOUPLED), _torch("Adagrad"), {"lr": 0.1}, decay=0.3),
    Case(rowwise_adagrad(), _torchrec_rowwise_adagrad, {}),
    Case(rowwise_adagrad(lr=0.1, **START), _torchrec_rowwise_adagrad, {"lr": 0.1, **START}),
    Case(
        rowwise_adagrad(lr=0.1, eps=0.5, **L2),
        _torchrec_rowwise_adagrad,
        {"lr": 0.1, "eps": 0.5, **L2},
    ),
    Case(rowwise_adagrad(lr=0.1, **DECOUPLED), _torchrec_rowwise_adagrad, {"lr": 0.1}, decay=0.3),
    Case(adam(), _torch("Adam"), {}),
    Case(
        adam(lr=0.1, betas=(0.8, 0.95), eps=0.01),
        _torch("Adam"),
        {"lr": 0.1, "betas": (0.8, 0.95), "eps": 0.01},
    ),
    Case(adam(lr=0.1, **L2), _torch("Adam"), {"lr": 0.1, **L2}),
    Case(adam(lr=0.1, **DECOUPLED), _torch("AdamW"), {"lr": 0.1, "weight_decay": 0.3}),
    Case(ftrl(lr=0.1, **FTRL), FTRL_TWIN, {"lr": 0.1}),
    Case(OptimizerSpec(name="ftrl", lr=0.1, hyper=FTRL, **L2), FTRL_TWIN, {"lr": 0.1, **L2}),
    Case(
        OptimizerSpec(name="ftrl", lr=0.1, hyper=FTRL, **DECOUPLED),
        FTRL_TWIN,
        {"lr": 0.1},
        decay=0.3,
    ),
    Case(laprop(lr=0.1, **LAPROP), LAPROP_TWIN, {"lr": 0.1}),
    Case(laprop(lr=0.1, **LAPROP, **L2), LAPROP_TWIN, {"lr": 0.1, **L2}),
    Case(laprop(lr=0.1, **LAPROP, **DECOUPLED), LAPROP_TWIN, {"lr": 0.1}, decay=0.3),
]


def test_every_rule_has_a_twin():
    assert {case.spec.rule.name for case in CASES} == set(RULES)


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES, ids=attrgetter("id"))
def test_25_dense_steps_equal_the_twin(case):
    """Weights and all state, with a learning rate that falls; the twin computes in float64."""
    torch = pytest.importorskip("torch", reason="pip install -r requirements/cpu.txt")
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((6, 20)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float64))
    twin = case.twin()([parameter], **case.arguments)
    rule = case.spec.rule
    state = [
        np.full(slot.shape(*weights.shape), case.spec.initial_value(slot), np.float32)
        for slot in rule.slots
    ]
    for step in range(1, NUM_STEPS + 1):
        lr = case.spec.lr * 0.95**step
        grad = (rng.standard_normal(weights.shape) * 10.0 ** rng.integers(-2, 2)).astype("f4")
        grad[step % 6] = 0
        weights, *state = apply(rule, grad, weights, state, case.spec.operands(step, lr=lr))
        for group in twin.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            parameter.mul_(1 - lr * case.decay)
        parameter.grad = torch.tensor(grad, dtype=torch.float64)
        twin.step()
        np.testing.assert_allclose(weights, parameter.detach(), rtol=2e-5, atol=2e-6)
        for slot, array in zip(rule.slots, state, strict=True):
            wanted = twin.state[parameter][slot.name].reshape(array.shape)
            np.testing.assert_allclose(array, wanted, rtol=2e-5, atol=2e-7 * wanted.abs().max())


@pytest.mark.parametrize(
    ("spec", "grad", "row", "state"),
    [
        (sgd(lr=0.1), [12, 24, 36, 48], [-0.2, -1.4, -2.6, -3.8], None),
        (adagrad(lr=0.1, eps=1e-8), [12, 24, 36, 48], [0.9] * 4, [144, 576, 1296, 2304]),
        (
            adagrad(lr=0.1, initial_accumulator_value=0.1),
            [1, 2, 3, 4],
            [0.9046537, 0.9012270, 0.9005510, 0.9003111],
            [1.1, 4.1, 9.1, 16.1],
        ),
        (adagrad(lr=0.1), [0, 1, 2, 3], [1, 0.9, 0.9, 0.9], [0, 1, 4, 9]),
        (
            rowwise_adagrad(lr=0.1, eps=1e-8),
            [12, 24, 36, 48],
            [0.9634852, 0.9269703, 0.8904555, 0.8539407],
            1080,
        ),
        (
            rowwise_adagrad(lr=0.1),
            [1, 2, 3, 4],
            [0.9634852, 0.9269703, 0.8904555, 0.8539407],
            7.5,
        ),
        (
            rowwise_adagrad(lr=0.1),
            [2, 4, 6, 8],
            [0.9634852, 0.9269703, 0.8904555, 0.8539407],
            30,
        ),
        (
            rowwise_adagrad(lr=0.1, weight_decay=0.5),
            [1, 2, 3, 4],
            [0.9531479, 0.9219131, 0.8906784, 0.8594436],
            10.25,
        ),
        (
            rowwise_adagrad(lr=0.1, weight_decay=0.5, weight_decay_mode="decoupled"),
            [1, 2, 3, 4],
            [0.9134852, 0.8769703, 0.8404555, 0.8039407],
            7.5,
        ),
        (adam(lr=0.1), [1, -2, 3, -4], [0.9, 1.1, 0.9, 1.1], None),
    ],
    ids=lambda value: repr(value) if isinstance(value, OptimizerSpec) else "",
)
def test_one_step_from_ones_by_hand(spec, grad, row, state):
    slots = [np.full(s.shape(1, 4), spec.initial_value(s), np.float32) for s in spec.rule.slots]
    ones = np.ones((1, 4), np.float32)
    new, *new_slots = apply(spec.rule, np.float32([grad]), ones, slots, spec.operands(1))
    np.testing.assert_allclose(new[0], row, rtol=1e-6)
    if state is not None:
        np.testing.assert_allclose(new_slots[0][0], state, rtol=1e-6)


def test_rowwise_state_is_the_mean_of_squares_and_not_another_mean():
    """Two steps, since a first step from 0 cannot tell a scale; and a gradient of mean 0."""
    spec = rowwise_adagrad(lr=0.1)
    row, total = np.ones((1, 4), np.float32), np.zeros(1, np.float32)
    row, total = apply(spec.rule, np.float32([[1, -1, 1, -1]]), row, [total], spec.operands(1))
    assert total[0] == 1
    row, total = apply(spec.rule, np.float32([[3, 3, 3, 3]]), row, [total], spec.operands(2))
    assert total[0] == 10
    np.testing.assert_allclose(row[0, 0], 0.9 - 0.3 / np.sqrt(10), rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("ftrl", "laprop")])
def test_a_zero_gradient_on_fresh_state_leaves_the_row_alone(name):
    """0 / 0 would poison the weight for ever."""
    spec = OptimizerSpec(name=name, lr=0.1)
    row = np.float32([[1, -2, 0]])
    slots = [np.zeros(slot.shape(1, 3), np.float32) for slot in spec.rule.slots]
    new, *state = apply(spec.rule, np.zeros_like(row), row, slots, spec.operands(1))
    np.testing.assert_array_equal(new, row)
    assert all((array == 0).all() for array in state)


@pytest.mark.parametrize("spec", [ftrl(lr=0.1), laprop(lr=0.1)], ids=repr)
def test_a_zero_gradient_leaves_the_row_finite(spec):
    row, zero = np.float32([[0, 0.5, -2]]), np.zeros((1, 3), np.float32)
    slots = [np.full((1, 3), spec.initial_value(slot), np.float32) for slot in spec.rule.slots]
    new, *state = apply(spec.rule, zero, row, slots, spec.operands(1))
    # FTRL's weight is a function of its state alone, and that says 0.
    np.testing.assert_array_equal(new, zero if spec.name == "ftrl" else row)
    assert all(np.isfinite(array).all() for array in state)


def test_adams_bias_correction_goes_on_after_a_pause():
    """Saved at step 7 and loaded: step 8 is not step 1."""
    spec = adam(lr=0.1)
    assert spec.operands(8)[0] == np.float32(0.1 * np.sqrt(1 - 0.999**8) / (1 - 0.9**8))
    assert spec.operands(8)[0] != spec.operands(1)[0]


# -------------------------------------------------------------------------------------------- spec


def test_a_new_learning_rate_is_an_operand_and_not_a_new_rule():
    spec = sgd(lr=0.1)
    one, ones = np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)
    for step, lr in ((1, None), (2, 0.01)):
        (ones,) = apply(spec.rule, one, ones, [], spec.operands(step, lr=lr))
    np.testing.assert_allclose(ones, [[0.89]], rtol=1e-6)
    assert spec.operands(1, lr=0.01).dtype == np.float32


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["l2", "decoupled"])
def test_operands_fit_the_rule(name, mode):
    for weight_decay in (0.0, 0.1):
        spec = OptimizerSpec(name=name, lr=0.1, weight_decay=weight_decay, weight_decay_mode=mode)
        assert spec.rule.name == (f"{name}_{mode}" if weight_decay else name)
        assert spec.operands(3).shape == (len(spec.rule.operands),)
    decoupled = OptimizerSpec(name=name, lr=0.1, weight_decay=0.5, weight_decay_mode="decoupled")
    assert decoupled.operands(3, lr=0.2)[-1] == np.float32(0.9)  # follows the schedule


def test_specs_are_values():
    make = lambda eps: adagrad(lr=0.1, eps=eps, weight_decay=0.2, max_gradient=3)  # noqa: E731
    spec = make(1e-8)
    assert spec == make(1e-8)
    assert hash(spec) == hash(make(1e-8))
    assert spec != make(1e-7)
    assert len({spec, make(1e-8), make(1e-7)}) == 2
    for twin in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), dataclasses.replace(spec)):
        assert twin == spec
    assert eval(repr(spec)) == spec


def test_a_group_is_what_tables_must_share():
    base = adagrad(lr=0.1)
    assert base.group == adagrad(lr=0.1, eps=1e-10).group
    others = [
        adagrad(lr=0.2),
        adagrad(lr=0.1, eps=1e-8),
        rowwise_adagrad(lr=0.1),
        adagrad(lr=0.1, weight_decay=0.1),
        adagrad(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled"),
        adagrad(lr=0.1, max_gradient=1.0),
        adagrad(lr=0.1, initial_accumulator_value=0.1),
    ]
    assert len({spec.group for spec in [base, *others]}) == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OptimizerSpec(name="rmsprop", lr=0.1),
            "'rmsprop'; there are .*sgd.*adam",
        ),
        (lambda: OptimizerSpec(name="adagrad_l2", lr=0.1), "'adagrad_l2'; there are"),
        (
            lambda: OptimizerSpec(name="adagrad", lr=0.1, hyper={"lr_decay": 0.1}),
            "adagrad has no setting 'lr_decay'; it has lr, eps, initial_accumulator_value",
        ),
        (lambda: OptimizerSpec(name="sgd", lr=0.1, hyper={"lr": 0.1}), "no setting 'lr'"),
        (lambda: sgd(lr=-0.1), "lr=-0.1 is not a number >= 0"),
        (lambda: sgd(lr=float("nan")), "lr=nan"),
        (lambda: sgd(lr=float("inf")), "lr=inf"),
        (lambda: sgd(lr="fast"), "lr='fast'"),
        (lambda: adagrad(eps=-1), "eps=-1 "),
        (lambda: adagrad(initial_accumulator_value=-0.1), "initial_accumulator_value=-0.1"),
        (lambda: adam(betas=(0.9, 1.0)), r"beta2=1.0 is not a number in \[0, 1\)"),
        (lambda: adam(betas=(-0.1, 0.9)), "beta1=-0.1"),
        (lambda: sgd(weight_decay=-1), "weight_decay=-1 "),
        (lambda: sgd(weight_decay_mode="L2"), "'L2' is not one of .*'l2', 'decoupled'"),
        (lambda: sgd(max_gradient=-1), "max_gradient=-1 "),
        (lambda: sgd(max_gradient=0), "max_gradient=0 would stop all training"),
        (lambda: ftrl(lr_power=0.5), "lr_power=0.5 is not a number <= 0"),
        (lambda: ftrl(l1=-1), "l1=-1 is not a number >= 0"),
        (lambda: laprop(betas=(1.0, 0.9)), r"beta1=1.0 is not a number in \[0, 1\)"),
        (lambda: adam().operands(0), "steps count from 1"),
        (lambda: adam().operands(1, lr=float("nan")), "lr must be finite"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(OptimizerError, match=message):
        make()
