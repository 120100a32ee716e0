"""Every backend against dense arithmetic, FBGEMM, hand-computed cases, and the reference."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from oracle import Arrays, gains_of

from torchrec_tpu.sparsecore import Block, Combiner, Table, backends, make_layout
from torchrec_tpu.sparsecore.backends import FOR_DEVICE
from torchrec_tpu.sparsecore.optimizers import (
    OPTIMIZERS,
    RULES,
    adagrad,
    rowwise_adagrad,
    sgd,
)
from torchrec_tpu.sparsecore.preprocess import Preprocessor
from torchrec_tpu.sparsecore.rules import apply

SUM, MEAN, SQRTN, NONE = Combiner.SUM, Combiner.MEAN, Combiner.SQRTN, Combiner.NONE

# ---------------------------------------------------------------------------------- argument specs


@dataclasses.dataclass(frozen=True, eq=False)
class Spec:
    """Tables as (rows, dim, combiner, features), their layout, and how batches are drawn."""

    tables: tuple[tuple[int, int, Combiner, tuple[str, ...]], ...]
    layout: dict = dataclasses.field(default_factory=dict)
    batch_size: int = 13
    mean_length: float = 3.0
    is_weighted: bool = False

    def make_layout(self):
        return make_layout(
            [
                Table(
                    name=f"t{i}",
                    num_embeddings=rows,
                    embedding_dim=dim,
                    combiner=combiner,
                    features=features,
                )
                for i, (rows, dim, combiner, features) in enumerate(self.tables)
            ],
            **self.layout,
        )


THREE_TABLES = (
    (50, 16, SUM, ("a",)),
    (9, 16, MEAN, ("b", "c")),
    (300, 12, SQRTN, ("d",)),
)
ARG_SPECS = {
    "one table": Spec(((100, 8, SUM, ("a",)),)),
    "one core": Spec(THREE_TABLES, {"cores_per_device": 1}),
    "stacked": Spec(THREE_TABLES, {"stacks": [["t0", "t1", "t2"]]}, is_weighted=True),
    "three cores": Spec(THREE_TABLES, {"num_devices": 3, "cores_per_device": 1}),
    "sixteen cores": Spec(THREE_TABLES, {"num_devices": 4, "cores_per_device": 4}),
    "two devices of eight": Spec(
        THREE_TABLES, {"num_devices": 8, "num_local_devices": 2, "first_local_device": 3}
    ),
    "blocks of rows": Spec(
        THREE_TABLES,
        {
            "num_devices": 3,
            "stacks": [["t0", "t1", "t2"]],
            "blocks": {"t0": Block(9, 4), "t1": Block(9, 2)},
        },
    ),
    "sequences": Spec(((40, 20, NONE, ("a", "b")), (30, 20, SUM, ("a",)), (7, 4, NONE, ("c",)))),
    "odd dims": Spec(((60, 1, SUM, ("a",)), (60, 130, MEAN, ("b",)), (60, 33, SUM, ("c",)))),
    "wide": Spec(((80, 64, SUM, ("a",)), (80, 128, SUM, ("b",)), (80, 32, SUM, ("c",)))),
    "hot row": Spec(((1, 16, SUM, ("a",)), (2, 48, MEAN, ("b",))), mean_length=20.0),
    "mostly empty": Spec(THREE_TABLES, mean_length=0.1),
    "no ids": Spec(THREE_TABLES, mean_length=0.0),
    "one sample": Spec(THREE_TABLES, batch_size=1),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A KJT, its buffers, and where its outputs are."""

    arrays: Arrays
    buffers: tuple
    geometry: object
    num_floats: int  # of the flat output


@cache
def make_batch(spec: Spec, seed: int) -> Batch:
    """Skewed ids with repetitions: a few rows get most lookups."""
    rng = np.random.default_rng(seed)
    rows_of = {key: rows for rows, _, _, features in reversed(spec.tables) for key in features}
    keys = [*rows_of, "ignored"]
    for rows, _, _, features in spec.tables:  # a key may feed several tables
        rows_of |= {key: min(rows_of[key], rows) for key in features}
    rng.shuffle(keys)
    lengths = rng.poisson(spec.mean_length, len(keys) * spec.batch_size).astype(np.int32)
    values, start = [], 0
    for key in keys:
        count = lengths[start : start + spec.batch_size].sum()
        values.append((rng.pareto(0.8, count) * 2).astype(np.int64) % rows_of.get(key, 5))
        start += spec.batch_size
    values = np.concatenate(values)
    weights = rng.random(len(values)).astype(np.float32) + 0.5 if spec.is_weighted else None
    return pack(spec, Arrays(keys, values, lengths, weights))


