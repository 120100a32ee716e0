"""Our buffers against those of the peer's own host code, bit by bit.

The wheel runs in an environment of its own: `pip install -r requirements/oracle.txt`. It ends the
process when a limit is exceeded, so its limits are set from what we measured, plus eight.
"""

import os
import random
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
REASON = "needs the wheel jax_tpu_embedding: pip install -r requirements/oracle.txt"
pytest.importorskip("jax_tpu_embedding", reason=REASON)

from jax_tpu_embedding.sparsecore.lib.core import pybind_input_preprocessing as native  # noqa: E402
from jax_tpu_embedding.sparsecore.lib.nn import (  # noqa: E402
    embedding,
    embedding_spec,
    table_stacking,
)

from torchrec_tpu.sparsecore import Capacity, Preprocessor, Table, make_layout  # noqa: E402

pytestmark = pytest.mark.oracle

PAD_SLOT = (2**31 - 1, 2**31 - 1, 0x7FC00000)  # id, sample, bits of the gain


def random_case(seed):
    """Tables, features and a batch; only what both sides accept (a power of two of cores)."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    case = SimpleNamespace()
    case.cores_per_device = pick(2, 4)
    case.num_devices = pick(1, 1, 2, 4, 8, 16, 64)
    case.num_local_devices = pick(*range(1, min(case.num_devices, 4) + 1))
    num_local_cores = case.num_local_devices * case.cores_per_device
    case.static_batch_size = int(pick(1, 2, 5, 8, 40)) * num_local_cores
    # Sometimes fewer samples than the static batch: the same as empty bags at its end.
    case.batch_size = case.static_batch_size - int(pick(0, 0, rng.integers(case.static_batch_size)))
    case.is_weighted = pick(True, False)
    case.int_type = pick(np.int32, np.int64)
    case.stacking = pick("auto", "auto", "explicit", "none")
    case.rotation = pick(None, None, 1, 3)
    case.optimizers = [
        embedding_spec.SGDOptimizerSpec(0.1),
        embedding_spec.AdagradOptimizerSpec(0.1),
    ]

    case.tables, case.optimizer_of = [], {}
    num_features = 0
    for i in range(rng.integers(1, 6)):
        features = tuple(f"f{num_features + j:03d}" for j in range(pick(1, 1, 2, 3)))
        num_features += len(features)
        optimizer = int(rng.integers(2))
        combiner = pick("sum", "mean", "sqrtn")
        table = Table(
            name=f"t{i}",
            num_embeddings=int(pick(3, 10, 63, 500, 5000, 2_000_000, 40_000_000)),
            embedding_dim=pick(4, 8, 12),
            combiner=combiner,
            features=features,
            group=f"{optimizer} {combiner}",  # the peer stacks only what agrees in both
        )
        case.tables.append(table)
        case.optimizer_of[table.name] = case.optimizers[optimizer]

    case.values, case.lengths, case.weights = {}, {}, {}
    is_dense = rng.random() < 0.3
    for table in case.tables:
        for key in table.features:
            if is_dense:
                lengths = np.full(case.batch_size, rng.integers(1, 6))
            else:
                lengths = rng.choice([0, 0, 1, 2, 3, 7, 20], case.batch_size)
            skew = pick(1, 4, 10)
            spread = rng.random(lengths.sum()) ** skew
            case.values[key] = (table.num_embeddings * spread).astype(np.int64)
            case.lengths[key] = lengths
            weights = pick(
                rng.choice([0.5, 1.0, 2.0], lengths.sum()),
                rng.uniform(0.1, 1.1, lengths.sum()),
                rng.normal(size=lengths.sum()),
            )
            case.weights[key] = weights.astype(np.float32)
    return case


def layout_of(case):
    stacks = case.stacking
    if stacks == "explicit":
        alike = {}
        for table in case.tables:
            alike.setdefault((table.dim, table.group), []).append(table.name)
        stacks = list(alike.values())
    return make_layout(
        case.tables,
        num_devices=case.num_devices,
        cores_per_device=case.cores_per_device,
        num_local_devices=case.num_local_devices,
        stacks=stacks,
        rotation=case.rotation,
        batch_size=case.static_batch_size,
    )


def arrays_of(case, layout):
    """Our call: the KJT in another key order, with a key that nothing looks up."""
    keys = [*case.values, "extra"]
    random.Random(len(keys)).shuffle(keys)
    extra = {"extra": np.zeros(case.batch_size, np.int64)}
    ones = {"extra": np.ones(case.batch_size, np.float32)}
    return {
        "keys": keys,
        "values": np.concatenate([{**case.values, **extra}[k] for k in keys]).astype(case.int_type),
        "lengths": np.concatenate(
            [{**case.lengths, "extra": np.ones(case.batch_size)}[k] for k in keys]
        ).astype(np.int32),
        "weights": np.concatenate([{**case.weights, **ones}[k] for k in keys])
        if case.is_weighted
        else None,
    }


def specs_of(case, layout, limit):
    """The peer's feature specs, in config order, stacked as `layout` is."""
    tables = {
        table.name: embedding_spec.TableSpec(
            name=table.name,
            vocabulary_size=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            initializer=lambda *_: None,
            optimizer=case.optimizer_of[table.name],
            combiner=str(table.combiner),
            max_ids_per_partition=limit,
            max_unique_ids_per_partition=limit,
        )
        for table in case.tables
    }
    global_batch = case.static_batch_size // case.num_local_devices * case.num_devices
    specs = [
        embedding_spec.FeatureSpec(
            name=key,
            table_spec=tables[table.name],
            input_shape=[global_batch, 1],
            output_shape=[global_batch, table.embedding_dim],
        )
        for table in case.tables
        for key in table.features
    ]
    options = {
        "rotation": case.rotation,
        "stack_to_max_ids_per_partition": lambda *_: limit,
        "stack_to_max_unique_ids_per_partition": lambda *_: limit,
    }
    cores = {
        "global_device_count": case.num_devices,
        "num_sc_per_device": case.cores_per_device,
    }
    if case.stacking == "auto":
        table_stacking.auto_stack_tables(specs, **cores, **options)
    elif case.stacking == "explicit":
        for stack in layout.stacks:
            names = [stacked.table.name for stacked in stack.tables]
            table_stacking.stack_tables(specs, names, **cores, **options)
    else:
        embedding.prepare_feature_specs_for_training(specs, **cores)
    return specs


