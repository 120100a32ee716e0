"""A training step of sharded embeddings, beside TorchRec's own collection under the same DMP.

    python benchmarks/dmp.py [--ranks 4] [--tables 8] [--rows 100000] [--dim 64] [--batch 512]
        [--pooling 8] [--steps 12] [--json FILE]

All ranks are processes of this machine over gloo. A step is forward, a sum, and backward with the
fused Adagrad update, on its own; ids are skewed. Both sides get the same plan and the same batches,
and take turns within one world, so that a busy machine slows both. Times are medians of the slowest
rank. Before anything is timed both sides train three steps from the same tables, whose difference
is printed: a fast wrong step is no result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchrec_tpu

KINDS = ("row_wise", "table_wise")


@dataclass(frozen=True, kw_only=True)
class Job:
    ranks: int
    tables: int
    rows: int
    dim: int
    batch: int
    pooling: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """One plan: median milliseconds of a step, and how far apart the trained tables are."""

    plan: str
    ours_ms: float
    torchrec_ms: float
    difference: float

    @property
    def ratio(self) -> float:
        return self.torchrec_ms / self.ours_ms


def make_dmp(job: Job, kind: str, *, ours: bool) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    from torchrec_tpu.sharding.placements import TablePlacement

    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=job.rows, embedding_dim=job.dim, feature_names=[f"f{i}"]
        )
        for i in range(job.tables)
    ]
    placements = [
        TablePlacement.row_wise(c.name, job.rows, job.dim, world_size=job.ranks)
        if kind == "row_wise"
        else TablePlacement.table_wise(c.name, job.rows, job.dim, rank=i % job.ranks)
        for i, c in enumerate(configs)
    ]
    fused_params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": 1e-3}
    torch.manual_seed(0)
    dmp = DistributedModelParallel(
        torch.nn.Sequential(EmbeddingBagCollection(tables=configs)),
        plan=ShardingPlan(
            {
                "0": EmbeddingModuleShardingPlan(
                    {p.table: p.to_parameter_sharding(job.ranks) for p in placements}
                )
            }
        ),
        sharders=torchrec_tpu.sharders(fused_params=fused_params)
        if ours
        else [EmbeddingBagCollectionSharder(fused_params=fused_params)],
    )
    for value in dmp.state_dict().values():  # TorchRec draws new tables when it shards
        for shard in value.local_shards():
            generator = torch.Generator().manual_seed(shard.metadata.shard_offsets[0])
            shard.tensor.copy_(torch.rand(shard.tensor.shape, generator=generator) - 0.5)
    return dmp


def make_batches(job: Job, rank: int) -> list[Any]:
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(4):
        lengths = torch.randint(
            0, 2 * job.pooling + 1, (job.tables * job.batch,), generator=generator
        )
        total = int(lengths.sum())
        ids = (torch.rand(total, generator=generator) ** 4 * job.rows).long()
        batches.append(
            KeyedJaggedTensor(
                keys=[f"f{i}" for i in range(job.tables)], values=ids, lengths=lengths
            )
        )
    return batches


def step(dmp: Any, batch: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    dmp(batch).values().sum().backward()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def run_rank(rank: int, job: Job, directory: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=job.ranks
    )
    batches = make_batches(job, rank)
    lines = []
    for kind in KINDS:
        sides = [make_dmp(job, kind, ours=ours) for ours in (True, False)]
        for batch in batches[:3]:
            for side in sides:
                step(side, batch)
        tables = [side.state_dict() for side in sides]
        difference = max(
            float((a.tensor - b.tensor).abs().max())
            for name in tables[0]
            for a, b in zip(
                tables[0][name].local_shards(), tables[1][name].local_shards(), strict=True
            )
        )
        times: list[list[float]] = [[], []]
        for index in range(job.steps):
            for side, of_side in zip(sides, times, strict=True):
                of_side.append(step(side, batches[index % len(batches)]))
        ours, theirs = (statistics.median(of_side) * 1e3 for of_side in times)
        lines.append(Line(plan=kind, ours_ms=ours, torchrec_ms=theirs, difference=difference))
    if rank == 0:
        (Path(directory) / "lines").write_text(json.dumps([asdict(line) for line in lines]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "ranks": 4,
        "tables": 8,
        "rows": 100_000,
        "dim": 64,
        "batch": 512,
        "pooling": 8,
        "steps": 12,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    arguments = vars(parser.parse_args())
    file = arguments.pop("json")
    job = Job(**arguments)
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (job, directory), nprocs=job.ranks)
        lines = [Line(**line) for line in json.loads((Path(directory) / "lines").read_text())]
    print(f"{job}\n{platform.machine()}, {os.cpu_count()} CPUs, {datetime.now(UTC):%Y-%m-%d}\n")
    print(f"{'plan':<12}{'ours ms':>10}{'torchrec ms':>13}{'ratio':>8}{'difference':>13}")
    for line in lines:
        print(
            f"{line.plan:<12}{line.ours_ms:>10.1f}{line.torchrec_ms:>13.1f}{line.ratio:>8.2f}"
            f"{line.difference:>13.1e}"
        )
    if file:
        report = {"job": asdict(job), "cpus": os.cpu_count(), "lines": [asdict(x) for x in lines]}
        file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
