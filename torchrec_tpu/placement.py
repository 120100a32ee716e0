"""A model's values on the devices of a program, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_tpu.api import has_keys, kjts_in
from torchrec_tpu.sharding.embeddings import collections_in
from torchrec_tpu.sparsecore.aot.pipeline import Feed, make_feed, pack_stack, unpack_stack
from torchrec_tpu.sparsecore.aot.pooled import PooledStack
from torchrec_tpu.sparsecore.aot.program import Program, StackFacts
from torchrec_tpu.sparsecore.aot.tracing import Shape, tensors_in
from torchrec_tpu.sparsecore.batch import SparseBatch
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import ProgramError
from torchrec_tpu.sparsecore.layout import Layout, Stack
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.sparsecore.preprocess import Preprocessor

Array = npt.NDArray[Any]


class Placement:
    """What a `Driver` takes and gives, from and to a model.

    Args:
        model: that was traced, with real tables.
        program: traced from it.
        layouts: FQN -> layout, those of the program.
        dense_optimizer: of the program. Replace the attribute to change its learning rate.
        batch_size: samples of one device.
        sequence_ids: KJT key -> the most ids of one device that the program was traced with.
        pooled: FQN -> pooled stacks, those of the program.

    Raises:
        ProgramError: `layouts`, `pooled` or `batch_size` are not those of the program.

    >>> placement = Placement(model, program, layouts=layouts, dense_optimizer=adagrad(),
    ...                       batch_size=32)  # doctest: +SKIP
    >>> driver = Driver(program, emulator, placement.state(),
    ...                 operands=placement.operands)  # doctest: +SKIP
    >>> for batches in loader:  # one a device  # doctest: +SKIP
    ...     driver.step(placement.feed(batches))
    >>> driver.drain()  # doctest: +SKIP
    >>> placement.write(driver.state, num_steps=driver.num_batches)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        *,
        layouts: Mapping[str, Layout],
        dense_optimizer: OptimizerSpec,
        batch_size: int,
        sequence_ids: Mapping[str, int] | None = None,
        pooled: Mapping[str, Sequence[PooledStack]] | None = None,
    ) -> None:
        self.dense_optimizer = dense_optimizer
        self._model = model
        self._program = program
        self._batch_size = batch_size
        self._sequence_ids = dict(sequence_ids or {})
        self._layouts = dict(layouts)
        self._collections = dict(collections_in(model))
        if moved := {
            n: str(c.device) for n, c in self._collections.items() if c.device.type != "cpu"
        }:
            raise ProgramError(f"collections are on {moved}; their values are read on the cpu")
        facts = {_prefix(f.collection, f.name): f for f in program.stacks}
        self._stacks = {
            _prefix(fqn, stack.name): (fqn, stack)
            for fqn, layout in self._layouts.items()
            for stack in layout.stacks
        }
        if facts.keys() != self._stacks.keys():
            raise ProgramError(
                f"the program has stacks {sorted(facts)}, the layouts {sorted(self._stacks)}; pass "
                "the layouts that it was traced with"
            )
        self._preprocessors = {
            fqn: self._preprocessor(fqn, {f.name: f for f in facts.values() if f.collection == fqn})
            for fqn, layout in self._layouts.items()
            if layout.stacks
        }
        self._pooled = {
            _prefix(fqn, stack.name): (fqn, stack)
            for fqn, stacks in (pooled or {}).items()
            for stack in stacks
        }
        self._check_pooled()
        self._pooled_preprocessors = {
            prefix: self._collections[fqn].preprocessor(
                stack.layout(batch_size=batch_size), batch_size=batch_size
            )
            for prefix, (fqn, stack) in self._pooled.items()
        }
        self._dense_slots = {
            argument.name: np.full(argument.shape, dense_optimizer.initial_value(slot), np.float32)
            for argument in program.arguments
            for slot in dense_optimizer.rule.slots
            if argument.name.startswith(f"dense_slot/{slot.name}/")
        }
        self._num_dense_steps = torch.zeros(())  # one number, which checkpoints load in place
        self.dense_slots = DenseSlots(self, self._dense_slots, self._num_dense_steps)

    def _check_pooled(self) -> None:
        expected = {
            _prefix(facts.collection, facts.name): (
                facts.rows, facts.dim, facts.samples, facts.max_ids,
            )
            for facts in self._program.pooled
        }  # fmt: skip
        found = {
            prefix: (
                stack.cores_per_device * stack.rows_per_core,
                stack.core_width,
                stack.cores_per_device * stack.samples_per_core(self._batch_size),
                stack.max_ids,
            )
            for prefix, (_, stack) in self._pooled.items()
        }
        if found != expected:
            raise ProgramError(
                f"pooled stacks have (rows, columns, samples, max_ids) {found} of a device for "
                f"batch_size={self._batch_size}, in the program {expected}; pass those that it was "
                "traced with"
            )

    def _preprocessor(self, fqn: str, facts: Mapping[str, StackFacts]) -> Preprocessor:
        layout, cores = self._layouts[fqn], self._program.cores_per_device
        shape = Shape.of(layout, batch_size=self._batch_size, sequence_ids=self._sequence_ids)
        for stack in layout.stacks:
            fact = facts[stack.name]
            found = (cores * stack.rows_per_core, stack.dim, shape.samples(stack))
            if found != (fact.rows, fact.dim, fact.samples):
                raise ProgramError(
                    f"stack {stack.name!r}: (rows, dim, samples) of a device are {found} for "
                    f"batch_size={self._batch_size}, in the program "
                    f"{(fact.rows, fact.dim, fact.samples)}"
                )
        return self._collections[fqn].preprocessor(
            layout,
            batch_size=self._batch_size,
            capacity={
                name: Capacity(
                    max_ids=fact.max_ids,
                    max_unique_ids=fact.max_unique_ids,
                    buffer_ids=fact.slots_per_device // cores,
                )
                for name, fact in facts.items()
            },
            sequence_ids={
                key: ids
                for key, ids in self._sequence_ids.items()
                if any(key == feature.key for feature in layout.features)
            },
        )

    def state(self) -> dict[str, Array]:
        """Name -> value of every table, slot, dense parameter and dense slot; a copy."""
        state = dict(self._dense_slots)
        for prefix, (fqn, stack) in self._stacks.items():
            for name, arrays in self._arrays(fqn, _tables(stack)).items():
                state[f"{prefix}/{name}"] = pack_stack(self._layouts[fqn], stack, arrays)
        for prefix, (fqn, owned) in self._pooled.items():
            for name, arrays in self._arrays(fqn, _tables(owned)).items():
                dummy = 0.0 if name == "table" else 1.0
                state[f"{prefix}/{name}"] = owned.pack(arrays, dummy=dummy)
        dense = self._dense()
        for argument in self._program.arguments:
            if argument.kind == "dense":
                state[argument.name] = dense[argument.name].numpy().copy()
        return state

    def write(self, state: Mapping[str, Any], *, num_steps: int) -> None:
        """Puts a driver's state into the model and its tables' optimizers, in place.

        Args:
            state: `Driver.state`, drained.
            num_steps: batches since `state()` was taken, for optimizers that count them.
        """
        for prefix, (fqn, stack) in self._stacks.items():
            for name, arrays in self._arrays(fqn, _tables(stack)).items():
                new = unpack_stack(self._layouts[fqn], stack, state[f"{prefix}/{name}"])
                for table, array in arrays.items():
                    array[:] = new[table]
        for prefix, (fqn, owned) in self._pooled.items():
            for name, arrays in self._arrays(fqn, _tables(owned)).items():
                owned.unpack(state[f"{prefix}/{name}"], arrays)
        for name, tensor in self._dense().items():
            if name in state:
                tensor.copy_(torch.from_numpy(state[name]))
        for name, array in self._dense_slots.items():
            array[:] = state[name]
        for collection in self._collections.values():
            collection.fused_optimizer.advance(num_steps)
        self._num_dense_steps += num_steps

    def operands(self, step: int) -> dict[str, float]:
        """The scalars of step `step`, from 1, with the learning rates of this moment."""
        operands = {}
        stacks: dict[str, tuple[str, Stack | PooledStack]] = {**self._stacks, **self._pooled}
        for prefix, (fqn, stack) in stacks.items():
            collection = self._collections[fqn]
            (spec,) = {collection.table_optimizers[table] for table in _tables(stack)}
            if spec is None:  # frozen
                continue
            values = {
                collection.fused_optimizer.operands(table, ahead=step - 1)
                for table in _tables(stack)
            }
            if len(values) > 1:
                raise ProgramError(
                    f"stack {stack.name!r}: its tables have made different numbers of steps, and "
                    "one update is of all of them"
                )
            for name, number in zip(spec.rule.operands, *values, strict=True):
                operands[f"{prefix}/operand:{name}"] = number
        spec = self.dense_optimizer
        for name, value in zip(
            spec.rule.operands, spec.operands(int(self._num_dense_steps) + step), strict=True
        ):
            operands[f"dense_operand/{name}"] = float(value)
        return operands

    def feed(self, batches: Sequence[Any]) -> Feed:
        """The feed of one step.

        Args:
            batches: one a device, each as the model takes it, of `batch_size` samples.

        Raises:
            ProgramError: another number of batches, or of samples.
            CapacityError: a batch exceeds the program's limits; or others of `Preprocessor`.
        """
        if len(batches) != self._program.num_devices:
            raise ProgramError(f"{len(batches)} batches for {self._program.num_devices} devices")
        sparse: dict[str, list[SparseBatch]] = {fqn: [] for fqn in self._preprocessors}
        owned: dict[str, list[Array]] = {}
        inputs: dict[str, list[Array]] = {}
        for device, batch in enumerate(batches):
            for kjt in kjts_in(batch):
                for fqn, collection in self._collections.items():
                    if has_keys(kjt, collection):
                        if kjt.stride() != self._batch_size:
                            raise ProgramError(
                                f"a device's batch has {kjt.stride()} samples, the program "
                                f"{self._batch_size}"
                            )
                        arrays = collection.arrays(kjt)
                        if fqn in sparse:
                            sparse[fqn].append(self._preprocessors[fqn](**arrays))
                        for prefix, (_, stack) in self._of(fqn):
                            ids = self._pooled_preprocessors[prefix](**arrays)
                            packed = stack.pack_ids(ids, device=device)
                            for name, array in zip(("header", "ids"), packed, strict=True):
                                owned.setdefault(f"{prefix}/buffer:{name}", []).append(array)
            for name, tensor in tensors_in(batch).items():
                inputs.setdefault(name, []).append(tensor.detach().numpy())
        feed = make_feed(sparse, inputs, self._layouts, batch_size=self._batch_size)
        buffers = {name: np.stack(arrays) for name, arrays in owned.items()}
        return replace(feed, buffers={**feed.buffers, **buffers})

    def _of(self, fqn: str) -> Iterator[tuple[str, tuple[str, PooledStack]]]:
        """The pooled stacks of one collection."""
        return ((prefix, pair) for prefix, pair in self._pooled.items() if pair[0] == fqn)

    def _arrays(self, fqn: str, tables: Sequence[str]) -> dict[str, dict[str, Array]]:
        """The live arrays of a stack, by the program's name for them and by table."""
        collection = self._collections[fqn]
        optimizer = collection.fused_optimizer
        arrays = {"table": {t: optimizer.weight(t).detach().numpy() for t in tables}}
        spec = collection.table_optimizers[tables[0]]
        if spec is not None:
            slots = {t: optimizer.slots(t) for t in tables}
            for index, slot in enumerate(spec.rule.slots):
                arrays[f"slot:{slot.name}"] = {t: slots[t][index].numpy() for t in tables}
        return arrays

    def _dense(self) -> dict[str, Tensor]:
        """The live tensors outside the collections, by the program's names for them."""
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {f"dense/{name}": tensor.detach() for name, tensor in tensors.items()}