def pack(spec: Spec, arrays: Arrays) -> Batch:
    layout = spec.make_layout()
    preprocessor = Preprocessor(layout, num_threads=1, is_weighted=spec.is_weighted)
    batch = preprocessor(arrays.keys, arrays.values, lengths=arrays.lengths, weights=arrays.weights)
    geometry = layout.geometry(batch)
    ends = [0]
    for table in geometry.tables:
        for f in geometry.features[table.first_feature :][: table.num_features]:
            ends.append(f.out_offset + max(f.num_samples - 1, 0) * f.out_stride + table.dim)
    return Batch(arrays, batch.stacks, geometry, max(ends))


def make_tables(spec: Spec, rng) -> list[np.ndarray]:
    layout = spec.make_layout()
    return [
        rng.standard_normal((t.table.num_embeddings, t.table.embedding_dim)).astype(np.float32)
        for t in layout.stack_order_tables
    ]


def make_slots(rule, tables, rng) -> list[list[np.ndarray]]:
    return [
        [rng.random(slot.shape(*table.shape)).astype(np.float32) for slot in rule.slots]
        for table in tables
    ]


def make_operands(rule, spec: Spec, step: int) -> np.ndarray:
    """Every table has its own learning rate."""
    hyper = {**rule.hyper, "weight_decay": 0.1}
    return np.array(
        [rule.prepare(step, {**hyper, "lr": 0.1 * (t + 1)}) for t in range(len(spec.tables))],
        np.float32,
    )


# ------------------------------------------------------------------------------------------ oracle


def occurrences(spec: Spec, batch: Batch):
    """(table, id, gain, first float of the output vector) of every id, from the KJT itself."""
    layout = spec.make_layout()
    dims = {t.name: t.embedding_dim for t in layout.tables}
    index = {t.table.name: i for i, t in enumerate(layout.stack_order_tables)}
    pooled = [f for f in layout.features if f.combiner is not NONE]
    width = sum(dims[f.table] for f in pooled)
    column, end = 0, batch.arrays.batch_size * width
    for feature in layout.features:
        for sample, (ids, weights) in enumerate(batch.arrays.bags(feature.key)):
            gains = gains_of(feature.combiner, len(ids), weights)
            for row, gain in zip(ids, gains, strict=True):
                start = end if feature.combiner is NONE else sample * width + column
                yield index[feature.table], row, gain, start
                if feature.combiner is NONE:
                    end += dims[feature.table]
        if feature.combiner is not NONE:
            column += dims[feature.table]


def dense_lookup(spec, batch, tables):
    out = np.zeros(batch.num_floats)
    for t, row, gain, start in occurrences(spec, batch):
        out[start : start + tables[t].shape[1]] += float(gain) * tables[t][row]
    return out


def dense_gradients(spec, batch, tables, grad, max_gradient):
    """Per table: the rows that the batch touches, and their summed gradients."""
    sums = [{} for _ in tables]
    limit = np.inf if max_gradient is None else max_gradient
    for t, row, gain, start in occurrences(spec, batch):
        term = float(gain) * np.clip(grad[start : start + tables[t].shape[1]], -limit, limit)
        sums[t][row] = sums[t].get(row, 0) + term.astype(np.float64)
    return [
        (list(rows), np.array(list(rows.values()), np.float32).reshape(-1, table.shape[1]))
        for rows, table in zip(sums, tables, strict=True)
    ]


# ------------------------------------------------------------------------------------- conformance


@pytest.fixture(params=FOR_DEVICE["cpu"])
def backend(request):
    if why := backends.why_unavailable(request.param):
        pytest.skip(f"backend {request.param}: {why}")
    return backends.load(request.param)


by_spec = pytest.mark.parametrize("spec", ARG_SPECS.values(), ids=ARG_SPECS)


@by_spec
def test_lookup_equals_dense_arithmetic(backend, spec):
    tables = make_tables(spec, np.random.default_rng(0))
    for seed in range(3):
        batch = make_batch(spec, seed)
        out = np.full(batch.num_floats + 3, np.nan, np.float32)
        backend.lookup(batch.buffers, tables, batch.geometry, out)
        wanted = dense_lookup(spec, batch, tables)
        np.testing.assert_allclose(out[:-3], wanted, rtol=1e-5, atol=1e-5)
        assert np.isnan(out[-3:]).all(), "wrote behind the last sample"


