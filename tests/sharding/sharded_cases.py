"""Models, batches and cases of test_sharded.py; the same in a world and in one process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_tpu import adagrad, adam, rowwise_adagrad, sgd
from torchrec_tpu.sharding.placements import TablePlacement
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec

WORLD_SIZE = 2
STEPS = 3
KEYS = ("user", "item", "tag")
ROWS = {"user": 37, "item": 23, "tag": 5}

BAGS = (
    EmbeddingBagConfig(name="users", num_embeddings=37, embedding_dim=8, feature_names=["user"]),
    EmbeddingBagConfig(
        name="goods",
        num_embeddings=37,
        embedding_dim=16,
        feature_names=["item", "user"],
        pooling=PoolingType.MEAN,
    ),
    EmbeddingBagConfig(name="tags", num_embeddings=5, embedding_dim=4, feature_names=["tag"]),
    EmbeddingBagConfig(name="one", num_embeddings=1, embedding_dim=4, feature_names=["none"]),
)
SEQUENCES = (
    EmbeddingConfig(name="users", num_embeddings=37, embedding_dim=8, feature_names=["user"]),
    EmbeddingConfig(
        name="goods", num_embeddings=37, embedding_dim=8, feature_names=["item", "user"]
    ),
    EmbeddingConfig(name="tags", num_embeddings=5, embedding_dim=8, feature_names=["tag"]),
)

SGD = sgd(lr=0.5)

Place = Callable[[str, int, int], TablePlacement]


def rows(table, num_rows, dim):
    return TablePlacement.row_wise(table, num_rows, dim, world_size=WORLD_SIZE)


def whole(table, num_rows, dim):
    return TablePlacement.table_wise(table, num_rows, dim, rank=len(table) % WORLD_SIZE)


def columns(table, num_rows, dim):
    return TablePlacement.column_wise(
        table, num_rows, dim, ranks=[1, 0, 1], widths=[dim // 4, dim // 2, dim // 4]
    )


def columns_of_one_rank(table, num_rows, dim):
    return TablePlacement.column_wise(table, num_rows, dim, ranks=[0, 0])


def copies(table, num_rows, dim):
    return TablePlacement.data_parallel(table, num_rows, dim)


def mixed(table, num_rows, dim):
    place = {"users": rows, "goods": columns, "tags": copies, "one": whole}[table]
    return place(table, num_rows, dim)


PLACES = {
    "rows": rows,
    "whole tables": whole,
    "columns": columns,
    "columns of one rank": columns_of_one_rank,
    "copies": copies,
    "mixed": mixed,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model trained for STEPS steps."""

    name: str
    place: Place = mixed
    optimizer: OptimizerSpec | dict[str, OptimizerSpec] = SGD
    is_sequence: bool = False
    is_weighted: bool = False
    batch_sizes: tuple[int, ...] = (5, 5)  # of the ranks
    empty_rank: int | None = None  # its bags have no ids
    frozen: str | None = None
    ids: str = "int64"
    is_pipelined: bool = False
    is_ours: bool = False  # the model has one of our collections
    own_wrapper: bool = True  # DataParallel, not TorchRec's
    as_dtensor: bool = False
    varies_per_key: bool = False
    is_half: bool = False  # float16 tables

    def __str__(self) -> str:
        return self.name


OPTIMIZERS = {
    "sgd": SGD,
    "adagrad": adagrad(lr=0.1, eps=1e-3),
    "rowwise_adagrad": rowwise_adagrad(lr=0.1, eps=1e-3, weight_decay=0.1),
    "adam": adam(lr=0.02, eps=1e-4, weight_decay=0.01, weight_decay_mode="decoupled"),
}

CASES = [
    *(
        Case(name=f"{place}, {rule}", place=PLACES[place], optimizer=spec)
        for place in PLACES
        for rule, spec in OPTIMIZERS.items()
    ),
    *(
        Case(
            name=f"sequences, {place}",
            place=PLACES[place],
            is_sequence=True,
            optimizer=OPTIMIZERS["adagrad"],
        )
        for place in PLACES
    ),
    Case(name="weights", is_weighted=True, optimizer=OPTIMIZERS["adagrad"]),
    Case(name="int32 ids", ids="int32"),
    Case(name="ranks with other batch sizes", batch_sizes=(2, 7)),
    Case(name="a rank without ids", empty_rank=1, optimizer=OPTIMIZERS["adam"]),
    Case(name="a rank without samples", batch_sizes=(0, 3)),
    Case(name="clipped gradients", optimizer=replace(OPTIMIZERS["adagrad"], max_gradient=0.01)),
    Case(
        name="an optimizer per table",
        optimizer={
            "users": OPTIMIZERS["adam"],
            "goods": OPTIMIZERS["rowwise_adagrad"],
            "tags": OPTIMIZERS["adagrad"],
            "one": OPTIMIZERS["sgd"],
        },
    ),
    Case(name="a frozen table", frozen="users", place=rows),
    Case(name="pipelined", is_pipelined=True, optimizer=OPTIMIZERS["adagrad"]),
    Case(name="our collection", is_ours=True, optimizer=OPTIMIZERS["adagrad"]),
    Case(name="our sequences", is_ours=True, is_sequence=True),
    Case(name="TorchRec's data parallel", own_wrapper=False, optimizer=OPTIMIZERS["adagrad"]),
    Case(name="DTensors", as_dtensor=True, optimizer=OPTIMIZERS["rowwise_adagrad"]),
    *(
        Case(name=f"float16, {rule}", is_half=True, optimizer=OPTIMIZERS[rule])
        for rule in ("adagrad", "rowwise_adagrad")
    ),
    Case(name="a batch size per key", varies_per_key=True, optimizer=OPTIMIZERS["adagrad"]),
    Case(name="sequences, a batch size per key", varies_per_key=True, is_sequence=True),
]


