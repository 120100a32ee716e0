"""Sharded collections under DistributedModelParallel, apart from long training (test_dmp_parity).

A scenario runs on every rank of a world and asserts there; all scenarios of a world share its
processes.
"""

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import (
    CPU,
    NUM_DENSE,
    PLACEMENTS,
    Job,
    Pieces,
    assembled,
    bag_configs,
    mixed_configs,
    new_batch,
    new_dmp,
    new_model,
    optimizer_of,
    pieces_of,
    plan_of,
    tables_of,
    train_sharded,
)
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from world import run_world

import torchrec_tpu
from torchrec_tpu.sharding.placements import TablePlacement
from torchrec_tpu.sharding.sharded import ShardedSparseCoreEmbeddingBagCollection
from torchrec_tpu.sparsecore.errors import (
    IdRangeError,
    KjtError,
    MissingKeyError,
    PeerBatchError,
    StateDictError,
    TorchrecTpuError,
)

Scenario = Callable[[int, int], None]
"""Called as scenario(rank, world_size)."""

MIXED_SGD = Job(optimizer="sgd", placement="mixed", num_steps=6)


def state_of(dmp: DistributedModelParallel) -> dict[str, Pieces]:
    """Copies of everything that training changes, on this rank."""
    found = {fqn: pieces_of(value) for fqn, value in dmp.state_dict().items()}
    for fqn, slots in dmp.fused_optimizer.state_dict()["state"].items():
        found |= {f"{fqn} {name}": pieces_of(value) for name, value in slots.items()}
    return found


def assert_same_bits(left: Mapping[str, Pieces], right: Mapping[str, Pieces]) -> None:
    assert left.keys() == right.keys()
    for name, pieces in left.items():
        for (offsets, value), (other_offsets, other) in zip(pieces, right[name], strict=True):
            assert offsets == other_offsets, name
            assert torch.equal(value, other), (name, (value - other).abs().max())


