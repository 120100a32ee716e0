"""The tables of a model that TorchRec's planner is asked about, and their optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchrec.distributed.planner.types import PlannerErrorType
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from torchrec_tpu.sharding.optimizer_specs import spec_from_class, spec_from_fused_params
from torchrec_tpu.sharding.search import PlanError
from torchrec_tpu.sparsecore.layout import Combiner, Table
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A table of a model, and what updates it.

    Attributes:
        module: FQN of its collection.
        table: shape, pooling, features.
        rule: key of `optimizers.RULES`; None for a frozen table.
        is_weighted: whether its bags are weighted.
    """

    module: str
    table: Table
    rule: str | None
    is_weighted: bool


def _sharded_modules(
    model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> list[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Modules that a sharder takes, with their FQN; as TorchRec finds them, by class name."""
    by_name = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    found = []

    def visit(fqn: str, module: nn.Module) -> None:
        sharder = by_name.get(sharder_name(type(module)))
        if sharder is not None:
            found.append((fqn, module, sharder))
            return
        for name, child in module.named_children():
            visit(f"{fqn}.{name}".lstrip("."), child)

    visit("", model)
    return found


def tables_in(model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> list[Found]:
    """Tables of every sharded module, in the model's order."""
    found = []
    for fqn, module, sharder in _sharded_modules(model, sharders):
        shardable = sharder.shardable_parameters(module)
        fused_params = getattr(sharder, "fused_params", None) or {}
        asked = getattr(sharder, "optimizer", None)
        is_weighted = isinstance(module, EmbeddingBagCollectionInterface) and module.is_weighted()
        for config in _configs(fqn, module):
            if config.name not in shardable:
                continue
            spec = spec_of(config.name, module, shardable[config.name], fused_params, asked)
            found.append(
                Found(
                    module=fqn,
                    table=Table(
                        name=config.name,
                        num_embeddings=config.num_embeddings,
                        embedding_dim=config.embedding_dim,
                        combiner=Combiner(config.pooling.value.lower())
                        if isinstance(config, EmbeddingBagConfig)
                        else Combiner.NONE,
                        features=tuple(config.feature_names),
                        group=spec.group if spec else "frozen",
                    ),
                    rule=spec.rule.name if spec else None,
                    is_weighted=is_weighted,
                )
            )
    if not found:
        raise PlanError(
            f"no module of the model has a sharder; sharders are for "
            f"{[sharder.module_type.__name__ for sharder in sharders]}",
            PlannerErrorType.OTHER,
        )
    return found


def _configs(fqn: str, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    if isinstance(module, EmbeddingBagCollectionInterface):
        return list(module.embedding_bag_configs())
    if isinstance(module, EmbeddingCollectionInterface):
        return list(module.embedding_configs())
    raise PlanError(
        f"module {fqn!r} is a {type(module).__name__}, neither a collection of embedding bags nor "
        "of embeddings",
        PlannerErrorType.OTHER,
    )


def spec_of(
    table: str,
    module: nn.Module,
    weight: Tensor,
    fused_params: Mapping[str, Any],
    optimizer: OptimizerSpec | Mapping[str, Any] | None = None,
) -> OptimizerSpec | None:
    """The optimizer of a table, from wherever TorchRec users say it; None when it is frozen.

    Args:
        table: name.
        module: its collection.
        weight: its parameter.
        fused_params: of the collection's sharder.
        optimizer: of one of this package's sharders: a spec for all tables, or specs by name.
    """
    if isinstance(own := getattr(module, "table_optimizers", None), Mapping):
        spec: OptimizerSpec | None = own[table]
        return spec
    if not weight.requires_grad:
        return None
    if classes := getattr(weight, "_optimizer_classes", None):
        return spec_from_class(classes[0], getattr(weight, "_optimizer_kwargs", [{}])[0])
    if isinstance(optimizer, Mapping):
        optimizer = optimizer.get(table)
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    return spec_from_fused_params(fused_params)


def dense_parameters(model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> int:
    """Numbers outside the sharded modules."""
    tables = {
        id(parameter)
        for _, module, _ in _sharded_modules(model, sharders)
        for parameter in module.parameters()
    }
    return sum(p.numel() for p in model.parameters() if id(p) not in tables)
