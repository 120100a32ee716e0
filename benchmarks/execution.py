"""CPU lookup and fused update of one DLRM v2 batch: this package beside FBGEMM and nn.EmbeddingBag.

    python benchmarks/execution.py [--dim 128 16] [--rule adagrad ...] [--threads 1] [--rounds 9]
        [--max-rows 500000 4000000] [--peer fbgemm bag] [--huge-pages] [--json FILE]

The batch: 26 tables and features, 214 ids per sample, 4096 samples, ids by a power law (alpha 1.05)
scattered over each table. Every round runs all sides, one after the other, in this process, so that
they meet the same neighbours; the table shows medians over rounds of the CPU time (user + system,
all threads) and of the wall time. Ratios are the peer's time over ours, > 1 when we are faster.

    lookup       packed buffers -> pooled vectors; the peer starts at KJT values and offsets
    train        lookup and fused update
    kjt+train    the same from KJT values and lengths: preprocessing is ours alone, so this is the
                 figure that a user sees
    bag          26 nn.EmbeddingBag(sparse=True) and torch.optim.Adagrad

All weights come from torch's allocator: with 4 KiB pages by default, with transparent huge pages
under --huge-pages, the same for every side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

# fmt: off
ROWS = (40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3_067_956, 405282, 10,
        2209, 11938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590152, 12973, 108, 36)
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
BATCH = 4096
MAX_ROWS = {128: 500_000, 16: 4_000_000}
LEARNING_RATE = 0.01
EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over rounds, in milliseconds."""

    cpu_ms: float
    wall_ms: float


