"""swap_embeddings on models of TorchRec and of our own."""

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
)
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import SGD as FbgemmSGD
from torchrec.optim import Adagrad as FbgemmAdagrad
from torchrec.optim import Adam as FbgemmAdam
from torchrec.optim import PartialRowWiseAdam, RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from twin import NUM_IDS, bag_configs, random_kjt, sequence_configs

from torchrec_tpu.sharding.embeddings import (
    SparseCoreEmbeddingBagCollection,
    SparseCoreEmbeddingCollection,
)
from torchrec_tpu.sharding.optimizer_specs import spec_from_class, spec_from_fused_params
from torchrec_tpu.sharding.swap import fused_optimizer, swap_embeddings
from torchrec_tpu.sparsecore.errors import LayoutError, OptimizerError
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad, adam, rowwise_adagrad, sgd

with warnings.catch_warnings():  # torch's own use of torch.jit
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import (
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )


class TwoTowers(nn.Module):
    """Pooled and sequence tables, nested, and one collection that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left = nn.ModuleDict({"bags": EmbeddingBagCollection(bag_configs())})
        self.right = nn.ModuleList([EmbeddingCollection(sequence_configs())])
        self.shared = nn.ModuleList([self.left["bags"], nn.Linear(36, 1)])

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.left["bags"](kjt).values()
        sequence: Tensor = self.right[0](kjt)["history@tags"].values()
        again: Tensor = self.shared[1](self.shared[0](kjt).values())
        return pooled.sum(1) + sequence.mean() + again.sum(1)


def dlrm() -> DLRM_DCN:
    torch.manual_seed(5)
    configs = [
        EmbeddingBagConfig(name=key, num_embeddings=rows, embedding_dim=8, feature_names=[key])
        for key, rows in NUM_IDS.items()
    ]
    return DLRM_DCN(
        EmbeddingBagCollection(configs),
        dense_in_features=3,
        dense_arch_layer_sizes=[16, 8],
        over_arch_layer_sizes=[16, 1],
        dcn_num_layers=2,
        dcn_low_rank_dim=4,
    )


def test_names_and_parameters_stay_the_same_objects() -> None:
    model = TwoTowers()
    before = dict(model.named_parameters(remove_duplicate=False))
    keys = list(model.state_dict())
    report = swap_embeddings(model, optimizer=sgd(lr=0.1))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert report.model is model
    assert list(model.state_dict()) == keys
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert isinstance(model.left["bags"], SparseCoreEmbeddingBagCollection)
    assert model.shared[0] is model.left["bags"]
    assert isinstance(model.right[0], SparseCoreEmbeddingCollection)
    dense = [name for name, _ in in_backward_optimizer_filter(model.named_parameters())]
    assert dense == ["shared.1.weight", "shared.1.bias"]


def test_a_swapped_model_predicts_and_trains_as_before() -> None:
    plain = TwoTowers()
    swapped = copy.deepcopy(plain)
    swap_embeddings(swapped, optimizer=sgd(lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    dense = torch.optim.SGD(swapped.parameters(), lr=0.1)  # tables have no .grad, so it skips them
    for seed in range(10):
        kjt = random_kjt(seed)
        for model, step in ((plain, optimizer), (swapped, dense)):
            step.zero_grad()
            model(kjt).tanh().mean().backward()
            step.step()
    want, start = plain.state_dict(), TwoTowers().state_dict()
    for name, value in swapped.state_dict().items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6, msg=name)
    touched = ("left.bags.embedding_bags.users.weight", "right.0.embeddings.tags.weight")
    assert all((want[name] - start[name]).abs().max() > 0.01 for name in touched)


def test_dlrm_dcn_trains_like_torchrec() -> None:
    plain, swapped = dlrm(), dlrm()
    swap_embeddings(swapped, optimizer=adagrad(lr=0.05))
    reference = torch.optim.Adagrad(plain.parameters(), lr=0.05)
    dense = dict(in_backward_optimizer_filter(swapped.named_parameters()))
    assert not any("embedding" in name for name in dense)
    optimizer = CombinedOptimizer(
        [
            fused_optimizer(swapped),
            KeyedOptimizerWrapper(dense, lambda some: torch.optim.Adagrad(some, lr=0.05)),
        ]
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    for seed in range(20):
        kjt, features = random_kjt(seed), torch.randn(9, 3, generator=generator)
        labels = (torch.rand(9, generator=generator) < 0.5).float()
        both = []
        for model, step in ((plain, reference), (swapped, optimizer)):
            step.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(features, kjt).squeeze(1), labels
            )
            loss.backward()
            step.step()
            both.append(loss.item())
        assert both[0] == pytest.approx(both[1], abs=1e-5)
        losses.append(both[0])
    assert len(set(losses)) == len(losses)
    want = plain.state_dict()
    for name, value in swapped.state_dict().items():
        torch.testing.assert_close(value, want[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_collection_that_is_the_model_itself_comes_back_in_the_report() -> None:
    root = EmbeddingBagCollection(bag_configs())
    report = swap_embeddings(root, optimizer=sgd())
    assert isinstance(report.model, SparseCoreEmbeddingBagCollection)
    assert report.model.embedding_bags["tags"].weight is root.embedding_bags["tags"].weight
    assert "(root)" in str(report)


def test_options_reach_the_new_modules() -> None:
    model = TwoTowers()
    swap_embeddings(model, optimizer=sgd(), num_devices=3, cores_per_device=4, stacks="none")
    assert model.left["bags"].layout.num_cores == 12
    assert len(model.right[0].layout.stacks) == 3
    with pytest.raises(TypeError, match="cores"):
        swap_embeddings(TwoTowers(), optimizer=sgd(), cores=4)  # type: ignore[call-arg]


def test_training_mode_is_kept() -> None:
    model = TwoTowers().eval()
    swap_embeddings(model, optimizer=sgd())
    assert not model.left["bags"].training


# ------------------------------------------------------------------------------------------ report


class OwnCollection(EmbeddingBagCollection):
    """A subclass, which may behave in its own way."""


def test_meta_tables_move_and_can_be_allocated_later() -> None:
    model = nn.Sequential(EmbeddingBagCollection(bag_configs(), device=torch.device("meta")))
    assert swap_embeddings(model, optimizer=adagrad(lr=0.5)).moved
    assert all(weight.is_meta for weight in model.parameters())
    model.to_empty(device="cpu")
    assert all(weight.device.type == "cpu" for weight in model.parameters())


def test_the_report_says_what_did_not_move_and_why() -> None:
    half = bag_configs()
    half[1].data_type = DataType.BF16
    hooked = EmbeddingBagCollection(bag_configs())
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "good": EmbeddingBagCollection(bag_configs()),
            "bf16": EmbeddingBagCollection(half),
            "plain": nn.EmbeddingBag(4, 2),
            "own": OwnCollection(bag_configs()),
            "hooked": hooked,
            "processed": FeatureProcessedEmbeddingBagCollection(
                EmbeddingBagCollection(
                    [EmbeddingBagConfig(8, 4, "t", feature_names=["f"])], is_weighted=True
                ),
                PositionWeightedModuleCollection({"f": 4}),
            ),
            "moved": SparseCoreEmbeddingBagCollection(bag_configs()),
        }
    )
    before = dict(model.named_modules())
    report = swap_embeddings(model, optimizer=adagrad(lr=0.5))
    assert {table.module for table in report.moved} == {"good"}
    reasons = {module.module: module.reason for module in report.kept}
    assert reasons.keys() == {"bf16", "plain", "own", "hooked", "processed", "moved"}
    assert "'goods'" in reasons["bf16"]
    assert "BF16" in reasons["bf16"]
    assert "nn.EmbeddingBag" in reasons["plain"]
    assert "subclass" in reasons["own"]
    assert "hooks" in reasons["hooked"]
    assert "gradient" in reasons["processed"]
    assert "already" in reasons["moved"]
    assert all(model[name] is before[name] for name in reasons)

    text = str(report)
    assert text == repr(report)
    for word in ("good", "users", "53", "adagrad(lr=0.5", "users+", "BF16", "OwnCollection"):
        assert word in text
    document = json.loads(report.to_json())
    assert document["moved"][0] == {
        "module": "good",
        "table": "users",
        "num_embeddings": 53,
        "embedding_dim": 4,
        "optimizer": "adagrad(lr=0.5, eps=1e-10, initial_accumulator_value=0.0)",
        "stack": document["moved"][0]["stack"],
    }
    assert [module["module"] for module in document["kept"]] == list(reasons)


def test_tied_weights_stay_where_all_their_gradients_are_summed() -> None:
    model = nn.ModuleDict(
        {
            "sequences": EmbeddingCollection(sequence_configs()),
            "output": nn.Linear(8, 53, bias=False),
            "bags": EmbeddingBagCollection(bag_configs()),
        }
    )
    model["output"].weight = model["sequences"].embeddings["users"].weight
    report = swap_embeddings(model, optimizer=sgd())
    assert {table.module for table in report.moved} == {"bags"}
    (kept,) = report.kept
    assert kept.module == "sequences"
    assert "users share their parameter" in kept.reason


def test_a_second_swap_finds_nothing() -> None:
    model = TwoTowers()
    assert len(swap_embeddings(model, optimizer=sgd()).moved) == 6
    again = swap_embeddings(model)
    assert not again.moved
    assert {module.module for module in again.kept} == {"left.bags", "right.0"}


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (OptimizerError, r"'left\.bags\.users' has no optimizer: pass optimizer=", {}),
        (
            OptimizerError,
            r"\['other'\].*tables: \['goods', 'tags'",
            {"optimizer": {"other": sgd()}},
        ),
        (OptimizerError, "'left.bags.users' has no", {"optimizer": {"goods": sgd()}}),
        (OptimizerError, "optimizer 'lamb' has no", {"optimizer": {"optimizer": "lamb"}}),
        (LayoutError, "unknown", {"optimizer": sgd(), "stacks": [["unknown"]]}),
    ],
)
def test_an_error_leaves_the_model_untouched(
    error: type[Exception], message: str, arguments: dict[str, Any]
) -> None:
    model = TwoTowers()
    # The second collection fails although the first would work.
    before = list(model.named_modules(remove_duplicate=False))
    attributes = [dict(vars(parameter)) for parameter in model.parameters()]
    with pytest.raises(error, match=message):
        swap_embeddings(model, **arguments)
    assert list(model.named_modules(remove_duplicate=False)) == before
    assert [dict(vars(parameter)) for parameter in model.parameters()] == attributes


def test_a_failure_in_the_second_collection_leaves_the_first_untouched() -> None:
    model = TwoTowers()
    apply_optimizer_in_backward(torch.optim.SGD, model.left.parameters(), {"lr": 0.1})
    before = list(model.named_modules())
    marks = [parameter._in_backward_optimizers for parameter in model.left.parameters()]
    with pytest.raises(OptimizerError, match=r"right\.0\.users"):
        swap_embeddings(model)
    assert list(model.named_modules()) == before
    now = [parameter._in_backward_optimizers for parameter in model.left.parameters()]
    assert all(a is b for a, b in zip(marks, now, strict=True))


# -------------------------------------------------------------------------------------- optimizers


def test_apply_optimizer_in_backward_wins_over_the_argument() -> None:
    model = TwoTowers()
    apply_optimizer_in_backward(
        RowWiseAdagrad, [model.left["bags"].embedding_bags["users"].weight], {"lr": 0.3}
    )
    model.right.requires_grad_(False)
    report = swap_embeddings(model, optimizer={"goods": adam(lr=0.2), "tags": sgd(lr=0.1)})
    optimizers = {(table.module, table.table): table.optimizer for table in report.moved}
    assert optimizers["left.bags", "users"].startswith("rowwise_adagrad(lr=0.3, eps=1e-10")
    assert optimizers["left.bags", "goods"].startswith("adam(lr=0.2")
    assert optimizers["left.bags", "tags"] == "sgd(lr=0.1)"
    assert optimizers["right.0", "users"] == "frozen"


def test_the_hook_of_apply_optimizer_in_backward_no_longer_fires() -> None:
    configs = bag_configs()
    by_hook, by_argument = (nn.Sequential(EmbeddingBagCollection(configs)) for _ in range(2))
    by_argument.load_state_dict(by_hook.state_dict())
    apply_optimizer_in_backward(torch.optim.SGD, by_hook.parameters(), {"lr": 0.3})
    swap_embeddings(by_hook)
    swap_embeddings(by_argument, optimizer=sgd(lr=0.3))
    for model in (by_hook, by_argument):
        model(random_kjt(0)).values().sum().backward()
    for name, value in by_hook.state_dict().items():
        assert torch.equal(value, by_argument.state_dict()[name])


CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any], OptimizerSpec]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0, "foreach": True}, sgd(lr=0.1)),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}, sgd(lr=0.1, weight_decay=0.2)),
    (torch.optim.Adagrad, {}, adagrad(lr=0.01, eps=1e-10)),
    (
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3, "weight_decay": 0.5},
        adagrad(lr=0.1, initial_accumulator_value=0.2, eps=1e-3, weight_decay=0.5),
    ),
    (torch.optim.Adam, {"betas": (0.5, 0.6)}, adam(lr=0.001, betas=(0.5, 0.6))),
    (
        torch.optim.AdamW,
        {"lr": 0.1},
        adam(lr=0.1, weight_decay=0.01, weight_decay_mode="decoupled"),
    ),
    (RowWiseAdagrad, {"lr": 0.1, "max_gradient": 2.0}, rowwise_adagrad(lr=0.1, max_gradient=2.0)),
    (FbgemmSGD, {"lr": 0.1}, sgd(lr=0.1)),
    (FbgemmAdagrad, {"lr": 0.1}, adagrad(lr=0.1, eps=1e-8)),
    (
        FbgemmAdam,
        {"weight_decay": 0.1, "beta1": 0.5},
        adam(lr=0.01, betas=(0.5, 0.999), weight_decay=0.1, weight_decay_mode="decoupled"),
    ),
]


@pytest.mark.parametrize(("optimizer", "options", "spec"), CLASSES)
def test_optimizer_classes_become_specs(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], spec: OptimizerSpec
) -> None:
    assert spec_from_class(optimizer, options) == spec


FUSED_PARAMS: list[tuple[dict[str, Any], OptimizerSpec]] = [
    ({}, sgd(lr=0.01)),
    ({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1, "eps": 1.0}, sgd(lr=0.1)),
    ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "lr": 0.1}, adagrad(lr=0.1, eps=1e-8)),
    (
        {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.1,
            "eps": 1e-4,
            "weight_decay": 0.5,
            "weight_decay_mode": WeightDecayMode.DECOUPLE,
            "stochastic_rounding": False,
            "output_dtype": DataType.FP32,
        },
        rowwise_adagrad(lr=0.1, eps=1e-4, weight_decay=0.5, weight_decay_mode="decoupled"),
    ),
    (
        {
            "optimizer": "adam",
            "weight_decay": 0.5,
            "weight_decay_mode": WeightDecayMode.L2,
            "gradient_clipping": True,
        },
        adam(lr=0.01, weight_decay=0.5, max_gradient=1.0),
    ),
    ({"optimizer": "exact_sgd", "max_gradient": 2.0, "gradient_clipping": False}, sgd(lr=0.01)),
]


@pytest.mark.parametrize(("fused_params", "spec"), FUSED_PARAMS)
def test_fused_params_become_specs(fused_params: dict[str, Any], spec: OptimizerSpec) -> None:
    assert spec_from_fused_params(fused_params) == spec


REFUSED: list[tuple[Callable[[], OptimizerSpec], str]] = [
    (lambda: spec_from_class(torch.optim.SGD, {"momentum": 0.9}), "torch.optim.sgd.SGD: momentum"),
    (lambda: spec_from_class(torch.optim.Adagrad, {"lr_decay": 0.1}), "lr_decay=0.1"),
    (lambda: spec_from_class(torch.optim.Adam, {"amsgrad": True}), "amsgrad=True"),
    (lambda: spec_from_class(torch.optim.RMSprop, {}), "RMSprop has no fused update here"),
    (lambda: spec_from_class(PartialRowWiseAdam, {}), "PartialRowWiseAdam has no fused"),
    (lambda: spec_from_class(FbgemmSGD, {"weight_decay": 0.1}), "no effect there without"),
    (lambda: spec_from_fused_params({"output_dtype": DataType.FP16}), "output_dtype"),
    (lambda: spec_from_fused_params({"bounds_check_mode": 1}), "bounds_check_mode have no equiv"),
    (
        lambda: spec_from_fused_params({"weight_decay_mode": WeightDecayMode.COUNTER}),
        "weight_decay_mode=.* is not supported",
    ),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_options_without_an_equivalent_are_refused(
    build: Callable[[], OptimizerSpec], message: str
) -> None:
    with pytest.raises(OptimizerError, match=message):
        build()
