"""The preprocessor: buffers equal the NumPy oracle's, errors name their cause, memory is reused."""

import dataclasses
import gc
import pickle
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Arrays, assert_equal, expect

from torchrec_tpu.sparsecore import Block, Capacity, Combiner, Preprocessor, Table, make_layout
from torchrec_tpu.sparsecore.backends.reference import ReferenceBackend
from torchrec_tpu.sparsecore.errors import (
    BatchLayoutError,
    BatchSizeError,
    DuplicateKeyError,
    IdRangeError,
    KjtError,
    LayoutError,
    MissingKeyError,
    WeightsError,
)


@st.composite
def layouts(draw):
    """Any number of cores, bags and sequences, keys that feed several tables."""
    num_devices = draw(st.integers(1, 7))
    cores_per_device = draw(st.sampled_from([1, 2, 3, 4]))
    sizes = [1, 3, 10, 64, 500, 3_000_000]
    if num_devices * cores_per_device > 2:
        sizes += [2**31 - 9, 5_000_000_000]  # ids need 64 bits, and so do sort keys
    tables = []
    for i in range(draw(st.integers(1, 5))):
        keys = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True))
        tables.append(
            Table(
                name=f"t{i}",
                num_embeddings=draw(st.sampled_from(sizes)),
                embedding_dim=draw(st.sampled_from([3, 8, 16])),
                combiner=draw(st.sampled_from(list(Combiner))),
                features=tuple(keys),
            )
        )
    num_local_devices = draw(st.integers(1, num_devices))
    num_cores = num_devices * cores_per_device
    blocks = {}
    for table in draw(st.lists(st.sampled_from(tables), unique_by=lambda table: table.name)):
        rows = table.num_embeddings
        least = -(-rows // num_cores)
        sizes = [least, least + 1] + ([rows, rows + 100] if rows < 2**30 else [])
        blocks[table.name] = Block(
            draw(st.sampled_from(sizes)), draw(st.integers(0, num_cores - 1))
        )
    are_huge = any(table.num_embeddings > 2**30 for table in tables)
    return make_layout(
        tables,
        num_devices=num_devices,
        cores_per_device=cores_per_device,
        num_local_devices=num_local_devices,
        first_local_device=draw(st.integers(0, num_devices - num_local_devices)),
        stacks="none" if are_huge else draw(st.sampled_from(["auto", "none"])),
        rotation=draw(st.sampled_from([None, 0, 1, 5])),
        blocks=blocks,
    )


def random_arrays(layout, seed, *, is_weighted=False, num_invalid=0, types=(np.int64, np.int64)):
    """A batch with skew, duplicates, empty bags, unknown keys, and all keys out of order."""
    rng = np.random.default_rng(seed)
    keys = sorted({feature.key for feature in layout.features} | {"z", "unknown"})
    rng.shuffle(keys)
    batch_size = int(rng.integers(0, 40))
    lengths = rng.choice([0, 0, 1, 2, 3, 12], (len(keys), batch_size))
    values = []
    for key, count in zip(keys, lengths, strict=True):
        rows = [
            layout.stacked_table(f.table).table.num_embeddings
            for f in layout.features
            if f.key == key
        ]
        spread = rng.random(count.sum()) ** rng.choice([1, 4])
        values.append((min([*rows, np.iinfo(types[0]).max]) * spread).astype(np.int64))
    values = np.concatenate(values)
    at = rng.permutation(len(values))[:num_invalid]
    values[at] = rng.choice([-1, -(2**31), 2**31 - 1, 4_000_000], len(at))
    return Arrays(
        keys,
        values.astype(types[0]),
        lengths.ravel().astype(types[1]),
        rng.choice([0, 0.5, -0.5, 1, 3, 0.1, 1e-30], len(values)).astype(np.float32)
        if is_weighted
        else None,
    )


def call(preprocessor, arrays, by="lengths", **options):
    given_by = {by: getattr(arrays, by)}
    return preprocessor(arrays.keys, arrays.values, **given_by, weights=arrays.weights, **options)


def copy_of(batch):
    """The specified bytes of a batch, to compare two runs."""
    parts = []
    for index, stack in enumerate(batch.stacks):
        required = batch.stats.required_slots[index]
        slots = stack.embedding_ids.size // len(required)
        is_written = (np.arange(slots) < required[:, None]).ravel()
        parts.append(stack.row_pointers.tobytes())
        for array in (stack.embedding_ids, stack.sample_ids, stack.gains):
            parts.append(array[is_written].tobytes())
    return parts


@settings(max_examples=200)
@given(
    layout=layouts(),
    seed=st.integers(0, 2**32),
    is_weighted=st.booleans(),
    id_policy=st.sampled_from(["error", "clamp", "drop"]),
    types=st.tuples(*[st.sampled_from([np.int32, np.int64])] * 2),
    by=st.sampled_from(["lengths", "offsets"]),
    num_threads=st.sampled_from([1, 2, 5]),
    extra_samples=st.sampled_from([None, 0, 1, 30]),
)
def test_buffers_equal_the_oracles_bit_for_bit(
    layout, seed, is_weighted, id_policy, types, by, num_threads, extra_samples
):
    arrays = random_arrays(
        layout,
        seed,
        is_weighted=is_weighted,
        num_invalid=0 if id_policy == "error" else 9,
        types=types,
    )
    static = None if extra_samples is None else max(1, arrays.batch_size + extra_samples)
    preprocessor = Preprocessor(
        layout,
        batch_size=static,
        id_policy=id_policy,
        is_weighted=is_weighted,
        num_threads=num_threads,
    )
    expected = expect(layout, arrays, batch_size=static, id_policy=id_policy)
    for _ in range(2):  # the second batch finds scratch and memory of the first
        batch = call(preprocessor, arrays, by)
        assert_equal(batch, expected, layout)
        del batch


LAYOUT = make_layout(
    [
        Table(
            name="users", num_embeddings=100, embedding_dim=8, combiner="mean", features=("u", "v")
        ),
        Table(name="items", num_embeddings=50, embedding_dim=8, combiner="sum", features=("i",)),
        Table(name="words", num_embeddings=9, embedding_dim=4, combiner="none", features=("w",)),
    ],
    num_devices=2,
)


def test_every_thread_count_gives_the_same_bits():
    arrays = [random_arrays(LAYOUT, seed, is_weighted=True) for seed in range(20)]
    results = [
        [
            copy_of(call(Preprocessor(LAYOUT, is_weighted=True, num_threads=n), batch))
            for batch in arrays
        ]
        for n in (1, 2, 3, 8)
    ]
    assert results[0] == results[1] == results[2] == results[3]


def test_all_buffers_are_views_of_one_block_without_gaps():
    batch = call(Preprocessor(LAYOUT), random_arrays(LAYOUT, 1))
    address = batch.block.ctypes.data
    assert address % 64 == 0
    for stack in batch.stacks:
        for array in (stack.row_pointers, stack.embedding_ids, stack.sample_ids, stack.gains):
            assert array.ctypes.data == address
            assert array.dtype.itemsize == 4
            address += array.nbytes
    assert address == batch.block.ctypes.data + batch.block.nbytes


def test_memory_is_reused_only_when_nobody_holds_a_view_of_it():
    preprocessor = Preprocessor(LAYOUT)
    arrays = [random_arrays(LAYOUT, seed) for seed in range(8)]
    wanted = [copy_of(call(Preprocessor(LAYOUT), batch)) for batch in arrays]
    held = [call(preprocessor, batch) for batch in arrays]  # e.g. forwards before any backward
    assert [copy_of(batch) for batch in held] == wanted
    assert len({batch.block.ctypes.data for batch in held}) == 8

    view = held[0].stacks[0].gains[1:]  # one view is enough to keep the block
    kept = view.copy()
    addresses = {batch.block.ctypes.data for batch in held}
    first = held[0].block.ctypes.data
    held.clear()
    again = [call(preprocessor, arrays[seed % 8]) for seed in range(30)]
    assert first not in {batch.block.ctypes.data for batch in again}
    assert addresses & {batch.block.ctypes.data for batch in again}
    np.testing.assert_array_equal(view, kept)


def test_steady_training_takes_no_new_memory():
    preprocessor = Preprocessor(LAYOUT)
    arrays = random_arrays(LAYOUT, 3)
    addresses = {call(preprocessor, arrays).block.ctypes.data for _ in range(50)}
    assert len(addresses) == 1


def test_out_is_written_in_place_and_refused_when_too_small_or_of_another_layout():
    preprocessor = Preprocessor(LAYOUT)
    small, large = sorted(
        (random_arrays(LAYOUT, seed) for seed in (1, 2)), key=lambda arrays: len(arrays.values)
    )
    out = call(preprocessor, large)
    batch = call(preprocessor, small, out=out)
    assert batch.block.ctypes.data == out.block.ctypes.data
    assert_equal(batch, expect(LAYOUT, small), LAYOUT)
    before = batch.block.copy()
    with pytest.raises(BatchLayoutError, match=r"out= has \d+ words, this batch needs \d+"):
        call(preprocessor, large, out=batch)
    np.testing.assert_array_equal(batch.block, before)
    other = make_layout(LAYOUT.tables, num_devices=4)
    with pytest.raises(BatchLayoutError, match="another layout"):
        call(Preprocessor(other), small, out=batch)


def test_a_batch_survives_pickling_and_moving_with_its_block():
    arrays = random_arrays(LAYOUT, 5)
    batch = call(Preprocessor(LAYOUT), arrays)
    for copy in (pickle.loads(pickle.dumps(batch)), batch.with_block(batch.block.copy())):
        assert_equal(copy, expect(LAYOUT, arrays), LAYOUT)
        for stack in copy.stacks:
            assert np.shares_memory(stack.gains, copy.block) == (stack.gains.size > 0)
        assert not np.shares_memory(copy.block, batch.block)
    assert len(pickle.dumps(batch)) < 1.3 * batch.block.nbytes + 4096  # the block travels once


def test_threads_that_share_a_preprocessor_get_their_own_batches():
    preprocessor = Preprocessor(LAYOUT, num_threads=2)
    arrays = [random_arrays(LAYOUT, seed) for seed in range(6)]
    wanted = [copy_of(call(Preprocessor(LAYOUT), batch)) for batch in arrays]
    failures = []

    def work(seed):
        for _ in range(40):
            batch = call(preprocessor, arrays[seed])
            if copy_of(batch) != wanted[seed]:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_values_are_read_where_they_are_and_never_changed():
    arrays = random_arrays(LAYOUT, 7)
    for array in (arrays.values, arrays.lengths):
        array.flags.writeable = False
    before = arrays.values.copy()
    expected = expect(LAYOUT, arrays)
    assert_equal(call(Preprocessor(LAYOUT), arrays), expected, LAYOUT)
    np.testing.assert_array_equal(arrays.values, before)
    # strided and unaligned arrays are copied, not misread
    strided = dataclasses.replace(
        arrays,
        values=np.repeat(arrays.values, 2)[::2],
        lengths=np.frombuffer(b"x" + arrays.lengths.tobytes(), np.int64, offset=1),
    )
    assert not strided.values.flags.c_contiguous
    assert not strided.lengths.flags.aligned
    assert_equal(call(Preprocessor(LAYOUT), strided), expected, LAYOUT)


def test_memory_of_the_caller_is_not_kept():
    preprocessor = Preprocessor(LAYOUT)
    arrays = random_arrays(LAYOUT, 7)
    before = copy_of(batch := call(preprocessor, arrays))
    arrays.values[:] = -1
    arrays.lengths[:] = -1
    assert copy_of(batch) == before
    assert batch.lengths.min() >= 0


def test_measure_says_what_a_call_would_need_and_ignores_capacities():
    arrays = random_arrays(LAYOUT, 9)
    tight = {stack.name: Capacity(max_ids=1, max_unique_ids=1) for stack in LAYOUT.stacks}
    stats = Preprocessor(LAYOUT, capacity=tight).measure(
        arrays.keys, arrays.values, lengths=arrays.lengths
    )
    full = call(Preprocessor(LAYOUT), arrays).stats
    for field in dataclasses.fields(stats):
        np.testing.assert_array_equal(getattr(stats, field.name), getattr(full, field.name))


def test_an_empty_batch_is_a_batch():
    empty = Arrays(["u", "v", "i", "w"], np.zeros(0, np.int64), np.zeros(0, np.int64))
    batch = call(Preprocessor(LAYOUT), empty)
    assert batch.batch_size == 0
    assert batch.lengths.shape == (4, 0)
    assert_equal(batch, expect(LAYOUT, empty), LAYOUT)
    assert_equal(
        call(Preprocessor(LAYOUT, batch_size=6), empty, "offsets"),
        expect(LAYOUT, empty, batch_size=6),
        LAYOUT,
    )


def test_one_key_may_feed_bags_and_sequences_and_sequences_ignore_weights():
    layout = make_layout(
        [
            Table(name=c, num_embeddings=20, embedding_dim=8, combiner=c, features=("x",))
            for c in Combiner
        ]
    )
    arrays = Arrays(
        ["x"], np.array([3, 3, 5]), np.array([2, 0, 1]), np.array([1, 3, 2], np.float32)
    )
    batch = call(Preprocessor(layout, is_weighted=True), arrays)
    assert_equal(batch, expect(layout, arrays), layout)
    sequence = batch.stacks[-1]
    assert sequence.gains[sequence.embedding_ids != 2**31 - 1].tolist() == [1, 1, 1]
    assert batch.num_samples == (3, 3, 3, 3)


def test_a_bag_whose_weights_cancel_has_gain_zero_not_nan():
    layout = make_layout(
        [
            Table(name=c, num_embeddings=20, embedding_dim=8, combiner=c, features=("x",))
            for c in ("mean", "sqrtn")
        ]
    )
    weights = np.array([0.5, -0.5, 0, 0], np.float32)
    arrays = Arrays(["x"], np.array([2, 4, 6, 8]), np.array([2, 2]), weights)
    batch = call(Preprocessor(layout, is_weighted=True), arrays)
    assert_equal(batch, expect(layout, arrays), layout)
    gains = batch.stacks[0].gains
    assert sorted(gains[~np.isnan(gains)].tolist()) == pytest.approx(
        [-(0.5**0.5), *[0.0] * 6, 0.5**0.5]
    )


# ---- errors

GOOD = Arrays(
    ["u", "v", "i", "w"],
    np.array([0, 1, 2, 99, 5, 49, 8, 8], np.int64),
    np.array([2, 0, 1, 1, 1, 1, 0, 2], np.int64),
)
ALL = {"keys": GOOD.keys, "values": GOOD.values, "lengths": GOOD.lengths}
WEIGHTS = np.ones(8, np.float32)
OFFSETS = GOOD.offsets


def changed(array, at, value):
    copy = array.copy()
    copy[at] = value
    return copy


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"keys": ["u", "x", "y", "w"]}, MissingKeyError, r"no keys \['v', 'i'\]; it has \['u'"),
        ({"keys": []}, MissingKeyError, r"no keys \['u', 'v', 'i', 'w'\]"),
        ({"keys": ["u", "v", "i", "w", "u", "i"]}, DuplicateKeyError, r"once: \['u', 'i'\]"),
        ({"keys": ["u", "v", "i", 3]}, KjtError, "keys must be strings"),
        ({"lengths": None}, KjtError, "neither lengths nor offsets"),
        ({"lengths": GOOD.lengths[:7]}, KjtError, "7 lengths are not a multiple of 4 keys"),
        (
            {"lengths": None, "offsets": OFFSETS[:-1]},
            KjtError,
            "7 offsets less the last are not a multiple of 4 keys",
        ),
        ({"lengths": None, "offsets": OFFSETS[:0]}, KjtError, "-1 offsets less the last"),
        (
            {"lengths": changed(GOOD.lengths, 3, -1)},
            KjtError,
            r"key 'v': sample 1 has length -1, not in 0\.\.8",
        ),
        (
            {"lengths": changed(GOOD.lengths, 7, 2**40)},
            KjtError,
            "key 'w': sample 1 has length 1099511627776, not in",
        ),
        ({"lengths": changed(GOOD.lengths, 0, 3)}, KjtError, "for 9 ids, values have 8"),
        (
            {"values": GOOD.values[:-1], "weights": WEIGHTS[:-1]},
            KjtError,
            "account for 8 ids, values have 7",
        ),
        (
            {"values": GOOD.values[:0], "weights": WEIGHTS[:0]},
            KjtError,
            r"key 'u': sample 0 has length 2, not in 0\.\.0",
        ),
        (
            {"lengths": None, "offsets": changed(OFFSETS, 0, 1)},
            KjtError,
            r"key 'u': offset 1 at position 0 \(sample 0\) is out of order",
        ),
        (
            {"lengths": None, "offsets": changed(OFFSETS, 5, 1)},
            KjtError,
            "key 'i': offset 1 at position 5 .* is out of order",
        ),
        (
            {"lengths": None, "offsets": changed(OFFSETS, 8, 2**33)},
            KjtError,
            "key 'w': offset 8589934592 at position 8",
        ),
        ({"lengths": None, "offsets": changed(OFFSETS, 8, 7)}, KjtError, "for 7 ids"),
        ({"offsets": changed(OFFSETS, 1, 1)}, KjtError, "both given and contradict"),
        ({"offsets": OFFSETS + 1}, KjtError, "both given and contradict"),
        ({"values": GOOD.values.astype(np.float32)}, KjtError, "values must be .* got float32"),
        ({"values": GOOD.values.astype(np.uint64)}, KjtError, "values must be .* got uint64"),
        ({"values": GOOD.values.astype(">i8")}, KjtError, "values must be .* got >i8"),
        ({"values": GOOD.values.tolist()}, KjtError, "values must be .* got list"),
        ({"values": GOOD.values.reshape(2, 4)}, KjtError, r"got int64 of shape \(2, 4\)"),
        ({"lengths": GOOD.lengths.astype(float)}, KjtError, "lengths must be .* got float64"),
        ({"lengths": GOOD.lengths.reshape(4, 2)}, KjtError, r"got int64 of shape \(4, 2\)"),
        ({"lengths": GOOD.lengths.astype(bool)}, KjtError, "lengths must be .* got bool"),
        ({"values": np.broadcast_to(np.int32(0), 2**31)}, KjtError, "2,147,483,648 elements"),
        ({"weights": None}, WeightsError, "is_weighted=True but the KJT has no weights"),
        ({"weights": WEIGHTS.astype(float)}, WeightsError, "float32 array, got float64"),
        ({"weights": WEIGHTS.tolist()}, WeightsError, "float32 array, got list"),
        ({"weights": WEIGHTS[:-1]}, KjtError, r"shape \(7,\), values have \(8,\)"),
        (
            {"weights": changed(WEIGHTS, 1, np.nan)},
            WeightsError,
            "feature 'u': sample 0 has weight nan at position 1; weights must be finite",
        ),
        (
            {"weights": changed(WEIGHTS, 5, -np.inf)},
            WeightsError,
            "feature 'i': sample 1 has weight -inf at position 0",
        ),
        (
            {"lengths": np.repeat(GOOD.lengths, 2), "values": np.repeat(GOOD.values, 2),
             "weights": np.repeat(WEIGHTS, 2)},
            BatchSizeError,
            "batch has 4 samples, the static batch size is 3",
        ),
        ({"values": changed(GOOD.values, 2, -5)}, IdRangeError, "has id -5 at position 0"),
    ],
)  # fmt: skip
def test_a_bad_batch_raises_its_error_writes_nothing_and_spoils_nothing(change, error, message):
    preprocessor = Preprocessor(LAYOUT, batch_size=3, is_weighted=True)
    good = {**ALL, "weights": WEIGHTS}
    out = preprocessor(**good)
    before = out.block.copy()
    wanted = copy_of(out)
    with pytest.raises(error, match=message):
        preprocessor(**{**good, **change}, out=out)
    np.testing.assert_array_equal(out.block, before)
    assert copy_of(preprocessor(**good, out=out)) == wanted


