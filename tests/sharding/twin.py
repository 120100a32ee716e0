"""What TorchRec does with the same tables: its eager collections with an optimizer of torch.

The optimizer steps the rows of the batch only, as a fused one does. For SGD and Adagrad that is the
same as stepping whole tables; for Adam and weight decay it is what "lazy" means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from torchrec.optim import RowWiseAdagrad

from torchrec_tpu.sharding.embeddings import (
    SparseCoreCollection,
    SparseCoreEmbeddingBagCollection,
    SparseCoreEmbeddingCollection,
)
from torchrec_tpu.sparsecore.optimizers import (
    OptimizerSpec,
    adagrad,
    adam,
    rowwise_adagrad,
    sgd,
)


@dataclass(frozen=True)
class Case:
    """One optimizer, here and in torch."""

    name: str
    spec: OptimizerSpec
    torch_class: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    slots: Mapping[str, str] = field(default_factory=dict)  # name here -> torch's
    initial: float = 0.0


CASES = (
    Case("sgd", sgd(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    Case("adagrad", adagrad(lr=0.1), torch.optim.Adagrad, {"lr": 0.1}, {"momentum1": "sum"}),
    Case(
        "adagrad with initial state",
        adagrad(lr=0.1, initial_accumulator_value=0.1),
        torch.optim.Adagrad,
        {"lr": 0.1},
        {"momentum1": "sum"},
        initial=0.1,
    ),
    Case(
        "rowwise_adagrad",
        rowwise_adagrad(lr=0.1),
        RowWiseAdagrad,
        {"lr": 0.1},
        {"momentum1": "sum"},
    ),
    Case(
        "adam",
        adam(lr=0.02),
        torch.optim.Adam,
        {"lr": 0.02},
        {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    Case(
        "adagrad_l2",
        adagrad(lr=0.1, weight_decay=0.2),
        torch.optim.Adagrad,
        {"lr": 0.1, "weight_decay": 0.2},
        {"momentum1": "sum"},
    ),
    Case(
        "adam_decoupled",
        adam(lr=0.02, weight_decay=0.2, weight_decay_mode="decoupled"),
        torch.optim.AdamW,
        {"lr": 0.02, "weight_decay": 0.2},
        {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
)


def first_state(case: Case, num_embeddings: int, embedding_dim: int) -> dict[str, Tensor]:
    """torch's optimizer state of one table before the first step."""
    shape = (num_embeddings, 1 if case.torch_class is RowWiseAdagrad else embedding_dim)
    slots = {name: torch.full(shape, case.initial) for name in case.slots.values()}
    return {"step": torch.tensor(0.0), **slots}


def step_rows(
    case: Case,
    weight: Tensor,
    grad: Tensor,
    rows: Tensor,
    state: dict[str, Tensor],
    lr: float | None = None,
) -> None:
    """One step of torch's optimizer on some rows of a table, in place."""
    some = nn.Parameter(weight[rows])
    some.grad = grad[rows]
    options = dict(case.options) | ({} if lr is None else {"lr": lr})
    optimizer = case.torch_class([some], **options)
    optimizer.state[some] = {
        name: value.clone() if name == "step" else value[rows] for name, value in state.items()
    }
    optimizer.step()
    weight[rows] = some.detach()
    for name, value in optimizer.state[some].items():
        if name == "step":
            state[name] = torch.as_tensor(float(value))
        elif name in state:
            state[name][rows] = value


class Twin:
    """A TorchRec collection that trains beside a SparseCore one, from the same weights."""

    def __init__(self, collection: SparseCoreCollection, case: Case) -> None:
        self.collection: EmbeddingBagCollection | EmbeddingCollection
        if isinstance(collection, SparseCoreEmbeddingBagCollection):
            self.configs: Sequence[Any] = collection.embedding_bag_configs()
            self.collection = EmbeddingBagCollection(
                list(self.configs), is_weighted=collection.is_weighted()
            )
        else:
            self.configs = collection.embedding_configs()
            self.collection = EmbeddingCollection(list(self.configs))
        self.collection.load_state_dict(collection.state_dict())
        self.case = case
        self.state = {
            config.name: first_state(case, config.num_embeddings, config.embedding_dim)
            for config in self.configs
        }

    def weight(self, table: str) -> nn.Parameter:
        tables = (
            self.collection.embedding_bags
            if isinstance(self.collection, EmbeddingBagCollection)
            else self.collection.embeddings
        )
        return tables[table].get_parameter("weight")

    def step(self, kjt: KeyedJaggedTensor, lr: float | None = None) -> None:
        """Updates every row that the batch names, and clears the gradients."""
        for config in self.configs:
            weight = self.weight(config.name)
            rows = torch.cat([kjt[key].values() for key in config.feature_names]).unique()
            assert weight.grad is not None
            step_rows(self.case, weight.detach(), weight.grad, rows, self.state[config.name], lr)
            weight.grad = None


