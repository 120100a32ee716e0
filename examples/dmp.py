"""A DLRM whose tables are spread over processes, in TorchRec's own DistributedModelParallel.

    torchrun --nproc-per-node 2 examples/dmp.py
    torchrun --nproc-per-node 4 examples/dmp.py --data criteo --path day_0.gz --batch-size 8192
    torchrun --nproc-per-node 4 --max-restarts 3 examples/dmp.py --folder runs/dmp

Three lines differ from a job for stock TorchRec; they are marked. With a folder, the job saves
checkpoints there and goes on from the newest when it is started again: by torchrun after a process
has died, or by you with another number of processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_tpu
from torchrec_tpu.datasets import BatchStream, CriteoFile, MultiHot, Synthetic, part_of
from torchrec_tpu.recipes import Recipe, capped, dlrm_v2_criteo, dlrm_v2_synthetic
from torchrec_tpu.sparsecore.errors import PeerError
from torchrec_tpu.training.sides import build_model, torch_optimizer

TRY_AGAIN = os.EX_TEMPFAIL  # exit code of a process whose peers are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the job does.

    Attributes:
        data: "synthetic" or "criteo".
        path: the Criteo file.
        batch_size: samples of a step, over all processes.
        max_rows: no table is longer.
        steps: to do in all, also those before a restart.
        folder: of the checkpoints, shared by all processes; None saves none.
        checkpoint_steps: steps between checkpoints.
        deadline_seconds: how long a process waits for another.
    """

    data: str = "synthetic"
    path: str | None = None
    batch_size: int = 512
    max_rows: int = 10_000
    steps: int = 100
    folder: str | None = None
    checkpoint_steps: int = 50
    deadline_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """After a step: steps done, and where the next batch is."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


def train(options: Options) -> Iterator[tuple[Progress, float]]:
    """Trains in every process of the default process group.

    Yields:
        after each step the progress, and the loss of this process's part of the batch.

    Raises:
        PeerError: other processes are missing.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    recipe = recipe_of(options)
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))

    # The same model definition, data and optimizers as without us.
    model = build_model(recipe, device=torch.device("meta"))

    # Stock TorchRec: [EmbeddingBagCollectionSharder(fused_params=...)]
    sharders = torchrec_tpu.sharders(
        optimizer=recipe.table_optimizer, deadline_seconds=options.deadline_seconds
    )
    # Stock TorchRec: EmbeddingShardingPlanner(topology=Topology(world_size, "cpu"))
    planner = torchrec_tpu.TpuEmbeddingShardingPlanner(
        torchrec_tpu.TpuTopology(world_size=world_size, chip="tpu7x", compute_device="cpu"),
        batch_size=-(-options.batch_size // world_size),
        constraints={
            f"t_{feature.key}": ParameterConstraints(pooling_factors=[feature.num_ids])
            for feature in recipe.features
        },
    )
    dmp = DistributedModelParallel(
        model,
        device=device,
        plan=planner.collective_plan(model, sharders, dist.group.WORLD),
        sharders=sharders,
        # Stock TorchRec: DefaultDataParallelWrapper(), its default
        data_parallel_wrapper=torchrec_tpu.DataParallel(deadline_seconds=options.deadline_seconds),
    )
    if rank == 0:
        print(planner.sparsecore_plan)

    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        partial(torch_optimizer, recipe.dense_optimizer),
    )
    progress = Progress()
    save = partial(
        torchrec_tpu.save_checkpoint,
        model=dmp,
        optimizers=dense_optimizer,
        deadline_seconds=options.deadline_seconds,
    )
    if options.folder is not None and torchrec_tpu.latest_checkpoint(options.folder) is not None:
        restored = torchrec_tpu.load_checkpoint(
            options.folder,
            dmp,
            optimizers=dense_optimizer,
            deadline_seconds=options.deadline_seconds,
        )
        progress = Progress(**restored.progress)
        if rank == 0:
            print(f"goes on after step {progress.step}, from {restored.path.name}", flush=True)

    optimizer = CombinedOptimizer([dmp.fused_optimizer, dense_optimizer])
    pipeline: TrainPipelineSparseDist[Batch, Any] = TrainPipelineSparseDist(dmp, optimizer, device)
    feed = Feed(open_data(options, recipe), progress)
    batches = (part_of(batch, rank, world_size) for batch in feed)
    while progress.step < options.steps:
        loss, _, _ = pipeline.progress(batches)  # what DLRMTrain returns beside its loss
        progress = feed.done()
        if options.folder is not None and (
            progress.step % options.checkpoint_steps == 0 or progress.step == options.steps
        ):
            save(options.folder, step=progress.step, progress=dataclasses.asdict(progress))
        yield progress, float(loss)


class Feed:
    """Batches without end, and the position behind those that were trained on.

    The pipeline takes batches before their step, so that position is not where the stream is.
    """

    def __init__(self, stream: BatchStream, progress: Progress) -> None:
        self._stream = stream
        self._progress = progress
        self._positions: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self._progress.epoch, self._progress.batch
        while True:
            for batch, item in enumerate(self._stream.batches(epoch, start=start), start=start + 1):
                self._positions.append((epoch, batch))
                yield item
            epoch, start = epoch + 1, 0

    def done(self) -> Progress:
        """The progress once the oldest batch that is under way is trained on."""
        epoch, batch = self._positions.popleft()
        self._progress = Progress(step=self._progress.step + 1, epoch=epoch, batch=batch)
        return self._progress


def recipe_of(options: Options) -> Recipe:
    """The model that fits the data."""
    recipe = dlrm_v2_criteo() if options.data == "criteo" else dlrm_v2_synthetic()
    recipe = dataclasses.replace(recipe, batch_size=options.batch_size)
    return capped(recipe, max_rows=options.max_rows)


def open_data(options: Options, recipe: Recipe) -> BatchStream:
    """The whole batches; every process reads them, and takes its part."""
    if options.data == "criteo":
        if options.path is None:
            sys.exit("Criteo data are read from a file: pass --path FILE")
        rows = [feature.num_embeddings for feature in recipe.features]
        return CriteoFile(options.path, num_embeddings=rows, batch_size=recipe.batch_size)
    return Synthetic(
        [
            MultiHot(key=f.key, num_embeddings=f.num_embeddings, num_ids=f.num_ids)
            for f in recipe.features
        ],
        batch_size=recipe.batch_size,
        num_batches=recipe.steps_per_epoch,
        exponent=recipe.exponent,
    )


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line with all options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Options):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=str if field.default is None else type(field.default),
            default=field.default,
            choices=("synthetic", "criteo") if field.name == "data" else None,
        )
    return parser


def join() -> None:
    """Makes the default process group.

    The store of torchrun's agent outlives the processes that it starts again. Under names of its
    own, an attempt does not find the addresses of the one before.
    """
    store, rank, world_size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d.PrefixStore(f"attempt{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def main() -> int:
    """One process of the job."""
    options = Options(**vars(parser_of(__doc__).parse_args()))
    join()
    try:
        for progress, loss in train(options):
            if dist.get_rank() == 0:
                print(f"step {progress.step}: loss {loss:.4f}", flush=True)
    except PeerError as error:
        print(error, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Python's own way out would wait for the collectives that are still under way, until their
        # deadline: gloo cannot give them up.
        os._exit(TRY_AGAIN)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
