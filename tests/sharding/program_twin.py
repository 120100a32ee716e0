"""A DLRM whose traced program runs beside its own training on the CPU, from the same weights."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from torchrec_tpu import aot
from torchrec_tpu.placement import Placement
from torchrec_tpu.sharding.embeddings import collections_in
from torchrec_tpu.sharding.swap import swap_embeddings
from torchrec_tpu.sparsecore.aot.pipeline import Driver, Execute
from torchrec_tpu.sparsecore.aot.pooled import PooledStack
from torchrec_tpu.sparsecore.aot.program import Mode, Program
from torchrec_tpu.sparsecore.layout import Layout
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad
from torchrec_tpu.training.sides import torch_optimizer

BATCH_SIZE = 5  # of one device: no multiple of its cores
CORES_PER_DEVICE = 2
DENSE_OPTIMIZER = adagrad(lr=0.05, eps=1e-3)

# Three stacks, one a padded width: 8 (rows of 6), 16, 24.
CONFIGS = (
    ("small", 5, 6, PoolingType.SUM, ["small"]),
    ("shared", 90, 6, PoolingType.MEAN, ["click", "view"]),  # two features
    ("user", 333, 16, PoolingType.SUM, ["user"]),
    ("item", 150, 16, PoolingType.MEAN, ["item"]),
    ("city", 40, 16, PoolingType.SUM, ["city"]),
    ("alone", 61, 24, PoolingType.MEAN, ["alone"]),
)
HISTORY_ROWS = 77
SEQUENCE_IDS = {"history": 4 * BATCH_SIZE + 1}  # more than any device gets
NUM_DENSE = 3
TOLERANCE = 5e-5  # after 20 steps, of the largest value; one step of float32 rounds by 6e-8


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=features,
            pooling=pooling,
        )
        for name, rows, dim, pooling, features in CONFIGS
    ]


@dataclass
class Batch:
    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor


class Dlrm(nn.Module):
    """Bags, a dense tower, their dot products, a tower above; mean loss."""

    def __init__(self, *, is_weighted: bool = True) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.ebc = EmbeddingBagCollection(configs(), is_weighted=is_weighted)
        width = sum(c.embedding_dim * len(c.feature_names) for c in configs())
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 16), nn.ReLU())
        self.project = nn.Linear(width, 16)
        self.over = nn.Sequential(nn.Linear(33, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.project(self.ebc(batch.sparse).values())
        dense = self.bottom(batch.dense)
        cross = (pooled * dense).sum(1, keepdim=True)
        logits = self.over(torch.cat([pooled, dense, cross], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, logits.detach()


class WithSequences(nn.Module):
    """A sequence of ids, averaged in each sample, beside a frozen table of bags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.history = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name="history",
                    num_embeddings=HISTORY_ROWS,
                    embedding_dim=12,
                    feature_names=["history"],
                )
            ]
        )
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="frozen", num_embeddings=333, embedding_dim=8, feature_names=["user"]
                )
            ],
            is_weighted=True,
        )
        self.bags.requires_grad_(False)
        self.over = nn.Linear(12 + 8 + NUM_DENSE, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sequence = self.history(batch.sparse)["history"]
        ends = torch.cumsum(sequence.lengths(), 0).unsqueeze(1)
        position = torch.arange(sequence.values().shape[0])
        is_own = (position < ends) & (position >= ends - sequence.lengths().unsqueeze(1))
        mean = is_own.float() @ sequence.values() / sequence.lengths().clamp(min=1).unsqueeze(1)
        bags = self.bags(batch.sparse).values()
        logits = self.over(torch.cat([mean, bags, batch.dense], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, logits.detach()


def batches(
    num_devices: int, *, num_steps: int, seed: int = 3, is_weighted: bool = True
) -> Iterator[list[Batch]]:
    """One batch a device a step: empty bags, duplicates within and between them, weights."""
    rng = np.random.default_rng(seed)
    rows = {feature: rows for _, rows, _, _, features in CONFIGS for feature in features}
    rows["history"] = HISTORY_ROWS
    for _ in range(num_steps):
        step = []
        for _ in range(num_devices):
            lengths = rng.integers(0, 5, (len(rows), BATCH_SIZE))
            values = [
                # Cubes of uniform numbers: low ids come again and again.
                (rng.random(int(n.sum())) ** 3 * count).astype(np.int64)
                for n, count in zip(lengths, rows.values(), strict=True)
            ]
            weights = rng.uniform(0.5, 2, int(lengths.sum())).astype(np.float32)
            step.append(
                Batch(
                    dense=torch.from_numpy(
                        rng.normal(size=(BATCH_SIZE, NUM_DENSE)).astype(np.float32)
                    ),
                    sparse=KeyedJaggedTensor(
                        keys=list(rows),
                        values=torch.from_numpy(np.concatenate(values)),
                        lengths=torch.from_numpy(lengths.ravel().astype(np.int32)),
                        weights=torch.from_numpy(weights) if is_weighted else None,
                    ),
                    labels=torch.from_numpy(rng.integers(0, 2, BATCH_SIZE)),  # int64
                )
            )
        yield step


def concatenated(parts: list[Batch]) -> Batch:
    """The global batch: the samples of device 0, then those of device 1, ..."""
    keys = parts[0].sparse.keys()
    lengths = [part.sparse.lengths().view(len(keys), -1) for part in parts]
    split = [part.sparse.to_dict() for part in parts]
    return Batch(
        dense=torch.cat([part.dense for part in parts]),
        sparse=KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([one[key].values() for key in keys for one in split]),
            lengths=torch.cat(lengths, 1).reshape(-1),
            weights=torch.cat([one[key].weights() for key in keys for one in split])
            if parts[0].sparse.weights_or_none() is not None
            else None,
        ),
        labels=torch.cat([part.labels for part in parts]),
    )


@dataclass
class Run:
    """What training gave: per step the loss and the logits (G * B,), then the trained values."""

    losses: list[float]
    logits: list[np.ndarray]
    values: dict[str, np.ndarray]


class Twin:
    """One model, to be trained on the CPU by torch, and by its program on `num_devices`."""

    def __init__(
        self,
        optimizer: OptimizerSpec,
        *,
        num_devices: int,
        num_steps: int,
        model: nn.Module | None = None,
        pooled: Callable[[Layout, int], Sequence[PooledStack]] | None = None,
        is_weighted: bool = True,
    ) -> None:
        """With `pooled`, some tables of the model's first collection stay with owners."""
        self.model = model or Dlrm(is_weighted=is_weighted)
        self._learning_rate = optimizer.lr
        swap_embeddings(self.model, optimizer=optimizer)
        self.num_devices = num_devices
        self.steps = list(batches(num_devices, num_steps=num_steps, is_weighted=is_weighted))
        self.pooled: dict[str, tuple[PooledStack, ...]] = {}
        if pooled:
            fqn, collection = next(iter(collections_in(self.model)))
            self.pooled = aot.fit_pooled(
                self.model,
                [batch for step in self.steps for batch in step],
                {fqn: pooled(collection.layout, num_devices)},
                batch_size=BATCH_SIZE,
            )
        self.layouts = aot.layouts(
            self.model,
            num_devices=num_devices,
            cores_per_device=CORES_PER_DEVICE,
            batch_size=BATCH_SIZE,
            pooled=self.pooled,
        )

    def program(self, mode: Mode = "exact") -> Program:
        return aot.trace(
            self.model,
            self.steps[0][0],
            num_devices=self.num_devices,
            cores_per_device=CORES_PER_DEVICE,
            dense_optimizer=DENSE_OPTIMIZER,
            capacities=aot.fit_capacities(
                self.model, [batch for step in self.steps for batch in step], self.layouts
            ),
            layouts=self.layouts,
            mode=mode,
            sequence_ids=SEQUENCE_IDS if self._has_sequences else None,
            pooled=self.pooled,
        )

    def _set_learning_rate(self, model: nn.Module, step: int) -> None:
        for _, collection in collections_in(model):
            for group in collection.fused_optimizer.param_groups:
                group["lr"] = self._learning_rate / (1 + 0.1 * step)

    @property
    def _has_sequences(self) -> bool:
        return isinstance(self.model, WithSequences)

    def placement(
        self, model: nn.Module, program: Program, layouts: Mapping[str, Layout] | None = None
    ) -> Placement:
        return Placement(
            model,
            program,
            layouts=layouts or self.layouts,
            dense_optimizer=DENSE_OPTIMIZER,
            batch_size=BATCH_SIZE,
            sequence_ids=SEQUENCE_IDS if self._has_sequences else None,
            pooled=self.pooled,
        )

    def train(self, mode: Mode = "exact") -> Run:
        """torch on the concatenated batches; pipelined: lookups miss the update before theirs."""
        model = copy.deepcopy(self.model)
        weights = dict(model.named_parameters())
        tables = {n: p for n, p in weights.items() if ".embedding" in n and p.requires_grad}
        dense = {n: p for n, p in weights.items() if ".embedding" not in n}
        dense_optimizer = torch_optimizer(DENSE_OPTIMIZER, dense.values())
        losses, logits = [], []
        before = {name: table.detach().clone() for name, table in tables.items()}
        for index, parts in enumerate(self.steps):
            self._set_learning_rate(model, index)
            now = {name: table.detach().clone() for name, table in tables.items()}
            if mode == "pipelined":
                _assign(tables, before)
            loss, outputs = model(concatenated(parts))
            _assign(tables, now)
            before = now
            dense_optimizer.zero_grad()
            loss.backward()
            dense_optimizer.step()
            losses.append(loss.item())
            logits.append(outputs.numpy())
        slots = {
            f"dense_slot/sum/{name}": dense_optimizer.state[p]["sum"] for name, p in dense.items()
        }
        return Run(losses, logits, _values(model) | {n: t.numpy() for n, t in slots.items()})

    def run(
        self,
        program: Program,
        execute: Execute,
        *,
        feed_layouts: Mapping[str, Layout] | None = None,
    ) -> Run:
        """The program on the same batches; values are those of the model that it is written to.

        With `feed_layouts`, batches are packed for other layouts than the tables: a fault.
        """
        model = copy.deepcopy(self.model)
        placement = self.placement(model, program)
        feeder = self.placement(model, program, feed_layouts)
        driver = Driver(program, execute, placement.state(), operands=placement.operands)
        results: list[Mapping[str, Any]] = []
        for index, parts in enumerate(self.steps):
            self._set_learning_rate(model, index)
            result = driver.step(feeder.feed(parts))
            results += [] if result is None else [result]
        results += driver.drain()
        placement.write(driver.state, num_steps=driver.num_batches)
        slots = {n: v for n, v in driver.state.items() if n.startswith("dense_slot/")}
        return Run(
            [float(result["loss"]) for result in results],
            [result["output.0"].ravel() for result in results],
            _values(model) | slots,
        )


def assert_equal(actual: Run, expected: Run) -> dict[str, float]:
    """Losses, logits and all values agree to float32 rounding; the largest differences seen.

    They are relative to the largest value of their kind.
    """
    assert len(actual.losses) == len(expected.losses)
    assert actual.values.keys() == expected.values.keys()
    pairs = {
        "loss": (np.array(actual.losses), np.array(expected.losses)),
        "logits": (np.stack(actual.logits), np.stack(expected.logits)),
        **{name: (actual.values[name], value) for name, value in expected.values.items()},
    }
    differences = {
        name: float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-30))
        for name, (one, other) in pairs.items()
    }
    wrong = {name: d for name, d in differences.items() if not d < TOLERANCE}
    assert not wrong, f"differ: {wrong}"
    return differences


def _assign(tables: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, table in tables.items():
        table.detach().copy_(values[name])


def _values(model: nn.Module) -> dict[str, np.ndarray]:
    """Parameters, and the tables' optimizer state."""
    tensors = dict(model.state_dict())
    for _, collection in collections_in(model):
        for state in collection.fused_optimizer.state_dict()["state"].values():
            tensors |= state
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}