@pytest.mark.parametrize("value", [-1, 50, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1, -(2**63)])
def test_an_id_outside_its_table_is_named_with_table_sample_position_and_rows(value):
    arrays = dataclasses.replace(GOOD, values=changed(GOOD.values, 5, value))
    with pytest.raises(IdRangeError) as caught:
        call(Preprocessor(LAYOUT), arrays)
    error = caught.value
    assert (error.feature, error.table, error.sample) == ("i", "items", 1)
    assert (error.position, error.value, error.num_embeddings) == (0, value, 50)
    assert f"feature 'i' of table 'items': sample 1 has id {value}" in str(error)


def test_the_first_bad_id_in_kjt_order_is_the_one_reported_for_every_thread_count():
    arrays = Arrays(["w", "i", "v", "u"], np.full(400, 100), np.full(40, 10))
    arrays.values[:20] = 3
    arrays.values[13:] = [9] + [-1] * 386
    for num_threads in (1, 2, 4, 7):
        with pytest.raises(IdRangeError) as caught:
            call(Preprocessor(LAYOUT, num_threads=num_threads), arrays)
        error = caught.value
        assert (error.feature, error.sample, error.position, error.value) == ("w", 1, 3, 9)


def test_bad_ids_and_weights_of_keys_that_no_table_looks_up_do_not_matter():
    arrays = Arrays(
        ["other", *GOOD.keys],
        np.concatenate([[-7, 2**60], GOOD.values]),
        np.concatenate([[1, 1], GOOD.lengths]),
        np.concatenate([[np.nan, np.inf], WEIGHTS]).astype(np.float32),
    )
    arrays.weights[-1] = np.nan  # of a sequence
    batch = call(Preprocessor(LAYOUT, is_weighted=True), arrays)
    assert_equal(batch, expect(LAYOUT, arrays), LAYOUT)


