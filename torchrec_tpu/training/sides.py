"""The two sides of a run: DLRM v2 on the SparseCore path, and as plain TorchRec runs it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_tpu.metrics import roc_auc
from torchrec_tpu.recipes import Recipe
from torchrec_tpu.report import SideRecord, TableDifference
from torchrec_tpu.sharding.embeddings import collections_in
from torchrec_tpu.sharding.swap import swap_embeddings
from torchrec_tpu.sparsecore.errors import OptimizerError
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.streams import spmd_safe

OURS, PLAIN = "torchrec_tpu", "torchrec"


def build_model(recipe: Recipe, *, device: torch.device | None = None) -> DLRMTrain:
    """The recipe's DLRM v2 in plain TorchRec, initialized from the recipe's seed.

    On "meta" it has shapes only, whatever its size.
    """
    torch.manual_seed(recipe.seed)
    init = None if recipe.init_std is None else partial(nn.init.normal_, std=recipe.init_std)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature.key}",
            num_embeddings=feature.num_embeddings,
            embedding_dim=recipe.embedding_dim,
            feature_names=[feature.key],
            pooling=PoolingType[feature.pooling.upper()],
            init_fn=init,
        )
        for feature in recipe.features
    ]
    return DLRMTrain(
        DLRM_DCN(
            EmbeddingBagCollection(tables=tables, device=device),
            dense_in_features=recipe.num_dense,
            dense_arch_layer_sizes=list(recipe.dense_arch),
            over_arch_layer_sizes=list(recipe.over_arch),
            dcn_num_layers=recipe.dcn_layers,
            dcn_low_rank_dim=recipe.dcn_rank,
            dense_device=device,
        )
    )


def torch_optimizer(
    spec: OptimizerSpec, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The eager optimizer with the semantics of a spec.

    Raises:
        OptimizerError: no eager class is like it: decoupled decay, clipping, ftrl or laprop.
    """
    hyper: dict[str, Any] = dict(spec.hyper)
    if spec.max_gradient is not None or (
        spec.weight_decay and spec.weight_decay_mode == "decoupled"
    ):
        raise OptimizerError(
            f"{spec!r}: no eager optimizer clips per element or decays decoupled in this way"
        )
    common: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, **common)
    if spec.name == "adagrad":
        return torch.optim.Adagrad(parameters, **common, **hyper)
    if spec.name == "rowwise_adagrad":
        rowwise: torch.optim.Optimizer = RowWiseAdagrad(parameters, **common, **hyper)
        return rowwise
    if spec.name != "adam":
        raise OptimizerError(f"{spec!r}: there is no eager optimizer for {spec.name!r}")
    betas = (hyper["beta1"], hyper["beta2"])
    return torch.optim.Adam(parameters, betas=betas, eps=hyper["eps"], **common)


@dataclass(slots=True, kw_only=True)
class Side:
    """A model with its optimizers, and what it has done so far."""

    name: str
    model: DLRMTrain
    optimizers: dict[str, torch.optim.Optimizer]
    tables: dict[str, nn.Parameter]
    table_state: Callable[[], dict[str, list[Tensor]]]  # optimizer state of each table, now
    record: SideRecord
    _train: Callable[[Batch], tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self._train = spmd_safe(self._train_plainly)

    def step(self, batch: Batch) -> Tensor:
        """One training step; returns the logits (B,)."""
        start = time.perf_counter()
        loss, logits = self._train(batch)
        self.record.losses.append(float(loss))
        self.record.step_seconds.append(time.perf_counter() - start)
        return logits

    def _train_plainly(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss, logits); nothing in it depends on the rank."""
        logits: Tensor
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        loss, (_, logits, _) = self.model(batch)
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss.detach(), logits

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """(mean loss, AUC) over batches, in evaluation mode."""
        self.model.eval()
        total, labels, logits = 0.0, [], []
        with torch.no_grad():
            for batch in batches:
                loss, (_, batch_logits, batch_labels) = self.model(batch)
                total += float(loss) * len(batch_labels)
                labels.append(batch_labels.numpy())
                logits.append(batch_logits.numpy())
        self.model.train()
        if not labels:
            return math.nan, math.nan
        labels_N, logits_N = np.concatenate(labels), np.concatenate(logits)
        return total / len(labels_N), roc_auc(labels_N, logits_N)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later run needs to go on with the same bits."""
        return {
            "model": self.model.state_dict(),
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, in place."""
        self.model.load_state_dict(state["model"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])


def _table_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Table name -> weight, in an eager or in a SparseCore collection."""
    marker = "embedding_bags."
    return {
        name.split(marker)[1].removesuffix(".weight"): parameter
        for name, parameter in model.named_parameters()
        if marker in name
    }


def our_side(recipe: Recipe, model: DLRMTrain) -> Side:
    """The model with its tables on the SparseCore path; they are updated during backward."""
    print(swap_embeddings(model, optimizer=recipe.table_optimizer))
    tables = _table_parameters(model)
    on_tables = {id(parameter) for parameter in tables.values()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in on_tables]
    ((_, collection),) = collections_in(model)
    fused = collection.fused_optimizer
    return Side(
        name=OURS,
        model=model,
        optimizers={
            "dense": torch_optimizer(recipe.dense_optimizer, dense),
            "tables": fused,
        },
        tables=tables,
        table_state=lambda: {name: fused.slots(name) for name in tables},
        record=SideRecord(),
    )


def plain_side(recipe: Recipe, model: DLRMTrain) -> Side:
    """The model as TorchRec runs it eagerly, with optimizers of the same semantics."""
    if recipe.table_optimizer.name == "adam" or recipe.table_optimizer.weight_decay:
        raise OptimizerError(
            f"{recipe.table_optimizer!r}: the eager optimizer also moves rows that no batch has "
            "touched, the fused one does not, so the two cannot be compared"
        )
    tables = _table_parameters(model)
    on_tables = {id(parameter) for parameter in tables.values()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in on_tables]
    of_tables = torch_optimizer(recipe.table_optimizer, tables.values())
    return Side(
        name=PLAIN,
        model=model,
        optimizers={
            "dense": torch_optimizer(recipe.dense_optimizer, dense),
            "tables": of_tables,
        },
        tables=tables,
        table_state=lambda: {
            name: [of_tables.state[weight]["sum"]] if of_tables.state[weight] else []
            for name, weight in tables.items()
        },
        record=SideRecord(),
    )


def differences(ours: Side, plain: Side) -> dict[str, TableDifference]:
    """How far each table and its state are apart now."""
    our_state, plain_state = ours.table_state(), plain.table_state()
    found = {}
    for name, weight in ours.tables.items():
        weight_max, weight_norm = _distance([weight.detach()], [plain.tables[name].detach()])
        state_max, state_norm = _distance(our_state[name], plain_state[name])
        found[name] = TableDifference(
            weight=weight_max, weight_norm=weight_norm, state=state_max, state_norm=state_norm
        )
    return found


def _distance(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> tuple[float, float]:
    """(largest absolute difference, norm of the difference / norm of `plain`)."""
    if not ours and not plain:
        return 0.0, 0.0
    a, b = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in (ours, plain))
    norm = float(b.norm())
    return float((a - b).abs().max()), float((a - b).norm()) / norm if norm else math.nan