class DenseSlots(KeyedOptimizer):
    """A placement's dense slots under torch's names; for checkpoints, it makes no steps.

    A dense optimizer of torch with the same slots reads what was saved of it, and the other way.
    """

    def __init__(self, placement: Placement, slots: Mapping[str, Array], num_steps: Tensor) -> None:
        self._placement = placement
        parameters = dict(placement._model.named_parameters())
        state: dict[Any, dict[str, Tensor]] = {}
        params: dict[str, Tensor] = {}
        for argument, array in slots.items():  # dense_slot/<slot>/<FQN>
            _, slot, name = argument.split("/", 2)
            params[name] = parameters[name]
            values = state.setdefault(parameters[name], {"step": num_steps})
            values[slot] = torch.from_numpy(array)
        group = {"params": list(params.values()), "lr": placement.dense_optimizer.lr}
        super().__init__(params, state, [group])

    def post_load_state_dict(self) -> None:
        """Hands the learning rate that was loaded to the placement."""
        (group,) = self.param_groups
        spec = self._placement.dense_optimizer
        self._placement.dense_optimizer = replace(spec, lr=float(group["lr"]))


def _tables(stack: Stack | PooledStack) -> list[str]:
    """Names of a stack's tables."""
    if isinstance(stack, PooledStack):
        return [table.name for table in stack.tables]
    return [stacked.table.name for stacked in stack.tables]


def _prefix(collection: str, stack: str) -> str:
    return f"{collection}/{stack}".lstrip("/")
