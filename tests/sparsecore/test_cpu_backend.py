"""The C++ kernels against the NumPy reference, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import resource
from operator import attrgetter

import numpy as np
import pytest

from torchrec_tpu.sparsecore import _native
from torchrec_tpu.sparsecore.backends.cpu import CpuBackend
from torchrec_tpu.sparsecore.backends.reference import ReferenceBackend
from torchrec_tpu.sparsecore.batch import StackBuffers
from torchrec_tpu.sparsecore.layout import Block, Combiner, Table
from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.preprocess import Preprocessor
from torchrec_tpu.sparsecore.stacking import make_layout


@pytest.fixture(autouse=True)
def _restore_instruction_set():
    before = _native.instruction_set()
    yield
    _native.set_instruction_set(before)


@dataclasses.dataclass
class Case:
    """Weights, state and one batch of a small collection."""

    layout: object
    buffers: tuple[StackBuffers, ...]
    geometry: object
    num_floats: int
    weights: list[np.ndarray]
    grad: np.ndarray

    def state(self, rule, seed=7):
        """Fresh (tables, slots, operands)."""
        rng = np.random.default_rng(seed)
        slots = [
            [
                rng.random(slot.shape(*weights.shape), dtype=np.float32) + np.float32(0.1)
                for slot in RULES[rule].slots
            ]
            for weights in self.weights
        ]
        operands = rng.random((len(self.weights), len(RULES[rule].operands)), dtype=np.float32)
        return [w.copy() for w in self.weights], slots, operands

    def lookup(self, backend):
        out = np.full(self.num_floats, np.nan, np.float32)
        backend.lookup(self.buffers, self.weights, self.geometry, out)
        return out

    def update(self, backend, rule, max_gradient=None, steps=2):
        """All arrays after some steps; `steps` > 1 shows that state is used."""
        tables, slots, operands = self.state(rule)
        for _ in range(steps):
            backend.update(
                self.grad, self.buffers, tables, slots, operands, self.geometry, rule, max_gradient
            )
        return [*tables, *itertools.chain(*slots)]


def table(name, rows, dim, combiner=Combiner.SUM, features=None):
    return Table(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        combiner=combiner,
        features=features or (f"{name}_f",),
    )


def make_case(tables, *, batch_size=13, max_length=5, seed=0, weighted=False, **layout):
    """A batch with skewed ids, duplicates, and empty bags, through the preprocessor."""
    layout = make_layout(tables, **layout)
    rng = np.random.default_rng(seed)
    keys = list(dict.fromkeys(feature.key for feature in layout.features))
    rows = {key: min(t.num_embeddings for t in tables if key in t.features) for key in keys}
    lengths, values = [], []
    for key in keys:
        length = rng.integers(0, max_length + 1, batch_size)
        lengths.append(length)
        values.append((rng.random(length.sum()) ** 3 * rows[key]).astype(np.int64))
    values = np.concatenate(values)
    weights = rng.random(len(values), dtype=np.float32) if weighted else None
    batch = Preprocessor(layout, is_weighted=weighted)(
        keys, values, lengths=np.concatenate(lengths), weights=weights
    )
    geometry = layout.geometry(batch)
    num_floats = max(
        f.out_offset + (f.num_samples - 1) * f.out_stride + t.dim if f.num_samples else 0
        for t in geometry.tables
        for f in geometry.features[t.first_feature : t.first_feature + t.num_features]
    )
    return Case(
        layout=layout,
        buffers=batch.stacks,
        geometry=geometry,
        num_floats=num_floats,
        weights=[
            rng.standard_normal((t.table.num_embeddings, t.table.embedding_dim), dtype=np.float32)
            for t in layout.stack_order_tables
        ],
        grad=rng.standard_normal(num_floats, dtype=np.float32),
    )


def assert_same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        bits = np.int16 if a.dtype == np.float16 else np.int32
        np.testing.assert_array_equal(a.view(bits), b.view(bits))


def check(case, rule, max_gradient=None):
    """Both operations on every instruction set and several thread counts, against the reference."""
    reference = ReferenceBackend()
    out = case.lookup(reference)
    arrays = case.update(reference, rule, max_gradient)
    for instruction_set in _native.instruction_sets():
        _native.set_instruction_set(instruction_set)
        for num_threads in (1, 2, 5):
            backend = CpuBackend(num_threads=num_threads)
            assert_same_bits([case.lookup(backend)], [out])
            assert_same_bits(case.update(backend, rule, max_gradient), arrays)


MIXED = [
    table("a", 50, 16, Combiner.MEAN),
    table("b", 3, 16, features=("b1", "shared")),
    table("c", 200, 16, Combiner.SQRTN, features=("c1", "c2", "shared")),
    table("d", 1000, 12),
    table("e", 70, 24, Combiner.NONE, features=("e1", "e2")),
]


@pytest.mark.parametrize("rule", RULES.values(), ids=attrgetter("name"))
@pytest.mark.parametrize("max_gradient", [None, 0.25])
def test_every_rule_gives_the_bits_of_the_reference(rule, max_gradient):
    check(make_case(MIXED), rule.name, max_gradient)


@pytest.mark.parametrize(
    "dim", [1, 2, 3, 7, 8, 12, 15, 16, 17, 24, 31, 32, 48, 64, 80, 96, 127, 128, 129, 144, 200]
)
@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad_l2"])
def test_every_dim_gives_the_bits_of_the_reference(dim, rule):
    check(make_case([table("t", 40, dim, Combiner.MEAN), table("u", 9, dim)]), rule)


@pytest.mark.parametrize(
    ("num_devices", "cores_per_device"),
    [(1, 1), (1, 2), (3, 1), (2, 2), (3, 2), (4, 2), (64, 2)],
    ids=str,
)
@pytest.mark.parametrize("stacks", ["none", "auto"])
def test_any_number_of_cores_gives_the_bits_of_the_reference(num_devices, cores_per_device, stacks):
    case = make_case(
        MIXED,
        batch_size=150,
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        stacks=stacks,
    )
    check(case, "adam")


@pytest.mark.parametrize("stacks", ["auto", "none"])
def test_blocks_of_rows_give_the_bits_of_the_reference_and_of_rows_dealt_out(stacks):
    tables = [table("a", 500, 16), table("b", 3, 16), table("c", 90, 16), table("d", 41, 16)]
    blocks = {"a": Block(125, 3), "b": Block(1), "c": Block(90, 1)}
    case = make_case(tables, num_devices=2, stacks=stacks, blocks=blocks)
    assert [t.block_rows for t in case.geometry.tables] == [125, 1, 90, 0]
    check(case, "rowwise_adagrad")
    # the same rows in another order within a bag: equal where sums are
    dealt = make_case(tables, num_devices=2, stacks=stacks)
    np.testing.assert_allclose(
        case.lookup(CpuBackend()), dealt.lookup(CpuBackend()), rtol=1e-5, atol=1e-5
    )


def test_an_owner_of_rows_serves_more_source_cores_than_there_are_partitions():
    """What a rank gets from the others: its block's entries of each of them, one partition."""
    tables = [table("a", 60, 16), table("b", 40, 8)]
    blocks = {"a": Block(20), "b": Block(40, 1)}
    case = make_case(tables, num_devices=3, cores_per_device=1, blocks=blocks, stacks=[["a", "b"]])
    (stack,) = case.buffers
    pointers = stack.row_pointers.reshape(3, -1)
    slots = len(stack.embedding_ids) // 3
    mine = []  # of partition 1, from every source core
    for core, (before, end) in enumerate(zip(pointers[:, 0], pointers[:, 1], strict=True)):
        mine.append(core * slots + np.arange(-(-before // 8) * 8, end))
    width = max(map(len, mine))
    assert all(map(len, mine))
    index = [np.pad(at, (0, width - len(at)), mode="edge") for at in mine]
    received = StackBuffers(
        row_pointers=np.repeat([len(at) for at in mine], 8).astype(np.int32),
        embedding_ids=stack.embedding_ids[np.concatenate(index)],
        sample_ids=stack.sample_ids[np.concatenate(index)],
        gains=stack.gains[np.concatenate(index)],
    )
    geometry = dataclasses.replace(
        case.geometry,
        num_cores=1,
        tables=tuple(
            t._replace(num_embeddings=rows, rotation=0, block_rows=0)
            for t, rows in zip(case.geometry.tables, (20, 40), strict=True)
        ),
    )
    assert (geometry.num_cores, geometry.num_local_cores) == (1, 3)
    block, whole = case.weights[0][20:40].copy(), case.weights[1].copy()
    owner = dataclasses.replace(
        case, buffers=(received,), geometry=geometry, weights=[block, whole]
    )
    check(owner, "adagrad")
    # rows 20..39 of `a`, and all of `b`, were updated as if there were no owner
    alone, shared = (c.update(CpuBackend(), "sgd") for c in (owner, case))
    assert_same_bits(alone, [shared[0][20:40].copy(), shared[1]])
    assert (shared[0][20:40] != block).any()


def test_a_row_behind_its_block_raises_and_changes_nothing():
    case = make_case(
        [table("a", 30, 8), table("b", 30, 8)],
        batch_size=400,
        cores_per_device=4,
        blocks={"a": Block(9)},
        stacks=[["a", "b"]],
    )
    (stack,) = case.buffers
    pointers = stack.row_pointers.reshape(4, -1)
    # partition 3 has rows 27..29 only; the others 9 each, then padding up to 16
    for partition, row, named in ((3, 3, "0..2"), (1, 9, "0..8"), (1, 15, "0..8")):
        begin = -(-pointers[0, partition - 1] // 8) * 8
        end = begin + np.searchsorted(stack.embedding_ids[begin : pointers[0, partition]], 16)
        ids = stack.embedding_ids.copy()
        ids[end - 1] = row
        bad = dataclasses.replace(case, buffers=(dataclasses.replace(stack, embedding_ids=ids),))
        _check_raises(bad, f"row {row} is not in table 0, whose rows are {named}")
        with pytest.raises(ValueError, match="is not in table 0"):
            bad.lookup(ReferenceBackend())


def test_weighted_bags_give_the_bits_of_the_reference():
    check(make_case(MIXED, weighted=True), "adagrad")


def test_a_batch_without_ids_is_zeros_and_changes_nothing():
    case = make_case(MIXED[:4], max_length=0)
    assert not case.lookup(CpuBackend()).any()
    assert_same_bits(case.update(CpuBackend(), "adam"), case.update(CpuBackend(), "adam", steps=0))
    check(case, "adam")


def test_one_id_per_sample_and_sequences_give_the_bits_of_the_reference():
    tables = [
        table("one", 30, 16),
        table("seq", 500, 128, Combiner.NONE),
        table("two", 500, 40, Combiner.NONE, features=("x", "y")),
    ]
    check(make_case(tables, max_length=1), "sgd")
    check(make_case(tables, max_length=7, batch_size=40), "sgd")


def test_long_runs_that_threads_share_give_the_bits_of_the_reference():
    tables = [table("hot", 700, 16), table("cold", 100_000, 32), table("single", 1, 16)]
    check(make_case(tables, batch_size=2500, max_length=20), "rowwise_adagrad")


def test_negative_zero_and_nan_give_the_bits_of_the_reference():
    case = make_case(MIXED)
    for weights in case.weights:
        weights[::2] = -0.0
    case.grad[::3] = -0.0
    check(case, "sgd")
    case.grad[5] = np.nan
    for backend in (ReferenceBackend(), CpuBackend()):
        arrays = case.update(backend, "adagrad", max_gradient=0.5)
        assert np.isnan(np.concatenate([a.ravel() for a in arrays])).any()


def halves(case):
    """The case with float16 tables, but for one."""
    weights = [w.astype(np.float16) for w in case.weights]
    weights[1] = weights[1].astype(np.float32)
    return dataclasses.replace(case, weights=weights)


@pytest.mark.parametrize("rule", ["sgd", "adagrad_l2", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dim", [1, 7, 16, 24, 32, 64, 100, 128, 200])
def test_float16_tables_give_the_bits_of_the_reference(dim, rule):
    tables = [table("a", 90, dim), table("b", 41, dim), table("c", 5, dim, Combiner.MEAN)]
    check(halves(make_case(tables, batch_size=9, num_devices=2, blocks={"c": Block(5)})), rule)


def bits_of_half(bits):
    return np.asarray(bits, np.uint16).view(np.float16)


def rows_case(num_rows, dim=16):
    """Sample i looks up row i of one table, with gain 1."""
    case = make_case([table("t", num_rows, dim)], cores_per_device=1, batch_size=num_rows)
    keys, ones = [f.key for f in case.layout.features], np.ones(num_rows, np.int32)
    batch = Preprocessor(case.layout)(keys, np.arange(num_rows), lengths=ones)
    return dataclasses.replace(
        case,
        buffers=batch.stacks,
        geometry=case.layout.geometry(batch),
        num_floats=num_rows * dim,
        grad=np.zeros(num_rows * dim, np.float32),
    )


@pytest.mark.parametrize("instruction_set", _native.instruction_sets())
@pytest.mark.parametrize("dim", [4, 16])  # less than a vector, and one
def test_every_float16_is_read_as_what_it_is(instruction_set, dim):
    _native.set_instruction_set(instruction_set)
    every = bits_of_half(np.arange(2**16)).reshape(-1, dim)
    case = dataclasses.replace(rows_case(len(every), dim), weights=[every])
    out = case.lookup(CpuBackend()).reshape(every.shape)
    np.testing.assert_array_equal(out, every.astype(np.float32))
    is_nan = np.isnan(every)
    np.testing.assert_array_equal(np.signbit(out)[is_nan], np.signbit(every)[is_nan])


NASTY_FLOATS = np.array(
    [
        *[0.0, 2.0**-24, 2.0**-25, 2.0**-26, 2.0**-14, 1.0, 65504.0, 65519.996, 65520.0, 65536.0],
        *[1e-45, 1e-38, 3.4e38, np.inf, np.nan, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1.0004894],
        *[3 * 2.0**-25, 5 * 2.0**-25, 1023.5 * 2.0**-24, 2.0**-14 - 2.0**-25, 6e-5, 6.1e-5],
    ],
    np.float32,
)


@pytest.mark.parametrize("instruction_set", _native.instruction_sets())
@pytest.mark.parametrize("dim", [7, 16])
def test_any_float32_is_stored_as_the_nearest_float16(instruction_set, dim):
    """SGD with rate -1 on zeros stores the gradient."""
    _native.set_instruction_set(instruction_set)
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 0x7BFF, 20_000)
    low, high = (bits_of_half(b).astype(np.float32) for b in (bits, bits + 1))
    ties = (low + high) / 2
    values = np.concatenate(
        [
            NASTY_FLOATS,
            rng.integers(0, 2**32, 20_000).astype(np.uint32).view(np.float32),
            low,
            ties,
            np.nextafter(ties, np.float32(0)),
            np.nextafter(ties, np.float32(np.inf)),
        ]
    )
    values = np.concatenate([values, -values])
    values = values[: len(values) // dim * dim].reshape(-1, dim)
    case = rows_case(len(values), dim)
    stored = np.zeros(values.shape, np.float16)
    CpuBackend().update(
        values.ravel(),
        case.buffers,
        [stored],
        [[]],
        np.full((1, 1), -1, np.float32),
        case.geometry,
        "sgd",
        None,
    )
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (np.float32(0) + values).astype(np.float16)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(stored), is_nan)
    np.testing.assert_array_equal(
        stored.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan]
    )


def test_a_row_that_several_cores_name_gets_one_update():
    case = make_case([table("t", 4, 16)], batch_size=64, num_devices=4, max_length=3)
    pointers = case.buffers[0].row_pointers.reshape(8, 8)
    assert (np.diff(pointers, axis=1).max(axis=1) > 0).sum() > 1
    tables, slots, _ = case.state("adagrad")
    slots[0][0][:] = 0
    before = tables[0].copy()
    operands = np.array([[1.0, 0.0]], np.float32)
    CpuBackend().update(
        case.grad, case.buffers, tables, slots, operands, case.geometry, "adagrad", None
    )
    # From state 0, one step moves every element by exactly the learning rate; two steps would not.
    touched = slots[0][0] != 0
    np.testing.assert_allclose(np.abs(tables[0] - before)[touched], 1, rtol=1e-5)


def test_tables_left_out_of_the_geometry_are_not_touched():
    case = make_case(MIXED, stacks="none")
    kept = case.geometry.tables[1:3]
    some = dataclasses.replace(case.geometry, tables=kept)
    results = []
    for backend in (ReferenceBackend(), CpuBackend()):
        tables, slots, operands = case.state("adagrad")
        backend.update(
            case.grad, case.buffers, tables[1:3], slots[1:3], operands[1:3], some, "adagrad", None
        )
        results.append([*tables, *itertools.chain(*slots)])
    assert_same_bits(*results)


def test_an_update_of_a_big_table_allocates_next_to_nothing():
    case = make_case([table("big", 4_000_000, 32)], batch_size=256)
    tables, slots, operands = case.state("adagrad")
    backend = CpuBackend()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backend.lookup(case.buffers, tables, case.geometry, np.empty(case.num_floats, np.float32))
    backend.update(case.grad, case.buffers, tables, slots, operands, case.geometry, "adagrad", None)
    extra_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert extra_kilobytes * 1024 < 0.02 * tables[0].nbytes


def _replace(case, stack=0, **arrays):
    """The case with some elements of a stack's buffers changed: name=(index, value)."""
    buffers = list(case.buffers)
    changed = {}
    for name, (index, value) in arrays.items():
        changed[name] = getattr(buffers[stack], name).copy()
        changed[name][index] = value
    buffers[stack] = dataclasses.replace(buffers[stack], **changed)
    return dataclasses.replace(case, buffers=tuple(buffers))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"row_pointers": (0, -1)}, "row pointer -1 is outside"),
        ({"row_pointers": (1, 10**6)}, "row pointer 1000000 is outside"),
        ({"row_pointers": (1, 0)}, "row pointer 0 is outside"),
        ({"embedding_ids": (0, 10**6)}, "not sorted"),
        ({"embedding_ids": (0, -5)}, "1 embedding_ids are in no table"),
        ({"sample_ids": (0, 7)}, "sample_ids"),
        ({"sample_ids": (0, -1)}, "sample_ids"),
        ({"sample_ids": (0, 2**31 - 1)}, "sample_ids"),
    ],
)
def test_corrupt_buffers_raise_and_change_nothing(arrays, message):
    _check_raises(_replace(make_case([table("t", 50, 16)]), **arrays), message)