def whole_tables(dmp: nn.Module) -> dict[str, Tensor]:
    """FQN -> every table, put together from the shards of all ranks. A collective."""
    own = {fqn: pieces_of(value) for fqn, value in dmp.state_dict().items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    tables = {fqn: value for fqn, value in dmp.state_dict().items() if fqn.endswith(".weight")}
    return {
        fqn: assembled([rank[fqn] for rank in of_ranks], torch.empty(value.size()))
        for fqn, value in tables.items()
        if ".embedding_bags." in f".{fqn}" or ".embeddings." in f".{fqn}"
    }


def train(dmp: nn.Module, batches: Sequence[Batch]) -> list[float]:
    optimizer = optimizer_of(dmp)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = dmp(batch)[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches_of(job: Job, rank: int, world_size: int, *, first: int = 0) -> list[Batch]:
    return [new_batch(job, first + s, rank, world_size) for s in range(job.num_steps)]


# ---- what TorchRec sees --------------------------------------------------------------------------


def describe(value: Any) -> Any:
    """Type, shape and shards of an entry of a state dict."""
    if isinstance(value, Tensor) and type(value).__name__ != "ShardedTensor":
        return "Tensor", tuple(value.shape)
    shards = sorted(
        (tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in value.metadata().shards_metadata
    )
    local = [(tuple(s.metadata.shard_offsets), tuple(s.tensor.shape)) for s in value.local_shards()]
    return type(value).__name__, tuple(value.size()), shards, sorted(local)


def stock_dmp(job: Job, world_size: int) -> DistributedModelParallel:
    """TorchRec's own, with the same optimizer in FBGEMM's words."""
    fused_params = {"optimizer": fbgemm_optimizer(str(job.optimizer)), "learning_rate": 0.1}
    sharders = [
        EmbeddingBagCollectionSharder(fused_params=dict(fused_params)),
        EmbeddingCollectionSharder(fused_params=dict(fused_params)),
    ]
    model = new_model(job.model)
    return DistributedModelParallel(
        model,
        device=CPU,
        plan=plan_of(model, job.placement, world_size, sharders),
        sharders=sharders,
    )


def fbgemm_optimizer(name: str) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }[name]


def keys_and_shards_are_those_of_stock_dmp(rank: int, world_size: int) -> None:
    for model in ("dlrm", "tower"):
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
            for placement in PLACEMENTS:
                job = Job(optimizer=optimizer, placement=placement, model=model)
                ours, stock = new_dmp(job), stock_dmp(job, world_size)
                where = job.name
                mine, theirs = ours.state_dict(), stock.state_dict()
                assert list(mine) == list(theirs), where
                for fqn, value in theirs.items():
                    assert describe(mine[fqn]) == describe(value), (where, fqn)
                for names in ("named_parameters", "named_buffers"):
                    found = [name for name, _ in getattr(ours, names)()]
                    wanted = [name for name, _ in getattr(stock, names)()]
                    # TorchRec's pooled collections list tables in the order of their kernels
                    assert sorted(found) == sorted(wanted), (where, names)
                replicated = {
                    fqn
                    for fqn, table in tables_of(new_model(model), placement, world_size).items()
                    if table.kind == "data_parallel"
                }
                mine = ours.fused_optimizer.state_dict()["state"]
                theirs = stock.fused_optimizer.state_dict()["state"]
                # There a replicated table is dense, with the optimizer of the dense part.
                assert mine.keys() == theirs.keys() | replicated, where
                for fqn, slots in theirs.items():
                    if optimizer == "sgd":
                        assert mine[fqn] == {}, where
                        continue
                    assert {k: describe(v) for k, v in mine[fqn].items()} == {
                        k: describe(v) for k, v in slots.items()
                    }, (where, fqn)
                left = set(optimizer_of(ours).params)
                assert left == set(optimizer_of(stock).params), where


def tables_start_as_the_module_was(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    for placement in PLACEMENTS:
        for model in ("dlrm", "tower"):
            before = tables_of(new_model(model), placement, 1)
            dmp = new_dmp(Job(optimizer="sgd", placement=placement, model=model))
            after = whole_tables(dmp)
            assert after.keys() == before.keys()
            for fqn, table in before.items():
                assert torch.equal(after[fqn], table.weight), (placement, fqn)


def tables_on_the_meta_device_are_initialised(rank: int, world_size: int) -> None:
    """Replicas alike, which `assembled` checks; rows differ, within the bounds of the config."""
    for placement in PLACEMENTS:
        job = Job(optimizer="adagrad", placement=placement, model="tower", num_steps=2)
        model = new_model(job.model, "meta")
        torch.manual_seed(100 + rank)
        sharders = torchrec_tpu.sharders(optimizer=job.case("").spec)
        dmp = DistributedModelParallel(
            model,
            device=CPU,
            plan=plan_of(model, placement, world_size, sharders),
            sharders=sharders,
        )
        for fqn, table in whole_tables(dmp).items():
            limit = table.shape[0] ** -0.5
            assert table.abs().max() <= limit, (placement, fqn)
            assert table.std() > 0.4 * limit, (placement, fqn)
            assert len(table[:, :4].unique(dim=0)) == len(table), (placement, fqn)
        assert all(torch.isfinite(torch.tensor(train(dmp, batches_of(job, rank, world_size)))))


def own_collections_are_sharded_too(rank: int, world_size: int) -> None:
    """The same bits as from TorchRec's, with the optimizer that they already have."""
    job = replace(MIXED_SGD, optimizer="adam")
    outcome = train_sharded(job)
    torch.manual_seed(7)
    bags = torchrec_tpu.SparseCoreEmbeddingBagCollection(bag_configs(), optimizer=job.case("").spec)
    model = DLRMTrain(DLRM(bags, NUM_DENSE, [16, 8], [16, 1]))
    sharders = torchrec_tpu.sharders()
    reference = new_model("dlrm")
    plan = plan_of(reference, job.placement, world_size, sharders)
    dmp = DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan(plan=plan.plan), sharders=sharders
    )
    assert train(dmp, batches_of(job, rank, world_size)) == outcome.losses
    assert_same_bits(
        {fqn: pieces_of(value) for fqn, value in dmp.state_dict().items()}, outcome.model
    )


# ---- training ------------------------------------------------------------------------------------


def a_pipeline_gives_the_same_bits(rank: int, world_size: int) -> None:
    for job in (
        Job(optimizer="adagrad", placement="mixed", num_steps=8),
        Job(optimizer="adam", placement="row_wise", num_steps=8, variable_batches=True),
    ):
        plain, piped = (train_sharded(replace(job, pipeline=on)) for on in (False, True))
        assert plain.losses == piped.losses
        assert_same_bits(plain.model, piped.model)
        assert_same_bits(plain.state, piped.state)  # type: ignore[arg-type]


def the_same_job_gives_the_same_bits(rank: int, world_size: int) -> None:
    for placement in PLACEMENTS:
        job = Job(optimizer="adagrad", placement=placement, model="tower", num_steps=5)
        first, second = train_sharded(job), train_sharded(job)
        assert first.losses == second.losses
        assert_same_bits(first.model, second.model)
        assert_same_bits(first.state, second.state)  # type: ignore[arg-type]


def two_forwards_before_one_backward(rank: int, world_size: int) -> None:
    """Both lookups see the same weights, and each makes its own update."""
    for placement in PLACEMENTS:
        job = Job(optimizer="sgd", placement=placement)
        dmp, alone = new_dmp(job), new_model(job.model)
        sum(dmp(new_batch(job, step, rank, world_size))[0] for step in (0, 1)).backward()
        losses = [
            alone(new_batch(job, step, other, world_size))[0]
            for step in (0, 1)
            for other in range(world_size)
        ]
        (torch.stack(losses).sum() / world_size).backward()
        found = whole_tables(dmp)
        for fqn, table in tables_of(alone, placement, world_size).items():
            wanted = table.weight.detach() - table.weight.grad  # lr is 1
            torch.testing.assert_close(found[fqn], wanted, rtol=0, atol=2e-7, msg=fqn)


def evaluation_changes_nothing(rank: int, world_size: int) -> None:
    for model in ("dlrm", "tower"):
        for placement in PLACEMENTS:
            job = Job(optimizer="adagrad", placement=placement, model=model)
            dmp, alone = new_dmp(job), new_model(model)
            before = state_of(dmp)
            dmp.eval()
            with torch.no_grad():
                for step in range(3):
                    batch = new_batch(job, step, rank, world_size)
                    found, wanted = dmp(batch), alone(batch)
                    torch.testing.assert_close(found[1][1], wanted[1][1], rtol=0, atol=1e-6)
            assert_same_bits(state_of(dmp), before)


def frozen_tables_stay(rank: int, world_size: int) -> None:
    for placement in PLACEMENTS:
        job = Job(optimizer="adagrad", placement=placement)
        model = new_model(job.model)
        frozen = [
            fqn
            for fqn, table in tables_of(model, placement, world_size).items()
            if table.config.name in ("users", "tags")
            and not table.weight.requires_grad_(False).requires_grad
        ]
        sharders = torchrec_tpu.sharders(optimizer=job.case("").spec)
        dmp = DistributedModelParallel(
            model,
            device=CPU,
            plan=plan_of(model, placement, world_size, sharders),
            sharders=sharders,
        )
        before = whole_tables(dmp)
        for step in range(2):
            dmp(new_batch(job, step, rank, world_size))[0].backward()
        after = whole_tables(dmp)
        for fqn in before:
            assert torch.equal(before[fqn], after[fqn]) == (fqn in frozen), (placement, fqn)


def a_rank_without_samples_takes_part(rank: int, world_size: int) -> None:
    """B = 0 on the last rank."""
    for model in ("dlrm", "tower"):
        for placement in PLACEMENTS:
            job = Job(optimizer="sgd", placement=placement, model=model)
            dmp, alone = new_dmp(job), new_model(model)
            batches = [new_batch(job, 0, other, world_size) for other in range(world_size)]
            batches[-1] = Batch(
                torch.empty(0, NUM_DENSE),
                KeyedJaggedTensor(
                    keys=batches[0].sparse_features.keys(),
                    values=torch.empty(0, dtype=torch.int64),
                    lengths=torch.empty(0, dtype=torch.int64),
                    weights=torch.empty(0) if model == "tower" else None,
                ),
                torch.empty(0, dtype=torch.int64),
            )
            captured = capture_logits(dmp)
            dmp(batches[rank])
            captured[-1].sum().backward()
            captured = capture_logits(alone)
            for batch in batches[:-1]:
                alone(batch)
            (torch.cat(captured).sum() / world_size).backward()
            found = whole_tables(dmp)
            for fqn, table in tables_of(alone, placement, world_size).items():
                wanted = table.weight.detach() - table.weight.grad
                torch.testing.assert_close(found[fqn], wanted, rtol=1e-5, atol=2e-6, msg=fqn)


def capture_logits(model: nn.Module) -> list[Tensor]:
    """What the last linear layer gives, from now on."""
    captured: list[Tensor] = []
    layer = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    layer.register_forward_hook(lambda module, arguments, output: captured.append(output))
    return captured


def columns_of_any_width(rank: int, world_size: int) -> None:
    """Shards of 1, 3 and 2 columns, two of them on one rank; a table of one column."""
    configs = [
        EmbeddingBagConfig(name="odd", num_embeddings=37, embedding_dim=6, feature_names=["word"]),
        EmbeddingBagConfig(name="one", num_embeddings=64, embedding_dim=1, feature_names=["item"]),
    ]
    places = {
        "odd": TablePlacement.column_wise(
            "odd", 37, 6, ranks=[0, world_size - 1, 0], widths=[1, 3, 2]
        ),
        "one": TablePlacement.row_wise("one", 64, 1, world_size=world_size),
    }
    torch.manual_seed(7)
    alone = EmbeddingBagCollection(tables=configs)
    sharders = torchrec_tpu.sharders(optimizer=torchrec_tpu.sgd(lr=1.0))
    plan = {name: place.to_parameter_sharding(world_size) for name, place in places.items()}
    dmp = DistributedModelParallel(
        copy.deepcopy(alone), device=CPU, plan=ShardingPlan(plan={"": plan}), sharders=sharders
    )
    batches = [new_batch(MIXED_SGD, 1, other, world_size) for other in range(world_size)]
    (dmp(batches[rank].sparse_features).values() ** 2).sum().backward()
    sum((alone(b.sparse_features).values() ** 2).sum() / world_size for b in batches).backward()
    found = whole_tables(dmp)
    for name, weight in alone.named_parameters():
        wanted = weight.detach() - weight.grad
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6, msg=name)


def weighted_means_divide_by_the_weights(rank: int, world_size: int) -> None:
    """Which TorchRec's eager collections cannot; a weighted SUM of divided weights is the same."""
    kjts = [weighted_kjt(seed) for seed in range(world_size)]
    for placement in PLACEMENTS:
        torch.manual_seed(7)
        alone = EmbeddingBagCollection(tables=mixed_configs_as(PoolingType.SUM), is_weighted=True)
        source = EmbeddingBagCollection(tables=mixed_configs_as(PoolingType.MEAN), is_weighted=True)
        source.load_state_dict(alone.state_dict())
        sharders = torchrec_tpu.sharders(optimizer=torchrec_tpu.sgd(lr=1.0))
        dmp = DistributedModelParallel(
            source,
            device=CPU,
            plan=plan_of(source, placement, world_size, sharders),
            sharders=sharders,
        )
        found = dmp(kjts[rank])
        wanted = [alone(divided(kjt)) for kjt in kjts]
        here = found.to_dict()
        for name, values in wanted[rank].to_dict().items():
            torch.testing.assert_close(here[name], values, rtol=1e-5, atol=1e-6, msg=name)
        (found.values() ** 2).sum().backward()
        sum((other.values() ** 2).sum() / world_size for other in wanted).backward()
        tables = whole_tables(dmp)
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(
                tables[name], weight.detach() - weight.grad, rtol=1e-5, atol=1e-6, msg=name
            )


def mixed_configs_as(pooling: PoolingType) -> list[EmbeddingBagConfig]:
    return [replace(config, pooling=pooling) for config in mixed_configs()]


def weighted_kjt(seed: int) -> KeyedJaggedTensor:
    job = Job(optimizer="sgd", placement="mixed", model="tower")
    return new_batch(job, 1, seed, 9).sparse_features


def divided(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Weights over their sum in the bag."""
    bags = torch.repeat_interleave(torch.arange(kjt.lengths().numel()), kjt.lengths().long())
    sums = torch.zeros(kjt.lengths().numel()).index_add_(0, bags, kjt.weights())
    return KeyedJaggedTensor(
        kjt.keys(), kjt.values(), weights=kjt.weights() / sums[bags], lengths=kjt.lengths()
    )


def sequences_return_their_ids(rank: int, world_size: int) -> None:
    configs = [
        EmbeddingConfig(
            name="texts", num_embeddings=101, embedding_dim=8, feature_names=["word", "user"]
        ),
        EmbeddingConfig(name="marks", num_embeddings=37, embedding_dim=8, feature_names=["word"]),
    ]
    kjt = new_batch(MIXED_SGD, 3, rank, world_size).sparse_features
    for placement in PLACEMENTS:
        torch.manual_seed(7)
        alone = EmbeddingCollection(tables=configs, need_indices=True)
        sharders = torchrec_tpu.sharders(optimizer=torchrec_tpu.sgd(lr=1.0))
        dmp = DistributedModelParallel(
            copy.deepcopy(alone),
            device=CPU,
            plan=plan_of(alone, placement, world_size, sharders),
            sharders=sharders,
        )
        found, wanted = dict(dmp(kjt).items()), alone(kjt)
        assert found.keys() == wanted.keys()
        for name, rows in wanted.items():
            assert torch.equal(found[name].values(), rows.values()), (placement, name)
            assert torch.equal(found[name].lengths(), rows.lengths()), (placement, name)
            assert torch.equal(found[name].weights(), rows.weights()), (placement, name)


# ---- state dicts ---------------------------------------------------------------------------------


def trained(job: Job, rank: int, world_size: int) -> DistributedModelParallel:
    dmp = new_dmp(job)
    train(dmp, batches_of(job, rank, world_size))
    return dmp


def jobs_with_state() -> list[Job]:
    return [
        Job(optimizer=optimizer, placement=placement, model="tower", num_steps=2)
        for optimizer in ("rowwise_adagrad", "adam")
        for placement in PLACEMENTS
    ]


def another_model_goes_on_from_state_dicts(rank: int, world_size: int) -> None:
    """With the weights alone it goes elsewhere, with the optimizer's state bit for bit the same."""
    for job in jobs_with_state():
        first, second = trained(job, rank, world_size), new_dmp(job)
        missing = second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert not missing.missing_keys, missing
        assert not missing.unexpected_keys, missing
        for fqn, pieces in ((fqn, pieces_of(v)) for fqn, v in first.state_dict().items()):
            assert_same_bits({fqn: pieces}, {fqn: pieces_of(second.state_dict()[fqn])})
        later = [new_batch(job, step, rank, world_size) for step in (2, 3)]
        train(second, later)
        state = copy.deepcopy(first.fused_optimizer.state_dict())
        weights = copy.deepcopy(first.state_dict())
        train(first, later)
        with pytest.raises(AssertionError):
            assert_same_bits(state_of(first), state_of(second))
        second.load_state_dict(weights)
        second.fused_optimizer.load_state_dict(state)
        train(second, later)
        assert_same_bits(state_of(first), state_of(second))


def state_dicts_can_have_a_prefix(rank: int, world_size: int) -> None:
    for job in jobs_with_state():
        first, second = trained(job, rank, world_size), new_dmp(job)
        state = first.state_dict(prefix="alpha.")
        assert [*state] == [f"alpha.{name}" for name in first.state_dict()]
        second.load_state_dict(copy.deepcopy(state), prefix="alpha.")
        assert_same_bits(
            {fqn: pieces_of(v) for fqn, v in first.state_dict().items()},
            {fqn: pieces_of(v) for fqn, v in second.state_dict().items()},
        )


def names_of_parameters_and_buffers_are_those_of_the_state_dict(rank: int, world_size: int) -> None:
    for job in jobs_with_state():
        dmp = new_dmp(job)
        names = {name for name, _ in (*dmp.named_parameters(), *dmp.named_buffers())}
        assert names == {*dmp.state_dict()}


def unsharded_state_dicts_are_taken(rank: int, world_size: int) -> None:
    """Those of the TorchRec model, with whole tables."""
    for job in jobs_with_state():
        dmp, alone = new_dmp(job), new_model(job.model)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.add_(torch.arange(parameter.numel()).view_as(parameter))
        dmp.load_state_dict(alone.state_dict())
        found = whole_tables(dmp)
        for fqn, table in tables_of(alone, job.placement, world_size).items():
            assert torch.equal(found[fqn], table.weight), (job.name, fqn)


def a_missing_table_is_reported(rank: int, world_size: int) -> None:
    for placement in PLACEMENTS:
        dmp = new_dmp(Job(optimizer="adam", placement=placement))
        state = copy.deepcopy(dmp.state_dict())
        gone = next(fqn for fqn in state if fqn.endswith("goods.weight"))
        del state[gone]
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*goods"):
            dmp.load_state_dict(state)


def tables_of_another_shape_are_refused(rank: int, world_size: int) -> None:
    for placement in ("row_wise", "table_wise", "column_wise", "data_parallel"):
        dmp = new_dmp(Job(optimizer="adam", placement=placement))
        before = state_of(dmp)
        whole = new_model("dlrm").state_dict()
        name = next(fqn for fqn in whole if fqn.endswith("users.weight"))
        whole[name] = torch.zeros(100, 8)
        with pytest.raises((StateDictError, RuntimeError), match="users"):
            dmp.load_state_dict(whole)
        assert_same_bits(state_of(dmp), before)


def a_pooled_collection_can_be_the_whole_model(rank: int, world_size: int) -> None:
    torch.manual_seed(7)
    bags = EmbeddingBagCollection(tables=bag_configs())
    sharders = torchrec_tpu.sharders(optimizer=torchrec_tpu.sgd(lr=1.0))
    dmp = DistributedModelParallel(
        bags, device=CPU, plan=plan_of(bags, "mixed", world_size, sharders), sharders=sharders
    )
    assert isinstance(dmp.module, ShardedSparseCoreEmbeddingBagCollection)
    kjt = new_batch(MIXED_SGD, 1, rank, world_size).sparse_features
    twice = KeyedJaggedTensor(
        [*kjt.keys(), "word"],
        torch.cat([kjt.values(), kjt["word"].values()]),
        lengths=torch.cat([kjt.lengths(), kjt["word"].lengths()]),
    )
    with pytest.raises(KjtError, match="word"):
        dmp(twice).values()
    assert dmp(kjt).values().shape == (kjt.stride(), 8 * 5)


# ---- errors --------------------------------------------------------------------------------------


def a_bad_batch_on_one_rank_is_an_error_on_all(rank: int, world_size: int) -> None:
    """Nothing has changed, and training goes on as if it had not been."""
    bad_rank = world_size - 1
    for placement in PLACEMENTS:
        for optimizer in ("sgd", "adam"):
            job = Job(optimizer=optimizer, placement=placement, num_steps=3)
            undisturbed, dmp = new_dmp(job), new_dmp(job)
            batches = batches_of(job, rank, world_size)
            losses = train(dmp, batches[:1])
            for spoil, error in SPOILT.items():
                before = state_of(dmp)
                batch = batches[1]
                if rank == bad_rank:
                    batch = Batch(batch.dense_features, spoil(batch.sparse_features), batch.labels)
                expected = error if rank == bad_rank else PeerBatchError
                with pytest.raises(expected) as raised:
                    dmp(batch)
                if rank != bad_rank:
                    assert raised.value.ranks == (bad_rank,)
                    assert f"rank {bad_rank}" in str(raised.value)
                    assert error.__name__ in str(raised.value)
                assert_same_bits(state_of(dmp), before)
            losses += train(dmp, batches[1:])
            assert losses == train(undisturbed, batches), (placement, optimizer)
            assert_same_bits(state_of(dmp), state_of(undisturbed))


def with_id(kjt: KeyedJaggedTensor, new: int) -> KeyedJaggedTensor:
    values = kjt.values().clone()
    values[-1] = new  # of "word", which has 37
    return KeyedJaggedTensor(kjt.keys(), values, lengths=kjt.lengths())


def too_large(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_id(kjt, 37)


def negative(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_id(kjt, -1)


def without_a_key(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    keys = [key for key in kjt.keys() if key != "tag"]  # noqa: SIM118 - a KeyedJaggedTensor
    return kjt.permute([kjt.keys().index(key) for key in keys])


def with_too_many_values(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    values = torch.cat([kjt.values(), torch.zeros(3, dtype=torch.int64)])
    return KeyedJaggedTensor(kjt.keys(), values, lengths=kjt.lengths())


SPOILT: Mapping[Callable[[KeyedJaggedTensor], KeyedJaggedTensor], type[TorchrecTpuError]] = {
    too_large: IdRangeError,
    negative: IdRangeError,
    without_a_key: MissingKeyError,
    with_too_many_values: KjtError,
}


def ids_outside_a_table_can_be_dropped(rank: int, world_size: int) -> None:
    """One on each rank, in the last bag of "word", which has 37."""
    batch = new_batch(MIXED_SGD, 1, rank, world_size)
    kjt = batch.sparse_features
    lengths = kjt.lengths().clone()
    lengths[-1] += 1
    bad = KeyedJaggedTensor(
        kjt.keys(), torch.cat([kjt.values(), torch.tensor([37])]), lengths=lengths
    )
    for placement in PLACEMENTS:
        model = new_model("dlrm")
        sharders = torchrec_tpu.sharders(optimizer=torchrec_tpu.sgd(lr=1.0), id_policy="drop")
        dmp = DistributedModelParallel(
            model,
            device=CPU,
            plan=plan_of(model, placement, world_size, sharders),
            sharders=sharders,
        )
        with torch.no_grad():
            found = dmp(Batch(batch.dense_features, bad, batch.labels))
            wanted = new_model("dlrm")(batch)
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-6)


# ---- the worlds ----------------------------------------------------------------------------------


SCENARIOS: Mapping[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        keys_and_shards_are_those_of_stock_dmp,
        tables_start_as_the_module_was,
        tables_on_the_meta_device_are_initialised,
        own_collections_are_sharded_too,
        a_pipeline_gives_the_same_bits,
        the_same_job_gives_the_same_bits,
        two_forwards_before_one_backward,
        evaluation_changes_nothing,
        frozen_tables_stay,
        a_rank_without_samples_takes_part,
        columns_of_any_width,
        weighted_means_divide_by_the_weights,
        sequences_return_their_ids,
        another_model_goes_on_from_state_dicts,
        state_dicts_can_have_a_prefix,
        names_of_parameters_and_buffers_are_those_of_the_state_dict,
        unsharded_state_dicts_are_taken,
        a_missing_table_is_reported,
        tables_of_another_shape_are_refused,
        a_pooled_collection_can_be_the_whole_model,
        a_bad_batch_on_one_rank_is_an_error_on_all,
        ids_outside_a_table_can_be_dropped,
    )
}


def run_scenarios(rank: int, world_size: int, names: Sequence[str]) -> dict[str, str | None]:
    """Name -> the traceback of what stopped it."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            SCENARIOS[name](rank, world_size)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, str | None]]:
    return run_world(run_scenarios, 2, list(SCENARIOS), deadline=250)


@pytest.fixture(scope="module")
def three_ranks() -> list[dict[str, str | None]]:
    return run_world(run_scenarios, 3, list(SCENARIOS), deadline=500)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(two_ranks: list[dict[str, str | None]], name: str) -> None:
    errors = [f"rank {r}: {found[name]}" for r, found in enumerate(two_ranks) if found[name]]
    assert not errors, "\n".join(errors)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_three_ranks(three_ranks: list[dict[str, str | None]], name: str) -> None:
    errors = [f"rank {r}: {found[name]}" for r, found in enumerate(three_ranks) if found[name]]
    assert not errors, "\n".join(errors)
