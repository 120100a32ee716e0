"""The optimizer of a collection: state, learning rates, checkpoints. Its updates run in backward.

Legend: V num_embeddings, D embedding_dim, T tables.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer

from torchrec_tpu.sharding.device import DeviceTables
from torchrec_tpu.sparsecore import ops
from torchrec_tpu.sparsecore.errors import OptimizerError, StateDictError
from torchrec_tpu.sparsecore.geometry import Geometry
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.sparsecore.rules import Rule


def state_name(rule: Rule, slot: int) -> str:
    """The name under which checkpoints know a slot.

    The first one is "momentum1" whatever it holds, as in TorchRec's fused optimizers, so that
    checkpoints can be exchanged; the others have the names of torch.optim.
    """
    return "momentum1" if slot == 0 else rule.slots[slot].name


def counts_steps(rule: Rule) -> bool:
    """Whether the rule's operands depend on the number of updates (Adam's bias correction)."""
    return rule.prepare(1, rule.hyper) != rule.prepare(2, rule.hyper)


def set_hyper_parameters(
    groups: Sequence[dict[str, Any]], hyper_parameters: Mapping[str, Any]
) -> None:
    """Sets hyperparameters by name in every group that has them.

    Raises:
        OptimizerError: no group has one of the names.
    """
    known = {name for group in groups for name in group} - {"params"}
    if unknown := hyper_parameters.keys() - known:
        raise OptimizerError(
            f"no table has hyperparameters {sorted(unknown)}; there are {sorted(known)}"
        )
    for group in groups:
        group.update((name, value) for name, value in hyper_parameters.items() if name in group)


def entries_of(
    table: str, key: str, loaded: Mapping[str, Any], state: Mapping[str, Any], rule: Rule
) -> dict[str, Any]:
    """A table's entries of a state dict, those that its optimizer has.

    A missing step (TorchRec saves none) is that of `state`, with a warning.

    Args:
        table: name.
        key: of the table in `loaded`.
        loaded: "state" of the state dict.
        state: what the optimizer has of the table.
        rule: of the table.

    Raises:
        StateDictError: the table is missing, or has other entries.
    """
    if key not in loaded:
        raise StateDictError(
            f"table {table!r}: the state dict has no {key!r}; it has {sorted(loaded)}"
        )
    new = dict(loaded[key])
    step = f"{table}.step"
    if step in state and step not in new:
        warnings.warn(
            f"table {table!r}: the state dict has no {step!r}, so the bias correction goes "
            f"on from step {int(state[step])}; set_optimizer_step(n) changes that",
            stacklevel=3,
        )
        new[step] = state[step]
    if new.keys() != state.keys():
        raise StateDictError(
            f"table {table!r}: the state dict has {sorted(new)}, optimizer "
            f"{rule.name!r} has {sorted(state)}"
        )
    return new


class FusedEmbeddingOptimizer(FusedOptimizer):
    """The optimizer of one collection: a torch optimizer whose updates happen in `backward()`.

    `param_groups` hold every hyperparameter, one group for each distinct `OptimizerSpec` in config
    order, and are read at each update, so learning rate schedulers work as usual. `step()` and
    `zero_grad()` have nothing left to do. State is allocated at construction and updated in place;
    `state_dict()` gives the live tensors, in logical shape:

        embedding_bags.<table>.weight:
            <table>.momentum1   first slot: (V, D), or (V,) for row-wise rules
            <table>.exp_avg_sq  further slots
            <table>.step        number of updates, () int64; only when the rule counts them

    Rows that a batch does not touch keep their weights and state: Adam's moments of such a row do
    not decay, and a collection's step counts once per backward of a lookup.
    """

    params: dict[str, Any]  # wrappers such as WarmupOptimizer add entries of their own
    state: dict[Any, dict[str, Tensor]]  # type: ignore[assignment]
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        specs: Mapping[str, OptimizerSpec],
        *,
        key: Callable[[str], str],
    ) -> None:
        """Allocates the state.

        Args:
            weights: (V, D) parameter of each table, in config order. State is float32 always.
            specs: optimizer of each table.
            key: table name -> parameter name in state dicts.
        """
        self._specs = dict(specs)
        self._on_device: DeviceTables | None = None
        self._keys = {table: key(table) for table in weights}
        groups: dict[OptimizerSpec, dict[str, Any]] = {}
        for table, weight in weights.items():
            group = groups.setdefault(specs[table], new_group(specs[table]))
            group["params"].append(weight)
        super().__init__(
            {self._keys[table]: weight for table, weight in weights.items()},
            {weight: self._initial_state(table, weight) for table, weight in weights.items()},
            list(groups.values()),
        )

    def update(
        self,
        grad: Tensor,
        buffers: Sequence[Tensor],
        geometry: Geometry,
        tables: Sequence[str],
        *,
        is_clipped: bool = False,
    ) -> None:
        """One update of every row that the batch looked up, in place; frozen tables are skipped.

        Args:
            grad: gradient of the lookup's output, contiguous float32.
            buffers: the lookup's.
            geometry: the lookup's.
            tables: names in the order of the geometry.
            is_clipped: whether `max_gradient` has been applied to `grad` before.

        Raises:
            OptimizerError: a learning rate or another setting is not finite; nothing has changed.
        """
        group_of = {weight: group for group in self.param_groups for weight in group["params"]}
        calls: dict[tuple[str, float], list[int]] = {}
        for index, table in enumerate(tables):
            weight = self.weight(table)
            if weight.requires_grad:
                max_gradient = 0.0 if is_clipped else group_of[weight]["max_gradient"] or 0.0
                calls.setdefault((self._specs[table].rule.name, max_gradient), []).append(index)
        arguments = []
        for (rule, max_gradient), indices in calls.items():
            names = [tables[index] for index in indices]
            operands = [self._operands(name, group_of[self.weight(name)]) for name in names]
            arguments.append(
                (
                    *self._arrays(names),
                    torch.tensor(operands, dtype=torch.float32),
                    geometry.select(indices).encode(),
                    rule,
                    max_gradient,
                )
            )
        for call in arguments:  # nothing has changed before all of them are ready
            ops.sparse_dense_matmul_update_(grad, buffers, *call)
        steps = (self.step_of(tables[index]) for index in itertools.chain(*calls.values()))
        for step in {id(step): step for step in steps if step is not None}.values():
            step.add_(1)  # once, also where shards of a table share it

    def _arrays(self, tables: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and slots as the op takes them, table by table or stack by stack."""
        if self._on_device is not None:
            return self._on_device.arrays(tables)
        slots = [slot for table in tables for slot in self.slots(table)]
        return [self.weight(table).detach() for table in tables], slots

    def weight(self, table: str) -> nn.Parameter:
        """The parameter of one table, (V, D): its live weights, unless they are on a device."""
        return self.params[self._keys[table]]  # type: ignore[no-any-return]

    def slots(self, table: str) -> list[Tensor]:
        """The live state of one table in the rule's order, (V, D) or (V,); on a device a copy."""
        state = self.state[self.params[self._keys[table]]]
        names = self._slot_names(table)
        if self._on_device is not None:
            return [self._on_device.read(table, 1 + index) for index in range(len(names))]
        return [state[name] for name in names]

    def _slot_names(self, table: str) -> list[str]:
        """Names of a table's slots in its state, in the rule's order."""
        rule = self._specs[table].rule
        return [f"{table}.{state_name(rule, index)}" for index in range(len(rule.slots))]

    def operands(self, table: str, *, ahead: int = 0) -> tuple[float, ...]:
        """The rule's operands for the next update of a table, with the current hyperparameters.

        `ahead` updates before it are still to come.
        """
        return self._operands(table, self.group(table), ahead)

    def max_gradient(self, table: str) -> float:
        """The current limit of each gradient element's magnitude; 0 for none."""
        return float(self.group(table)["max_gradient"] or 0.0)

    def advance(self, num_updates: int) -> None:
        """Counts updates that were made elsewhere, for the bias correction of those to come."""
        for table in self._keys:
            counter = self.step_of(table)
            if counter is not None:
                counter.add_(num_updates)

    def group(self, table: str) -> dict[str, Any]:
        """The param_group of one table."""
        weight = self.params[self._keys[table]]
        return next(g for g in self.param_groups if any(p is weight for p in g["params"]))

    def step_of(self, table: str) -> Tensor | None:
        """The live number of updates of one table, () int64; None when its rule counts none."""
        return self.state[self.params[self._keys[table]]].get(f"{table}.step")

    def share_step(self, table: str, step: Tensor) -> None:
        """Lets a table count its updates in another one's tensor."""
        self.state[self.params[self._keys[table]]][f"{table}.step"] = step

    def spec(self, table: str) -> OptimizerSpec:
        """What the table's optimizer was at construction; `param_groups` has the current values."""
        return self._specs[table]

    @property
    def specs(self) -> Mapping[str, OptimizerSpec]:
        """`spec` of every table, in config order."""
        return self._specs

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: backward has made the update. A closure is ignored, as in TorchRec."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: tables have no gradients."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Does nothing: state exists from the start, and a dummy step would count as one."""

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of updates that the bias correction of every table counts from."""
        for table in self._keys:
            counter = self.step_of(table)
            if counter is not None:
                counter.fill_(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Sets hyperparameters by name in every group that has them.

        Raises:
            OptimizerError: no group has one of the names.
        """
        set_hyper_parameters(self.param_groups, params_dict)

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name; see the class. On a device, the tensors are copies."""
        result = super().state_dict()
        if self._on_device is not None:
            for table, key in self._keys.items():
                result["state"][key] |= zip(self._slot_names(table), self.slots(table), strict=True)
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a state dict into the live tensors, after all of it has been checked.

        A missing step (TorchRec saves none) leaves the counter as it is, with a warning.

        Raises:
            StateDictError: tables, slots or shapes differ; nothing has been changed.
        """
        loaded = dict(state_dict["state"])
        for table, key in self._keys.items():
            state = self.state[self.params[key]]
            new = loaded[key] = entries_of(table, key, loaded, state, self._specs[table].rule)
            for name, value in new.items():
                _check_loadable(table, name, value, state[name])
        if unknown := loaded.keys() - self.params.keys():
            raise StateDictError(
                f"the state dict has parameters {sorted(unknown)} that are not here; tables: "
                f"{sorted(self._keys)}"
            )
        if self._on_device is not None:
            for table, key in self._keys.items():
                for index, name in enumerate(self._slot_names(table)):
                    self._on_device.write(table, loaded[key][name], 1 + index)
                    loaded[key][name] = self.state[self.params[key]][name]  # a shape on "meta"
        super().load_state_dict({**state_dict, "state": loaded})

    def rebind(
        self, weights: Mapping[str, nn.Parameter], *, device: DeviceTables | None = None
    ) -> None:
        """Follows parameters that were replaced or moved; state of meta tables starts anew.

        The dicts and groups change in place, so that wrappers which hold them stay valid.

        Args:
            weights: parameter of each table.
            device: what has the tables and their state from now on. The parameters, and the
                state here, are shapes on "meta" then; only the number of updates stays.
        """
        for table, weight in weights.items():
            old = self.params[self._keys[table]]
            slots = dict(zip(self._slot_names(table), self.slots(table), strict=True))
            state = self.state.pop(old) | (slots if self._on_device is not None else {})
            if device is not None:
                state = {
                    name: value.to("meta") if name in slots else _step_on_host(value)
                    for name, value in state.items()
                }
            else:
                state = {
                    name: value if value.device == weight.device else value.to(weight.device)
                    for name, value in state.items()
                    if not value.is_meta
                }
            self.params[self._keys[table]] = weight
            self.state[weight] = state or self._initial_state(table, weight)
            for group in self.param_groups:
                group["params"][:] = [weight if p is old else p for p in group["params"]]
        self._on_device = device
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Tells TorchRec's `in_backward_optimizer_filter` that the tables need no optimizer."""
        for key in self._keys.values():
            mark(self.params[key])

    def _operands(self, table: str, group: Mapping[str, Any], ahead: int = 0) -> tuple[float, ...]:
        rule = self._specs[table].rule
        step = self.step_of(table)
        hyper = {name: float(group[name]) for name in rule.hyper}
        operands = rule.prepare(1 if step is None else int(step) + 1 + ahead, hyper)
        if not all(map(math.isfinite, operands)):
            raise OptimizerError(f"table {table!r}: {hyper} makes {rule.name} step by {operands}")
        return operands

    def _initial_state(self, table: str, weight: nn.Parameter) -> dict[str, Tensor]:
        spec = self._specs[table]
        state = {
            f"{table}.{state_name(spec.rule, index)}": _filled(
                slot.shape(*weight.shape), spec.initial_value(slot), weight.device
            )
            for index, slot in enumerate(spec.rule.slots)
        }
        if counts_steps(spec.rule):
            state[f"{table}.step"] = torch.zeros((), dtype=torch.int64, device=weight.device)
        return state


def mark(parameter: Any) -> None:
    """Tells TorchRec's `in_backward_optimizer_filter` that a parameter needs no optimizer."""
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]