def test_a_row_behind_the_table_raises_and_changes_nothing():
    case = make_case([table("t", 50, 16)])
    end = case.buffers[0].row_pointers[0]
    # 50 rows on 2 cores are 25 each, padded to 32
    _check_raises(_replace(case, embedding_ids=(end - 1, 25)), "row 25 is not in table 0")
    _check_raises(_replace(case, embedding_ids=(end - 1, 32)), "1 embedding_ids are in no table")


def test_a_padding_sample_raises_and_changes_nothing():
    case = make_case([table("t", 50, 16, features=("f", "g"))], batch_size=13)
    second_core = len(case.buffers[0].sample_ids) // 2
    _check_raises(_replace(case, sample_ids=(second_core, 6)), "sample_ids")  # 13 = 7 + 6


def _check_raises(case, message):
    tables, slots, operands = case.state("adagrad")
    before = [a.copy() for a in [*tables, *itertools.chain(*slots)]]
    out = np.full(case.num_floats, 5, np.float32)
    backend = CpuBackend()
    with pytest.raises(ValueError, match=message):
        backend.lookup(case.buffers, tables, case.geometry, out)
    if "in no table" not in message:  # an update may leave tables out
        with pytest.raises(ValueError, match=message):
            backend.update(
                case.grad, case.buffers, tables, slots, operands, case.geometry, "adagrad", None
            )
    assert (out == 5).all()
    assert_same_bits([*tables, *itertools.chain(*slots)], before)