class Model(nn.Module):
    """A sparse part, and a dense one that all of it goes through."""

    def __init__(self, sparse: nn.Module, width: int, is_sequence: bool) -> None:
        super().__init__()
        self.sparse = sparse
        self.dense = nn.Linear(width, 1)
        self.unused = nn.Linear(1, 1)
        self.is_sequence = is_sequence

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B,) scores."""
        embeddings = self.sparse(features)
        if not self.is_sequence:
            return self.dense(embeddings.values()).squeeze(1)
        scores = []
        for tensor in embeddings.values():
            score = self.dense(tensor.values()).squeeze(1)
            bags = torch.repeat_interleave(torch.arange(len(tensor.lengths())), tensor.lengths())
            scores.append(torch.zeros(len(tensor.lengths())).index_add(0, bags, score))
        return torch.stack(scores).sum(0)


class Pair(nn.Module):
    """What TorchRec's pipelines want: (loss, result) of a batch."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The loss of the whole batch, and it again."""
        loss = self.model(features).square().mean()
        return loss, loss.detach()


def make_model(case: Case, device: str = "cpu") -> Model:
    """The same first values each time, unless they are on meta."""
    torch.manual_seed(11)
    where = torch.device(device)
    sparse: nn.Module
    data_type = DataType.FP16 if case.is_half else DataType.FP32
    if case.is_sequence:
        sparse = EmbeddingCollection(tables=list(SEQUENCES), device=where)
        width = 8
    else:
        sparse = EmbeddingBagCollection(
            tables=[replace(config, data_type=data_type) for config in BAGS],
            is_weighted=case.is_weighted,
            device=where,
        )
        width = sum(c.embedding_dim * len(c.feature_names) for c in BAGS)
    if case.frozen:
        sparse.get_parameter(f"embedding_bags.{case.frozen}.weight").requires_grad_(False)
    return Model(sparse, width, case.is_sequence)


def make_plan(case: Case, fqn: str, tables: Any = None) -> ShardingPlan:
    configs = tables or (SEQUENCES if case.is_sequence else BAGS)
    return ShardingPlan(
        {
            fqn: EmbeddingModuleShardingPlan(
                {
                    c.name: case.place(
                        c.name, c.num_embeddings, c.embedding_dim
                    ).to_parameter_sharding(WORLD_SIZE)
                    for c in configs
                }
            )
        }
    )


@dataclass(frozen=True, kw_only=True)
class Bags:
    """One rank's batch: lists of ids (and weights) by key and sample."""

    ids: dict[str, list[Tensor]]
    weights: dict[str, list[Tensor]]

    def __add__(self, other: "Bags") -> "Bags":
        return Bags(
            ids={key: self.ids[key] + other.ids[key] for key in self.ids},
            weights={key: self.weights[key] + other.weights[key] for key in self.weights},
        )

    def kjt(self, case: Case) -> KeyedJaggedTensor:
        """With a batch size per key: each bag that comes again is there once."""
        keys = list(self.ids)
        lists = [bag for key in keys for bag in self.ids[key]]
        weights = [bag for key in keys for bag in self.weights[key]]
        dtype = getattr(torch, case.ids)
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([torch.empty(0), *lists]).to(dtype),
            lengths=torch.tensor([len(bag) for bag in lists], dtype=torch.int32),
            weights=torch.cat([torch.empty(0), *weights]) if case.is_weighted else None,
            stride=len(self.ids[keys[0]]),
        )

    def kjt_per_key(self, case: Case) -> KeyedJaggedTensor:
        """Every second sample has the bag of the one before, which is there once."""
        batch_size = len(self.ids["user"])
        bags_of = {key: range(0, batch_size, 1 + (key != "tag")) for key in self.ids}
        lists = [self.ids[key][bag] for key, bags in bags_of.items() for bag in bags]
        return KeyedJaggedTensor(
            keys=list(self.ids),
            values=torch.cat(lists).to(getattr(torch, case.ids)),
            lengths=torch.tensor([len(bag) for bag in lists]),
            stride_per_key_per_rank=[[len(bags)] for bags in bags_of.values()],
            inverse_indices=(
                list(self.ids),
                torch.stack([torch.arange(batch_size) // (1 + (key != "tag")) for key in self.ids]),
            ),
        )


def make_bags(case: Case, step: int, rank: int) -> Bags:
    """Skewed ids, many of them more than once; keys in another order than the tables'."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch_size = case.batch_sizes[rank]
    ids: dict[str, list[Tensor]] = {}
    weights: dict[str, list[Tensor]] = {}
    for key, num_rows in (*ROWS.items(), ("none", 1)):
        lengths = torch.randint(0, 4, (batch_size,), generator=generator)
        if case.empty_rank == rank or key == "none":
            lengths.zero_()
        bags = [torch.rand(int(n), generator=generator) ** 2 * num_rows for n in lengths]
        ids[key] = [bag.floor() for bag in bags]
        weights[key] = [torch.rand(len(bag), generator=generator) + 0.5 for bag in bags]
    if case.varies_per_key:
        for key in ("user", "item", "none"):
            ids[key] = [ids[key][sample // 2 * 2] for sample in range(batch_size)]
    return Bags(ids=ids, weights=weights)