@by_spec
@pytest.mark.parametrize("max_gradient", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_equals_dense_arithmetic(backend, spec, name, max_gradient):
    """Once per touched row. All other rows and their state hold NaN: they are not even read."""
    rule, rng = RULES[name], np.random.default_rng(1)
    batch = make_batch(spec, 0)
    tables = make_tables(spec, rng)
    slots = make_slots(rule, tables, rng)
    operands = make_operands(rule, spec, 1)
    grad = rng.standard_normal(batch.num_floats).astype(np.float32)
    wanted = []
    for t, (rows, row_grad) in enumerate(dense_gradients(spec, batch, tables, grad, max_gradient)):
        new = apply(rule, row_grad, tables[t][rows], [s[rows] for s in slots[t]], operands[t])
        for array, new_rows in zip((tables[t], *slots[t]), new, strict=True):
            array[np.setdiff1d(np.arange(len(array)), rows)] = np.nan
            wanted.append(array.copy())
            wanted[-1][rows] = new_rows
    backend.update(grad, batch.buffers, tables, slots, operands, batch.geometry, name, max_gradient)
    got = [array for t in range(len(tables)) for array in (tables[t], *slots[t])]
    for array, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(array, want, rtol=1e-4, atol=1e-5)


@by_spec
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", [name for name in FOR_DEVICE["cpu"] if name != "reference"])
def test_a_backend_equals_the_reference_bit_for_bit(name, spec, rule):
    """Four steps of lookup and update, with and without clipping."""
    if why := backends.why_unavailable(name):
        pytest.skip(f"backend {name}: {why}")
    rng = np.random.default_rng(2)
    tables = make_tables(spec, rng)
    slots = make_slots(rule, tables, rng)
    grads = [
        rng.standard_normal(make_batch(spec, step).num_floats).astype(np.float32)
        for step in range(4)
    ]

    def train(backend):
        """Everything that four steps write."""
        weights = [table.copy() for table in tables]
        state = [[slot.copy() for slot in arrays] for arrays in slots]
        outs = []
        for step, grad in enumerate(grads):
            batch = make_batch(spec, step)
            outs.append(np.full(batch.num_floats, 7, np.float32))
            backend.lookup(batch.buffers, weights, batch.geometry, outs[-1])
            backend.update(
                grad,
                batch.buffers,
                weights,
                state,
                make_operands(rule, spec, step + 1),
                batch.geometry,
                rule.name,
                [None, 0.5][step % 2],
            )
        return [*outs, *weights, *(slot for arrays in state for slot in arrays)]

    for got, want in zip(
        train(backends.load(name)), train(backends.load("reference")), strict=True
    ):
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


# ------------------------------------------------------------------------------------------ FBGEMM


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (sgd(lr=0.1), "EXACT_SGD"),
        (sgd(lr=0.1, max_gradient=0.3), "EXACT_SGD"),
        (adagrad(lr=0.1, eps=1e-8), "EXACT_ADAGRAD"),
        (rowwise_adagrad(lr=0.1, eps=1e-8), "EXACT_ROWWISE_ADAGRAD"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("combiner", [SUM, MEAN])
def test_20_steps_with_duplicates_and_skew_equal_fbgemm(backend, spec, name, combiner):
    torch = pytest.importorskip("torch", reason="pip install -r requirements/cpu.txt")
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    arg_spec = Spec(
        ((50, 16, combiner, ("a", "c")), (9, 12, combiner, ("b",))), {"stacks": [["t0", "t1"]]}
    )
    rng = np.random.default_rng(4)
    tables = make_tables(arg_spec, rng)
    slots = [[np.zeros(s.shape(*t.shape), np.float32) for s in spec.rule.slots] for t in tables]
    theirs = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(*table.shape, common.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU) for table in tables],
        feature_table_map=[0, 0, 1],  # a, c, b
        optimizer=EmbOptimType[name],
        learning_rate=spec.lr,
        eps=1e-8,
        gradient_clipping=spec.max_gradient is not None,
        max_gradient=spec.max_gradient or 1.0,
        pooling_mode=common.PoolingMode[combiner.name],
    )
    for ours, weight in zip(tables, theirs.split_embedding_weights(), strict=True):
        weight.copy_(torch.from_numpy(ours))

    for seed in range(20):
        batch = make_batch(arg_spec, seed)
        bags = [list(batch.arrays.bags(key)) for key in ("a", "c", "b")]
        lengths = [len(ids) for key in bags for ids, _ in key]
        out = theirs(
            torch.tensor([i for key in bags for ids, _ in key for i in ids], dtype=torch.int64),
            torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
        )
        grad = rng.standard_normal(out.shape).astype(np.float32)
        ours = np.empty(batch.num_floats, np.float32)
        backend.lookup(batch.buffers, tables, batch.geometry, ours)
        np.testing.assert_allclose(ours, out.detach().numpy().ravel(), rtol=1e-5, atol=1e-5)
        out.backward(torch.from_numpy(grad))
        backend.update(
            grad.ravel(),
            batch.buffers,
            tables,
            slots,
            np.stack([spec.operands(seed + 1)] * len(tables)),
            batch.geometry,
            spec.rule.name,
            spec.max_gradient,
        )
        for ours, weight in zip(tables, theirs.split_embedding_weights(), strict=True):
            np.testing.assert_allclose(ours, weight.numpy(), rtol=1e-5, atol=1e-5)
        states = theirs.split_optimizer_states() if spec.rule.slots else [(), ()]
        for arrays, states_of_table in zip(slots, states, strict=True):
            for ours, state in zip(arrays, states_of_table, strict=True):
                wanted = state.numpy().reshape(ours.shape)
                np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-7 * wanted.max())


