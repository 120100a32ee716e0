"""Whatever comes in at the Python entry: the oracle's answer or one of our errors, nothing else."""

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracle import Arrays, assert_equal, expect

from torchrec_tpu.sparsecore import Block, Capacity, Combiner, Preprocessor, Table, make_layout
from torchrec_tpu.sparsecore.errors import TorchrecTpuError

NUM_ROWS = 20
KEYS = ["a", "b", "c", "d"]
LAYOUTS = [
    make_layout(
        [
            Table(
                name=combiner,
                num_embeddings=NUM_ROWS,
                embedding_dim=8,
                combiner=combiner,
                features=(key, "d"),
            )
            for key, combiner in zip("abc", combiners, strict=True)
        ],
        num_devices=num_devices,
        blocks=blocks,
    )
    for combiners, num_devices, blocks in (
        ((Combiner.SUM, Combiner.MEAN, Combiner.SQRTN), 1, {}),
        ((Combiner.SUM, Combiner.MEAN, Combiner.SQRTN), 3, {}),
        ((Combiner.NONE, Combiner.MEAN, Combiner.SUM), 2, {}),
        (
            (Combiner.NONE, Combiner.MEAN, Combiner.SUM),
            2,
            {Combiner.MEAN: Block(7), Combiner.SUM: Block(20, 3)},
        ),
    )
]
# Long-lived, so that an error which spoils the next batch is seen.
PREPROCESSORS = {
    (index, id_policy, is_weighted, is_limited): Preprocessor(
        layout,
        id_policy=id_policy,
        is_weighted=is_weighted,
        num_threads=2,
        batch_size=4 if is_limited else None,
        capacity={layout.stacks[0].name: Capacity(max_ids=6, max_unique_ids=4)}
        if is_limited
        else None,
    )
    for index, layout in enumerate(LAYOUTS)
    for id_policy in ("error", "clamp", "drop")
    for is_weighted in (False, True)
    for is_limited in (False, True)
}

EXTREME_IDS = [-1, NUM_ROWS, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1, -(2**31), -(2**63)]
NASTY_TYPES = [
    np.dtype(code)
    for code in ("f4", "f8", "u4", "u8", "i2", "?", "c8", "U3", "M8[s]", "O", ">i4", ">i8", "V8")
]


@st.composite
def batches(draw):
    """Mostly right arrays; then perhaps one of them is made wrong."""
    keys = draw(st.permutations([*KEYS, "unused"][: draw(st.integers(4, 5))]))
    batch_size = draw(st.integers(0, 5))
    types = [draw(st.sampled_from([np.int32, np.int64])) for _ in range(2)]
    lengths = draw(
        hnp.arrays(types[0], len(keys) * batch_size, elements=st.integers(0, 4), fill=st.nothing())
    )
    limits = np.iinfo(types[1])
    ids = (
        st.integers(0, NUM_ROWS - 1)
        | st.sampled_from([i for i in EXTREME_IDS if limits.min <= i <= limits.max])
        if draw(st.booleans())
        else st.integers(0, NUM_ROWS - 1)
    )
    values = draw(hnp.arrays(types[1], int(lengths.sum()), elements=ids))
    weights = draw(
        st.none()
        | hnp.arrays(np.float32, values.size, elements=st.floats(-4, 4, width=32))
        | hnp.arrays(np.float32, values.size, elements=st.floats(width=32))
    )
    return Arrays(list(keys), values, lengths, weights)


def arrays_of_anything():
    types = st.sampled_from(
        [np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32), *NASTY_TYPES]
    )
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12)
    anything = types.flatmap(
        lambda dtype: (
            st.builds(np.zeros, shapes, st.just(dtype))
            if dtype.kind in "OVUM"
            else hnp.arrays(dtype, shapes)
        )
    )
    return anything | st.sampled_from([[], [1, 2], "abc", 7, b"12345678", {}, object()])


def broken(draw, arguments):
    """One argument replaced, cut, stretched, or changed in one place."""
    name = draw(st.sampled_from(sorted(arguments)))
    value = arguments[name]
    kind = draw(st.sampled_from(["anything", "cut", "longer", "element", "type", "none"]))
    if name == "keys":
        strange = st.text(max_size=2) | st.integers() | st.none()
        return name, draw(st.lists(strange | st.sampled_from(KEYS), max_size=6))
    if kind == "none":
        return name, None
    if kind == "anything" or not isinstance(value, np.ndarray):
        return name, draw(arrays_of_anything())
    if kind == "cut":
        return name, value[: draw(st.integers(0, max(0, value.size - 1)))]
    if kind == "longer":
        return name, np.concatenate([value, value[:1], value[:1]])
    if kind == "type":
        nasty = draw(st.sampled_from([t for t in NASTY_TYPES if t.kind not in "VM"]))
        with np.errstate(all="ignore"):
            return name, value.astype(nasty)
    copy = value.copy()
    if copy.size and copy.dtype.kind == "i":
        limits = np.iinfo(copy.dtype)
        copy[draw(st.integers(0, copy.size - 1))] = draw(st.integers(limits.min, limits.max))
    return name, copy


