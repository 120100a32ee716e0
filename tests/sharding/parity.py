"""One training job twice: under DistributedModelParallel, and alone by TorchRec in one process.

The lone process steps on the mean over ranks of each rank's mean loss, which is what data
parallelism does, with TorchRec's eager collections and torch's optimizers.

Legend: W ranks, V num_embeddings, D embedding_dim, B batch size of one rank.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from twin import Case, first_state, step_rows

import torchrec_tpu
from torchrec_tpu import adagrad, adam, rowwise_adagrad, sgd

CPU = torch.device("cpu")
PLACEMENTS = ("row_wise", "table_wise", "column_wise", "data_parallel", "mixed")
NUM_DENSE = 5
DENSE_LR = 0.1

NUM_IDS = {"item": 64, "unused": 1000, "user": 101, "history": 64, "tag": 3, "word": 37}
"""KJT keys, in another order than the tables', and how many ids each may have."""

# Well-conditioned: where the state is zero, a first Adagrad or Adam step is lr * sign(gradient)
# even for a gradient that is rounding noise, and the comparison would be of noise.
CASES = {
    case.name: case
    for case in (
        Case("sgd", sgd(lr=1.0), torch.optim.SGD, {"lr": 1.0}),
        Case(
            "adagrad",
            adagrad(lr=0.1, initial_accumulator_value=0.1),
            torch.optim.Adagrad,
            {"lr": 0.1},
            {"momentum1": "sum"},
            initial=0.1,
        ),
        Case(
            "rowwise_adagrad",
            rowwise_adagrad(lr=0.1, initial_accumulator_value=0.1),
            RowWiseAdagrad,
            {"lr": 0.1},
            {"momentum1": "sum"},
            initial=0.1,
        ),
        Case(
            "adam",
            adam(lr=0.02, eps=1e-4),
            torch.optim.Adam,
            {"lr": 0.02, "eps": 1e-4},
            {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, how it is sharded, and how it is told.

    Attributes:
        optimizer: of CASES, for all tables; or by table name, through apply_optimizer_in_backward.
        placement: of PLACEMENTS; "mixed" deals the four kinds out to the tables.
        model: "dlrm", or "tower": pooled, weighted and sequence collections of mixed widths.
        pipeline: under TrainPipelineSparseDist.
        scheduler: the learning rate of the tables halves every 10 steps.
        divides: TorchRec's switch for dividing the gradients of tables by W.
        variable_batches: each key has a batch size of its own (VBE).
        own_wrapper: torchrec_tpu.DataParallel in the place of DistributedDataParallel.
        max_gradient: limit of each element of the gradient of a collection's output.
        fused_params: the optimizer comes as fbgemm's names, not as a spec.
        id_dtype: of the KJT's values and lengths.
    """

    optimizer: str | Mapping[str, str]
    placement: str
    model: Literal["dlrm", "tower"] = "dlrm"
    num_steps: int = 30
    pipeline: bool = False
    scheduler: bool = False
    divides: bool = True
    variable_batches: bool = False
    own_wrapper: bool = False
    max_gradient: float | None = None
    fused_params: Mapping[str, Any] | None = None
    id_dtype: torch.dtype = torch.int64
    note: str = ""

    @property
    def name(self) -> str:
        optimizer = self.optimizer if isinstance(self.optimizer, str) else "per-table"
        return "-".join(filter(None, (self.model, optimizer, self.placement, self.note)))

    def case(self, table: str) -> Case:
        return CASES[self.optimizer if isinstance(self.optimizer, str) else self.optimizer[table]]

    def lr(self, table: str, step: int) -> float:
        lr: float = self.case(table).options["lr"]
        return lr * 0.5 ** (step // 10) if self.scheduler else lr


# ---- models -------------------------------------------------------------------------------------


def bag_configs() -> list[EmbeddingBagConfig]:
    """Sizes that 2, 3 and 4 do not divide, one smaller than four ranks, a shared table, MEAN."""
    return [
        EmbeddingBagConfig(
            name="users", num_embeddings=101, embedding_dim=8, feature_names=["user"]
        ),
        EmbeddingBagConfig(
            name="goods",
            num_embeddings=64,
            embedding_dim=8,
            feature_names=["item", "history"],
            pooling=PoolingType.MEAN,
        ),
        EmbeddingBagConfig(name="tags", num_embeddings=3, embedding_dim=8, feature_names=["tag"]),
        EmbeddingBagConfig(
            name="words", num_embeddings=37, embedding_dim=8, feature_names=["word"]
        ),
    ]


def mixed_configs() -> list[EmbeddingBagConfig]:
    """Several widths that TorchRec can halve, and a feature that two tables share."""
    return [
        EmbeddingBagConfig(
            name="users", num_embeddings=101, embedding_dim=16, feature_names=["user"]
        ),
        EmbeddingBagConfig(
            name="goods",
            num_embeddings=64,
            embedding_dim=24,
            feature_names=["item", "history"],
            pooling=PoolingType.MEAN,
        ),
        EmbeddingBagConfig(name="tags", num_embeddings=3, embedding_dim=8, feature_names=["tag"]),
        EmbeddingBagConfig(
            name="past", num_embeddings=64, embedding_dim=40, feature_names=["history"]
        ),
    ]


def weighted_configs() -> list[EmbeddingBagConfig]:
    """TorchRec's eager collections have no weighted MEAN."""
    return [
        EmbeddingBagConfig(
            name="prices", num_embeddings=64, embedding_dim=8, feature_names=["item", "word"]
        ),
        EmbeddingBagConfig(
            name="ages", num_embeddings=101, embedding_dim=16, feature_names=["user"]
        ),
    ]


def sequence_configs() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name="clicks", num_embeddings=64, embedding_dim=8, feature_names=["item"]),
        EmbeddingConfig(
            name="texts", num_embeddings=101, embedding_dim=8, feature_names=["word", "user"]
        ),
        EmbeddingConfig(name="marks", num_embeddings=3, embedding_dim=8, feature_names=["tag"]),
        EmbeddingConfig(name="notes", num_embeddings=37, embedding_dim=8, feature_names=["word"]),
    ]


def names_of(configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig]) -> list[str]:
    """Of outputs: "feature@table" for a feature that several tables share."""
    return [name for names in get_embedding_names_by_table(list(configs)) for name in names]


def summed(sequences: JaggedTensor) -> Tensor:
    """The sum of each sequence, (B, D)."""
    lengths = sequences.lengths().long()
    sample_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), sequences.values().shape[1])
    return sums.index_add(0, sample_of, sequences.values())