# --------------------------------------------------------------------------------- cases, by hand


def one_step(backend, spec, optimizer, arrays, grad, *, tables):
    """(output, slots) of one lookup and update; `tables` change in place."""
    batch = pack(spec, arrays)
    out = np.empty(batch.num_floats, np.float32)
    slots = [
        [
            np.full(slot.shape(*table.shape), optimizer.initial_value(slot), np.float32)
            for slot in optimizer.rule.slots
        ]
        for table in tables
    ]
    backend.lookup(batch.buffers, tables, batch.geometry, out)
    backend.update(
        np.float32(grad).ravel(),
        batch.buffers,
        tables,
        slots,
        np.stack([optimizer.operands(1)] * len(tables)),
        batch.geometry,
        optimizer.rule.name,
        optimizer.max_gradient,
    )
    return out, slots


def kjt(keys, values, lengths, weights=None):
    return Arrays(
        keys,
        np.array(values, np.int64),
        np.array(lengths, np.int32),
        None if weights is None else np.array(weights, np.float32),
    )


EIGHT_ROWS = Spec(((8, 4, SUM, ("a",)),))
BAGS = [[1, 2, 3, 4], [10, 20, 30, 40]]


@pytest.mark.parametrize(
    ("optimizer", "row3", "row5", "state3", "state5"),
    [
        (sgd(lr=0.1), [-0.2, -1.4, -2.6, -3.8], [0, -1, -2, -3], None, None),
        (
            adagrad(lr=0.1, eps=1e-8),
            [0.9] * 4,
            [0.9] * 4,
            [144, 576, 1296, 2304],
            [100, 400, 900, 1600],
        ),
        (
            rowwise_adagrad(lr=0.1, eps=1e-8),
            [0.9634852, 0.9269703, 0.8904555, 0.8539407],
            [0.9634852, 0.9269703, 0.8904555, 0.8539407],
            1080,
            750,
        ),
    ],
    ids=repr,
)
def test_duplicates_make_one_update_per_row(backend, optimizer, row3, row5, state3, state5):
    """Ids [3, 3] and [3, 5]: the gradient of row 3 is 2 * bag 0 + bag 1."""
    table = np.ones((8, 4), np.float32)
    arrays = kjt(["a"], [3, 3, 3, 5], [2, 2])
    _, slots = one_step(backend, EIGHT_ROWS, optimizer, arrays, BAGS, tables=[table])
    np.testing.assert_allclose(table[3], row3, rtol=1e-6)
    np.testing.assert_allclose(table[5], row5, rtol=1e-6, atol=1e-6)
    assert (np.delete(table, [3, 5], axis=0) == 1).all()
    for state in slots[0]:
        np.testing.assert_allclose(state[3], state3, rtol=1e-6)
        np.testing.assert_allclose(state[5], state5, rtol=1e-6)


