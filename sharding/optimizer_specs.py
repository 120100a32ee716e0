"""OptimizerSpecs from what TorchRec users write: optimizer classes with options, fused_params."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torchrec.optim
from torch import nn

from torchrec_tpu.sparsecore.errors import OptimizerError
from torchrec_tpu.sparsecore.optimizers import RULES, OptimizerSpec, WeightDecayMode, sgd

Optimizers = OptimizerSpec | Mapping[str, OptimizerSpec] | Mapping[str, Any]
"""One for all tables, one per table name, or a sharder's `fused_params`."""

FROZEN: Final = sgd(lr=0.0)
"""The optimizer of a table that is not trained: no state, no update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """What an optimizer of another library is here.

    Attributes:
        name: one of OPTIMIZERS.
        defaults: values of settings that the user leaves out.
        decay: meaning of a weight_decay without weight_decay_mode; None where it has no effect.
    """

    name: str
    defaults: Mapping[str, Any]
    decay: WeightDecayMode | None


_TORCH_ADAM: Final = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_FBGEMM: Final = {"lr": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}

_FBGEMM_SGD: Final = _Origin(name="sgd", defaults=_FBGEMM, decay=None)
_FBGEMM_ADAGRAD: Final = _Origin(name="adagrad", defaults=_FBGEMM, decay=None)
_FBGEMM_ROWWISE: Final = _Origin(name="rowwise_adagrad", defaults=_FBGEMM, decay=None)
_FBGEMM_ADAM: Final = _Origin(name="adam", defaults=_FBGEMM, decay="decoupled")

_CLASSES: Final[Mapping[type[torch.optim.Optimizer], _Origin]] = MappingProxyType(
    {
        torch.optim.SGD: _Origin(name="sgd", defaults={"lr": 1e-3}, decay="l2"),
        torch.optim.Adagrad: _Origin(
            name="adagrad", defaults={"lr": 1e-2, "eps": 1e-10}, decay="l2"
        ),
        torch.optim.Adam: _Origin(name="adam", defaults=_TORCH_ADAM, decay="l2"),
        torch.optim.AdamW: _Origin(
            name="adam", defaults={**_TORCH_ADAM, "weight_decay": 1e-2}, decay="decoupled"
        ),
        torchrec.optim.RowWiseAdagrad: _Origin(
            name="rowwise_adagrad", defaults={"lr": 1e-2, "eps": 1e-10}, decay="l2"
        ),
        # Names without code: TorchRec hands them to FBGEMM, whose defaults they have.
        torchrec.optim.SGD: _FBGEMM_SGD,
        torchrec.optim.Adagrad: _FBGEMM_ADAGRAD,
        torchrec.optim.Adam: _FBGEMM_ADAM,
    }
)

_FUSED: Final[Mapping[str, _Origin]] = MappingProxyType(
    {  # values of fbgemm_gpu's EmbOptimType
        "sgd": _FBGEMM_SGD,
        "exact_sgd": _FBGEMM_SGD,
        "exact_adagrad": _FBGEMM_ADAGRAD,
        "row_wise_adagrad": _FBGEMM_ROWWISE,
        "exact_row_wise_adagrad": _FBGEMM_ROWWISE,
        "adam": _FBGEMM_ADAM,
    }
)

_DECAY_MODES: Final[Mapping[Any, WeightDecayMode | None]] = MappingProxyType(
    {
        "l2": "l2",
        "decoupled": "decoupled",
        0: None,
        1: "l2",
        2: "decoupled",
    }  # ints: WeightDecayMode
)

_INERT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "momentum": 0,
        "dampening": 0,
        "nesterov": False,
        "maximize": False,
        "lr_decay": 0,
        "amsgrad": False,
        "differentiable": False,
        "output_dtype": 0,  # SparseType.FP32 and DataType.FP32 are compared below by name
    }
)
"""Options that are accepted only with the value that turns them off."""

_WITHOUT_EFFECT: Final = frozenset(
    {
        "foreach",
        "fused",
        "capturable",
        "stochastic_rounding",  # float16 tables are rounded to nearest, others not at all
        "enforce_hbm",
        "prefetch_pipeline",
        "cache_algorithm",
        "cache_load_factor",
        "cache_reserved_memory",
        "cache_precision",
    }
)
"""Options that say how another library runs an update, not what it computes."""


def spec_from_class(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any]
) -> OptimizerSpec:
    """The spec of `apply_optimizer_in_backward(optimizer, params, options)`.

    Raises:
        OptimizerError: the class or an option of it has no fused update here.

    >>> spec_from_class(torch.optim.Adagrad, {"lr": 0.5})
    adagrad(lr=0.5, eps=1e-10, initial_accumulator_value=0.0)
    """
    origin = _CLASSES.get(optimizer)
    where = f"{optimizer.__module__}.{optimizer.__qualname__}"
    if origin is None:
        known = sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in _CLASSES)
        raise OptimizerError(f"{where} has no fused update here; there are {', '.join(known)}")
    return _spec(origin, options, where)


def spec_from_fused_params(fused_params: Mapping[str, Any]) -> OptimizerSpec:
    """The spec of a sharder's `fused_params`, with FBGEMM's names and defaults.

    Raises:
        OptimizerError: the optimizer or an option has no fused update here.

    >>> spec_from_fused_params({"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.5})
    rowwise_adagrad(lr=0.5, eps=1e-08, initial_accumulator_value=0.0)
    """
    options = dict(fused_params)
    optimizer = options.pop("optimizer", "exact_sgd")
    name = getattr(optimizer, "value", optimizer)
    if name not in _FUSED:
        raise OptimizerError(
            f"fused_params: optimizer {name!r} has no fused update here; there are "
            f"{', '.join(sorted(_FUSED))}"
        )
    return _spec(_FUSED[name], options, "fused_params")


def requested_specs(optimizer: Optimizers | None, tables: Set[str]) -> Mapping[str, OptimizerSpec]:
    """The optimizer that the caller wants, by table; tables without one are left out."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, OptimizerSpec):
        return dict.fromkeys(tables, optimizer)
    by_table = {k: v for k, v in optimizer.items() if isinstance(v, OptimizerSpec)}
    if not by_table:
        return dict.fromkeys(tables, spec_from_fused_params(optimizer))
    if unknown := optimizer.keys() - (tables & by_table.keys()):
        raise OptimizerError(
            f"optimizer names {sorted(unknown)}, which are no tables with an OptimizerSpec; "
            f"tables: {sorted(tables)}"
        )
    return by_table


def spec_of_table(fqn: str, weight: nn.Parameter, requested: OptimizerSpec | None) -> OptimizerSpec:
    """The optimizer of one table: the parameter's own, else the requested one."""
    classes = getattr(weight, "_optimizer_classes", [])
    options = getattr(weight, "_optimizer_kwargs", [])
    if len(classes) > 1:
        raise OptimizerError(
            f"table {fqn!r}: apply_optimizer_in_backward was called {len(classes)} times"
        )
    if classes:
        try:
            return spec_from_class(classes[0], options[0])
        except OptimizerError as error:
            raise OptimizerError(f"table {fqn!r}: {error}") from error
    if requested is None and not weight.requires_grad:
        return FROZEN
    if requested is None:
        raise OptimizerError(
            f"table {fqn!r} has no optimizer: pass optimizer=, for example adagrad(lr=0.01), or "
            "call apply_optimizer_in_backward on its parameter"
        )
    return requested


def _spec(origin: _Origin, options: Mapping[str, Any], where: str) -> OptimizerSpec:
    given = dict(options)
    if "learning_rate" in given:
        given["lr"] = given.pop("learning_rate")
    given = {**origin.defaults, **given}
    if "betas" in given:
        given["beta1"], given["beta2"] = given.pop("betas")
    for name in _WITHOUT_EFFECT & given.keys():
        del given[name]
    for name in _INERT.keys() & given.keys():
        value = given.pop(name)
        if value != _INERT[name] and getattr(value, "name", "") != "FP32":
            raise OptimizerError(f"{where}: {name}={value!r} has no fused update here")

    decay = float(given.pop("weight_decay", 0.0))
    mode = origin.decay
    if given.pop("decoupled_weight_decay", False):
        mode = "decoupled"
    if "weight_decay_mode" in given:
        value = given.pop("weight_decay_mode")
        try:
            mode = _DECAY_MODES[getattr(value, "value", value)] or origin.decay
        except KeyError:
            raise OptimizerError(f"{where}: weight_decay_mode={value!r} is not supported") from None
    if decay and mode is None:
        raise OptimizerError(
            f"{where}: weight_decay={decay} has no effect there without weight_decay_mode; say "
            "weight_decay_mode='l2' or 'decoupled', or leave weight_decay out"
        )

    limit = given.pop("max_gradient", None)
    clipping = given.pop("gradient_clipping", limit is not None)
    if clipping and limit is None:
        limit = 1.0  # FBGEMM's default
    lr = given.pop("lr")
    known = {*RULES[origin.name].hyper}
    # FBGEMM takes every optimizer's settings and uses those of the chosen one.
    spare = {"eps", "beta1", "beta2", "initial_accumulator_value"} - known
    hyper = {name: value for name, value in given.items() if name not in spare}
    if unknown := hyper.keys() - known:
        raise OptimizerError(
            f"{where}: options {', '.join(sorted(unknown))} have no equivalent here"
        )
    return OptimizerSpec(
        name=origin.name,
        lr=lr,
        hyper=hyper,
        weight_decay=decay,
        weight_decay_mode=mode or "l2",
        max_gradient=limit if clipping else None,
    )