def assert_equal_training(ours: SparseCoreCollection, twin: Twin) -> None:
    """Weights and optimizer state agree in every row."""
    for config in twin.configs:
        name = config.name
        weight = ours.get_parameter(f"{ours._tables_name}.{name}.weight")
        torch.testing.assert_close(weight, twin.weight(name), rtol=1e-5, atol=2e-6, msg=name)
        state = ours.fused_optimizer.state[weight]
        for here, there in twin.case.slots.items():
            torch.testing.assert_close(
                state[f"{name}.{here}"],
                twin.state[name][there].reshape(state[f"{name}.{here}"].shape),
                rtol=2e-5,
                atol=1e-6,
            )
        assert f"{name}.step" not in state or state[f"{name}.step"] == twin.state[name]["step"]


def bag_configs(pooling: PoolingType = PoolingType.MEAN) -> list[EmbeddingBagConfig]:
    """Uneven sizes, an unaligned dim, both poolings, and one feature in two tables."""
    return [
        EmbeddingBagConfig(
            name="users", num_embeddings=53, embedding_dim=4, feature_names=["user"]
        ),
        EmbeddingBagConfig(
            name="goods",
            num_embeddings=31,
            embedding_dim=12,
            feature_names=["item", "history"],
            pooling=pooling,
        ),
        EmbeddingBagConfig(
            name="tags", num_embeddings=7, embedding_dim=8, feature_names=["history"]
        ),
    ]


def sequence_configs() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name="users", num_embeddings=53, embedding_dim=8, feature_names=["user"]),
        EmbeddingConfig(
            name="goods", num_embeddings=31, embedding_dim=8, feature_names=["item", "history"]
        ),
        EmbeddingConfig(name="tags", num_embeddings=7, embedding_dim=8, feature_names=["history"]),
    ]


NUM_IDS = {"item": 31, "unused": 1000, "user": 53, "history": 7}
"""KJT keys, in another order than the configs', and how many ids each may have."""


def random_kjt(seed: int, batch_size: int = 9, *, weighted: bool = False) -> KeyedJaggedTensor:
    """Skewed ids with duplicates inside and between bags; about a fifth of the bags are empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(NUM_IDS) * batch_size,), generator=generator)
    per_key = lengths.view(len(NUM_IDS), batch_size).sum(1).tolist()
    values = [
        (torch.rand(count, generator=generator) ** 3 * num_ids).long()
        for count, num_ids in zip(per_key, NUM_IDS.values(), strict=True)
    ]
    total = sum(per_key)
    return KeyedJaggedTensor(
        keys=list(NUM_IDS),
        values=torch.cat(values),
        lengths=lengths,
        weights=torch.rand(total, generator=generator) + 0.1 if weighted else None,
    )


def gradient_like(output: Tensor, seed: int) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))


def outputs(collection: nn.Module, kjt: KeyedJaggedTensor) -> Tensor:
    """All output floats of a collection as one tensor, in output order."""
    result = collection(kjt)
    if isinstance(result, dict):
        return torch.cat([jagged.values().flatten() for jagged in result.values()])
    values: Tensor = result.values()
    return values


def train(collection: nn.Module, kjts: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
    """One backward a batch, with a gradient that depends on its position. Returns the outputs."""
    seen = []
    for seed, kjt in enumerate(kjts):
        output = outputs(collection, kjt)
        seen.append(output.detach().clone())
        output.backward(gradient_like(output, seed))
    return seen


def snapshot(collection: SparseCoreCollection) -> dict[str, Tensor]:
    """Copies of all weights and all optimizer state."""
    copies = {name: value.clone() for name, value in collection.state_dict().items()}
    for slots in collection.fused_optimizer.state.values():
        copies |= {name: value.clone() for name, value in slots.items()}
    return copies


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def pooled(**options: Any) -> SparseCoreEmbeddingBagCollection:
    """A new pooled collection with the same first values each time."""
    torch.manual_seed(7)
    return SparseCoreEmbeddingBagCollection(bag_configs(), **options)


def sequence(**options: Any) -> SparseCoreEmbeddingCollection:
    torch.manual_seed(7)
    return SparseCoreEmbeddingCollection(sequence_configs(), **options)