def test_arrays_that_do_not_fit_raise_and_name_themselves():
    case = make_case([table("t", 50, 16)])
    tables, slots, operands = case.state("adagrad")
    backend = CpuBackend()

    def update(grad=case.grad, tables=tables, slots=slots, operands=operands, rule="adagrad"):
        backend.update(grad, case.buffers, tables, slots, operands, case.geometry, rule, None)

    read_only = tables[0].copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="table 0: is read-only"):
        update(tables=[read_only])
    with pytest.raises(ValueError, match=r"table 0: wanted shape \(50, 16\), got \(49, 16\)"):
        update(tables=[tables[0][:-1]])
    with pytest.raises(ValueError, match="table 0: wanted a contiguous array"):
        update(tables=[np.asfortranarray(tables[0])])
    with pytest.raises(TypeError, match="table 0: wanted a numpy array of float32 or float16, got"):
        update(tables=[tables[0].astype(np.float64)])
    with pytest.raises(ValueError, match=r"table 0: wanted shape \(50, 16\), got \(50, 15\)"):
        update(tables=[np.zeros((50, 15), np.float16)])
    with pytest.raises(ValueError, match="table 0: wanted a contiguous array"):
        update(tables=[np.zeros((16, 50), np.float16).T])
    with pytest.raises(TypeError, match="table 0: wanted a numpy array of float32 or float16, got"):
        update(tables=[tables[0].astype(">f2")])
    with pytest.raises(ValueError, match="wanted 1 tables, got 2"):
        update(tables=tables * 2)
    with pytest.raises(ValueError, match="row slots"):
        update(slots=[[]])
    with pytest.raises(ValueError, match="operands: wanted shape"):
        update(operands=operands[:, :1])
    with pytest.raises(ValueError, match="floats of the output"):
        update(grad=case.grad[:-1])
    with pytest.raises(NotImplementedError, match="no fused 'lion' update"):
        update(rule="lion")
    with pytest.raises(ValueError, match="do not fit the header"):
        _native.RowOps(_native.ThreadPool(1)).lookup([], [], [4, 4, 1, 9, 9], case.grad)


def test_kernels_and_rules_are_the_same_list():
    assert _native.rules() == list(RULES)


def test_unknown_instruction_set_raises():
    assert _native.instruction_sets()[-1] == "baseline"
    with pytest.raises(ValueError, match="does not run here"):
        _native.set_instruction_set("mmx")
