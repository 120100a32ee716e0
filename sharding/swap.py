"""Moves the embedding collections of a TorchRec model onto SparseCores, in place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Unpack

from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_tpu.sharding.embeddings import (
    Options,
    SparseCoreCollection,
    SparseCoreEmbeddingBagCollection,
    SparseCoreEmbeddingCollection,
    check_table,
    collections_in,
    weights_of,
)
from torchrec_tpu.sharding.optimizer_specs import (
    FROZEN,
    Optimizers,
    requested_specs,
    spec_of_table,
)
from torchrec_tpu.sparsecore.errors import TableError
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTable:
    """One table that now runs on SparseCores."""

    module: str  # FQN of its collection
    table: str
    num_embeddings: int
    embedding_dim: int
    optimizer: str
    stack: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModule:
    """One module with embedding tables that stays what it was."""

    module: str  # FQN
    type: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SwapReport:
    """What `swap_embeddings` has moved, what not, and why. Print it.

    Attributes:
        model: the model; another object than the argument only when that itself was a collection.
        moved: tables that run on SparseCores now, in model order.
        kept: modules with tables that were left alone.
    """

    model: nn.Module
    moved: tuple[MovedTable, ...]
    kept: tuple[KeptModule, ...]

    def to_json(self) -> str:
        """The report without the model, as JSON."""
        return json.dumps(
            {"moved": [asdict(t) for t in self.moved], "kept": [asdict(m) for m in self.kept]},
            indent=2,
        )

    def __str__(self) -> str:
        modules = len({table.module for table in self.moved})
        lines = [f"moved: {len(self.moved)} tables of {modules} modules"]
        if self.moved:
            lines += _columns(
                ("module", "table", "rows", "dim", "optimizer", "stack"),
                [
                    (
                        t.module or "(root)",
                        t.table,
                        f"{t.num_embeddings:,}",
                        str(t.embedding_dim),
                        t.optimizer,
                        t.stack,
                    )
                    for t in self.moved
                ],
            )
        lines.append(f"not moved: {len(self.kept)} modules")
        if self.kept:
            lines += _columns(
                ("module", "type", "reason"),
                [(m.module or "(root)", m.type, m.reason) for m in self.kept],
            )
        return "\n".join(lines)

    __repr__ = __str__


def swap_embeddings(
    model: nn.Module, *, optimizer: Optimizers | None = None, **options: Unpack[Options]
) -> SwapReport:
    """Replaces every EmbeddingBagCollection and EmbeddingCollection inside a model, in place.

    Names, parameters and their memory stay: the new modules hold the same `nn.Parameter` objects. A
    table whose parameter was given to `apply_optimizer_in_backward` keeps that optimizer; others
    get `optimizer`. Optimizer state starts anew. An error leaves the model as it was.

    Args:
        model: any module; when it is a collection itself, the new one is `report.model`.
        optimizer: for tables without one: a spec for all, specs by table name, or a sharder's
            `fused_params` dict. Frozen tables (requires_grad=False) need none.
        options: of the new modules, see `Options`; `capacity` may name stacks of several modules.

    Returns:
        The report; print it.

    Raises:
        OptimizerError: a table has no optimizer, or one that has no fused update here.
        LayoutError: tables, features or stacks contradict each other.

    >>> import torchrec, torchrec_tpu
    >>> model = nn.Sequential(torchrec.EmbeddingBagCollection([torchrec.EmbeddingBagConfig(
    ...     num_embeddings=100, embedding_dim=8, name="t", feature_names=["f"])]))
    >>> print(swap_embeddings(model, optimizer=torchrec_tpu.sgd(lr=0.5)))
    moved: 1 tables of 1 modules
      module  table  rows  dim  optimizer    stack
      0       t      100   8    sgd(lr=0.5)  t
    not moved: 0 modules
    """
    found, kept = _scan(model)
    names = {config.name for module in found.values() for config, _ in _tables(module)}
    requested = requested_specs(optimizer, names)
    replacements: dict[nn.Module, SparseCoreCollection] = {}
    moved: list[MovedTable] = []
    for fqn, module in found.items():
        specs = {
            config.name: spec_of_table(
                f"{fqn}.{config.name}".lstrip("."), weight, requested.get(config.name)
            )
            for config, weight in _tables(module)
        }
        new: SparseCoreCollection
        if isinstance(module, EmbeddingBagCollection):
            new = SparseCoreEmbeddingBagCollection.from_torchrec(module, optimizer=specs, **options)
        else:
            new = SparseCoreEmbeddingCollection.from_torchrec(module, optimizer=specs, **options)
        replacements[module] = new
        moved += _moved(fqn, new, specs)

    # Nothing below can fail: the model changes as a whole or not at all.
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])
    for new in replacements.values():
        new.fused_optimizer.mark_parameters()
    return SwapReport(model=replacements.get(model, model), moved=tuple(moved), kept=tuple(kept))


def fused_optimizer(model: nn.Module) -> CombinedOptimizer:
    """One optimizer over every SparseCore collection of a model, keyed by the model's FQNs.

    Pass it, or combine it with the dense one, wherever a torch optimizer goes: LR schedulers,
    checkpoints, training pipelines.
    """
    return CombinedOptimizer(
        [(fqn, collection.fused_optimizer) for fqn, collection in collections_in(model)]
    )


def _scan(
    model: nn.Module,
) -> tuple[dict[str, EmbeddingBagCollection | EmbeddingCollection], list[KeptModule]]:
    """Collections to replace by FQN, and the modules with tables that stay."""
    found: dict[str, EmbeddingBagCollection | EmbeddingCollection] = {}
    kept: list[KeptModule] = []

    def visit(fqn: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        reason = _reason_to_keep(module) or _reason_of_ties(module, owners)
        if reason is not None:
            kept.append(KeptModule(module=fqn, type=type(module).__name__, reason=reason))
        elif _is_plain(module):
            found[fqn] = module
        else:
            for name, child in module.named_children():
                visit(f"{fqn}.{name}" if fqn else name, child)

    seen: set[nn.Module] = set()
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    visit("", model)
    return found, kept


def _is_plain(module: nn.Module) -> TypeIs[EmbeddingBagCollection | EmbeddingCollection]:
    return type(module) in (EmbeddingBagCollection, EmbeddingCollection)


def _reason_to_keep(module: nn.Module) -> str | None:
    """Why a module with tables stays as it is; None for a collection to move, or no tables."""
    if isinstance(module, SparseCoreCollection):
        return "already on SparseCores"
    if isinstance(module, ShardedModule):
        return "already sharded by DistributedModelParallel: swap the model before sharding it"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return f"a plain nn.{type(module).__name__}: put the table into a TorchRec collection"
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        return "its feature processors need the gradient of per-id weights"
    if not isinstance(module, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface):
        return None
    if not _is_plain(module):
        return "a subclass or another implementation, whose own behaviour would be lost"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks, which would be lost: remove them and register them again afterwards"
    try:
        for config, weight in _tables(module):
            check_table(config, weight)
    except TableError as error:
        return str(error)
    return None


def _reason_of_ties(module: nn.Module, owners: Mapping[nn.Parameter, int]) -> str | None:
    """Why a collection must stay whose parameters other modules have too."""
    if not _is_plain(module):
        return None
    tied = [config.name for config, weight in _tables(module) if owners[weight] > 1]
    if not tied:
        return None
    return f"tables {', '.join(tied)} share their parameter with another module (tied weights)"


def _tables(
    module: EmbeddingBagCollection | EmbeddingCollection,
) -> Iterator[tuple[BaseEmbeddingConfig, nn.Parameter]]:
    configs: Sequence[BaseEmbeddingConfig]
    if isinstance(module, EmbeddingBagCollection):
        configs, weights = module.embedding_bag_configs(), weights_of(module.embedding_bags)
    else:
        configs, weights = module.embedding_configs(), weights_of(module.embeddings)
    return zip(configs, weights.values(), strict=True)


def _moved(
    fqn: str, module: SparseCoreCollection, specs: Mapping[str, OptimizerSpec]
) -> Iterator[MovedTable]:
    stack_of = {t.table.name: stack.name for stack in module.layout.stacks for t in stack.tables}
    for table in module.layout.tables:
        yield MovedTable(
            module=fqn,
            table=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            optimizer="frozen" if specs[table.name] is FROZEN else repr(specs[table.name]),
            stack=stack_of[table.name],
        )


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(f"{v:<{w}}" for v, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
