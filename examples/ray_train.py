"""The job of dmp.py on Ray: its TorchTrainer starts the processes, and starts them again.

    pip install 'torchrec_tpu[ray]'
    python examples/ray_train.py --workers 2 --folder runs/ray

The folder must be one that all workers reach by the same path. When a worker dies, the others miss
it and end; Ray then starts all of them again, and they go on from the newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import ray
import ray.train
from dmp import Options, parser_of, train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_worker(options: dict[str, object]) -> None:
    """One process of the job; Ray has made the process group."""
    chosen = Options(**options)  # type: ignore[arg-type]
    rank = ray.train.get_context().get_world_rank()
    for progress, loss in train(chosen):
        if rank == 0:
            print(f"step {progress.step}: loss {loss:.4f}", flush=True)
        if progress.step % chosen.checkpoint_steps == 0:
            ray.train.report({"step": progress.step, "loss": loss})


def main() -> int:
    """Runs the job on the cluster that RAY_ADDRESS names, or on this machine."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus-per-worker", type=float, default=1.0)
    parser.add_argument("--max-restarts", type=int, default=3)
    chosen = vars(parser.parse_args())
    workers, cpus, restarts = (
        chosen.pop(name) for name in ("workers", "cpus_per_worker", "max_restarts")
    )
    options = Options(**chosen)
    if options.folder is None:
        parser.error("without --folder there is nothing to go on from when a worker dies")
    folder = Path(options.folder).absolute()  # workers have other working directories
    options = dataclasses.replace(options, folder=str(folder))

    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})  # workers import dmp
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=dataclasses.asdict(options),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=restarts)
        ),
    )
    trainer.fit()  # raises when all restarts are used up
    return 0


if __name__ == "__main__":
    sys.exit(main())
