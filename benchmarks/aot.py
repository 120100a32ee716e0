"""The compiled step of DLRM v2, beside Google's JAX baseline: what the same libtpu makes of both.

    python benchmarks/aot.py --baseline-python JAX_ENVIRONMENT/bin/python
        [--topology tpu7x:4x4x2] [--global-batch 65536] [--mode exact pipelined]
        [--own-limit-mib 12] [--max-rows N] [--texts DIRECTORY] [--json FILE]

Both sides compile one training step of MLPerf's DLRM v2 (26 tables of 128, Adagrad) for the same
slice, with the same stacks and limits: the plan of this package with JAX's bound for a stack, 2 MiB
of activations. Limits are fitted to synthetic batches. A third compile is ours with stacks of our
own choice. All scheduled programs are read by one parser, `torchrec_tpu.sparsecore.aot.hlo`.

The baseline (benchmarks/aot_baseline.py) runs in an environment of its own, with the libtpu that is
installed here:

    python3.12 -m venv JAX_ENVIRONMENT
    JAX_ENVIRONMENT/bin/pip install jax_tpu_embedding==0.2.0 libtpu==<as here>

Without --baseline-python only our side is compiled and nothing is compared. A full slice takes
minutes and some GB of memory, one compile after the other; --max-rows and a small slice make a
quick check. No time on a TPU is known or claimed: cycles are the compiler's estimates.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from torchrec_tpu.aot import fit_capacities, layouts, recipe_batches, recipe_model, trace
from torchrec_tpu.recipes import Recipe, capped, dlrm_v2_mlperf
from torchrec_tpu.sparsecore.aot import adapter, hlo
from torchrec_tpu.sparsecore.aot.compile import (
    DEADLINE_SECONDS,
    Compiled,
    Memory,
    compile_program,
    run,
)
from torchrec_tpu.sparsecore.aot.program import Mode, Program
from torchrec_tpu.sparsecore.aot.topology import Topology, topology
from torchrec_tpu.sparsecore.errors import TorchrecTpuError
from torchrec_tpu.sparsecore.layout import Layout
from torchrec_tpu.sparsecore.stacking import make_layout

WORKER: Final = Path(__file__).with_name("aot_baseline.py")
JAX_LIMIT_BYTES: Final = 2 << 20
"""Activations of a stack on one core in jax-tpu-embedding, unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One device's step, as compiled. Bytes are bytes; a share is 0..1."""

    stacks: int
    args_bytes: int
    alias_bytes: int
    temp_bytes: int
    args_and_temp_bytes: int
    code_bytes: int
    sc_stack_bytes: int  # high watermarks of all SparseCore calls
    sc_calls: int
    sub_kernels: int
    sc_program_bytes: int
    gather_bytes: int  # of one core, like what follows
    exchange_row_bytes: int
    exchange_id_bytes: int
    tc_cycles: int
    tc_share_under_sc: float
    dots: int
    dots_under_sc: int
    tc_collectives: int
    tc_collective_bytes: int
    table_copies: int
    table_copy_bytes: int
    flops: float


def figures(compiled: Compiled, program: Program) -> Figures:
    """What the scheduled text of either side says; `program` has the same tables as both."""
    schedule, memory = hlo.parse(compiled.text), compiled.memory
    calls = schedule.embedding_calls
    tables = {
        (a.dtype, math.prod(a.shape)) for a in program.arguments if a.kind in ("table", "slot")
    }
    copies = schedule.copies_of(tables)
    return Figures(
        stacks=len(program.stacks),
        args_bytes=memory.argument_bytes,
        alias_bytes=memory.alias_bytes,
        temp_bytes=memory.temp_bytes,
        args_and_temp_bytes=memory.argument_bytes + memory.temp_bytes,
        code_bytes=memory.code_bytes,
        sc_stack_bytes=sum(call.stack_bytes for call in calls),
        sc_calls=len(calls),
        sub_kernels=schedule.num_sub_kernels,
        sc_program_bytes=sum(call.program_bytes for call in calls),
        gather_bytes=sum(call.gather_bytes for call in calls),
        exchange_row_bytes=sum(call.exchange_row_bytes for call in calls),
        exchange_id_bytes=sum(call.exchange_id_bytes for call in calls),
        tc_cycles=schedule.tc_cycles,
        tc_share_under_sc=schedule.tc_share_under_sparsecore,
        dots=schedule.dots,
        dots_under_sc=schedule.dots_under_sparsecore,
        tc_collectives=len(schedule.collectives),
        tc_collective_bytes=sum(c.num_bytes for c in schedule.collectives),
        table_copies=len(copies),
        table_copy_bytes=sum(copy.num_bytes for copy in copies),
        flops=compiled.flops,
    )


