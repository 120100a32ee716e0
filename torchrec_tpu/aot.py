"""Ahead of time: a model's training step as a program for a TPU slice, without a TPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tpu.api import has_keys, kjts_in
from torchrec_tpu.datasets.synthetic import MultiHot, Synthetic
from torchrec_tpu.sharding.embeddings import SparseCoreCollection, collections_in
from torchrec_tpu.sharding.swap import swap_embeddings
from torchrec_tpu.sparsecore.aot.program import Mode, Program, program_layout, trace_step
from torchrec_tpu.sparsecore.capacity import Capacity, observe
from torchrec_tpu.sparsecore.errors import ProgramError
from torchrec_tpu.sparsecore.layout import Combiner, Layout
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.training import build_model

if TYPE_CHECKING:
    from torchrec_tpu.recipes import Recipe
    from torchrec_tpu.sparsecore.aot.tracing import Loss

NUM_FITTED_BATCHES: Final = 3
"""Synthetic batches of one device that a recipe's limits are fitted to."""


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def layouts(
    model: nn.Module, *, num_devices: int, cores_per_device: int, batch_size: int
) -> dict[str, Layout]:
    """The layout of every SparseCore collection on a slice, as its first device feeds it.

    Args:
        model: has the collections.
        num_devices: of the slice.
        cores_per_device: SparseCores of one (`chips.CHIPS`).
        batch_size: samples of one device.
    """
    return {
        fqn: program_layout(
            collection.layout,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            batch_size=batch_size,
        )
        for fqn, collection in collections_in(model)
    }


def fit_capacities(
    model: nn.Module,
    batches: Iterable[object],
    layouts: Mapping[str, Layout],
    *,
    headroom: float = 0.25,
) -> dict[str, dict[str, Capacity]]:
    """Static limits for a slice from data like that of one device.

    Args:
        model: has the collections.
        batches: of one device, as the model gets them.
        layouts: from `layouts`.
        headroom: what to add for batches to come, as a fraction.

    Returns:
        FQN of the collection -> stack name -> limits.

    Raises:
        ValueError: no batch has a collection's keys.
    """
    collections = dict(collections_in(model))
    observations = {fqn: observe(layouts[fqn]) for fqn in collections}
    for batch in batches:
        for fqn, kjt in _features(batch, collections):
            preprocessor = collections[fqn].preprocessor(layouts[fqn])
            stats = preprocessor.measure(**collections[fqn].arrays(kjt))
            observations[fqn] = observations[fqn].merge(observe(layouts[fqn], stats))
    return {
        fqn: observation.suggest(layouts[fqn], headroom=headroom)
        for fqn, observation in observations.items()
    }


