"""The optimizers that are fused into the backward pass: sgd, adagrad, rowwise_adagrad, adam, ...

Each is one pure function of a row, and each also comes with weight decay, made by a wrapper. To
add one: write its function, add it to `_PLAIN`, run `python -m torchrec_tpu.sparsecore.rules
--write`, rebuild, and add a line to the table in tests/sparsecore/test_optimizers.py.

Semantics common to all: the gradients of a row are summed over the whole batch first, then the
rule runs once for that row; rows that the batch does not touch, and their state, are not read
(which torch.optim calls sparse, and for Adam "lazy").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from torchrec_tpu.sparsecore.errors import OptimizerError
from torchrec_tpu.sparsecore.rules import Ops, Rule, Slot

WeightDecayMode = Literal["l2", "decoupled"]

# ------------------------------------------------------------------------------------------- rules


def _sgd(_: Ops, grad: Any, row: Any, lr: Any) -> tuple[Any, ...]:
    return (row - lr * grad,)


def _adagrad(ops: Ops, grad: Any, row: Any, total: Any, lr: Any, eps: Any) -> tuple[Any, ...]:
    total = total + grad * grad
    return row - lr * grad / (ops.sqrt(total) + eps), total


def _rowwise_adagrad(
    ops: Ops, grad: Any, row: Any, total: Any, lr: Any, eps: Any
) -> tuple[Any, ...]:
    total = total + ops.mean_row(grad * grad)
    return row - lr / (ops.sqrt(total) + eps) * grad, total


def _adam(
    ops: Ops,
    grad: Any,
    row: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    lr_t: Any,
    eps_t: Any,
    beta1: Any,
    one_minus_beta1: Any,
    beta2: Any,
    one_minus_beta2: Any,
) -> tuple[Any, ...]:
    exp_avg = beta1 * exp_avg + one_minus_beta1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad)
    return row - lr_t * exp_avg / (ops.sqrt(exp_avg_sq) + eps_t), exp_avg, exp_avg_sq


def _prepare_adam(step: int, hyper: Mapping[str, float]) -> tuple[float, ...]:
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    # Both bias corrections move into two scalars: m^ / (sqrt(v^) + eps) with m^ = m / (1 - b1^t)
    # and v^ = v / (1 - b2^t) is m * sqrt(1 - b2^t) / (1 - b1^t) / (sqrt(v) + eps sqrt(1 - b2^t)).
    root = math.sqrt(1 - beta2**step)
    lr_t = hyper["lr"] * root / (1 - beta1**step)
    return lr_t, hyper["eps"] * root, beta1, 1 - beta1, beta2, 1 - beta2


def _ftrl(
    ops: Ops,
    grad: Any,
    row: Any,
    total: Any,
    linear: Any,
    lr: Any,
    lr_power: Any,
    l1: Any,
    l2: Any,
    beta: Any,
) -> tuple[Any, ...]:
    new_total = total + grad * grad
    old_root, root = ops.power(total, -lr_power), ops.power(new_total, -lr_power)
    linear = linear + grad - (root - old_root) / lr * row
    shrunk = ops.where_equal(l1, 0.0, -linear, ops.clamp(-l1, linear, l1) - linear)
    return shrunk / ((root + beta) / lr + 2.0 * l2), new_total, linear


def _laprop(
    ops: Ops, grad: Any, row: Any, mu: Any, nu: Any, lr: Any, beta1: Any, beta2: Any, eps: Any
) -> tuple[Any, ...]:
    nu = nu * beta2 + (1.0 - beta2) * (grad * grad + eps)
    scale = ops.power(1.0 - ops.power(beta1, 2.0), 0.5)
    mu = beta1 * mu + scale * (grad / ops.sqrt(nu))
    return row - lr * mu, mu, nu


def _lr_and_eps(_: int, hyper: Mapping[str, float]) -> tuple[float, ...]:
    return hyper["lr"], hyper["eps"]


_PLAIN: Final = (
    Rule(
        name="sgd",
        hyper={"lr": 0.01},
        operands=("lr",),
        prepare=lambda _, hyper: (hyper["lr"],),
        update=_sgd,
    ),
    Rule(
        name="adagrad",
        slots=(Slot(name="sum", init="initial_accumulator_value"),),
        hyper={"lr": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.0},
        operands=("lr", "eps"),
        prepare=_lr_and_eps,
        update=_adagrad,
    ),
    Rule(
        name="rowwise_adagrad",
        slots=(Slot(name="sum", width="scalar", init="initial_accumulator_value"),),
        hyper={"lr": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.0},
        operands=("lr", "eps"),
        prepare=_lr_and_eps,
        update=_rowwise_adagrad,
    ),
    Rule(
        name="adam",
        slots=(Slot(name="exp_avg"), Slot(name="exp_avg_sq")),
        hyper={"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
        operands=("lr_t", "eps_t", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2"),
        prepare=_prepare_adam,
        update=_adam,
    ),
    Rule(
        name="ftrl",
        slots=(Slot(name="sum", init="initial_accumulator_value"), Slot(name="linear")),
        hyper={
            "lr": 0.01,
            "lr_power": -0.5,
            "l1": 0.0,
            "l2": 0.0,
            "beta": 0.0,
            "initial_accumulator_value": 0.1,
        },
        operands=("lr", "lr_power", "l1", "l2", "beta"),
        prepare=lambda _, hyper: tuple(
            hyper[name] for name in ("lr", "lr_power", "l1", "l2", "beta")
        ),
        update=_ftrl,
        is_literal=True,
    ),
    Rule(
        name="laprop",
        slots=(Slot(name="mu"), Slot(name="nu")),
        hyper={"lr": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-30},
        operands=("lr", "beta1", "beta2", "eps"),
        prepare=lambda _, hyper: tuple(hyper[name] for name in ("lr", "beta1", "beta2", "eps")),
        update=_laprop,
        is_literal=True,
    ),
)


def with_l2(rule: Rule) -> Rule:
    """`rule` on the gradient of loss + weight_decay / 2 * |row|^2, for the rows of the batch."""

    def update(ops: Ops, grad: Any, row: Any, *rest: Any) -> tuple[Any, ...]:
        *inner, weight_decay = rest
        return rule.update(ops, grad + weight_decay * row, row, *inner)

    return Rule(
        name=f"{rule.name}_l2",
        slots=rule.slots,
        hyper={**rule.hyper, "weight_decay": 0.0},
        operands=(*rule.operands, "weight_decay"),
        prepare=lambda step, hyper: (*rule.prepare(step, hyper), hyper["weight_decay"]),
        update=update,
        is_literal=rule.is_literal,
    )


def with_decoupled_decay(rule: Rule) -> Rule:
    """`rule` after row *= 1 - lr * weight_decay, for the rows of the batch; state sees no decay."""

    def update(ops: Ops, grad: Any, row: Any, *rest: Any) -> tuple[Any, ...]:
        *inner, keep = rest
        return rule.update(ops, grad, row * keep, *inner)

    return Rule(
        name=f"{rule.name}_decoupled",
        slots=rule.slots,
        hyper={**rule.hyper, "weight_decay": 0.0},
        operands=(*rule.operands, "keep"),
        prepare=lambda step, hyper: (
            *rule.prepare(step, hyper),
            1 - hyper["lr"] * hyper["weight_decay"],
        ),
        update=update,
        is_literal=rule.is_literal,
    )


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        rule.name: rule
        for plain in _PLAIN
        for rule in (plain, with_l2(plain), with_decoupled_decay(plain))
    }
)
"""Every rule by name. The order is that of the generated C++ list."""

OPTIMIZERS: Final = tuple(rule.name for rule in _PLAIN)
"""Names that OptimizerSpec takes."""


# -------------------------------------------------------------------------------------------- spec

_RANGES: Final[Mapping[str, tuple[float, float, str]]] = MappingProxyType(
    {
        "beta1": (0.0, 1.0, "in [0, 1)"),
        "beta2": (0.0, 1.0, "in [0, 1)"),
        "lr_power": (-math.inf, math.nextafter(0.0, 1.0), "<= 0"),
    }
)
"""Settings that are not just any number >= 0: lowest value, first value too high, and in words."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer with its settings, as one table uses it. Hashable, picklable, comparable.

    Build it with `sgd`, `adagrad`, `rowwise_adagrad`, `adam`, `ftrl` or `laprop`.

    Attributes:
        name: one of OPTIMIZERS.
        lr: learning rate; what a schedule changes is passed to `operands`, not stored here.
        hyper: the optimizer's other settings by name; what is left out takes its default.
        weight_decay: factor of the decay; 0 turns it off.
        weight_decay_mode: "l2" adds weight_decay * row to the gradient, "decoupled" multiplies the
            row by 1 - lr * weight_decay first (as AdamW).
        max_gradient: limit of the absolute value of every element of the gradient of a bag's
            output, before it is scaled by the id's weight and before duplicates are summed (as
            FBGEMM); None for no limit.

    Raises:
        OptimizerError: an unknown name, or a value outside its range.

    >>> spec = adagrad(lr=0.5, weight_decay=0.25)
    >>> spec.rule.name, spec.rule.operands
    ('adagrad_l2', ('lr', 'eps', 'weight_decay'))
    >>> spec
    adagrad(lr=0.5, eps=1e-10, initial_accumulator_value=0.0, weight_decay=0.25)
    """

    name: str
    lr: float
    hyper: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "l2"
    max_gradient: float | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise OptimizerError(f"no optimizer is named {self.name!r}; there are {OPTIMIZERS}")
        if self.weight_decay_mode not in get_args(WeightDecayMode):
            raise OptimizerError(
                f"{self.name}: weight_decay_mode={self.weight_decay_mode!r} is not one of "
                f"{get_args(WeightDecayMode)}"
            )
        defaults = {k: v for k, v in RULES[self.name].hyper.items() if k != "lr"}
        if unknown := self.hyper.keys() - defaults.keys():
            raise OptimizerError(
                f"{self.name} has no setting {', '.join(map(repr, sorted(unknown)))}; it has "
                f"{', '.join(('lr', *defaults, 'weight_decay', 'max_gradient'))}"
            )
        hyper = {k: self._checked(k, self.hyper.get(k, v)) for k, v in defaults.items()}
        object.__setattr__(self, "hyper", hyper)
        for field in ("lr", "weight_decay"):
            object.__setattr__(self, field, self._checked(field, getattr(self, field)))
        if self.max_gradient is not None:
            value = self._checked("max_gradient", self.max_gradient)
            if value == 0:
                raise OptimizerError(
                    f"{self.name}: max_gradient=0 would stop all training; None means no limit"
                )
            object.__setattr__(self, "max_gradient", value)

    def _checked(self, field: str, value: object) -> float:
        """`value` as a float, if it is a number that `field` may hold."""
        low, high, words = _RANGES.get(field, (0.0, math.inf, ">= 0"))
        if isinstance(value, Real) and low <= float(value) < high:
            return float(value)
        raise OptimizerError(f"{self.name}: {field}={value!r} is not a number {words}")

    @property
    def rule(self) -> Rule:
        """The rule to run: the optimizer, with weight decay when that is not 0."""
        return RULES[f"{self.name}_{self.weight_decay_mode}" if self.weight_decay else self.name]

    @property
    def group(self) -> str:
        """What tables must have in common to share a stack: one update, one learning rate."""
        return repr(self)

    def operands(self, step: int, *, lr: float | None = None) -> NDArray[np.float32]:
        """The rule's operands for one update, float32, in the order of `rule.operands`.

        Args:
            step: number of this update, from 1.
            lr: the learning rate of this step; that of the spec unless given.

        >>> adam(lr=0.1).operands(1)[:2]  # step size and eps with both bias corrections
        array([3.1622775e-02, 3.1622777e-10], dtype=float32)
        """
        lr = self.lr if lr is None else float(lr)
        if step < 1 or not math.isfinite(lr):
            raise OptimizerError(
                f"{self.name}: step={step} and lr={lr}; steps count from 1, lr must be finite"
            )
        hyper = {**self.hyper, "lr": lr, "weight_decay": self.weight_decay}
        return np.array(self.rule.prepare(step, hyper), np.float32)

    def initial_value(self, slot: Slot) -> float:
        """What every element of a state array holds before the first update."""
        return self.hyper[slot.init] if isinstance(slot.init, str) else slot.init

    def __repr__(self) -> str:
        settings = {"lr": self.lr, **self.hyper}
        if self.weight_decay:
            settings["weight_decay"] = self.weight_decay
        words = [f"{k}={v!r}" for k, v in settings.items()]
        if self.weight_decay and self.weight_decay_mode != "l2":
            words.append(f"weight_decay_mode={self.weight_decay_mode!r}")
        if self.max_gradient is not None:
            words.append(f"max_gradient={self.max_gradient!r}")
        return f"{self.name}({', '.join(words)})"


def sgd(
    *,
    lr: float = 0.01,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    max_gradient: float | None = None,
) -> OptimizerSpec:
    r"""Stochastic gradient descent, without momentum.

    .. math:: w \leftarrow w - \mathrm{lr} \cdot g

    Args:
        lr: learning rate.
        weight_decay: see OptimizerSpec, as the two below.
        weight_decay_mode: "l2" or "decoupled"; the same for plain SGD but for rounding.
        max_gradient: limit of each element of a bag's gradient.

    Returns:
        The spec. No state.

    >>> from torchrec_tpu.sparsecore.rules import apply
    >>> spec = sgd(lr=0.25)
    >>> grad, row = np.float32([[1, 8]]), np.float32([[1, 1]])
    >>> apply(spec.rule, grad, row, [], spec.operands(1))
    (array([[ 0.75, -1.  ]], dtype=float32),)

    Same as torch.optim.SGD with momentum 0, on the rows that the batch touches.
    """
    return OptimizerSpec(
        name="sgd",
        lr=lr,
        weight_decay=weight_decay,
        weight_decay_mode=weight_decay_mode,
        max_gradient=max_gradient,
    )


def adagrad(
    *,
    lr: float = 0.01,
    eps: float = 1e-10,
    initial_accumulator_value: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    max_gradient: float | None = None,
) -> OptimizerSpec:
    r"""Adagrad: each weight has its own step size, which shrinks as its gradients add up.

    .. math::
        s \leftarrow s + g^2, \qquad
        w \leftarrow w - \mathrm{lr} \cdot \frac{g}{\sqrt{s} + \mathrm{eps}}

    Args:
        lr: learning rate; there is no lr_decay.
        eps: added outside the root, so that a weight whose gradients were all 0 stays finite.
            FBGEMM's default is 1e-8, torch's is this one.
        initial_accumulator_value: first value of s.
        weight_decay: see OptimizerSpec, as the two below.
        weight_decay_mode: "l2" or "decoupled".
        max_gradient: limit of each element of a bag's gradient.

    Returns:
        The spec. State: "sum", shape (num_embeddings, embedding_dim).

    >>> from torchrec_tpu.sparsecore.rules import apply
    >>> spec = adagrad(lr=0.1)
    >>> grad, row, total = np.float32([[0, 3, 4]]), np.float32([[1, 1, 1]]), np.float32([[0, 0, 0]])
    >>> apply(spec.rule, grad, row, [total], spec.operands(1))
    (array([[1. , 0.9, 0.9]], dtype=float32), array([[ 0.,  9., 16.]], dtype=float32))

    Same as torch.optim.Adagrad on the rows that the batch touches. Reference: Duchi, Hazan, Singer,
    "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", JMLR 2011.
    """
    return OptimizerSpec(
        name="adagrad",
        lr=lr,
        hyper={"eps": eps, "initial_accumulator_value": initial_accumulator_value},
        weight_decay=weight_decay,
        weight_decay_mode=weight_decay_mode,
        max_gradient=max_gradient,
    )


def rowwise_adagrad(
    *,
    lr: float = 0.01,
    eps: float = 1e-10,
    initial_accumulator_value: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    max_gradient: float | None = None,
) -> OptimizerSpec:
    r"""Adagrad with one step size per row: 1/D of the state of Adagrad.

    .. math::
        s \leftarrow s + \frac{1}{D} \sum_k g_k^2, \qquad
        w \leftarrow w - \frac{\mathrm{lr}}{\sqrt{s} + \mathrm{eps}} \cdot g

    with D = embedding_dim, padding not counted.

    Args:
        lr: learning rate.
        eps: added outside the root.
        initial_accumulator_value: first value of s.
        weight_decay: see OptimizerSpec, as the two below.
        weight_decay_mode: "l2" (s sees the decayed gradient) or "decoupled" (it does not).
        max_gradient: limit of each element of a bag's gradient.

    Returns:
        The spec. State: "sum", shape (num_embeddings,).

    >>> from torchrec_tpu.sparsecore.rules import apply
    >>> spec = rowwise_adagrad(lr=0.1)
    >>> grad, row, total = np.float32([[1, 7]]), np.float32([[1, 1]]), np.float32([0])
    >>> apply(spec.rule, grad, row, [total], spec.operands(1))
    (array([[0.98, 0.86]], dtype=float32), array([25.], dtype=float32))

    Same as FBGEMM's EXACT_ROWWISE_ADAGRAD and TorchRec's RowWiseAdagrad. The mean is of the
    squares: the square of the mean, or the sum of squares, is another optimizer.
    """
    return OptimizerSpec(
        name="rowwise_adagrad",
        lr=lr,
        hyper={"eps": eps, "initial_accumulator_value": initial_accumulator_value},
        weight_decay=weight_decay,
        weight_decay_mode=weight_decay_mode,
        max_gradient=max_gradient,
    )


def adam(
    *,
    lr: float = 0.001,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    max_gradient: float | None = None,
) -> OptimizerSpec:
    r"""Adam, bias-corrected and lazy: moments of a row move only when the batch touches the row.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \mathrm{lr} \cdot
            \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \mathrm{eps}}

    t counts the updates of the table, not those of the row. On dense gradients this is
    torch.optim.Adam; a row that a step leaves out keeps its moments, where dense Adam would decay
    them and move the weight.

    Args:
        lr: learning rate.
        betas: decay of the two moments.
        eps: added outside the root of the corrected second moment.
        weight_decay: see OptimizerSpec, as the two below.
        weight_decay_mode: "l2" (torch.optim.Adam) or "decoupled" (torch.optim.AdamW).
        max_gradient: limit of each element of a bag's gradient.

    Returns:
        The spec. State: "exp_avg" and "exp_avg_sq", shape (num_embeddings, embedding_dim).

    >>> from torchrec_tpu.sparsecore.rules import apply
    >>> spec = adam(lr=0.1)
    >>> grad, row, zero = np.float32([[2, -8]]), np.float32([[1, 1]]), np.float32([[0, 0]])
    >>> apply(spec.rule, grad, row, [zero, zero], spec.operands(1))[0]  # first step: lr * sign(g)
    array([[0.9, 1.1]], dtype=float32)

    Reference: Kingma, Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """
    beta1, beta2 = betas
    return OptimizerSpec(
        name="adam",
        lr=lr,
        hyper={"beta1": beta1, "beta2": beta2, "eps": eps},
        weight_decay=weight_decay,
        weight_decay_mode=weight_decay_mode,
        max_gradient=max_gradient,
    )


def ftrl(
    *,
    lr: float = 0.01,
    lr_power: float = -0.5,
    l1: float = 0.0,
    l2: float = 0.0,
    beta: float = 0.0,
    initial_accumulator_value: float = 0.1,
    max_gradient: float | None = None,
) -> OptimizerSpec:
    r"""FTRL-proximal: the weight follows from the state alone, exactly 0 where l1 outweighs it.

    .. math::
        \sigma &= \frac{(n + g^2)^{-p} - n^{-p}}{\mathrm{lr}}, \qquad
        n \leftarrow n + g^2, \qquad z \leftarrow z + g - \sigma w \\
        w &\leftarrow \frac{\mathrm{clamp}(z, \pm l_1) - z}{(n^{-p} + \beta) / \mathrm{lr} + 2 l_2}

    The first update of a row overwrites its initial value, which only enters through sigma: start
    such tables at 0. It raises to a power element by element, which is slow on a CPU.

    Args:
        lr: learning rate.
        lr_power: p, <= 0.
        l1: strength of the penalty on absolute values.
        l2: strength of the penalty on squares.
        beta: added to the root of n.
        initial_accumulator_value: first value of n.
        max_gradient: limit of each element of a bag's gradient.

    Returns:
        The spec. State: "sum" (n) and "linear" (z), shape (num_embeddings, embedding_dim).

    >>> from torchrec_tpu.sparsecore.rules import apply
    >>> spec = ftrl(lr=1.0, initial_accumulator_value=0.0)
    >>> grad, zero = np.float32([[3, -4]]), np.float32([[0, 0]])
    >>> apply(spec.rule, grad, zero, [zero, zero], spec.operands(1))[0]  # -g / sqrt(g^2)
    array([[-1.,  1.]], dtype=float32)

    The computation of jax-tpu-embedding, to the letter. Reference: McMahan et al., "Ad Click
    Prediction: a View from the Trenches", KDD 2013.
    """
    return OptimizerSpec(
        name="ftrl",
        lr=lr,
        hyper={
            "lr_power": lr_power,
            "l1": l1,
            "l2": l2,
            "beta": beta,
            "initial_accumulator_value": initial_accumulator_value,
        },
        max_gradient=max_gradient,
    )


def laprop(
    *,
    lr: float = 0.001,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-30,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    max_gradient: float | None = None,
) -> OptimizerSpec:
    r"""LaProp: Adam with the momentum taken of the scaled gradient; lazy, not bias-corrected.

    .. math::
        \nu &\leftarrow \beta_2 \nu + (1 - \beta_2) (g^2 + \mathrm{eps}) \\
        \mu &\leftarrow \beta_1 \mu + \sqrt{1 - \beta_1^2} \cdot g / \sqrt{\nu}, \qquad
        w \leftarrow w - \mathrm{lr} \cdot \mu

    Args:
        lr: learning rate.
        betas: decay of the momentum and of the squares.
        eps: added to the squares.
        weight_decay: see OptimizerSpec, as the two below.
        weight_decay_mode: "l2" or "decoupled".
        max_gradient: limit of each element of a bag's gradient.

    Returns:
        The spec. State: "mu" and "nu", shape (num_embeddings, embedding_dim).

    >>> from torchrec_tpu.sparsecore.rules import apply
    >>> spec = laprop(lr=1.0, betas=(0.0, 0.75))
    >>> grad, row, zero = np.float32([[2, -8]]), np.float32([[1, 1]]), np.float32([[0, 0]])
    >>> apply(spec.rule, grad, row, [zero, zero], spec.operands(1))[0]
    array([[-1.,  3.]], dtype=float32)

    The computation of jax-tpu-embedding, to the letter. Reference: Ziyin, Wang, Ueda, "LaProp:
    Separating Momentum and Adaptivity in Adam", 2020.
    """
    beta1, beta2 = betas
    return OptimizerSpec(
        name="laprop",
        lr=lr,
        hyper={"beta1": beta1, "beta2": beta2, "eps": eps},
        weight_decay=weight_decay,
        weight_decay_mode=weight_decay_mode,
        max_gradient=max_gradient,
    )
