"""A plan for a model or a recipe on a TPU slice, without a TPU: `torchrec-tpu plan`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from torchrec_tpu.api import has_keys, kjts_in
from torchrec_tpu.recipes import RECIPES, Recipe, capped, dlrm_v2_mlperf
from torchrec_tpu.sharding.cost import Step, TableLoad, Way
from torchrec_tpu.sharding.embeddings import collections_in
from torchrec_tpu.sharding.lookups import Lookups
from torchrec_tpu.sharding.plan import SparseCorePlan
from torchrec_tpu.sharding.search import PlanError, make_plan
from torchrec_tpu.sharding.topology import Slice
from torchrec_tpu.sparsecore.errors import TopologyError

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from torchrec_tpu.sparsecore.layout import Table


COMPILED: Final = (Way.ROWS, Way.POOLED)
"""Ways that programs for TPUs know."""


def plan_model(
    model: nn.Module,
    batches: Iterable[object],
    target: Slice,
    *,
    global_batch_size: int,
    dense_row_slots: int = 1,
    exponent: float | None = None,
    is_linked: bool = False,
    ways: Sequence[Way] = COMPILED,
    max_widths: int = 1,
) -> SparseCorePlan:
    """The plan of a model's SparseCore collections, from data like yours.

    Args:
        model: with collections (`shard`, `swap_embeddings`); may be on "meta".
        batches: of one device, as the model gets them.
        target: the slice.
        global_batch_size: samples of a step on all devices.
        dense_row_slots: optimizer arrays for every parameter outside the tables.
        exponent: see `Lookups.observed`, like `is_linked`.
        is_linked: whether the first id of a bag decides the others.
        ways: that may be used.
        max_widths: see `make_plan`, like what is raised.

    Raises:
        PlanError: the tables do not fit, or the batches lack a collection's keys.
    """
    collections = dict(collections_in(model))
    kjts: dict[str, list[KeyedJaggedTensor]] = {fqn: [] for fqn in collections}
    for batch in batches:
        for kjt in kjts_in(batch):
            for fqn, collection in collections.items():
                if has_keys(kjt, collection):
                    kjts[fqn].append(kjt)
    loads = []
    for fqn, collection in collections.items():
        if not kjts[fqn]:
            raise PlanError(f"no batch has the keys of collection {fqn!r}")
        for table in collection.layout.tables:
            spec = collection.table_optimizers[table.name]
            loads.append(
                TableLoad(
                    module=fqn,
                    table=table,
                    rule=spec.rule.name if spec else None,
                    is_weighted=isinstance(collection, EmbeddingBagCollectionInterface)
                    and collection.is_weighted(),
                    lookups=Lookups.observed(
                        table.num_embeddings,
                        [_ids_of(table, kjt) for kjt in kjts[fqn]],
                        samples=global_batch_size // target.num_devices,
                        cores=target.chip.cores_per_device,
                        num_cores=target.num_cores,
                        exponent=exponent,
                        is_linked=is_linked,
                        is_merged=not table.is_sequence,
                    ),
                )
            )
    tables = {id(p) for collection in collections.values() for p in collection.parameters()}
    return make_plan(
        loads,
        Step(
            global_batch_size=global_batch_size,
            dense_parameters=sum(p.numel() for p in model.parameters() if id(p) not in tables),
            dense_row_slots=dense_row_slots,
        ),
        target,
        ways=ways,
        max_widths=max_widths,
    )


def plan_recipe(
    recipe: Recipe,
    target: Slice | str,
    *,
    global_batch_size: int,
    ways: Sequence[Way] = COMPILED,
    max_widths: int = 1,
) -> SparseCorePlan:
    """The plan of a recipe's DLRM v2, from synthetic batches with the recipe's skew.

    Args:
        recipe: model, optimizers and skew of the ids.
        target: the slice, e.g. "tpu7x:4x4x2".
        global_batch_size: samples of a step on all devices.
        ways: that may be used; `[Way.ROWS]` is the baseline.
        max_widths: see `make_plan`, like what is raised.

    Raises:
        PlanError: the tables do not fit; the batch does not divide by the devices.
        TopologyError: no slice has that name.
    """
    from torchrec_tpu.aot import recipe_batches, recipe_model  # tracing is only needed there

    target = Slice.named(target) if isinstance(target, str) else target
    return plan_model(
        recipe_model(recipe),
        recipe_batches(recipe, batch_size=max(1, global_batch_size // target.num_devices)),
        target,
        global_batch_size=global_batch_size,
        dense_row_slots=sum(s.width == "row" for s in recipe.dense_optimizer.rule.slots),
        exponent=recipe.exponent,
        is_linked=True,
        ways=ways,
        max_widths=max_widths,
    )


def _ids_of(
    table: Table, kjt: KeyedJaggedTensor
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """All ids of a table in a batch, and the sample of each."""
    ids, samples = [], []
    for key in table.features:
        jagged = kjt[key]
        ids.append(jagged.values().numpy().astype(np.int64))
        samples.append(np.repeat(np.arange(kjt.stride()), jagged.lengths().numpy()))
    return np.concatenate(ids), np.concatenate(samples)


# ------------------------------------------------------------------------------------ command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torchrec-tpu plan`."""
    parser.add_argument("--topology", required=True, help='the slice, e.g. "tpu7x:4x4x2"')
    parser.add_argument(
        "--recipe", required=True, choices=sorted(_RECIPES), help="model, optimizers and skew"
    )
    parser.add_argument(
        "--global-batch", required=True, type=_positive, metavar="N", help="samples of all devices"
    )
    parser.add_argument(
        "--all-mod",
        action="store_true",
        help="the baseline: every table row-sharded over all SparseCores",
    )
    parser.add_argument(
        "--replicas",
        action="store_true",
        help="tiny tables may be replicated too; compiled programs have no replicas",
    )
    parser.add_argument("--torus", action="store_true", help="the ends of each axis are joined")
    parser.add_argument("--max-rows", type=_positive, metavar="N", help="no table longer than this")
    parser.add_argument("--explain", metavar="TABLE", help="also why this table is where it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with bars and reasons"
    )


def command(args: argparse.Namespace) -> int:
    """Prints the plan; 0 when there is one, 1 when the tables do not fit, 2 for wrong arguments."""
    for option in ("json", "html"):
        path: Path | None = getattr(args, option)
        if path is not None and not path.parent.is_dir():
            print(f"error: --{option} {path}: there is no such folder", file=sys.stderr)
            return 2
    recipe = _RECIPES[args.recipe]()
    if args.max_rows is not None:
        recipe = capped(recipe, max_rows=args.max_rows)
    try:
        plan = plan_recipe(
            recipe,
            Slice.named(args.topology, torus=args.torus),
            global_batch_size=args.global_batch,
            ways=[Way.ROWS] if args.all_mod else tuple(Way) if args.replicas else COMPILED,
        )
        explanation = plan.explain(args.explain) if args.explain else None
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (TopologyError, KeyError) as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2
    print(plan)
    if explanation:
        print(f"\n{explanation}")
    if args.json is not None:
        plan.save(args.json)
    if args.html is not None:
        from torchrec_tpu.plan_page import page

        args.html.write_text(page(plan), encoding="utf-8")
    return 0


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


_RECIPES: Final[Mapping[str, Callable[[], Recipe]]] = {"dlrm_v2": dlrm_v2_mlperf, **RECIPES}