class Tower(nn.Module):
    """A linear layer over the dense features and all embeddings; sequences are summed."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        where = torch.device(device)
        self.pooled = EmbeddingBagCollection(tables=mixed_configs(), device=where)
        self.weighted = EmbeddingBagCollection(
            tables=weighted_configs(), is_weighted=True, device=where
        )
        self.sequence = EmbeddingCollection(tables=sequence_configs(), device=where)
        num_columns = sum(
            config.embedding_dim * len(config.feature_names)
            for config in (*mixed_configs(), *weighted_configs(), *sequence_configs())
        )
        self.head = nn.Linear(NUM_DENSE + num_columns, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss, and for TorchRec's pipelines the detached loss and logits."""
        kjt = batch.sparse_features
        without_weights = KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths())
        pooled, weighted = self.pooled(without_weights), self.weighted(kjt)
        sequences = self.sequence(without_weights)
        embeddings = [  # by name: the order of a sharded collection's outputs is its own affair
            *(pooled[name] for name in names_of(mixed_configs())),
            *(weighted[name] for name in names_of(weighted_configs())),
            *(summed(sequences[name]) for name in names_of(sequence_configs())),
        ]
        logits = self.head(torch.cat([batch.dense_features, *embeddings], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach())


def new_model(kind: str, device: str = "cpu") -> nn.Module:
    """The same first values each time."""
    torch.manual_seed(7)
    if kind == "tower":
        return Tower(device)
    bags = EmbeddingBagCollection(tables=bag_configs(), device=torch.device(device))
    return DLRMTrain(DLRM(bags, NUM_DENSE, [16, 8], [16, 1]))


Config = EmbeddingBagConfig | EmbeddingConfig


def collections_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Any]]]:
    """FQN, module and configs of TorchRec's collections."""
    for fqn, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            yield fqn, module, list(module.embedding_bag_configs())
        elif isinstance(module, EmbeddingCollection):
            yield fqn, module, list(module.embedding_configs())