def trace(
    model: nn.Module,
    batch: Any,
    *,
    num_devices: int,
    cores_per_device: int,
    dense_optimizer: OptimizerSpec,
    loss: Loss = _call,
    capacities: Mapping[str, Mapping[str, Capacity]] | None = None,
    mode: Mode = "exact",
    layouts: Mapping[str, Layout] | None = None,
    sequence_ids: Mapping[str, int] | None = None,
) -> Program:
    """One training step of a model on every device of a slice, as one program.

    Args:
        model: with SparseCore collections (`shard`, `swap_embeddings`); on "cpu" or "meta". Only
            shapes are read.
        batch: of one device, as `loss` takes it; its largest batch. It has the keys of every
            collection.
        num_devices: of the slice.
        cores_per_device: SparseCores of one (`chips.CHIPS`).
        dense_optimizer: of all parameters outside the collections.
        loss: (model, batch) -> mean loss over the batch, or a tuple that begins with it.
        capacities: FQN -> stack -> static limits; fitted to `batch` when None.
        mode: "exact", or "pipelined": SparseCores and TensorCore work at once, and lookups miss the
            update of the batch before theirs. See `trace_step`.
        layouts: FQN -> layout; those of `layouts()` when None.
        sequence_ids: KJT key -> the most ids of one device, for sequence features; those of `batch`
            when None.

    Raises:
        ProgramError: the model cannot be such a program; says why.
        DependencyError: torch_tpu or jaxlib is missing or was never tested.
    """
    collections = dict(collections_in(model))
    if not collections:
        raise ProgramError("the model has no SparseCore collection; call shard(model) first")
    features = dict(_features(batch, collections))
    if missing := collections.keys() - features.keys():
        raise ProgramError(
            f"no KeyedJaggedTensor in the batch has the keys of collections {sorted(missing)}"
        )
    (batch_size, *more) = {kjt.stride() for kjt in features.values()}
    if more:
        raise ProgramError(f"the batch has KJTs of several batch sizes: {[batch_size, *more]}")
    if layouts is None:
        layouts = _layouts(
            model,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            batch_size=batch_size,
        )
    if capacities is None:
        capacities = fit_capacities(model, [batch], layouts)
    if sequence_ids is None:
        sequence_ids = {
            feature.key: ids
            for fqn, kjt in features.items()
            for feature in layouts[fqn].features
            if feature.combiner is Combiner.NONE
            for ids in [kjt.length_per_key()[kjt.keys().index(feature.key)]]
        }
    return trace_step(
        model,
        collections,
        batch,
        loss=loss,
        batch_size=batch_size,
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        capacities=capacities,
        dense_optimizer=dense_optimizer,
        mode=mode,
        layouts=layouts,
        sequence_ids=sequence_ids,
        gradient_division=get_gradient_division(),
    )


_layouts = layouts  # `trace` has an argument of that name


def trace_recipe(
    recipe: Recipe,
    *,
    num_devices: int,
    cores_per_device: int,
    global_batch_size: int,
    mode: Mode = "exact",
    capacities: Mapping[str, Mapping[str, Capacity]] | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Program:
    """A recipe's DLRM v2 as a program: the model that trains on the CPU, tables on "meta".

    Limits are fitted to synthetic batches of one device with the recipe's skew, unless given.

    Args:
        recipe: model, optimizers and skew of the ids.
        num_devices: of the slice.
        cores_per_device: SparseCores of one.
        global_batch_size: samples of all devices.
        mode: see `trace`.
        capacities: FQN -> stack -> static limits.
        layouts: FQN -> layout.

    Raises:
        ProgramError: the batch does not divide by the devices; or as `trace`.
    """
    if global_batch_size % num_devices:
        raise ProgramError(
            f"a global batch of {global_batch_size} does not divide by {num_devices} devices"
        )
    batch_size = global_batch_size // num_devices
    model: nn.Module = build_model(recipe, device=torch.device("meta"))
    swap_embeddings(model, optimizer=recipe.table_optimizer)
    batches = list(
        Synthetic(
            [
                MultiHot(key=f.key, num_embeddings=f.num_embeddings, num_ids=f.num_ids)
                for f in recipe.features
            ],
            num_dense=recipe.num_dense,
            batch_size=batch_size,
            num_batches=NUM_FITTED_BATCHES,
            exponent=recipe.exponent,
            seed=recipe.seed,
        )
    )
    if layouts is None:
        layouts = _layouts(
            model,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            batch_size=batch_size,
        )
    if capacities is None:
        capacities = fit_capacities(model, batches, layouts)
    return trace(
        model,
        batches[0],
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        dense_optimizer=recipe.dense_optimizer,
        capacities=capacities,
        mode=mode,
        layouts=layouts,
    )


def _features(
    batch: object, collections: Mapping[str, SparseCoreCollection]
) -> Iterator[tuple[str, KeyedJaggedTensor]]:
    """Each KJT of a batch with the FQN of every collection whose keys it has."""
    for kjt in kjts_in(batch):
        for fqn, collection in collections.items():
            if has_keys(kjt, collection):
                yield fqn, kjt
