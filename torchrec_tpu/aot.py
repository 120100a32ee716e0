"""Ahead of time: a model's training step as a program for a TPU slice, without a TPU."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tpu.api import has_keys, kjts_in
from torchrec_tpu.datasets.synthetic import MultiHot, Synthetic
from torchrec_tpu.recipes import RECIPES, Recipe, capped, dlrm_v2_mlperf
from torchrec_tpu.sharding.cost import Way
from torchrec_tpu.sharding.embeddings import SparseCoreCollection, collections_in
from torchrec_tpu.sharding.plan import SparseCorePlan
from torchrec_tpu.sharding.swap import swap_embeddings
from torchrec_tpu.sparsecore.aot.compile import DEADLINE_SECONDS, compile_program
from torchrec_tpu.sparsecore.aot.pooled import PooledStack
from torchrec_tpu.sparsecore.aot.probe import is_doubtful, suggest_feasible
from torchrec_tpu.sparsecore.aot.program import Mode, Program, program_layout, trace_step
from torchrec_tpu.sparsecore.aot.report import Report, Traffic, refused, report
from torchrec_tpu.sparsecore.aot.topology import Topology, topology
from torchrec_tpu.sparsecore.capacity import Capacity, observe
from torchrec_tpu.sparsecore.errors import (
    HbmError,
    LimitsError,
    ProgramError,
    TorchrecTpuError,
)
from torchrec_tpu.sparsecore.layout import Combiner, Layout
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.training import build_model

if TYPE_CHECKING:
    from torchrec_tpu.sparsecore.aot.tracing import Loss

NUM_FITTED_BATCHES: Final = 3
"""Synthetic batches of one device that a recipe's limits are fitted to."""


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def layouts(
    model: nn.Module,
    *,
    num_devices: int,
    cores_per_device: int,
    batch_size: int,
    stacks: Literal["auto", "none"] | Mapping[str, Sequence[Sequence[str]]] = "auto",
    pooled: Mapping[str, Sequence[PooledStack]] | None = None,
) -> dict[str, Layout]:
    """The layout of every SparseCore collection on a slice, as its first device feeds it.

    Args:
        model: has the collections.
        num_devices: of the slice.
        cores_per_device: SparseCores of one (`chips.CHIPS`).
        batch_size: samples of one device.
        stacks: for every collection, or FQN -> lists of table names.
        pooled: FQN -> stacks of the tables that are left out.
    """
    return {
        fqn: program_layout(
            collection.layout,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            batch_size=batch_size,
            stacks=stacks if isinstance(stacks, str) else stacks[fqn],
            frozen=[t for t, spec in collection.table_optimizers.items() if spec is None],
            without={t.name for stack in (pooled or {}).get(fqn, ()) for t in stack.tables},
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
    observations = {fqn: observe(layouts[fqn]) for fqn in collections if layouts[fqn].stacks}
    for batch in batches:
        for fqn, kjt in _features(batch, collections):
            if fqn not in observations:
                continue
            preprocessor = collections[fqn].preprocessor(layouts[fqn])
            stats = preprocessor.measure(**collections[fqn].arrays(kjt))
            observations[fqn] = observations[fqn].merge(observe(layouts[fqn], stats))
    return {
        fqn: observations[fqn].suggest(layouts[fqn], headroom=headroom)
        if fqn in observations
        else {}
        for fqn in collections
    }


def fit_pooled(
    model: nn.Module,
    batches: Iterable[object],
    pooled: Mapping[str, Sequence[PooledStack]],
    *,
    batch_size: int,
    headroom: float = 0.25,
) -> dict[str, tuple[PooledStack, ...]]:
    """Pooled stacks with room for the ids of data like that of one device.

    Args:
        model: has the collections.
        batches: of one device, as the model gets them.
        pooled: FQN -> stacks, whose own `max_ids` do not matter.
        batch_size: samples of one device.
        headroom: what to add for batches to come, as a fraction.

    Returns:
        FQN -> the stacks with other `max_ids`.
    """
    collections = dict(collections_in(model))
    most: dict[tuple[str, str], Any] = {}
    for batch in batches:
        for fqn, kjt in _features(batch, collections):
            for stack in pooled.get(fqn, ()):
                preprocessor = collections[fqn].preprocessor(stack.layout(batch_size=batch_size))
                counts = stack.count_ids(preprocessor(**collections[fqn].arrays(kjt)))
                key = fqn, stack.name
                most[key] = np.maximum(most.get(key, 0), counts)
    return {
        fqn: tuple(
            dataclasses.replace(
                stack,
                max_ids=tuple(
                    max(1, math.ceil(count * (1 + headroom))) if slots else 0
                    for count, slots in zip(
                        most[fqn, stack.name].tolist(), stack.of_device, strict=True
                    )
                ),
            )
            for stack in stacks
        )
        for fqn, stacks in pooled.items()
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
    pooled: Mapping[str, Sequence[PooledStack]] | None = None,
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
        pooled: FQN -> stacks of tables that stay with owners; `layouts` have the others.

    Raises:
        ProgramError: the model cannot be such a program; says why.
        DependencyError: torch_tpu or jaxlib is missing or was never tested.
    """
    collections = dict(collections_in(model))
    if not collections:
        raise ProgramError("the model has no SparseCore collection; call shard(model) first")
    if half := [
        name
        for collection in collections.values()
        for name in collection.table_optimizers
        if collection.fused_optimizer.weight(name).dtype is not torch.float32
    ]:
        raise ProgramError(
            f"tables {half} are float16, and a program looks up and updates float32 tables: its "
            "results would be others; give them DataType.FP32"
        )
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
            pooled=pooled,
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
        pooled=pooled,
    )


_layouts = layouts  # `trace` has an argument of that name


def recipe_model(recipe: Recipe) -> nn.Module:
    """A recipe's DLRM v2 with SparseCore collections, on "meta": the model that trains on CPU."""
    model: nn.Module = build_model(recipe, device=torch.device("meta"))
    swap_embeddings(model, optimizer=recipe.table_optimizer)
    return model


def recipe_batches(recipe: Recipe, *, batch_size: int) -> list[Batch]:
    """Synthetic batches of one device with the recipe's skew: what its limits are fitted to."""
    features = [
        MultiHot(key=f.key, num_embeddings=f.num_embeddings, num_ids=f.num_ids)
        for f in recipe.features
    ]
    return list(
        Synthetic(
            features,
            num_dense=recipe.num_dense,
            batch_size=batch_size,
            num_batches=NUM_FITTED_BATCHES,
            exponent=recipe.exponent,
            seed=recipe.seed,
        )
    )


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
    """A recipe's DLRM v2 as a program.

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
    batch_size = _per_device(global_batch_size, num_devices)
    model = recipe_model(recipe)
    batches = recipe_batches(recipe, batch_size=batch_size)
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


def _per_device(global_batch_size: int, num_devices: int) -> int:
    if global_batch_size % num_devices:
        raise ProgramError(
            f"a global batch of {global_batch_size} does not divide by {num_devices} devices"
        )
    return global_batch_size // num_devices


# ----------------------------------------------------------------------------------------- compile


def compile_for(
    program: Program,
    target: Topology | str,
    *,
    global_batch_size: int | None = None,
    traffic: Mapping[tuple[str, str], Traffic] | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    keep: bool = True,
) -> Report:
    """Compiles a program for a slice that need not exist, and says what it takes.

    A program that needs too much memory gets a report too, with `fits=False` and the reasons.

    Args:
        program: from `trace`, for as many devices and cores.
        target: the slice, e.g. "tpu7x:4x4x2".
        global_batch_size: samples of all devices, to be shown.
        traffic: see `report.roofline`; from `measure_traffic`.
        deadline_seconds: wall time that the compiler may take.
        keep: whether to use and keep results on disk.

    Raises:
        TopologyError: the slice does not exist.
        ProgramError: the program is for another number of devices or cores.
        DependencyError: jax, jaxlib or libtpu is missing or was never tested.
        CompileError: the compiler refuses for another reason than memory, died, or took too long.
    """
    target = topology(target) if isinstance(target, str) else target
    try:
        compiled = compile_program(program, target, deadline_seconds=deadline_seconds, keep=keep)
    except (LimitsError, HbmError) as error:
        return refused(program, target, error, global_batch_size=global_batch_size)
    return report(program, target, compiled, global_batch_size=global_batch_size, traffic=traffic)


def compile_recipe(
    recipe: Recipe,
    target: Topology | str,
    *,
    global_batch_size: int,
    mode: Mode = "exact",
    headroom: float = 0.25,
    deadline_seconds: float = DEADLINE_SECONDS,
    keep: bool = True,
    plan: SparseCorePlan | None = None,
) -> Report:
    """A recipe's DLRM v2 on a slice that need not exist: traced, compiled, reported.

    Limits are fitted to synthetic batches of one device with the recipe's skew. Where the compiler
    refuses such a limit and takes a larger one, it gets the larger one.

    Args:
        recipe: model, optimizers and skew of the ids.
        target: the slice, e.g. "tpu7x:4x4x2".
        global_batch_size: samples of all devices.
        mode: see `trace`.
        headroom: what to add to the limits for batches to come, as a fraction.
        deadline_seconds: as of `compile_for`, like what follows.
        keep: whether to use and keep results on disk.
        plan: where the tables go, made for this slice and batch; all row-sharded when None.

    Raises:
        ProgramError: the batch does not divide by the devices, or the plan is for something else;
            or as `trace`.
        TopologyError, DependencyError, CompileError: as `compile_for`.
    """
    target = topology(target) if isinstance(target, str) else target
    num_devices, cores_per_device = target.num_devices, target.chip.cores_per_device
    batch_size = _per_device(global_batch_size, num_devices)
    model = recipe_model(recipe)
    batches = recipe_batches(recipe, batch_size=batch_size)
    pooled: Mapping[str, Sequence[PooledStack]] = {}
    if plan is not None:
        _check_plan(plan, model, target, global_batch_size)
        pooled = fit_pooled(
            model, batches, plan.pooled_stacks(), batch_size=batch_size, headroom=headroom
        )
    of_slice = layouts(
        model,
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        batch_size=batch_size,
        stacks="auto"
        if plan is None
        else {fqn: plan.stacks_of(fqn) for fqn, _ in collections_in(model)},
        pooled=pooled,
    )
    capacities = fit_capacities(model, batches, of_slice, headroom=headroom)

    def traced() -> Program:
        return trace(
            model,
            batches[0],
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            dense_optimizer=recipe.dense_optimizer,
            capacities=capacities,
            mode=mode,
            layouts=of_slice,
            pooled=pooled,
        )

    program = traced()
    try:
        feasible = {
            stack: suggest_feasible(capacities[stack.collection][stack.name], stack, target)
            for stack in program.stacks
            if is_doubtful(stack, target)
        }
    except LimitsError as error:
        return refused(program, target, error, global_batch_size=global_batch_size)
    for stack, capacity in feasible.items():
        capacities[stack.collection][stack.name] = capacity
    if feasible:
        program = traced()
    return compile_for(
        program,
        target,
        global_batch_size=global_batch_size,
        traffic=measure_traffic(model, batches, of_slice),
        deadline_seconds=deadline_seconds,
        keep=keep,
    )


def _check_plan(
    plan: SparseCorePlan, model: nn.Module, target: Topology, global_batch_size: int
) -> None:
    """Refuses a plan that this program cannot follow.

    Raises:
        ProgramError: it is for another slice, batch or model, or has replicas.
    """
    made_for = plan.topology, plan.global_batch_size
    if made_for != (target.name, global_batch_size):
        raise ProgramError(
            f"the plan is for {made_for[0]} and a global batch of {made_for[1]}, not for "
            f"{target.name} and {global_batch_size}; plan again"
        )
    of_plan = {(p.module, p.table, p.num_embeddings, p.embedding_dim) for p in plan.tables}
    of_model = {
        (fqn, table.name, table.num_embeddings, table.embedding_dim)
        for fqn, collection in collections_in(model)
        for table in collection.layout.tables
    }
    if of_plan != of_model:
        raise ProgramError(
            "the plan is for other tables; (module, table, rows, columns) that only one side has: "
            f"{sorted(of_plan ^ of_model)[:6]}"
        )
    if replicas := [p.table for p in plan.tables if p.chosen.way is Way.REPLICATED]:
        raise ProgramError(
            f"the plan replicates tables {replicas}, which compiled programs cannot; plan without "
            "--replicas"
        )


def measure_traffic(
    model: nn.Module, batches: Iterable[object], layouts: Mapping[str, Layout]
) -> dict[tuple[str, str], Traffic]:
    """(collection, stack) -> rows and ids that a device looks up in a step, mean over batches.

    Args:
        model: has the collections.
        batches: of one device, as the model gets them.
        layouts: from `layouts`.
    """
    collections = dict(collections_in(model))
    rows: dict[tuple[str, str], list[float]] = {}
    ids: dict[tuple[str, str], list[float]] = {}
    for batch in batches:
        for fqn, kjt in _features(batch, collections):
            layout = layouts[fqn]
            if not layout.stacks:  # all tables are pooled
                continue
            preprocessor = collections[fqn].preprocessor(layout)
            stats = preprocessor.measure(**collections[fqn].arrays(kjt))
            for index, stack in enumerate(layout.stacks):
                # Maxima over the cores of the device: what each of them needs, or a little less.
                each = layout.num_local_cores
                key = fqn, stack.name
                rows.setdefault(key, []).append(each * float(stats.max_unique_ids[index].sum()))
                ids.setdefault(key, []).append(each * float(stats.max_ids[index].sum()))
    return {key: Traffic(rows=fmean(rows[key]), ids=fmean(ids[key])) for key in rows}


def _features(
    batch: object, collections: Mapping[str, SparseCoreCollection]
) -> Iterator[tuple[str, KeyedJaggedTensor]]:
    """Each KJT of a batch with the FQN of every collection whose keys it has."""
    for kjt in kjts_in(batch):
        for fqn, collection in collections.items():
            if has_keys(kjt, collection):
                yield fqn, kjt


# ------------------------------------------------------------------------------------ command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torchrec-tpu aot`."""
    parser.add_argument("--topology", required=True, help='the slice, e.g. "tpu7x:4x4x2"')
    parser.add_argument(
        "--recipe", required=True, choices=sorted(_RECIPES), help="model, optimizers and skew"
    )
    parser.add_argument(
        "--global-batch", required=True, type=_positive, metavar="N", help="samples of all devices"
    )
    parser.add_argument(
        "--pipelined",
        action="store_true",
        help="SparseCores and TensorCore work at once; lookups are one update behind",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="where the tables go, from `torchrec-tpu plan --json FILE` with the same arguments",
    )
    parser.add_argument("--max-rows", type=_positive, metavar="N", help="no table longer than this")
    parser.add_argument(
        "--headroom",
        type=_not_negative,
        default=0.25,
        metavar="X",
        help="what to add to limits for batches to come, as a fraction (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=_not_negative,
        default=DEADLINE_SECONDS,
        metavar="SECONDS",
        help="wall time of the compiler (default: %(default)g)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")


def command(args: argparse.Namespace) -> int:
    """Prints the report; 0 when the step fits, 1 when not, 2 when there is none."""
    if args.json is not None and not args.json.parent.is_dir():
        print(f"error: --json {args.json}: there is no such folder", file=sys.stderr)
        return 2
    recipe = _RECIPES[args.recipe]()
    if args.max_rows is not None:
        recipe = capped(recipe, max_rows=args.max_rows)
    try:
        target = topology(args.topology)
        plan = SparseCorePlan.load(args.plan) if args.plan else None
        print("tracing and compiling, which may take minutes; the result is kept", file=sys.stderr)
        found = compile_recipe(
            recipe,
            target,
            global_batch_size=args.global_batch,
            mode="pipelined" if args.pipelined else "exact",
            headroom=args.headroom,
            deadline_seconds=args.deadline,
            plan=plan,
        )
    except (TorchrecTpuError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found)
    if args.json is not None:
        args.json.write_text(found.to_json() + "\n")
    return 0 if found.fits else 1


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _not_negative(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is negative or not finite")
    return value


_RECIPES: Final = {"dlrm_v2": dlrm_v2_mlperf, **RECIPES}