def test_weights_whose_sum_overflows_are_still_finite():
    arrays = dataclasses.replace(GOOD, weights=np.full(8, 3e38, np.float32))
    with np.errstate(over="ignore"):
        expected = expect(LAYOUT, arrays)
    assert_equal(call(Preprocessor(LAYOUT, is_weighted=True), arrays), expected, LAYOUT)


def test_weights_without_is_weighted_are_ignored_with_one_warning():
    preprocessor = Preprocessor(LAYOUT)
    with pytest.warns(UserWarning, match="is_weighted=False: they are ignored") as record:
        batch = preprocessor(**ALL, weights=WEIGHTS * 7)
    assert record[0].filename == __file__
    assert_equal(batch, expect(LAYOUT, GOOD), LAYOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preprocessor(**ALL, weights=WEIGHTS * 7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, BatchSizeError, "batch_size=0 must be >= 1"),
        ({"batch_size": 2**33}, BatchSizeError, "more samples on one core than int32 can index"),
        ({"id_policy": "wrap"}, ValueError, "id_policy='wrap' is not one of"),
        ({"num_threads": 0}, ValueError, "num_threads=0 must be >= 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Preprocessor(LAYOUT, **options)


def test_a_dropped_preprocessor_gives_its_memory_back():
    preprocessor = Preprocessor(LAYOUT)
    batch = call(preprocessor, GOOD)
    del preprocessor
    gc.collect()
    assert_equal(batch, expect(LAYOUT, GOOD), LAYOUT)  # the batch outlives it


def test_sequence_ids_lay_every_batch_out_alike():
    """What a compiled program needs: the same samples of a core whatever the number of ids."""
    layout = make_layout(
        [Table(name="t", num_embeddings=50, embedding_dim=8, combiner="none", features=("f",))]
    )
    preprocessor = Preprocessor(layout, batch_size=4, sequence_ids={"f": 12})
    for num_ids in (0, 5, 12):
        ids = np.arange(num_ids)
        lengths = np.array([num_ids, 0, 0, 0])
        batch = preprocessor(["f"], ids, lengths=lengths)
        assert batch.samples_per_core == (6,)
        assert batch.num_samples == (num_ids,)
        table = np.arange(50 * 8, dtype=np.float32).reshape(50, 8)
        out = np.full(num_ids * 8, np.nan, np.float32)
        ReferenceBackend().lookup(batch.stacks, [table], layout.geometry(batch), out)
        np.testing.assert_array_equal(out.reshape(-1, 8), table[ids])
    with pytest.raises(BatchSizeError, match="has 13 ids, sequence_ids allows 12"):
        preprocessor(["f"], np.arange(13), lengths=np.array([13, 0, 0, 0]))
    with pytest.raises(LayoutError, match=r"\['g'\], the sequence features are \['f'\]"):
        Preprocessor(layout, sequence_ids={"g": 1})
