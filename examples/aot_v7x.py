"""A model of yours on TPU slices that you don't have: does it fit, and how well does it overlap?

    python examples/aot_v7x.py [--topology tpu7x:4x4x2] [--batch-size 1024]

Needs `pip install "torchrec_tpu[aot]"`, and no TPU. The tables are on "meta": their 14 GB, and as
much optimizer state, are not allocated.
"""

import argparse

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_tpu
from torchrec_tpu import aot
from torchrec_tpu.sparsecore.aot.topology import topology

ROWS = {"user": 20_000_000, "item": 8_000_000, "shop": 50_000, "country": 250}
IDS_PER_BAG = {"user": 1, "item": 20, "shop": 2, "country": 1}
DIM, NUM_DENSE = 128, 16

Batch = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]


class Recommender(nn.Module):
    """Written for TorchRec; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{key}", num_embeddings=rows, embedding_dim=DIM, feature_names=[key]
                )
                for key, rows in ROWS.items()
            ],
            device=torch.device("meta"),
        )
        self.dense = nn.Sequential(nn.Linear(NUM_DENSE, 256), nn.ReLU(), nn.Linear(256, DIM))
        self.over = nn.Sequential(
            nn.Linear(DIM * (1 + len(ROWS)), 1024), nn.ReLU(), nn.Linear(1024, 1)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean binary cross entropy of a batch."""
        dense, features, clicked = batch
        joined = torch.cat([self.dense(dense), self.tables(features).values()], dim=1)
        return nn.functional.binary_cross_entropy_with_logits(self.over(joined)[:, 0], clicked)


def make_batch(size: int, generator: torch.Generator) -> Batch:
    """One device's batch; a third of all ids are of the most popular thousand."""
    values, lengths = [], []
    for key, rows in ROWS.items():
        num_ids = size * IDS_PER_BAG[key]
        ids = torch.randint(rows, (num_ids,), generator=generator)
        popular = torch.rand(num_ids, generator=generator) < 1 / 3
        values.append(torch.where(popular, ids % min(1000, rows), ids))
        lengths.append(torch.full((size,), IDS_PER_BAG[key]))
    features = KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=torch.cat(lengths))
    return torch.zeros(size, NUM_DENSE), features, torch.zeros(size)


def main() -> None:
    """Traces and compiles the exact and the pipelined step, and prints both reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="tpu7x:2x2x1")
    parser.add_argument("--batch-size", type=int, default=256, help="samples of one device")
    args = parser.parse_args()
    target = topology(args.topology)
    devices = {
        "num_devices": target.num_devices,
        "cores_per_device": target.chip.cores_per_device,
    }

    model = torchrec_tpu.shard(Recommender(), optimizer=torchrec_tpu.adagrad(lr=0.01))
    generator = torch.Generator().manual_seed(0)
    batches = [make_batch(args.batch_size, generator) for _ in range(3)]
    layouts = aot.layouts(model, **devices, batch_size=args.batch_size)
    capacities = aot.fit_capacities(model, batches, layouts)
    for mode in ("exact", "pipelined"):
        program = aot.trace(
            model,
            batches[0],
            **devices,
            dense_optimizer=torchrec_tpu.adagrad(lr=0.01),
            capacities=capacities,
            layouts=layouts,
            mode=mode,
        )
        report = aot.compile_for(
            program,
            target,
            global_batch_size=args.batch_size * target.num_devices,
            traffic=aot.measure_traffic(model, batches, layouts),
        )
        print(f"{report}\n")


if __name__ == "__main__":
    main()
