"""The optimizer of a sharded collection, as TorchRec and its checkpoints know one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.fused import FusedOptimizer

from torchrec_tpu.sharding.optimizer import (
    FusedEmbeddingOptimizer,
    entries_of,
    new_group,
    set_hyper_parameters,
    state_name,
)
from torchrec_tpu.sharding.placements import Shard, TablePlacement
from torchrec_tpu.sharding.tensors import Local, copy, global_tensor, parts
from torchrec_tpu.sparsecore.errors import StateDictError
from torchrec_tpu.sparsecore.geometry import Geometry
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec


class ShardedEmbeddingOptimizer(FusedOptimizer):
    """Tables and their state over all ranks, for the optimizer that updates this rank's shards.

    Keys and names are those of `FusedEmbeddingOptimizer`. Sharded entries are ShardedTensors (or
    DTensors) that alias the live shards, so reading them needs no collective; `<table>.step` is the
    same on all ranks. A table without a shard on this rank has no entry here, as in TorchRec;
    `param_groups`, one for each distinct `OptimizerSpec`, are alike on all ranks.
    """

    params: dict[str, Any]
    state: dict[Any, dict[str, Any]]  # type: ignore[assignment]
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        local: FusedEmbeddingOptimizer,
        specs: Mapping[str, OptimizerSpec],
        placements: Mapping[str, TablePlacement],
        shards: Mapping[str, Sequence[tuple[str, Shard]]],
        weights: Mapping[str, Any],
        *,
        env: ShardingEnv,
        prefix: str,
    ) -> None:
        """Wraps the optimizer of this rank's shards.

        Args:
            local: of the shards (and replicas) here, by shard name.
            specs: optimizer of each table, in config order.
            placements: of each table.
            shards: name in `local` and place of each shard that is here, by table.
            weights: a table's parameter or distributed tensor, by table; those with state here.
            env: of the collection.
            prefix: of parameter names, "embedding_bags" or "embeddings".
        """
        self._local = local
        self._specs = dict(specs)
        self._placements = dict(placements)
        self._shards = {table: tuple(pairs) for table, pairs in shards.items()}
        self._keys = {table: f"{prefix}.{table}.weight" for table in weights}
        groups = {spec: new_group(spec) for spec in specs.values()}
        for table, weight in weights.items():
            groups[specs[table]]["params"].append(weight)
        self._group_of = groups  # the dicts that are in param_groups
        super().__init__(
            {self._keys[table]: weight for table, weight in weights.items()},
            {weight: self._state_of(table, env) for table, weight in weights.items()},
            list(groups.values()),
        )

    def update(
        self,
        grad: Tensor,
        buffers: Sequence[Tensor],
        geometry: Geometry,
        shards: Sequence[str],
        *,
        is_clipped: bool = False,
    ) -> None:
        """One update of every row that the buffers name; see `FusedEmbeddingOptimizer.update`."""
        self.sync()
        self._local.update(grad, buffers, geometry, shards, is_clipped=is_clipped)

    def count_updates(self, shards: Sequence[str]) -> None:
        """Counts an update of shards that have no rows, for the bias correction to agree."""
        for name in shards:
            step = self._local.step_of(name)
            if step is not None and self._local.weight(name).requires_grad:
                step.add_(1)

    def sync(self) -> None:
        """Hands the current hyperparameters to the optimizer of the shards."""
        for name, spec in self._local.specs.items():
            group = self._local.group(name)
            current = self._group_of[spec]
            group.update((key, current[key]) for key in group if key != "params")

    @property
    def local(self) -> FusedEmbeddingOptimizer:
        """The optimizer of this rank's shards and replicas, by shard name."""
        return self._local

    def spec(self, table: str) -> OptimizerSpec:
        """What the table's optimizer was at construction; `param_groups` has the current values."""
        return self._specs[table]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: backward has made the update. A closure is ignored, as in TorchRec."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: tables have no gradients."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Does nothing: state exists from the start, and a dummy step would count as one."""

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of updates that the bias correction of every table counts from."""
        self._local.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Sets hyperparameters by name in every group that has them.

        Raises:
            OptimizerError: no group has one of the names.
        """
        set_hyper_parameters(self.param_groups, params_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a state dict into the live shards.

        Its entries are whole tensors, or sharded as this plan does. A missing step (TorchRec saves
        none) leaves the counter as it is, with a warning.

        Raises:
            StateDictError: tables, slots or shapes differ; nothing has been changed.
        """
        loaded = state_dict["state"]
        pairs: list[tuple[Tensor, Tensor]] = []
        for table, key in self._keys.items():
            state = self.state[self.params[key]]
            new = entries_of(table, key, loaded, state, self._specs[table].rule)
            for name, value in new.items():
                if name == f"{table}.step" or not self._shards.get(table):
                    if value.shape != state[name].shape:
                        raise StateDictError(
                            f"table {table!r}: {name!r} has shape {tuple(value.shape)}, expected "
                            f"{tuple(state[name].shape)}"
                        )
                    pairs.append((state[name], value))
                else:
                    local = self._slots(table)[name.removeprefix(f"{table}.")]
                    pairs += parts(self._placements[table], local, value, name=name)
        copy(pairs)
        if self.defaults["_save_param_groups"]:
            rest = {**state_dict, "state": {k: self.state[p] for k, p in self.params.items()}}
            super().load_state_dict(rest)

    def _slots(self, table: str) -> dict[str, Local]:
        """Slot name -> the live state of this rank's shards of one table."""
        rule = self._specs[table].rule
        return {
            state_name(rule, index): [
                (shard, self._local.slots(name)[index]) for name, shard in self._shards[table]
            ]
            for index in range(len(rule.slots))
        }

    def _state_of(self, table: str, env: ShardingEnv) -> dict[str, Any]:
        if table not in self._shards:  # a replica
            return self._local.state[self._local.weight(table)]
        rule = self._specs[table].rule
        state: dict[str, Any] = {
            f"{table}.{name}": global_tensor(
                self._placements[table],
                local,
                env,
                dtype=torch.float32,
                ndim=len(slot.shape(1, 1)),
            )
            for (name, local), slot in zip(self._slots(table).items(), rule.slots, strict=True)
        }
        first, *others = (name for name, _ in self._shards[table])
        if (step := self._local.step_of(first)) is not None:
            for name in others:
                self._local.share_step(name, step)
            state[f"{table}.step"] = step
        return state