def power_law_ids(rng: np.random.Generator, num_rows: int, num_ids: int) -> np.ndarray:
    if num_rows == 1:
        return np.zeros(num_ids, np.int64)
    span = (num_rows + 1.0) ** -0.05 - 1
    ranks = ((span * rng.random(num_ids) + 1) ** -20 - 1).astype(np.int64)
    return (np.minimum(ranks, num_rows - 1) * 1_000_003 + 12345) % num_rows


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for round_number in range(rounds + 1):
        for name, function in functions.items():
            cpu, wall = cpu_seconds(), time.perf_counter()
            function()
            sample = (cpu_seconds() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
            if round_number > 0:  # the first one warms up
                samples[name].append(sample)
    return {
        name: Timing(*(statistics.median(column) for column in zip(*rows, strict=True)))
        for name, rows in samples.items()
    }


def run_case(dim: int, rule_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torchrec_tpu.sparsecore import Combiner, Table, make_layout
    from torchrec_tpu.sparsecore.backends.cpu import CpuBackend
    from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
    from torchrec_tpu.sparsecore.preprocess import Preprocessor

    max_rows = arguments.max_rows or MAX_ROWS.get(dim, 64_000_000 // dim)
    rows = [min(count, max_rows) for count in ROWS]
    rng = np.random.default_rng(1)
    values = np.concatenate(
        [power_law_ids(rng, n, BATCH * hot) for n, hot in zip(rows, HOTNESS, strict=True)]
    )
    lengths = np.repeat(np.array(HOTNESS, np.int64), BATCH)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    keys = [f"f{i}" for i in range(len(rows))]
    layout = make_layout(
        [
            Table(
                name=f"t{i}",
                num_embeddings=n,
                embedding_dim=dim,
                combiner=Combiner.SUM,
                features=(keys[i],),
            )
            for i, n in enumerate(rows)
        ],
        stacks=arguments.stacks,
    )
    order = [int(table.table.name[1:]) for table in layout.stack_order_tables]

    def new_weights(index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.empty(rows[index], dim).uniform_(-0.05, 0.05, generator=generator)

    spec = OptimizerSpec(
        name=rule_name, lr=LEARNING_RATE, hyper={} if rule_name == "sgd" else {"eps": EPS}
    )
    weights = {i: new_weights(i) for i in order}
    tables = [weights[i].numpy() for i in order]
    slots = [
        [torch.zeros(slot.shape(rows[i], dim)).numpy() for slot in spec.rule.slots] for i in order
    ]
    operands = np.tile(spec.operands(1), (len(rows), 1))
    preprocessor = Preprocessor(layout, num_threads=arguments.threads)
    backend = CpuBackend(num_threads=arguments.threads)
    batch = preprocessor(keys, values, lengths=lengths)
    geometry = layout.geometry(batch)
    out = torch.empty(BATCH, len(rows) * dim)
    grad = torch.empty(BATCH, len(rows) * dim).uniform_(-0.01, 0.01)
    flat_out, flat_grad = out.numpy().reshape(-1), grad.numpy().reshape(-1)

    def update(batch: Any, geometry: Any) -> None:
        backend.update(
            flat_grad, batch.stacks, tables, slots, operands, geometry, spec.rule.name, None
        )

    def lookup() -> None:
        backend.lookup(batch.stacks, tables, geometry, flat_out)

    def train() -> None:
        lookup()
        update(batch, geometry)

    def kjt_train() -> None:
        batch = preprocessor(keys, values, lengths=lengths)
        geometry = layout.geometry(batch)
        backend.lookup(batch.stacks, tables, geometry, flat_out)
        update(batch, geometry)

    functions: dict[str, Callable[[], object]] = {
        "ours lookup": lookup,
        "ours update": lambda: update(batch, geometry),
        "ours train": train,
        "ours preprocess": lambda: preprocessor(keys, values, lengths=lengths),
        "ours kjt+train": kjt_train,
    }
    differences: dict[str, float] = {}
    ids, bags = torch.from_numpy(values), torch.from_numpy(offsets)
    if "fbgemm" in arguments.peer:
        peer = fbgemm_tables(rows, dim, rule_name)
        for i, peer_weights in enumerate(peer.split_embedding_weights()):
            peer_weights.detach().copy_(weights[i])

        def peer_lookup() -> Any:
            with torch.no_grad():
                return peer(ids, bags)

        def peer_train() -> None:
            peer(ids, bags).backward(grad)

        lookup()
        differences["lookup"] = (peer_lookup() - out).abs().max().item()
        update(batch, geometry)
        peer_train()
        differences["weights after a step"] = max(
            (w.detach() - weights[i]).abs().max().item()
            for i, w in enumerate(peer.split_embedding_weights())
        )
        functions |= {"fbgemm lookup": peer_lookup, "fbgemm train": peer_train}
    if "bag" in arguments.peer and rule_name == "adagrad":
        bag_lookup, bag_train = embedding_bags(weights, values, grad, dim)
        functions |= {"bag lookup": bag_lookup, "bag train": bag_train}

    timings = measure(functions, arguments.rounds)
    ratios = {
        f"{peer} / {ours}": {
            kind: getattr(timings[peer], kind) / getattr(timings[ours], kind)
            for kind in ("cpu_ms", "wall_ms")
        }
        for peer, ours in (
            ("fbgemm lookup", "ours lookup"),
            ("fbgemm train", "ours train"),
            ("fbgemm train", "ours kjt+train"),
            ("bag lookup", "ours lookup"),
            ("bag train", "ours train"),
            ("bag train", "ours kjt+train"),
        )
        if peer in timings
    }
    return {
        "dim": dim,
        "rule": rule_name,
        "max_rows": max_rows,
        "table_bytes": sum(rows) * dim * 4,
        "num_ids": len(values),
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "ratios": ratios,
        "largest_difference_to_fbgemm": differences,
    }


def fbgemm_tables(rows: list[int], dim: int, rule_name: str) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    optimizer = {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adam": EmbOptimType.ADAM,
    }[rule_name]
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(n, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in rows],
        optimizer=optimizer,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        stochastic_rounding=False,
    )


def embedding_bags(
    weights: dict[int, Any], values: np.ndarray, grad: Any, dim: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Lookup and training step; the weights are shared with our side, the state is not."""
    import torch

    bags, inputs = [], []
    start = 0
    for i, hot in enumerate(HOTNESS):
        bags.append(
            torch.nn.EmbeddingBag(len(weights[i]), dim, mode="sum", sparse=True, _weight=weights[i])
        )
        count = BATCH * hot
        inputs.append(
            (
                torch.from_numpy(values[start : start + count].copy()),
                torch.arange(0, count, hot),
            )
        )
        start += count
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=LEARNING_RATE, eps=EPS)

    def forward() -> Any:
        return torch.cat([bag(*pair) for bag, pair in zip(bags, inputs, strict=True)], 1)

    def lookup() -> Any:
        with torch.no_grad():
            return forward()

    def train() -> None:
        optimizer.zero_grad()
        forward().backward(grad)
        optimizer.step()

    return lookup, train


def show(case: dict[str, Any]) -> None:
    print(
        f"\nD={case['dim']} {case['rule']}: {case['num_ids']:,} ids, "
        f"{case['table_bytes'] / 1e9:.2f} GB of weights"
    )
    print(f"  {'':34}{'CPU ms':>9}{'wall ms':>9}")
    for name, timing in case["timings"].items():
        print(f"  {name:34}{timing['cpu_ms']:9.2f}{timing['wall_ms']:9.2f}")
    for name, ratio in case["ratios"].items():
        print(f"  {name:34}{ratio['cpu_ms']:8.2f}x{ratio['wall_ms']:8.2f}x")
    for name, difference in case["largest_difference_to_fbgemm"].items():
        print(f"  largest difference to fbgemm, {name}: {difference:.1e}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--rule", nargs="+", default=["adagrad", "rowwise_adagrad", "sgd"])
    parser.add_argument("--threads", type=int, default=1, help="on both sides")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-rows", type=int, help="rows that a table is capped at")
    parser.add_argument("--stacks", choices=["auto", "none"], default="auto")
    parser.add_argument("--peer", nargs="*", choices=["fbgemm", "bag"], default=["fbgemm", "bag"])
    parser.add_argument("--huge-pages", action="store_true", help="for the weights of every side")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()

    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["THP_MEM_ALLOC_ENABLE"] = str(int(arguments.huge_pages))
    if arguments.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    from torchrec_tpu.sparsecore import _native

    torch.set_num_threads(arguments.threads)
    result = {
        "benchmark": "execution",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {cpu_model()}",
        "instruction_set": _native.instruction_set(),
        "torch": torch.__version__,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "pages": "huge" if arguments.huge_pages else "4 KiB",
        "cases": [],
    }
    print(
        f"{result['machine']}; {result['instruction_set']}; {arguments.threads} thread(s), "
        f"{result['pages']} pages, median of {arguments.rounds}, "
        f"load {' '.join(f'{x:.1f}' for x in os.getloadavg())}"
    )
    for dim in arguments.dim:
        for rule_name in arguments.rule:
            case = run_case(dim, rule_name, arguments)
            show(case)
            result["cases"].append(case)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