def new_group(spec: OptimizerSpec) -> dict[str, Any]:
    """A param_group without parameters: every hyperparameter of the spec by its name."""
    given = {"lr": spec.lr, "weight_decay": spec.weight_decay, **dict(spec.hyper)}
    hyper = {name: given[name] for name in spec.rule.hyper}
    return {"params": [], **hyper, "max_gradient": spec.max_gradient}


def _step_on_host(step: Tensor) -> Tensor:
    """A table's number of updates; none, where it has no value yet."""
    return torch.zeros_like(step, device="cpu") if step.is_meta else step


def _filled(shape: tuple[int, ...], value: float, device: torch.device) -> Tensor:
    if value == 0 and device.type == "cpu":
        # calloc: pages of rows that no batch ever touches take no memory
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.full(shape, value, dtype=torch.float32, device=device)


def _check_loadable(table: str, name: str, new: object, current: Tensor) -> None:
    if type(new) is not torch.Tensor and type(new) is not nn.Parameter:
        raise StateDictError(
            f"table {table!r}: {name!r} is a {type(new).__name__}, expected a torch.Tensor of "
            f"shape {tuple(current.shape)}; sharded checkpoints are loaded by "
            "torch.distributed.checkpoint"
        )
    if new.shape != current.shape:
        raise StateDictError(
            f"table {table!r}: {name!r} has shape {tuple(new.shape)}, expected "
            f"{tuple(current.shape)}"
        )