@dataclass(frozen=True, kw_only=True)
class PlacedTable:
    config: Config
    weight: nn.Parameter
    kind: str  # of placement
    shard_ranks: tuple[int, ...]  # of TABLE_WISE and COLUMN_WISE


def tables_of(model: nn.Module, placement: str, world_size: int) -> dict[str, PlacedTable]:
    """FQN of its weight -> every table of a model that is not sharded yet."""
    tables = {}
    for fqn, module, configs in collections_of(model):
        weights = {name.split(".")[-2]: (name, p) for name, p in module.named_parameters()}
        for index, config in enumerate(configs):
            name, weight = weights[config.name]
            kind = PLACEMENTS[index % 4] if placement == "mixed" else placement
            count = {"table_wise": 1, "column_wise": 2}.get(kind, 0)
            tables[f"{fqn}.{name}"] = PlacedTable(
                config=config,
                weight=weight,
                kind=kind,
                shard_ranks=tuple((index + at) % world_size for at in range(count)),
            )
    return tables


# ---- batches ------------------------------------------------------------------------------------


def new_batch(job: Job, step: int, rank: int, world_size: int, *, expanded: bool = False) -> Batch:
    """Of one rank: skewed ids with duplicates inside and between bags, empty bags, B that varies.

    At every fifth step one rank has no id at all. A job with variable batches has a KJT of
    distinct bags per key, or with `expanded` what it stands for.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch_size = 5 + (3 * step + 5 * rank) % 7
    is_idle = step % 5 == 4 and step // 5 % world_size == rank
    num_bags = {
        key: 1 + (step + index) % batch_size if job.variable_batches else batch_size
        for index, key in enumerate(NUM_IDS)
    }
    lengths, values = {}, {}
    for key, num_ids in NUM_IDS.items():
        lengths[key] = torch.randint(0, 5, (num_bags[key],), generator=generator)
        if is_idle:
            lengths[key].zero_()
        total = int(lengths[key].sum())
        values[key] = (torch.rand(total, generator=generator) ** 3 * num_ids).long()
    dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
    labels = torch.randint(0, 2, (batch_size,), generator=generator)
    weights = torch.rand(sum(len(v) for v in values.values()), generator=generator) + 0.1
    variable: dict[str, Any] = {}
    if job.variable_batches:
        inverse = {
            key: torch.randint(0, num_bags[key], (batch_size,), generator=generator)
            for key in NUM_IDS
        }
        if expanded:
            for key, bags in inverse.items():
                parts = torch.split(values[key], lengths[key].tolist())
                values[key] = torch.cat([parts[bag] for bag in bags.tolist()])
                lengths[key] = lengths[key][bags]
        else:
            variable = {
                "stride_per_key_per_rank": [[num_bags[key]] for key in NUM_IDS],
                "inverse_indices": (list(NUM_IDS), torch.stack([*inverse.values()])),
            }
    kjt = KeyedJaggedTensor(
        keys=list(NUM_IDS),
        values=torch.cat([*values.values()]).to(job.id_dtype),
        lengths=torch.cat([*lengths.values()]).to(job.id_dtype),
        weights=weights if job.model == "tower" else None,
        **variable,
    )
    return Batch(dense, kjt, labels)


# ---- one process --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job leaves behind; tensors are whole.

    Attributes:
        losses: mean over ranks, by step.
        weights: FQN -> table.
        state: FQN of a table and slot name of a fused optimizer -> slot.
        dense: FQN -> parameter or buffer.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    state: dict[tuple[str, str], Tensor]
    dense: dict[str, Tensor]


def as_sharded(table: PlacedTable, slot: Tensor) -> Tensor:
    """Row-wise slots lose their dim; as in TorchRec each shard of columns has one, end to end."""
    if slot.shape[1] > 1:
        return slot
    return slot.squeeze(1).repeat(len(table.shard_ranks) if table.kind == "column_wise" else 1)


def clip_gradients(model: nn.Module, limit: float) -> None:
    """Of the outputs of pooled collections."""

    def clip(module: nn.Module, arguments: Any, output: KeyedTensor) -> None:
        output.values().register_hook(lambda grad: grad.clamp(-limit, limit))

    for _, module, _ in collections_of(model):
        module.register_forward_hook(clip)


def train_alone(job: Job, world_size: int) -> Outcome:
    """The reference: no shards, no fused optimizer, none of our code."""
    model = new_model(job.model)
    tables = tables_of(model, job.placement, world_size)
    states = {
        fqn: first_state(job.case(table.config.name), *table.weight.shape)
        for fqn, table in tables.items()
    }
    if job.max_gradient is not None:
        clip_gradients(model, job.max_gradient)
    dense = {name: p for name, p in model.named_parameters() if name not in tables}
    optimizer = torch.optim.SGD(dense.values(), lr=DENSE_LR)
    losses = []
    for step in range(job.num_steps):
        batches = [
            new_batch(job, step, rank, world_size, expanded=True) for rank in range(world_size)
        ]
        loss = torch.stack([model(batch)[0] for batch in batches]).mean()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for fqn, table in tables.items():
            ids = [
                batch.sparse_features[key].values()
                for batch in batches
                for key in table.config.feature_names
            ]
            assert table.weight.grad is not None
            step_rows(
                job.case(table.config.name),
                table.weight.detach(),
                table.weight.grad,
                torch.cat(ids).unique(),
                states[fqn],
                job.lr(table.config.name, step),
            )
    return Outcome(
        losses=losses,
        weights={fqn: table.weight.detach() for fqn, table in tables.items()},
        state={
            (fqn, here): as_sharded(table, states[fqn][there])
            for fqn, table in tables.items()
            for here, there in job.case(table.config.name).slots.items()
        },
        dense={name: p.detach() for name, p in dense.items()},
    )


# ---- many processes -----------------------------------------------------------------------------


def sharders_of(job: Job) -> list[ModuleSharder[nn.Module]]:
    if job.fused_params is not None:
        return torchrec_tpu.sharders(fused_params=dict(job.fused_params))
    if isinstance(job.optimizer, str):
        spec = replace(CASES[job.optimizer].spec, max_gradient=job.max_gradient)
        return torchrec_tpu.sharders(optimizer=spec)
    return torchrec_tpu.sharders()


def plan_of(
    model: nn.Module,
    placement: str,
    world_size: int,
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> ShardingPlan:
    """By TorchRec's own constructors of plans."""
    tables = tables_of(model, placement, world_size)
    plans = {}
    for fqn, module, configs in collections_of(model):
        generators = {}
        for config in configs:
            (table,) = (t for t in tables.values() if t.config is config)
            match table.kind:
                case "row_wise":
                    generators[config.name] = row_wise(compute_kernel="fused")
                case "table_wise":
                    generators[config.name] = table_wise(
                        rank=table.shard_ranks[0], compute_kernel="fused"
                    )
                case "column_wise":
                    generators[config.name] = column_wise(
                        ranks=list(table.shard_ranks), compute_kernel="fused"
                    )
                case "data_parallel":
                    generators[config.name] = data_parallel()
        plans[fqn] = construct_module_sharding_plan(
            module,
            generators,
            next(sharder for sharder in sharders if sharder.module_type is type(module)),
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
    return ShardingPlan(plan=plans)


def new_dmp(job: Job, device: str = "cpu") -> DistributedModelParallel:
    """The job's model, sharded over the processes of the default group."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns as it is imported

    model, world_size = new_model(job.model, device), dist.get_world_size()
    if not isinstance(job.optimizer, str):
        for table in tables_of(model, job.placement, world_size).values():
            case = job.case(table.config.name)
            initial = {"initial_accumulator_value": case.initial} if case.initial else {}
            _apply_optimizer_in_backward(
                case.torch_class, [table.weight], {**case.options, **initial}
            )
    sharders = sharders_of(job)
    return DistributedModelParallel(
        model,
        device=CPU,
        plan=plan_of(model, job.placement, world_size, sharders),
        sharders=sharders,
        data_parallel_wrapper=torchrec_tpu.DataParallel() if job.own_wrapper else None,
    )


def optimizer_of(dmp: DistributedModelParallel) -> CombinedOptimizer:
    """The fused optimizer of the tables, and SGD for what TorchRec's filter leaves."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=DENSE_LR),
    )
    return CombinedOptimizer([dmp.fused_optimizer, dense])