def peer_rows(case, key, what):
    """One feature's samples as the peer wants them, empty bags up to the static batch."""
    lengths = case.lengths[key]
    bags = np.split(what, np.cumsum(lengths)[:-1])
    bags += [what[:0]] * (case.static_batch_size - case.batch_size)
    if case.batch_size == case.static_batch_size and len(set(lengths.tolist())) == 1 and lengths[0]:
        return np.stack(bags)
    rows = np.empty(len(bags), object)
    rows[:] = bags
    return rows


@pytest.mark.parametrize("seed", range(320))
def test_buffers_equal_the_peers_bit_for_bit(seed):
    case = random_case(seed)
    layout = layout_of(case)
    arrays = arrays_of(case, layout)
    options = {"batch_size": case.static_batch_size, "is_weighted": case.is_weighted}
    stats = Preprocessor(layout, **options).measure(**arrays)
    limit = int(stats.max_ids.max()) + 8
    capacity = {
        stack.name: Capacity(max_ids=limit, max_unique_ids=limit) for stack in layout.stacks
    }
    batch = Preprocessor(layout, capacity=capacity, num_threads=2, **options)(**arrays)

    specs = specs_of(case, layout, limit)
    keys = [key for table in case.tables for key in table.features]
    *peer_buffers, _, peer_stats = native.preprocess_sparse_dense_matmul_input(
        [peer_rows(case, key, case.values[key].astype(np.int32)) for key in keys],
        [peer_rows(case, key, case.weights[key]) for key in keys] if case.is_weighted else None,
        specs,
        case.num_local_devices,
        case.num_devices,
        num_sc_per_device=case.cores_per_device,
    )

    ours_by_key = {stack.features[0].key: stack.name for stack in layout.stacks}
    peer_name = {}
    for spec in specs:
        if spec.name in ours_by_key:
            stacked = spec.table_spec.stacked_table_spec
            peer_name[ours_by_key[spec.name]] = stacked.stack_name
        place = layout.stacked_table(spec.table_spec.name)
        transform = spec.id_transformation
        assert transform.col_offset == place.row_offset * layout.num_cores
        assert transform.col_shift == place.rotation
    assert len(set(peer_name.values())) == len(layout.stacks) == len(peer_buffers[0])

    for index, (stack, ours) in enumerate(zip(layout.stacks, batch.stacks, strict=True)):
        name = peer_name[stack.name]
        pointers, ids, samples, gains = (arrays[name] for arrays in peer_buffers)
        np.testing.assert_array_equal(ours.row_pointers, pointers)
        # The peer leaves what is behind a core's last partition as it was; all before is compared.
        required = stats.required_slots[index]
        slots = len(ids) // layout.num_local_cores
        assert ours.embedding_ids.size == len(ids)
        is_written = (np.arange(slots) < required[:, None]).ravel()
        our_slots = (ours.embedding_ids, ours.sample_ids, ours.gains.view(np.int32))
        for mine, theirs, pad in zip(
            our_slots, (ids, samples, gains.view(np.int32)), PAD_SLOT, strict=True
        ):
            np.testing.assert_array_equal(mine[is_written], theirs[is_written])
            assert ((mine == pad) == (ours.embedding_ids == PAD_SLOT[0]))[is_written].all()

        per_device = (case.num_local_devices, layout.num_cores)
        for mine, theirs in (
            (batch.stats.max_ids, peer_stats.max_ids_per_partition),
            (batch.stats.max_unique_ids, peer_stats.max_unique_ids_per_partition),
        ):
            np.testing.assert_array_equal(mine[index], np.reshape(theirs[name], per_device).max(0))
        np.testing.assert_array_equal(required, peer_stats.required_buffer_sizes[name])


def test_the_cases_cover_what_they_claim():
    cases = [random_case(seed) for seed in range(320)]
    layouts = [layout_of(case) for case in cases]
    assert {case.cores_per_device for case in cases} == {2, 4}
    assert {case.num_devices for case in cases} == {1, 2, 4, 8, 16, 64}
    assert {case.num_local_devices for case in cases} == {1, 2, 3, 4}
    assert {str(table.combiner) for case in cases for table in case.tables} == {
        "sum", "mean", "sqrtn",
    }  # fmt: skip
    num_stacked = [max(len(stack.tables) for stack in layout.stacks) for layout in layouts]
    assert sum(tables > 1 for tables in num_stacked) > 50
    rotations = {t.rotation for layout in layouts for t in layout.stack_order_tables}
    assert rotations > {0, 1, 2, 3, 4}
    assert 100 < sum(case.is_weighted for case in cases) < 220
    assert sum(case.batch_size < case.static_batch_size for case in cases) > 50
    assert any(not len(ids) for case in cases for ids in case.values.values())
    assert sum(len(ids) for case in cases for ids in case.values.values()) > 300_000