# ------------------------------------------------------------------------------------------- goals


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of one figure, and what was found."""

    figure: str
    found: float
    bound: float
    is_at_most: bool

    @property
    def is_met(self) -> bool:
        return self.found <= self.bound if self.is_at_most else self.found >= self.bound

    def __str__(self) -> str:
        verdict = "ok  " if self.is_met else "MISS"
        return f"{verdict} {self.figure}: {self.found:.4g} {'<=' if self.is_at_most else '>='} " + (
            f"{self.bound:.4g}"
        )


def goals(ours: Figures, baseline: Figures | None, mode: Mode) -> list[Goal]:
    """Same stacks on both sides: never more than the baseline takes."""
    found = [
        Goal("table copies", ours.table_copies, 0, True),
        Goal("TensorCore collectives", ours.tc_collectives, 1, True),
    ]
    if mode == "pipelined":
        found.append(Goal("TC share under SparseCore", ours.tc_share_under_sc, 0.95, False))
    if baseline is None:
        return found
    for name, bound in (
        ("args_and_temp_bytes", 1.0),
        ("sub_kernels", 1.0),
        ("sc_program_bytes", 1.0),
        ("tc_cycles", 1.02),
        ("tc_collective_bytes", 1.0),
    ):
        found.append(Goal(f"{name} / baseline", _ratio(ours, baseline, name), bound, True))
    if mode == "exact":
        share = baseline.tc_share_under_sc
        found.append(Goal("TC share under SparseCore", ours.tc_share_under_sc, share, False))
    return found


def own_goals(own: Figures, baseline: Figures) -> list[Goal]:
    """Stacks of our choice against those that JAX makes."""
    return [
        Goal("own stacks: sub_kernels / baseline", _ratio(own, baseline, "sub_kernels"), 0.5, True),
        Goal("own stacks: temp_bytes / baseline", _ratio(own, baseline, "temp_bytes"), 0.9, True),
        Goal("own stacks: args_and_temp_bytes / baseline",
             _ratio(own, baseline, "args_and_temp_bytes"), 1.0, True),
    ]  # fmt: skip


def _ratio(ours: Figures, baseline: Figures, name: str) -> float:
    base = getattr(baseline, name)
    return getattr(ours, name) / base if base else math.nan


# ------------------------------------------------------------------------------------------- sides


def traced(
    recipe: Recipe, target: Topology, *, global_batch_size: int, mode: Mode, limit_bytes: int
) -> Program:
    """Our step, with stacks up to `limit_bytes` of activations on a core."""
    model = recipe_model(recipe)
    batches = recipe_batches(recipe, batch_size=global_batch_size // target.num_devices)
    batch_size = batches[0].dense_features.shape[0]
    num_devices, cores_per_device = target.num_devices, target.chip.cores_per_device
    chosen: dict[str, Layout] = {
        fqn: make_layout(
            layout.tables,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            num_local_devices=1,
            batch_size=batch_size,
            activation_limit_bytes=limit_bytes,
        )
        for fqn, layout in layouts(
            model,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            batch_size=batch_size,
        ).items()
    }
    return trace(
        model,
        batches[0],
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        dense_optimizer=recipe.dense_optimizer,
        capacities=fit_capacities(model, batches, chosen),
        mode=mode,
        layouts=chosen,
    )


def baseline(
    python: Path,
    recipe: Recipe,
    program: Program,
    target: Topology,
    *,
    global_batch_size: int,
    deadline_seconds: float,
) -> tuple[Compiled, dict[str, str]]:
    """The JAX side of `program`, and the versions that made it.

    Raises:
        RuntimeError: it failed (with what it said), or its libtpu is not the one of our side.
    """
    request = {
        "topology": target.name,
        "mode": program.mode,
        "global_batch_size": global_batch_size,
        "cores_per_device": target.chip.cores_per_device,
        "num_dense": recipe.num_dense,
        "embedding_dim": recipe.embedding_dim,
        "dense_arch": recipe.dense_arch,
        "over_arch": recipe.over_arch,
        "dcn_layers": recipe.dcn_layers,
        "dcn_rank": recipe.dcn_rank,
        "lr": recipe.table_optimizer.lr,
        "eps": recipe.table_optimizer.hyper["eps"],
        "features": [
            {
                "key": feature.key,
                "table": f"t_{feature.key}",
                "num_embeddings": feature.num_embeddings,
                "num_ids": feature.num_ids,
            }
            for feature in recipe.features
        ],
        "stacks": [asdict(stack) for stack in program.stacks],
    }
    with tempfile.TemporaryDirectory(prefix="torchrec_tpu_") as name:
        directory = Path(name)
        (directory / "request.json").write_text(json.dumps(request))
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LIBTPU_INIT_ARGS")},
            **adapter.ENVIRONMENT,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_dump_to={directory / 'dump'} --xla_dump_hlo_as_text",
        }
        command = [str(python), str(WORKER), str(directory)]
        code, output = run(command, environment, deadline_seconds=deadline_seconds)
        if code:
            raise RuntimeError(f"the baseline ended with exit code {code}:\n{output[-4000:]}")
        result = json.loads((directory / "result.json").read_text())
        (scheduled,) = (directory / "dump").glob("*.after_codegen.txt")
        text = scheduled.read_text()
    versions = result["versions"]
    if versions["libtpu"] != metadata.version("libtpu"):
        raise RuntimeError(
            f"the baseline has libtpu {versions['libtpu']}, our side {metadata.version('libtpu')}: "
            "two compilers cannot be compared; install the same in both environments"
        )
    memory = result["memory"]
    memory["code"] = memory.pop("generated_code")
    compiled = Compiled(
        topology=target.name,
        memory=Memory(**{f"{key}_bytes": value for key, value in memory.items()}),
        flops=result["flops"],
        text=text,
        libtpu=versions["libtpu"],
        seconds=result["seconds"],
        is_kept=False,
    )
    return compiled, versions


# ------------------------------------------------------------------------------------------- table


def rows(columns: Mapping[str, Figures]) -> list[list[str]]:
    """A table: figure, one column a side, then the ratio of each of our sides to the baseline."""
    base = columns.get("baseline")
    ratios = [name for name in columns if base and name != "baseline"]
    table = [["", *columns, *(f"{name} / baseline" for name in ratios)]]
    names = list(asdict(next(iter(columns.values()))))
    for name in names:
        line = [name, *(_value(name, getattr(side, name)) for side in columns.values())]
        for ratio in ratios:
            assert base is not None
            value = _ratio(columns[ratio], base, name)
            line.append("-" if math.isnan(value) else f"{value:.3f}")
        table.append(line)
    return table


def _value(name: str, value: float) -> str:
    return f"{value:.1%}" if "share" in name else f"{value:,.0f}"


def markdown(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(cells: Iterable[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return " | ".join(["| " + first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]) + " |"

    rule = "|" + "|".join("-" * (w + 1) + "-:"[bool(i)] for i, w in enumerate(widths)) + "|"
    return "\n".join([line(table[0]), rule, *map(line, table[1:])])


# -------------------------------------------------------------------------------------------- runs


def run_case(mode: Mode, recipe: Recipe, target: Topology, arguments: Any) -> dict[str, Any]:
    """Compiles all sides of one mode, prints the table, and returns it as JSON."""
    size = arguments.global_batch
    compiled: dict[str, Compiled] = {}
    programs: dict[str, Program] = {}
    versions: dict[str, str] = {}

    def ours(name: str, limit_bytes: int) -> None:
        programs[name] = traced(
            recipe, target, global_batch_size=size, mode=mode, limit_bytes=limit_bytes
        )
        compiled[name] = compile_program(
            programs[name], target, deadline_seconds=arguments.deadline
        )

    ours("ours", JAX_LIMIT_BYTES)
    if arguments.baseline_python:
        programs["baseline"] = programs["ours"]
        compiled["baseline"], versions = baseline(
            arguments.baseline_python,
            recipe,
            programs["ours"],
            target,
            global_batch_size=size,
            deadline_seconds=arguments.deadline,
        )
    ours("own stacks", arguments.own_limit_mib << 20)
    columns = {name: figures(side, programs[name]) for name, side in compiled.items()}
    if arguments.texts:
        arguments.texts.mkdir(parents=True, exist_ok=True)
        for name, side in compiled.items():
            path = arguments.texts / f"{mode}.{name.replace(' ', '_')}.hlo.txt"
            path.write_text(side.text)
    base = columns.get("baseline")
    found = goals(columns["ours"], base, mode)
    if base:
        found += own_goals(columns["own stacks"], base)
    print(f"\n{mode} step, {target.name}, global batch {size:,}\n")
    print(markdown(rows(columns)))
    for name in ("ours", "own stacks"):
        limits = Counter((s.max_ids, s.max_unique_ids) for s in programs[name].stacks)
        print(f"limits of {name} (max_ids, max_unique_ids): {', '.join(map(str, limits))}")
    if base is None:
        print("no baseline: --baseline-python is not given, so nothing is compared")
    for goal in found:
        print(goal)
    sys.stdout.flush()
    return {
        "mode": mode,
        "figures": {name: asdict(side) for name, side in columns.items()},
        "compile_seconds": {name: side.seconds for name, side in compiled.items()},
        "stacks": {
            name: [asdict(stack) for stack in programs[name].stacks]
            for name in ("ours", "own stacks")
        },
        "goals": [{**asdict(goal), "is_met": goal.is_met} for goal in found],
        "baseline_versions": versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline-python", type=Path, help="with jax_tpu_embedding and libtpu")
    parser.add_argument("--topology", default="tpu7x:4x4x2")
    parser.add_argument("--global-batch", type=int, default=65_536)
    parser.add_argument("--mode", nargs="+", choices=["exact", "pipelined"], default=["exact"])
    parser.add_argument(
        "--own-limit-mib", type=int, default=12, help="bound of a stack in the third compile"
    )
    parser.add_argument("--max-rows", type=int, help="no table longer than this")
    parser.add_argument("--deadline", type=float, default=DEADLINE_SECONDS, help="of one compile")
    parser.add_argument("--texts", type=Path, help="also write the scheduled programs there")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    recipe = dlrm_v2_mlperf()
    if arguments.max_rows is not None:
        recipe = capped(recipe, max_rows=arguments.max_rows)
    try:
        target = topology(arguments.topology)
        if arguments.global_batch % target.num_devices:
            parser.error(f"--global-batch does not divide by {target.num_devices} devices")
        cases = [run_case(mode, recipe, target, arguments) for mode in arguments.mode]
    except (TorchrecTpuError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        result = {
            "benchmark": "aot",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "topology": target.name,
            "global_batch_size": arguments.global_batch,
            "max_rows": arguments.max_rows,
            "versions": {
                name: metadata.version(name)
                for name in ("torch", "torchrec", "torch_tpu", "jax", "jaxlib", "libtpu")
            },
            "cases": cases,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