Pieces = list[tuple[tuple[int, ...], Tensor]]
"""(offsets, values) of one rank's shards; a tensor that is not sharded is one piece at ()."""


def pieces_of(value: Tensor | ShardedTensor) -> Pieces:
    if isinstance(value, ShardedTensor):
        return [(tuple(s.metadata.shard_offsets), s.tensor.clone()) for s in value.local_shards()]
    return [((), value.detach().clone())]


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What one rank has after a job."""

    losses: list[float]
    model: dict[str, Pieces]
    state: dict[tuple[str, str], Pieces]


def train_sharded(job: Job) -> RankOutcome:
    """Runs in each process of a world."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    set_gradient_division(job.divides)
    dmp = new_dmp(job)
    optimizer = optimizer_of(dmp)
    scheduler = (
        torch.optim.lr_scheduler.StepLR(dmp.fused_optimizer, step_size=10, gamma=0.5)
        if job.scheduler
        else None
    )
    batches = (new_batch(job, step, rank, world_size) for step in range(job.num_steps))
    losses = []
    if job.pipeline:
        pipeline = TrainPipelineSparseDist(dmp, optimizer, CPU)
        for _ in range(job.num_steps):
            losses.append(pipeline.progress(batches)[0].item())
        assert pipeline._pipelined_modules, "nothing was pipelined"
    else:
        for batch in batches:
            optimizer.zero_grad()
            loss, _ = dmp(batch)
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.item())
    set_gradient_division(True)
    return RankOutcome(
        losses=losses,
        model={fqn: pieces_of(value) for fqn, value in dmp.state_dict().items()},
        state={
            (fqn, name.split(".")[-1]): pieces_of(value)
            for fqn, slots in dmp.fused_optimizer.state_dict()["state"].items()
            for name, value in slots.items()
        },
    )


