"""The collections against TorchRec's eager ones in one process."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.optimizers import in_backward_optimizer_filter
from twin import (
    CASES,
    NUM_IDS,
    Case,
    Twin,
    assert_equal_training,
    assert_same_bits,
    bag_configs,
    gradient_like,
    outputs,
    pooled,
    random_kjt,
    sequence,
    sequence_configs,
    snapshot,
    train,
)

from torchrec_tpu.sharding.embeddings import (
    SparseCoreCollection,
    SparseCoreEmbeddingBagCollection,
    SparseCoreEmbeddingCollection,
)
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import (
    BatchLayoutError,
    BatchSizeError,
    CapacityError,
    DuplicateKeyError,
    IdRangeError,
    KjtError,
    MissingKeyError,
    OptimizerError,
    TableError,
    WeightsError,
)
from torchrec_tpu.sparsecore.optimizers import adagrad, adam, rowwise_adagrad, sgd

KINDS = pytest.mark.parametrize("build", [pooled, sequence])
Build = Callable[..., SparseCoreCollection]


def one_table(
    rows: int,
    dim: int,
    *,
    value: Callable[[int], float] = float,
    pooling: PoolingType = PoolingType.SUM,
    **options: Any,
) -> SparseCoreEmbeddingBagCollection:
    """Table "t" of feature "f", where row i is filled with value(i)."""

    def fill(weight: torch.Tensor) -> None:
        weight.detach().copy_(torch.tensor([[value(i)] for i in range(rows)]).expand(rows, dim))

    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=["f"],
        pooling=pooling,
        init_fn=fill,
    )
    return SparseCoreEmbeddingBagCollection([config], **options)


def one_feature(
    values: list[int], lengths: list[int], weights: list[float] | None = None
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        weights=None if weights is None else torch.tensor(weights),
    )


def weight_of(collection: SparseCoreEmbeddingBagCollection) -> torch.Tensor:
    return collection.embedding_bags["t"].get_parameter("weight").detach()


# ------------------------------------------------------------------------- names, shapes, values


def test_outputs_have_torchrecs_names_order_and_columns() -> None:
    def rows_of(factor: int) -> Callable[[torch.Tensor], None]:
        return lambda weight: weight.detach().copy_(
            (torch.arange(4.0) * factor)[:, None].expand_as(weight)
        )

    collection = SparseCoreEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t1",
                num_embeddings=4,
                embedding_dim=2,
                feature_names=["a"],
                init_fn=rows_of(1),
            ),
            EmbeddingBagConfig(
                name="t2",
                num_embeddings=4,
                embedding_dim=3,
                feature_names=["b", "a"],
                init_fn=rows_of(10),
            ),
        ]
    )
    lengths = torch.tensor([1, 0, 1, 1, 1, 1])  # of b, a and a key that no table has
    kjt = KeyedJaggedTensor(["b", "a", "z"], torch.tensor([3, 1, 2, 999, 7]), lengths=lengths)
    result = collection(kjt)
    assert result.keys() == ["a@t1", "b", "a@t2"]
    assert result.length_per_key() == [2, 3, 3]
    assert result.values().tolist() == [
        [1, 1, 30, 30, 30, 10, 10, 10],
        [2, 2, 0, 0, 0, 20, 20, 20],
    ]


def test_sequences_have_torchrecs_names_order_values_and_lengths() -> None:
    ours = SparseCoreEmbeddingCollection(sequence_configs(), need_indices=True)
    theirs = EmbeddingCollection(sequence_configs(), need_indices=True)
    theirs.load_state_dict(ours.state_dict())
    kjt = random_kjt(0)
    for dtype in (torch.int32, torch.int64):
        kjt = KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths().to(dtype))
        got, want = ours(kjt), theirs(kjt)
        assert list(got) == list(want)
        for name in want:
            assert torch.equal(got[name].values(), want[name].values())
            assert torch.equal(got[name].weights(), want[name].weights())
            assert torch.equal(got[name].lengths(), want[name].lengths())
            assert got[name].lengths().dtype == dtype
    assert ours.embedding_names_by_table() == theirs.embedding_names_by_table()
    assert ours.embedding_dim() == theirs.embedding_dim()
    assert ours.need_indices()
    assert [config.name for config in ours.embedding_configs()] == ["users", "goods", "tags"]


def test_sequences_carry_no_weights_unless_indices_are_wanted() -> None:
    result = sequence()(random_kjt(0, weighted=True))
    assert all(jagged.weights_or_none() is None for jagged in result.values())


@pytest.mark.parametrize(
    ("ours", "theirs", "configs"),
    [
        (SparseCoreEmbeddingBagCollection, EmbeddingBagCollection, bag_configs),
        (SparseCoreEmbeddingCollection, EmbeddingCollection, sequence_configs),
    ],
)
def test_first_values_are_torchrecs_bit_for_bit(ours: Any, theirs: Any, configs: Any) -> None:
    def tables() -> list[Any]:
        some = configs()
        some[0].init_fn = nn.init.ones_
        return [*some, type(some[0])(100, some[0].embedding_dim, "last", weight_init_max=3.0)]

    torch.manual_seed(11)
    got = ours(tables())
    torch.manual_seed(11)
    want = theirs(tables())
    assert_same_bits(got.state_dict(), want.state_dict())
    got.reset_parameters()
    torch.manual_seed(12)
    got.reset_parameters()
    torch.manual_seed(12)
    want.reset_parameters()
    assert_same_bits(got.state_dict(), want.state_dict())


def test_it_answers_the_questions_that_torchrec_answers() -> None:
    collection = pooled(is_weighted=True)
    assert collection.is_weighted()
    names = [config.name for config in collection.embedding_bag_configs()]
    assert names == ["users", "goods", "tags"]
    assert collection.device == torch.device("cpu")
    assert "users: (53, 4)" in repr(collection)
    assert "adagrad(lr=0.01" in repr(collection)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64])
@KINDS
def test_ids_and_lengths_of_either_integer_type_give_the_same(
    build: Build, id_dtype: torch.dtype, length_dtype: torch.dtype
) -> None:
    kjt = random_kjt(0)
    other = KeyedJaggedTensor(
        kjt.keys(), kjt.values().to(id_dtype), lengths=kjt.lengths().to(length_dtype)
    )
    by_offsets = KeyedJaggedTensor(
        kjt.keys(), kjt.values().to(id_dtype), offsets=kjt.offsets().to(length_dtype)
    )
    collection = build()
    want = outputs(collection, kjt)
    assert torch.equal(outputs(collection, other), want)
    assert torch.equal(outputs(collection, by_offsets), want)


@KINDS
def test_an_empty_batch_gives_empty_outputs_and_trains(build: Build) -> None:
    collection = build()
    before = snapshot(collection)
    keys = random_kjt(0).keys()
    kjt = KeyedJaggedTensor(
        keys, torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64)
    )
    result = outputs(collection, kjt)
    assert result.numel() == 0
    result.sum().backward()
    assert_same_bits(snapshot(collection), before)


def test_a_batch_of_empty_bags_gives_zeros_not_nan() -> None:
    collection = pooled()
    keys = random_kjt(0).keys()
    kjt = KeyedJaggedTensor(
        keys,
        torch.empty(0, dtype=torch.int64),
        lengths=torch.zeros(len(keys) * 3, dtype=torch.int64),
    )
    before = snapshot(collection)
    result = collection(kjt).values()
    assert torch.equal(result, torch.zeros(3, 4 + 12 + 12 + 8))
    result.sum().backward()
    assert_same_bits(snapshot(collection), before)


# --------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
@KINDS
def test_training_equals_torchrec_in_weights_and_state(build: Build, case: Case) -> None:
    ours = build(optimizer=case.spec)
    twin = Twin(ours, case)
    start = snapshot(ours)
    for seed in range(22):
        kjt = random_kjt(seed)
        got, want = outputs(ours, kjt), outputs(twin.collection, kjt)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
        gradient = gradient_like(got, seed)
        got.backward(gradient)
        want.backward(gradient)
        twin.step(kjt)
        assert_equal_training(ours, twin)
    moved = snapshot(ours)
    assert max((moved[name] - start[name]).abs().max() for name in start) > 0.1
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_weighted_training_equals_torchrec() -> None:
    case = CASES[1]
    torch.manual_seed(7)
    ours = SparseCoreEmbeddingBagCollection(
        bag_configs(PoolingType.SUM), is_weighted=True, optimizer=case.spec
    )
    twin = Twin(ours, case)
    for seed in range(20):
        kjt = random_kjt(seed, weighted=True)
        got, want = outputs(ours, kjt), outputs(twin.collection, kjt)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
        gradient = gradient_like(got, seed)
        got.backward(gradient)
        want.backward(gradient)
        twin.step(kjt)
    assert_equal_training(ours, twin)


def test_weighted_mean_divides_by_the_sum_of_weights() -> None:
    """The eager oracle refuses weighted MEAN, so it gets weights that are already divided."""
    case = CASES[3]
    torch.manual_seed(7)
    ours = SparseCoreEmbeddingBagCollection(bag_configs(), is_weighted=True, optimizer=case.spec)
    twin = Twin(pooled(), case)
    twin.configs = bag_configs(PoolingType.SUM)
    twin.collection = EmbeddingBagCollection(list(twin.configs), is_weighted=True)
    twin.collection.load_state_dict(ours.state_dict())
    divided_keys = {"item", "history"}  # "history" also feeds "tags", which is a SUM
    for seed in range(20):
        kjt = random_kjt(seed, weighted=True)
        parts = [kjt[key] for key in kjt.keys()]  # noqa: SIM118 - a method of KJT
        divided = [
            part.weights()
            / torch.segment_reduce(part.weights(), "sum", lengths=part.lengths()).repeat_interleave(
                part.lengths()
            )
            if key in divided_keys
            else part.weights()
            for key, part in zip(kjt.keys(), parts, strict=True)
        ]
        normalized = KeyedJaggedTensor(
            kjt.keys(), kjt.values(), lengths=kjt.lengths(), weights=torch.cat(divided)
        )
        got = ours(kjt).values()[:, : 4 + 12 + 12]
        want = twin.collection(normalized).values()[:, : 4 + 12 + 12]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
        gradient = gradient_like(got, seed)
        got.backward(gradient)
        want.backward(gradient)
        twin.step(kjt)
    twin.configs = twin.configs[:2]
    assert_equal_training(ours, twin)


def test_duplicates_make_one_update_per_row() -> None:
    gradient = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]])
    want = {
        sgd(lr=0.1): [[-0.2, -1.4, -2.6, -3.8], [0, -1, -2, -3]],
        adagrad(lr=0.1, eps=1e-8): [[0.9] * 4, [0.9] * 4],
        rowwise_adagrad(lr=0.1, eps=1e-8): [
            [0.9634852, 0.9269703, 0.8904555, 0.8539407],
            [0.9634852, 0.9269703, 0.8904555, 0.8539407],
        ],
    }
    for spec, rows in want.items():
        collection = one_table(8, 4, value=lambda _: 1.0, optimizer=spec)
        collection(one_feature([3, 3, 3, 5], [2, 2])).values().backward(gradient)
        torch.testing.assert_close(weight_of(collection)[[3, 5]], torch.tensor(rows))
        assert torch.equal(weight_of(collection)[[0, 1, 2, 4, 6, 7]], torch.ones(6, 4))
    state = collection.fused_optimizer.slots("t")[0]
    assert state.tolist() == [0, 0, 0, 1080, 0, 750, 0, 0]


def test_a_row_that_two_features_name_is_updated_once() -> None:
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=8,
        embedding_dim=4,
        feature_names=["f", "g"],
        init_fn=lambda weight: weight.detach().fill_(1),
    )
    collection = SparseCoreEmbeddingBagCollection([config], optimizer=rowwise_adagrad(lr=0.1))
    kjt = KeyedJaggedTensor(["f", "g"], torch.tensor([3, 3]), lengths=torch.tensor([1, 1]))
    gradient = torch.tensor([[1.0, 2, 3, 4, 1, 2, 3, 4]])
    collection(kjt).values().backward(gradient)
    assert collection.fused_optimizer.slots("t")[0][3] == 30
    torch.testing.assert_close(
        weight_of(collection)[3], torch.tensor([0.9634852, 0.9269703, 0.8904555, 0.8539407])
    )


def test_max_gradient_clips_bag_gradients_before_duplicates_are_summed() -> None:
    collection = one_table(8, 4, value=lambda _: 1.0, optimizer=sgd(lr=0.1, max_gradient=1.5))
    collection(one_feature([3, 3], [2])).values().backward(torch.tensor([[1.0, 2, 3, 4]]))
    torch.testing.assert_close(weight_of(collection)[3], torch.tensor([0.8, 0.7, 0.7, 0.7]))


def test_two_lookups_before_one_backward_make_two_updates() -> None:
    """As two steps in a row, apart from the values that the second lookup saw."""
    together, one_by_one = pooled(optimizer=adam(lr=0.1)), pooled(optimizer=adam(lr=0.1))
    first, second = random_kjt(0), random_kjt(1)
    a, b = together(first).values(), together(second).values()
    x, y = gradient_like(a, 0), gradient_like(b, 1)
    ((a * x).sum() + (b * y).sum()).backward()
    # The engine runs the newest node first.
    one_by_one(second).values().backward(y)
    one_by_one(first).values().backward(x)
    assert_same_bits(snapshot(together), snapshot(one_by_one))
    weight = together.get_parameter("embedding_bags.users.weight")
    assert together.fused_optimizer.state[weight]["users.step"] == 2


@KINDS
def test_inference_neither_updates_nor_asks_for_a_gradient(build: Build) -> None:
    collection = build()
    before = snapshot(collection)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not outputs(collection, random_kjt(0)).requires_grad
    collection.eval()
    assert outputs(
        collection, random_kjt(0)
    ).requires_grad  # as in TorchRec, eval() is no no_grad()
    assert_same_bits(snapshot(collection), before)


def test_a_table_frozen_later_stays_while_others_of_its_stack_train() -> None:
    collection = pooled(optimizer=sgd(lr=1.0), stacks=[["users", "goods", "tags"]])
    collection.embedding_bags["goods"].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in collection.state_dict().items()}
    collection(random_kjt(0)).values().sum().backward()
    moved = {n: not torch.equal(v, before[n]) for n, v in collection.state_dict().items()}
    assert moved == {
        "embedding_bags.users.weight": True,
        "embedding_bags.goods.weight": False,
        "embedding_bags.tags.weight": True,
    }


def test_frozen_tables_do_not_move() -> None:
    collection = pooled(optimizer=adam(lr=0.1))
    collection.get_parameter("embedding_bags.goods.weight").requires_grad_(False)
    before = snapshot(collection)
    train(collection, [random_kjt(seed) for seed in range(3)])
    after = snapshot(collection)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {
        "embedding_bags.goods.weight",
        "goods.momentum1",
        "goods.exp_avg_sq",
        "goods.step",
    }
    others = pooled(optimizer=adam(lr=0.1))
    train(others, [random_kjt(seed) for seed in range(3)])
    want = snapshot(others)
    assert_same_bits(
        {name: after[name] for name in after.keys() - still},
        {name: want[name] for name in after.keys() - still},
    )
    collection.requires_grad_(False)
    assert not collection(random_kjt(0)).values().requires_grad


def test_each_table_may_have_its_own_optimizer() -> None:
    specs = {"users": adam(lr=0.1), "goods": sgd(lr=0.2), "tags": rowwise_adagrad(lr=0.3)}
    mixed = pooled(optimizer=specs)
    kjts = [random_kjt(seed) for seed in range(5)]
    train(mixed, kjts)
    for table, spec in specs.items():
        alone = pooled(optimizer=spec)
        for seed, kjt in enumerate(kjts):
            output = outputs(alone, kjt)
            output.backward(gradient_like(output, seed))
        name = f"embedding_bags.{table}.weight"
        assert torch.equal(mixed.state_dict()[name], alone.state_dict()[name])
    with pytest.raises(
        OptimizerError, match=r"given for \['users'\].*\['goods', 'tags', 'users'\]"
    ):
        pooled(optimizer={"users": sgd(lr=0.1)})


LAYOUTS = [
    {"num_devices": devices, "cores_per_device": cores, "stacks": stacks}
    for devices, cores, stacks in [
        (1, 1, "none"),
        (1, 3, "auto"),
        (1, 4, "none"),
        (2, 2, "auto"),
        (3, 1, "none"),
        (4, 2, "auto"),
        (1, 2, [["tags", "users"]]),
    ]
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@KINDS
def test_the_answer_does_not_depend_on_the_layout(build: Build, layout: dict[str, Any]) -> None:
    kjts = [random_kjt(seed, batch_size=seed + 1) for seed in range(8)]
    plain, other = build(optimizer=adam(lr=0.05)), build(optimizer=adam(lr=0.05), **layout)
    assert repr(plain.layout) != repr(other.layout)
    for got, want in zip(train(other, kjts), train(plain, kjts), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    want, got = snapshot(plain), snapshot(other)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=2e-6, msg=name)


@KINDS
def test_the_number_of_threads_does_not_change_a_bit(build: Build) -> None:
    kjts = [random_kjt(seed, batch_size=50) for seed in range(4)]
    one, three = build(num_threads=1), build(num_threads=3)
    train(one, kjts)
    train(three, kjts)
    assert_same_bits(snapshot(one), snapshot(three))


def test_batches_up_to_the_static_size_give_the_same_as_without_one() -> None:
    kjts = [random_kjt(seed, batch_size=size) for seed, size in enumerate((16, 3, 1, 16))]
    static, free = pooled(batch_size=16), pooled()
    for got, want in zip(train(static, kjts), train(free, kjts), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    with pytest.raises(BatchSizeError, match="17 samples, the static batch size is 16"):
        static(random_kjt(0, batch_size=17))


# ---------------------------------------------------------------------------------------- weights


def test_weighted_sum() -> None:
    collection = one_table(8, 1, is_weighted=True, optimizer=sgd(lr=0.1))
    result = collection(one_feature([1, 2], [2], [10.0, 100.0])).values()
    assert result.tolist() == [[210.0]]
    result.sum().backward()
    torch.testing.assert_close(weight_of(collection)[1:3], torch.tensor([[0.0], [-8.0]]))


def test_weighted_mean() -> None:
    collection = one_table(8, 1, is_weighted=True, pooling=PoolingType.MEAN, optimizer=sgd(lr=0.1))
    result = collection(one_feature([1, 2], [2], [10.0, 100.0])).values()
    torch.testing.assert_close(result, torch.tensor([[210 / 110]]))
    result.sum().backward()
    torch.testing.assert_close(
        weight_of(collection)[1:3], torch.tensor([[1 - 1 / 110], [2 - 10 / 110]])
    )


def test_a_mean_over_weights_that_add_to_zero_is_zero() -> None:
    collection = one_table(8, 1, is_weighted=True, pooling=PoolingType.MEAN)
    before = snapshot(collection)
    result = collection(one_feature([1, 2], [2], [0.0, 0.0])).values()
    assert result.tolist() == [[0.0]]
    result.sum().backward()
    assert_same_bits(snapshot(collection), before)


def test_weights_are_ignored_with_one_warning_when_not_asked_for() -> None:
    collection = one_table(8, 1)
    kjt = one_feature([1, 2], [2], [10.0, 100.0])
    with pytest.warns(UserWarning, match="is_weighted=False: they are ignored"):
        result = collection(kjt)
    assert result.values().tolist() == [[3.0]]
    assert torch.equal(collection(kjt).values(), result.values())  # a second warning would fail
    collection.attach(kjt)


def test_weights_that_are_needed_must_be_there_and_need_no_gradient() -> None:
    collection = one_table(8, 1, is_weighted=True)
    with pytest.raises(WeightsError, match="no weights"):
        collection(one_feature([1, 2], [2]))
    kjt = one_feature([1, 2], [2], [10.0, 100.0])
    kjt.weights().requires_grad_()
    with pytest.raises(WeightsError, match="require a gradient"):
        collection(kjt)
    with torch.no_grad():
        assert collection(kjt).values().tolist() == [[210.0]]


# ----------------------------------------------------------------------------------------- errors


def with_ids(change: Callable[[torch.Tensor], None]) -> KeyedJaggedTensor:
    kjt = random_kjt(5)
    change(kjt.values())
    return kjt


def changed(**arguments: Any) -> KeyedJaggedTensor:
    kjt = random_kjt(5)
    given = {"keys": kjt.keys(), "values": kjt.values(), "lengths": kjt.lengths()} | arguments
    return KeyedJaggedTensor(**given)


def set_first(value: int) -> Callable[[torch.Tensor], None]:
    def change(values: torch.Tensor) -> None:
        values[0] = value

    return change


def crowded() -> KeyedJaggedTensor:
    """Seven even ids in every bag: all of them live on the first of two cores."""
    even = torch.arange(7) * 2
    values = torch.cat([even.repeat(3 * 12), torch.arange(7).repeat(12)])
    return KeyedJaggedTensor(list(NUM_IDS), values, lengths=torch.full((4 * 12,), 7))


BAD_BATCHES: list[tuple[type[Exception], str, Callable[[], KeyedJaggedTensor]]] = [
    (IdRangeError, r"'item' of table 'goods'.* id 31 .*0\.\.30", lambda: with_ids(set_first(31))),
    (IdRangeError, "has id -1 at position 0", lambda: with_ids(set_first(-1))),
    (IdRangeError, "has id 4294967299", lambda: with_ids(set_first(2**32 + 3))),
    (MissingKeyError, "history", lambda: changed(keys=["item", "unused", "user", "other"])),
    (DuplicateKeyError, "item", lambda: changed(keys=["item", "item", "user", "history"])),
    (KjtError, "account for", lambda: changed(values=random_kjt(5).values()[:-1])),
    (KjtError, "has length -1", lambda: changed(lengths=random_kjt(5).lengths() - 1)),
    (KjtError, "lengths", lambda: changed(lengths=random_kjt(5).lengths()[:-1])),
    (KjtError, "expected 20", lambda: changed(stride=5)),
    (KjtError, "int32 or int64", lambda: changed(values=random_kjt(5).values().double())),
    (
        KjtError,
        "variable batch size per key",
        lambda: changed(stride_per_key_per_rank=[[9], [9], [9], [9]]),
    ),
    (
        KjtError,
        "contradict",
        lambda: changed(offsets=torch.zeros(4 * 9 + 1, dtype=torch.int64)),
    ),
    (KjtError, "on meta", lambda: changed(values=random_kjt(5).values().to("meta"))),
    (BatchSizeError, "static batch size is 12", lambda: random_kjt(0, batch_size=13)),
    (CapacityError, "partition .* needs .* ids, capacity is 24", crowded),
]


@pytest.mark.parametrize(("error", "message", "bad_batch"), BAD_BATCHES, ids=lambda v: str(v)[:40])
@KINDS
def test_an_error_leaves_weights_and_state_as_they_were(
    build: Build,
    error: type[Exception],
    message: str,
    bad_batch: Callable[[], KeyedJaggedTensor],
) -> None:
    def new() -> SparseCoreCollection:
        collection = build(optimizer=adam(lr=0.1), batch_size=12, stacks="none")
        # Every stack may have as many ids as these batches do, but not all in one partition.
        collection.capacity = {
            name: Capacity(max_ids=24, max_unique_ids=24) for name in ("users", "goods", "tags")
        }
        return collection

    collection, untroubled = new(), new()
    train(collection, [random_kjt(1)])
    before = snapshot(collection)
    with pytest.raises(error, match=message):
        outputs(collection, bad_batch())
    assert_same_bits(snapshot(collection), before)
    train(collection, [random_kjt(2)])
    train(untroubled, [random_kjt(1)])
    train(untroubled, [random_kjt(2)])
    assert_same_bits(snapshot(collection), snapshot(untroubled))


def test_an_id_error_names_feature_table_sample_position_and_id() -> None:
    collection = one_table(8, 2)
    with pytest.raises(IdRangeError) as caught:
        collection(one_feature([1, 2, 8], [1, 0, 2]))
    error = caught.value
    assert (error.feature, error.table, error.sample, error.position) == ("f", "t", 2, 1)
    assert (error.value, error.num_embeddings) == (8, 8)


def test_clamped_ids_read_row_0_and_dropped_ones_nothing() -> None:
    kjt = one_feature([9, 2, -1], [2, 1])
    clamp = one_table(8, 1, value=lambda i: i + 1.0, id_policy="clamp")
    drop = one_table(8, 1, value=lambda i: i + 1.0, id_policy="drop")
    assert clamp(kjt).values().tolist() == [[4.0], [1.0]]
    assert drop(kjt).values().tolist() == [[3.0], [0.0]]
    assert drop.preprocess(kjt).stats.num_invalid.tolist() == [2]


def test_tables_that_do_not_fit_are_refused() -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    for data_type in (DataType.BF16, DataType.INT8):
        config.data_type = data_type
        with pytest.raises(TableError, match=f"'t': data_type {data_type}.*FP32 or .*FP16"):
            SparseCoreEmbeddingBagCollection([config])
    config.data_type = DataType.FP32
    config.pooling = PoolingType.NONE
    with pytest.raises(TableError, match="pooling"):
        SparseCoreEmbeddingBagCollection([config])
    config.pooling = PoolingType.SUM
    config.use_virtual_table = True
    with pytest.raises(TableError, match="virtual"):
        SparseCoreEmbeddingBagCollection([config])
    with pytest.raises(TypeError, match="num_device"):
        SparseCoreEmbeddingBagCollection([], num_device=2)  # type: ignore[call-arg]


# ---------------------------------------------------------------------------- as an nn.Module


@KINDS
def test_copies_are_independent_and_train_alike(build: Build) -> None:
    original = build(optimizer=adam(lr=0.1))
    train(original, [random_kjt(0)])
    before = snapshot(original)
    for clone in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert_same_bits(snapshot(clone), before)
        train(clone, [random_kjt(1)])
        assert_same_bits(snapshot(original), before)
        expected = copy.deepcopy(original)
        train(expected, [random_kjt(1)])
        assert_same_bits(snapshot(clone), snapshot(expected))
        assert not list(in_backward_optimizer_filter(clone.named_parameters()))


def test_tables_stay_float32_on_cpu() -> None:
    collection = pooled()
    before = snapshot(collection)
    for convert in (nn.Module.half, nn.Module.double, nn.Module.bfloat16):
        with pytest.raises(TableError, match="float32"):
            convert(nn.Sequential(collection))
    assert_same_bits(snapshot(collection), before)
    assert collection.float().to("cpu") is collection
    train(collection, [random_kjt(0)])


def test_float16_tables_stay_float16() -> None:
    configs = bag_configs()
    configs[1].data_type = DataType.FP16
    collection = SparseCoreEmbeddingBagCollection(configs)
    before = snapshot(collection)
    with pytest.raises(TableError, match=r"\['goods'\] are float16 on cpu.* torch.float32"):
        nn.Sequential(collection).float()
    with pytest.raises(TableError, match=r"\['users', .*are float32 on cpu.* torch.float16"):
        collection.half()
    assert_same_bits(snapshot(collection), before)
    assert collection.to("cpu") is collection
    source = EmbeddingBagCollection(configs)
    source.embedding_bags["goods"].float()
    with pytest.raises(TableError, match=r"'goods': weight is torch\.float32 .* torch\.float16 on"):
        SparseCoreEmbeddingBagCollection.from_torchrec(source, optimizer=sgd(lr=0.1))


@KINDS
def test_meta_tables_can_be_allocated_later(build: Build) -> None:
    collection = build(device="meta", optimizer=adagrad(lr=0.1, initial_accumulator_value=0.5))
    with pytest.raises(TableError, match="to_empty"):
        outputs(collection, random_kjt(0))
    collection.to_empty(device="cpu")
    torch.manual_seed(7)
    collection.reset_parameters()
    want = build(optimizer=adagrad(lr=0.1, initial_accumulator_value=0.5))
    torch.manual_seed(7)
    want.reset_parameters()
    kjts = [random_kjt(seed) for seed in range(3)]
    train(collection, kjts)
    train(want, kjts)
    assert_same_bits(snapshot(collection), snapshot(want))


def test_state_dicts_are_exchanged_with_torchrec_and_alias_the_weights() -> None:
    ours, theirs = pooled(), EmbeddingBagCollection(bag_configs())
    theirs.load_state_dict(ours.state_dict())
    assert_same_bits(ours.state_dict(), theirs.state_dict())
    kept = ours.state_dict()
    train(ours, [random_kjt(0)])
    assert_same_bits(kept, ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_same_bits(kept, theirs.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own doing
def test_a_compiled_model_trains_like_an_eager_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.top = pooled(optimizer=adagrad(lr=0.1)), nn.Linear(36, 1)

        def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
            result: torch.Tensor = self.top(self.bags(kjt).values()).tanh()
            return result

    eager = Model()
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, backend="aot_eager")
    for seed in range(3):
        kjt = random_kjt(seed)
        eager(kjt).sum().backward()
        run(kjt).sum().backward()
    for name, value in snapshot(compiled.bags).items():
        torch.testing.assert_close(value, snapshot(eager.bags)[name], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------- prepared batches


@KINDS
def test_a_prepared_batch_gives_what_its_kjt_gives(build: Build) -> None:
    by_kjt, by_batch, attached = build(), build(), build()
    for seed in range(5):
        kjt = random_kjt(seed)
        train(by_kjt, [kjt])
        train(by_batch, [by_batch.preprocess(kjt)])  # type: ignore[list-item]
        attached.attach(kjt)
        train(attached, [kjt])
    assert_same_bits(snapshot(by_kjt), snapshot(by_batch))
    assert_same_bits(snapshot(by_kjt), snapshot(attached))


def test_an_attached_batch_is_used_until_the_kjt_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    collection = one_table(8, 1)
    kjt = one_feature([1, 2], [1, 1])
    batch = collection.attach(kjt)
    assert collection.attach(kjt) is batch
    other = one_table(8, 1, num_devices=2)
    assert other.attach(kjt) is not batch
    with monkeypatch.context() as patch:
        patch.setattr(collection, "preprocess", None)
        assert collection(kjt).values().tolist() == [[1.0], [2.0]]
        moved = kjt.to(torch.device("cpu"))  # as training loops do with every batch
        assert moved is not kjt
        assert collection(moved).values().tolist() == [[1.0], [2.0]]
    longer = KeyedJaggedTensor(["f"], kjt.values(), lengths=torch.tensor([0, 2]))
    assert collection(longer).values().tolist() == [[0.0], [3.0]]
    kjt.values()[0] = 5
    assert collection(kjt).values().tolist() == [[5.0], [2.0]]
    kjt.lengths().copy_(torch.tensor([2, 0]))
    assert collection(kjt).values().tolist() == [[7.0], [0.0]]


def test_an_attached_batch_is_not_used_with_other_weights_or_keys() -> None:
    collection = one_table(8, 1, is_weighted=True)
    kjt = one_feature([1, 2], [2], [10.0, 100.0])
    collection.attach(kjt)
    values, lengths = kjt.values(), kjt.lengths()
    other = KeyedJaggedTensor(["f"], values, lengths=lengths, weights=torch.ones(2))
    assert collection(other).values().tolist() == [[3.0]]
    kjt.weights().mul_(2)
    assert collection(kjt).values().tolist() == [[420.0]]
    renamed = KeyedJaggedTensor(["g"], values, lengths=lengths, weights=kjt.weights())
    with pytest.raises(MissingKeyError, match="'f'"):
        collection(renamed)


def test_a_batch_of_another_module_is_not_used() -> None:
    weighted, plain = one_table(8, 1, is_weighted=True), one_table(8, 1)
    kjt = one_feature([1, 2], [2], [10.0, 100.0])
    weighted.attach(kjt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert plain(kjt).values().tolist() == [[3.0]]
    assert weighted(kjt).values().tolist() == [[210.0]]
    with pytest.raises(BatchLayoutError, match="made for layout"):
        one_table(9, 1)(plain.preprocess(one_feature([1], [1])))
    collection = SparseCoreEmbeddingCollection(sequence_configs(), need_indices=True)
    batch = collection.preprocess(random_kjt(0))
    with pytest.raises(BatchLayoutError, match="need_indices=True"):
        collection(batch)


def test_capacity_can_be_set_later_and_a_wrong_one_changes_nothing() -> None:
    collection = one_table(64, 2)
    kjt = one_feature(list(range(64)), [32, 32])
    want = collection(kjt).values()
    collection.capacity = {"t": Capacity(max_ids=8, max_unique_ids=8)}
    with pytest.raises(CapacityError, match="stack 't'"):
        collection(kjt)
    with pytest.raises(ValueError, match="unknown stacks"):
        collection.capacity = {"other": Capacity(max_ids=8, max_unique_ids=8)}
    assert collection.capacity == {"t": Capacity(max_ids=8, max_unique_ids=8)}
    collection.capacity = None
    assert torch.equal(collection(kjt).values(), want)


@pytest.fixture(autouse=True)
def _no_new_dtype_default() -> Iterator[None]:
    yield
    assert torch.get_default_dtype() is torch.float32


def test_configs_without_features_are_looked_up_by_the_tables_name() -> None:
    collection = SparseCoreEmbeddingBagCollection(
        [EmbeddingBagConfig(name="f", num_embeddings=8, embedding_dim=4)]
    )
    assert collection(one_feature([1], [1])).keys() == ["f"]
    names = SparseCoreEmbeddingCollection(
        [EmbeddingConfig(name="f", num_embeddings=8, embedding_dim=4)]
    )(one_feature([1], [1]))
    assert list(names) == ["f"]