@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    arrays=batches(),
    which=st.sampled_from(sorted(PREPROCESSORS)),
    by=st.sampled_from(["lengths", "offsets", "both"]),
    is_broken=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:the KJT has weights but is_weighted=False")
def test_the_answer_is_the_oracles_or_one_of_our_errors(data, arrays, which, by, is_broken):
    index, id_policy, is_weighted, is_limited = which
    layout, preprocessor = LAYOUTS[index], PREPROCESSORS[which]
    arguments = {
        "keys": arrays.keys,
        "values": arrays.values,
        "lengths": None if by == "offsets" else arrays.lengths,
        "offsets": None if by == "lengths" else arrays.offsets,
        "weights": arrays.weights,
    }
    if is_broken:
        name, value = broken(data.draw, arguments)
        arguments[name] = value
    outcome = batch_or_error(preprocessor, arguments)
    event(type(outcome).__name__)
    if isinstance(outcome, TorchrecTpuError):
        assert is_broken or is_limited or may_refuse(arrays, id_policy, is_weighted), outcome
        return
    # What was accepted is a batch of int and float arrays that agree with each other.
    values, lengths, offsets = arguments["values"], arguments["lengths"], arguments["offsets"]
    lengths = np.diff(offsets) if lengths is None else lengths
    weights = arguments["weights"] if is_weighted else None
    seen = Arrays(list(arguments["keys"]), values, lengths, weights)
    assert seen.lengths.sum() == len(values)
    assert is_weighted or weights is None
    static = 4 if is_limited else None
    slots = None
    if is_limited:
        slots = [
            preprocessor.capacity[stack.name].slots_per_core(layout.num_cores)
            if stack.name in preprocessor.capacity
            else int(outcome.stats.required_slots[i].max())
            for i, stack in enumerate(layout.stacks)
        ]
    expected = expect(layout, seen, batch_size=static, id_policy=id_policy, slots_per_core=slots)
    assert_equal(outcome, expected, layout)
    assert id_policy != "error" or not any(expected.num_invalid)


def batch_or_error(preprocessor, arguments):
    try:
        return preprocessor(**arguments)
    except TorchrecTpuError as error:
        return error


def may_refuse(arrays, id_policy, is_weighted):
    """Whether unbroken arrays have something in them that is an error."""
    has_bad_id = ((arrays.values < 0) | (arrays.values >= NUM_ROWS)).any()
    if id_policy == "error" and has_bad_id:
        return True
    return is_weighted and (arrays.weights is None or not np.isfinite(arrays.weights).all())


def mostly(good, bad):
    return st.integers(0, 40).flatmap(lambda n: bad if n == 40 else good)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            mostly(st.uuids().map(str), st.text(max_size=1)),
            mostly(st.integers(1, 300), st.integers(-1, 2**33)),
            mostly(st.integers(1, 300), st.integers(-1, 0)),
            mostly(st.sampled_from(list(Combiner)), st.sampled_from(["max", "", None])),
            st.lists(st.text(max_size=1), max_size=3, min_size=1, unique=True)
            | mostly(st.just(["x"]), st.lists(st.sampled_from("xy"), max_size=3)),
        ),
        max_size=4,
        min_size=1,
    ),
    mostly(st.integers(1, 9), st.integers(-1, 0)),
    mostly(st.integers(1, 5), st.integers(-1, 0)),
    mostly(st.none(), st.integers(-1, 9)),
    mostly(st.just(0), st.integers(-1, 9)),
    st.none() | st.integers(-10, 10),
)
def test_any_tables_and_devices_make_a_layout_that_preprocesses_or_one_of_our_errors(
    rows, num_devices, cores_per_device, num_local_devices, first_local_device, rotation
):
    try:
        tables = [
            Table(
                name=name,
                num_embeddings=num_embeddings,
                embedding_dim=dim,
                combiner=combiner,
                features=tuple(features),
            )
            for name, num_embeddings, dim, combiner, features in rows
        ]
        layout = make_layout(
            tables,
            num_devices=num_devices,
            cores_per_device=cores_per_device,
            num_local_devices=num_local_devices,
            first_local_device=first_local_device,
            rotation=rotation,
        )
    except TorchrecTpuError as error:
        event(type(error).__name__)
        return
    event("laid out")
    keys = list(dict.fromkeys(f.key for f in layout.features))
    last = [min(t.num_embeddings for t in tables if key in t.features) - 1 for key in keys]
    arrays = Arrays(keys, np.array(last), np.ones(len(keys), np.int32))
    batch = Preprocessor(layout, num_threads=1)(keys, arrays.values, lengths=arrays.lengths)
    assert_equal(batch, expect(layout, arrays), layout)
