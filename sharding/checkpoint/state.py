"""The state of a training run by name, as live tensors: model, optimizers, hyperparameters.

Names are those of TorchRec: FQNs for parameters, `<table>.momentum1` for the first slot of a fused
optimizer. All values alias the memory that training uses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torchrec_tpu.sharding.checkpoint.storage import blocks_of
from torchrec_tpu.sharding.embeddings import SparseCoreCollection
from torchrec_tpu.sharding.optimizer import FusedEmbeddingOptimizer
from torchrec_tpu.sharding.sharded_optimizer import ShardedEmbeddingOptimizer
from torchrec_tpu.sparsecore.errors import CheckpointError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_KINDS: Final = ("embedding_bags", "embeddings")
_PLAIN: Final = (bool, int, float, str, type(None), Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """What must be the same when a table is loaded.

    Attributes:
        size: (num_embeddings, embedding_dim).
        features: KJT keys, where the module tells.
        optimizer: name of its rule, where the module tells.
    """

    size: tuple[int, int]
    features: tuple[str, ...] | None = None
    optimizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimized:
    """A parameter as its optimizer knows it.

    Attributes:
        optimizer: that updates it.
        parameter: key of `optimizer.state`.
        group: of the parameter; live.
        table: its name, when the parameter is an embedding table.
        copies: its state when that is on a device, where it has another form.
    """

    optimizer: torch.optim.Optimizer
    parameter: Any
    group: MutableMapping[str, Any]
    table: str | None
    copies: Mapping[str, Any] | None = None

    @property
    def state(self) -> Mapping[str, Any]:
        """Live, or copies; empty before the first step of some optimizers."""
        if self.copies is not None:
            return self.copies
        state: Mapping[Any, Mapping[str, Any]] = self.optimizer.state
        return state.get(self.parameter, {})

    @property
    def is_fused(self) -> bool:
        """Whether it runs in backward."""
        return isinstance(self.optimizer, FusedOptimizer)

    @property
    def hyper(self) -> dict[str, Any]:
        """Settings of the parameter, those that are plain values."""
        return {
            name: value
            for name, value in self.group.items()
            if name != "params" and _is_plain(value)
        }


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedModelParallel or DistributedDataParallel: no prefix in FQNs."""
    while isinstance(model, DistributedModelParallel | DistributedDataParallel):
        model = model.module
    return model


def model_state(model: nn.Module) -> dict[str, Any]:
    """FQN -> live tensor, or a small object.

    Raises:
        CheckpointError: a parameter has no memory yet.
    """
    state = dict(unwrapped(model).state_dict())
    for name, value in state.items():
        if isinstance(value, Tensor) and any(b.tensor.is_meta for b in blocks_of(value)):
            raise CheckpointError(
                f"{name!r} is on the meta device: give the model real parameters first"
            )
    return state


def tables_of(model: nn.Module, state: Mapping[str, Any]) -> dict[str, TableFacts]:
    """FQN -> facts of every embedding table of TorchRec's form in a model."""
    features: dict[str, tuple[str, ...]] = {}
    rules: dict[str, str] = {}
    for fqn, module in unwrapped(model).named_modules():
        for kind, method in zip(
            _KINDS, ("embedding_bag_configs", "embedding_configs"), strict=True
        ):
            configs = getattr(module, method, None)
            for config in configs() if callable(configs) else ():
                key = _join(fqn, f"{kind}.{config.name}.weight")
                features[key] = tuple(config.feature_names)
        if isinstance(module, FusedOptimizerModule):
            optimizer = module.fused_optimizer
            if isinstance(optimizer, FusedEmbeddingOptimizer | ShardedEmbeddingOptimizer):
                for key in optimizer.params:
                    table = table_name(key)
                    if table is not None:
                        rules[_join(fqn, key)] = optimizer.spec(table).name
    return {
        key: TableFacts(
            size=(value.size(0), value.size(1)),
            features=features.get(key),
            optimizer=rules.get(key),
        )
        for key, value in state.items()
        if table_name(key) is not None and isinstance(value, Tensor) and value.dim() == 2
    }


def table_name(fqn: str) -> str | None:
    """The table of `...embedding_bags.<table>.weight`; None for other parameters."""
    head, _, leaf = fqn.rpartition(".")
    rest, _, table = head.rpartition(".")
    return table if leaf == "weight" and rest.rpartition(".")[2] in _KINDS else None