def train_all(rank: int, world_size: int, jobs: Sequence[Job]) -> dict[str, RankOutcome | str]:
    """Name of a job -> its outcome, or the traceback of what stopped it."""
    outcomes: dict[str, RankOutcome | str] = {}
    for job in jobs:
        try:
            outcomes[job.name] = train_sharded(job)
        except Exception:  # the test of this job fails, the others go on
            outcomes[job.name] = traceback.format_exc()
    return outcomes


# ---- comparison ---------------------------------------------------------------------------------


def assembled(ranks: Sequence[Pieces], like: Tensor) -> Tensor:
    """The whole tensor; replicas must be bit-equal, and shards must cover it."""
    pieces = [piece for rank in ranks for piece in rank]
    if all(offsets == () for offsets, _ in pieces):
        assert all(torch.equal(piece, pieces[0][1]) for _, piece in pieces), "replicas differ"
        return pieces[0][1]
    whole = torch.full_like(like, torch.nan)
    for offsets, piece in pieces:
        window = tuple(
            slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True)
        )
        assert whole[window].isnan().all(), "shards overlap"
        whole[window] = piece
    assert not whole.isnan().any(), "shards do not cover the tensor"
    return whole


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest absolute differences."""

    loss: float
    table: float
    state: float
    dense: float


def compare(ranks: Sequence[RankOutcome], alone: Outcome) -> Differences:
    losses = torch.tensor([rank.losses for rank in ranks], dtype=torch.float64).mean(0)

    def largest(names: Mapping[Any, Tensor], of_rank: Callable[[RankOutcome], Any]) -> float:
        found = 0.0
        for name, wanted in names.items():
            pieces = [of_rank(rank)[name] for rank in ranks if name in of_rank(rank)]
            assert pieces, f"no rank has {name}"
            whole = assembled(pieces, wanted)
            assert whole.shape == wanted.shape, (name, whole.shape, wanted.shape)
            found = max(found, (whole - wanted).abs().max().item())
        return found

    return Differences(
        loss=(losses - torch.tensor(alone.losses, dtype=torch.float64)).abs().max().item(),
        table=largest(alone.weights, lambda rank: rank.model),
        state=largest(alone.state, lambda rank: rank.state),
        dense=largest(alone.dense, lambda rank: rank.model),
    )