def test_two_features_of_one_table_make_one_update(backend):
    """Two updates in a row would leave state 15 instead of 30."""
    spec = Spec(((8, 4, SUM, ("a", "b")),))
    table = np.ones((8, 4), np.float32)
    _, ((state,),) = one_step(
        backend,
        spec,
        rowwise_adagrad(lr=0.1, eps=1e-8),
        kjt(["a", "b"], [3, 3], [1, 1]),
        [1, 2, 3, 4] * 2,
        tables=[table],
    )
    np.testing.assert_allclose(state[3], 30, rtol=1e-6)
    np.testing.assert_allclose(table[3], [0.9634852, 0.9269703, 0.8904555, 0.8539407], rtol=1e-6)


def test_a_gradient_is_clipped_per_bag_and_not_per_row(backend):
    """Clipping the sum of the two occurrences instead would give [.85, .85, .85, .85]."""
    table = np.ones((8, 4), np.float32)
    arrays = kjt(["a"], [3, 3], [2])
    one_step(
        backend, EIGHT_ROWS, sgd(lr=0.1, max_gradient=1.5), arrays, [1, 2, 3, 4], tables=[table]
    )
    np.testing.assert_allclose(table[3], [0.8, 0.7, 0.7, 0.7], rtol=1e-6)


@pytest.mark.parametrize(
    ("combiner", "weights", "pooled", "gain1", "gain2"),
    [
        (SUM, [10, 100], 210, 10, 100),
        (SUM, None, 3, 1, 1),
        (MEAN, [10, 100], 210 / 110, 10 / 110, 100 / 110),
        (MEAN, [0, 0], 0, 0, 0),
        (MEAN, None, 1.5, 0.5, 0.5),
    ],
)
def test_weights_scale_the_row_and_its_gradient(backend, combiner, weights, pooled, gain1, gain2):
    spec = Spec(((8, 4, combiner, ("a",)),), is_weighted=weights is not None)
    table = np.repeat(np.arange(8, dtype=np.float32)[:, None], 4, axis=1)
    out, _ = one_step(
        backend, spec, sgd(lr=0.1), kjt(["a"], [1, 2], [2], weights), [1] * 4, tables=[table]
    )
    np.testing.assert_allclose(out, [pooled] * 4, rtol=1e-6)
    np.testing.assert_allclose(table[1], [1 - 0.1 * gain1] * 4, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(table[2], [2 - 0.1 * gain2] * 4, rtol=1e-6)


def test_outputs_are_in_config_order_and_empty_bags_are_zero(backend):
    """Two tables, three lookups, one key that feeds both; the KJT has another order."""
    spec = Spec(((4, 2, SUM, ("a",)), (4, 3, SUM, ("b", "a"))))
    tables = [np.repeat(np.float32([[0], [1], [2], [3]]) * s, d, 1) for s, d in ((1, 2), (10, 3))]
    out, _ = one_step(
        backend,
        spec,
        sgd(lr=0.1),
        kjt(["b", "a", "z"], [3, 1, 2, 0], [1, 0, 1, 1, 0, 1]),
        np.zeros(16),
        tables=tables,
    )
    np.testing.assert_array_equal(
        out.reshape(2, 8), [[1, 1, 30, 30, 30, 10, 10, 10], [2, 2, 0, 0, 0, 20, 20, 20]]
    )


# ------------------------------------------------------------------------------------------ errors


FIRST = lambda stack: 0  # noqa: E731
LAST_OF_CORE_0 = lambda stack: stack.row_pointers[1] - 1  # noqa: E731
FIRST_OF_CORE_1 = lambda stack: len(stack.embedding_ids) // 2  # noqa: E731


@pytest.mark.parametrize(
    ("field", "slot", "value", "message"),
    [
        ("sample_ids", FIRST, 7, "sample_ids of table 0 are outside its features"),
        ("sample_ids", FIRST, -1, "sample_ids of table 0 are outside its features"),
        ("sample_ids", FIRST_OF_CORE_1, 6, "sample_ids of table 0 are outside its features"),
        ("embedding_ids", LAST_OF_CORE_0, 31, "is not in table 0"),
        ("embedding_ids", LAST_OF_CORE_0, 32, "in no table"),
        ("row_pointers", FIRST, -8, "row pointer -8 is outside 0"),
        ("row_pointers", FIRST, 10_000, "row pointer 10000 is outside"),
    ],
)
def test_buffers_that_name_what_is_not_there_are_refused_before_anything_is_written(
    backend, field, slot, value, message
):
    # Row 31 of a core is padding, and so is sample 6 of core 1.
    spec = Spec(((61, 8, SUM, ("a",)),), batch_size=13)
    tables, batch = make_tables(spec, np.random.default_rng(5)), make_batch(spec, 0)
    before, out = tables[0].copy(), np.zeros(batch.num_floats, np.float32)
    (stack,) = batch.buffers
    array = getattr(stack, field).copy()
    array[slot(stack)] = value
    buffers = [dataclasses.replace(stack, **{field: array})]
    with pytest.raises(ValueError, match=f"stack 0.*{message}"):
        backend.lookup(buffers, tables, batch.geometry, out)
    operands = np.ones((1, 1), np.float32)
    if message != "in no table":  # an update may leave tables out
        with pytest.raises(ValueError, match=f"stack 0.*{message}"):
            backend.update(out + 1, buffers, tables, [[]], operands, batch.geometry, "sgd", None)
    assert not out.any()
    np.testing.assert_array_equal(tables[0], before)


@pytest.mark.parametrize(
    "change",
    [
        {"tables": [np.ones((99, 8), np.float32)]},
        {"tables": []},
        {"grad": np.ones(7, np.float32)},
        {"slots": [[]]},
        {"slots": [[np.ones(100, np.float32)]]},
        {"operands": np.ones((1, 3), np.float32)},
        {"operands": np.ones((2, 2), np.float32)},
        {"max_gradient": -1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_arguments_that_contradict_each_other_are_refused(backend, change):
    spec = ARG_SPECS["one table"]
    batch = make_batch(spec, 0)
    table = np.ones((100, 8), np.float32)
    arguments = {
        "grad": np.ones(batch.num_floats, np.float32),
        "buffers": batch.buffers,
        "tables": [table],
        "slots": [[np.ones((100, 8), np.float32)]],
        "operands": np.ones((1, 2), np.float32),
        "geometry": batch.geometry,
        "rule": "adagrad",
        "max_gradient": None,
    }
    with pytest.raises(ValueError, match=r"\w"):
        backend.update(**arguments | change)
    assert (table == 1).all()
    with pytest.raises(NotImplementedError, match=r"'rmsprop'.*adagrad"):
        backend.update(**arguments | {"rule": "rmsprop"})
    backend.update(**arguments)
    assert not (table == 1).all()


# ------------------------------------------------------------------------------------------ choice


def test_the_default_of_a_device_can_be_forced(monkeypatch):
    monkeypatch.delenv(backends.FORCE_VARIABLE, raising=False)
    monkeypatch.setattr(backends, "FOR_DEVICE", {"cpu": ("reference",), "tpu": ("cpu",)})
    assert backends.choose("cpu").name == "reference"
    monkeypatch.undo()
    assert backends.choose("cpu", name="reference") is backends.load("reference")
    monkeypatch.setenv(backends.FORCE_VARIABLE, "reference")
    assert backends.choose("cpu").name == "reference"


def test_a_choice_that_cannot_work_says_why(monkeypatch):
    with pytest.raises(NotImplementedError, match=r"device .cuda.; move the module to cpu"):
        backends.choose("cuda")
    with pytest.raises(ValueError, match=r"'tpv'; there are .*reference"):
        backends.choose("cpu", name="tpv")
    monkeypatch.setenv(backends.FORCE_VARIABLE, "tpv")
    with pytest.raises(ValueError, match="'tpv'"):
        backends.choose("cpu")
    monkeypatch.setattr(backends, "FOR_DEVICE", {"cpu": ("cpu",)})
    with pytest.raises(NotImplementedError, match=r"'reference' does not work .*'cpu'; use cpu"):
        backends.choose("cpu", name="reference")


def test_a_backend_that_lacks_a_package_is_listed_with_the_reason(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", {"dream": "package_of_dreams.backend:Dream"})
    monkeypatch.setattr(backends, "FOR_DEVICE", {"cpu": ("dream",)})
    assert backends.describe() == "dream  unavailable: No module named 'package_of_dreams'"
    with pytest.raises(NotImplementedError, match=r"'dream' cannot run here.*package_of_dreams"):
        backends.choose("cpu")