def optimized(model: nn.Module, optimizers: Optimizers) -> dict[str, Optimized]:
    """Name -> every parameter with an optimizer: the model's fused ones, and those given.

    A parameter's name is its FQN; other entries of a TorchRec optimizer keep their key.

    Raises:
        CheckpointError: two optimizers have state for one parameter, or a parameter has no name.
    """
    found: dict[str, Optimized] = {}
    seen: set[int] = set()
    names = {id(p): name for name, p in unwrapped(model).named_parameters()}
    for prefix, fused in _fused(model):
        _add(found, seen, fused, names, prefix)
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for optimizer in given:
        _add(found, seen, optimizer, names, "")
    return found


def leaves(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """(prefix of its keys, optimizer) of every optimizer in a combined one."""
    if isinstance(optimizer, CombinedOptimizer):
        for prefix, child in optimizer.optimizers:
            for inner, leaf in leaves(child):
                yield _join(prefix, inner), leaf
    else:
        yield "", optimizer


def _add(
    found: dict[str, Optimized],
    seen: set[int],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    prefix: str,
) -> None:
    known = set(names.values())
    for inner, leaf in leaves(optimizer):
        named: Mapping[str, Any] = leaf.params if isinstance(leaf, KeyedOptimizer) else {}
        keys = {id(p): _join(_join(prefix, inner), key) for key, p in named.items()}
        groups = {id(p): group for group in leaf.param_groups for p in group["params"]}
        copies = _copies_from_device(leaf)
        in_groups = (p for group in leaf.param_groups for p in group["params"])
        parameters = {id(p): p for p in (*in_groups, *named.values(), *leaf.state)}
        for identity, parameter in parameters.items():
            if identity in seen:
                continue
            name = names.get(identity) or keys.get(identity)
            if name is None:
                raise CheckpointError(
                    f"{type(leaf).__name__} has a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's, so it has no name to be saved under"
                )
            if name not in known:  # TorchRec's own fused collection leaves a part of the FQN out
                candidates = [_join(prefix, f"{kind}.{keys.get(identity)}") for kind in _KINDS]
                name = next((c for c in candidates if c in known), name)
            entry = Optimized(
                optimizer=leaf,
                parameter=parameter,
                group=groups.get(identity, {"params": [parameter]}),
                table=table_name(name),
                copies=next((copies.get(k) for k, p in named.items() if p is parameter), None),
            )
            if name in found:
                if not entry.state:
                    continue  # a table that a dense optimizer was given too, and never steps
                raise CheckpointError(f"{name!r} has state in two optimizers")
            seen.add(identity)
            found[name] = entry


def _copies_from_device(optimizer: torch.optim.Optimizer) -> Mapping[str, Mapping[str, Any]]:
    """By parameter name: state of tables on a device, as copies; see `write_to_device`."""
    if not isinstance(optimizer, FusedEmbeddingOptimizer) or not any(
        value.is_meta for state in optimizer.state.values() for value in state.values()
    ):
        return {}
    copies: Mapping[str, Mapping[str, Any]] = optimizer.state_dict()["state"]
    return copies


def write_to_device(
    model: nn.Module, state: Mapping[str, Any], parameters: Mapping[str, Optimized]
) -> None:
    """Takes the copies that `model_state` and `optimized` gave of tables on a device back there."""
    for fqn, module in unwrapped(model).named_modules():
        if isinstance(module, SparseCoreCollection) and module.device.type not in ("cpu", "meta"):
            names = module.state_dict().keys()
            module.load_state_dict({name: state[_join(fqn, name)] for name in names})
    copies: dict[int, tuple[FusedEmbeddingOptimizer, dict[str, Any]]] = {}
    for entry in parameters.values():
        if entry.copies is not None and isinstance(entry.optimizer, FusedEmbeddingOptimizer):
            key = next(k for k, p in entry.optimizer.params.items() if p is entry.parameter)
            _, of_optimizer = copies.setdefault(id(entry.optimizer), (entry.optimizer, {}))
            of_optimizer[key] = entry.copies
    for optimizer, of_optimizer in copies.values():
        optimizer.load_state_dict({"state": of_optimizer})


def _fused(model: nn.Module) -> Iterator[tuple[str, KeyedOptimizer]]:
    """(FQN of the module, optimizer) of every fused optimizer, as DistributedModelParallel has."""

    def visit(fqn: str, module: nn.Module) -> Iterator[tuple[str, KeyedOptimizer]]:
        if isinstance(module, FusedOptimizerModule):
            fused: Any = module.fused_optimizer
            yield fqn, fused() if callable(fused) else fused  # a method in TorchRec's own
        else:
            for name, child in module.named_children():
                yield from visit(_join(fqn, name), child)

    return visit("", unwrapped(model))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def rng_state() -> dict[str, Any]:
    """States of the CPU generators of torch, random and numpy."""
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one
    return {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": (kind, torch.tensor(np.array(words, np.int64)), position, has_gauss, gauss),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(_tuples(state["random"]))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, tuple | list) else value
