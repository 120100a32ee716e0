import dataclasses

import numpy as np
import pytest
from planned import load_of, loads_of_sizes

from torchrec_tpu.datasets.synthetic import MultiHot, Synthetic
from torchrec_tpu.sharding import cost
from torchrec_tpu.sharding.cost import CONSTANTS, Step, Way
from torchrec_tpu.sharding.lookups import Lookups
from torchrec_tpu.sharding.search import make_plan
from torchrec_tpu.sharding.topology import Slice
from torchrec_tpu.sparsecore.capacity import observe
from torchrec_tpu.sparsecore.layout import Table
from torchrec_tpu.sparsecore.preprocess import Preprocessor
from torchrec_tpu.sparsecore.stacking import make_layout

TARGET = Slice.named("tpu7x:2x2x1")  # 8 devices, 16 SparseCores


def test_every_constant_names_its_source() -> None:
    for constant in CONSTANTS.values():
        assert constant.origin in ("published", "measured", "assumed")
        assert len(constant.source) > 20


# ----------------------------------------------------------------------------------------- lookups


@pytest.mark.parametrize(("exponent", "rows"), [(0.0, 5000), (1.0, 5000), (1.05, 200_000)])
def test_expected_distinct_rows_are_those_of_draws(exponent: float, rows: int) -> None:
    lookups = Lookups.power_law(
        rows, [3.0, 2.0], samples_per_core=100, num_cores=16, exponent=exponent
    )
    law = Synthetic(
        [MultiHot(key="f", num_embeddings=rows)],
        batch_size=50_000,
        num_batches=1,
        exponent=exponent,
    )
    (batch,) = law
    ids = batch.sparse_features.values().numpy()
    for samples in (100, 1000, 10_000):
        found = len(np.unique(ids[: 5 * samples]))
        assert lookups.rows(samples) == pytest.approx(found, rel=0.06)


def test_rows_are_never_more_than_ids_or_the_table() -> None:
    lookups = Lookups.power_law(50, [2.0], samples_per_core=10, num_cores=4, exponent=0.0)
    assert lookups.rows(1) <= 2
    assert lookups.rows(1e9) == pytest.approx(50)


def test_bags_that_their_first_id_decides_are_followed_beyond_what_was_observed() -> None:
    """16 devices' batches, told from one's."""
    rows, num_ids, samples = 100_000, 12, 256
    stream = Synthetic(
        [MultiHot(key="f", num_embeddings=rows, num_ids=num_ids)],
        batch_size=16 * samples,
        num_batches=1,
    )
    (batch,) = stream
    ids = batch.sparse_features.values().numpy().reshape(16, -1)
    sample = np.repeat(np.arange(samples), num_ids)
    lookups = Lookups.observed(
        rows,
        [(ids[0], sample), (ids[1], sample)],
        samples=samples,
        cores=2,
        num_cores=32,
        exponent=1.05,
        is_linked=True,
    )
    assert lookups.rows(samples) == pytest.approx(len(np.unique(ids[0])), rel=0.1)
    assert lookups.rows(16 * samples) == pytest.approx(len(np.unique(ids)), rel=0.1)


def test_limits_of_a_stack_are_those_that_the_preprocessor_measures() -> None:
    tables = [
        Table(name="a", num_embeddings=999, embedding_dim=8, combiner="sum", features=("f", "g")),
        Table(name="b", num_embeddings=40, embedding_dim=8, combiner="mean", features=("h",)),
    ]
    layout = make_layout(
        tables, num_devices=8, cores_per_device=2, num_local_devices=1, batch_size=64
    )
    (stack,) = layout.stacks
    features = [
        MultiHot(key="f", num_embeddings=999, num_ids=3),
        MultiHot(key="g", num_embeddings=999, num_ids=2),
        MultiHot(key="h", num_embeddings=40, num_ids=5),
    ]
    batches = list(Synthetic(features, batch_size=64, num_batches=3))
    preprocessor = Preprocessor(layout, batch_size=64)
    stats, ids = [], {"a": [], "b": []}
    for batch in batches:
        kjt = batch.sparse_features
        stats.append(
            preprocessor.measure(
                keys=kjt.keys(), values=kjt.values().numpy(), lengths=kjt.lengths().numpy()
            )
        )
        for table in tables:
            parts = [kjt[key].values().numpy() for key in table.features]
            lengths = [kjt[key].lengths().numpy() for key in table.features]
            # Features of one table in one sample are different bags: repeats there stay.
            ids[table.name].append(
                (
                    np.concatenate(parts),
                    np.concatenate([np.repeat(np.arange(64), n) for n in lengths]),
                )
            )
    wanted = observe(layout, *stats).suggest(layout)[stack.name]
    lookups = {
        table.name: Lookups.observed(
            table.num_embeddings, ids[table.name], samples=64, cores=2, num_cores=16
        )
        for table in tables
    }
    found = cost.stack_capacity(stack, lookups, num_cores=16)
    assert found.max_unique_ids == wanted.max_unique_ids
    assert found.max_ids == pytest.approx(wanted.max_ids, abs=8)  # repeats across features
    assert found.buffer_ids == pytest.approx(wanted.buffer_ids, rel=0.1)


# ------------------------------------------------------------------------------------------- bytes


def test_rows_that_travel_are_the_distinct_ones_of_every_source_core() -> None:
    """Counted one by one in a batch of all devices."""
    batch_size, num_ids, rows = 1024, 6, 3000
    (batch,) = Synthetic(
        [MultiHot(key="f", num_embeddings=rows, num_ids=num_ids)],
        batch_size=batch_size,
        num_batches=1,
    )
    ids = batch.sparse_features.values().numpy().reshape(batch_size, num_ids)
    pairs = sum(len(np.unique(part)) for part in np.split(ids, TARGET.num_cores))
    each = batch_size // TARGET.num_devices
    lookups = Lookups.observed(
        rows,
        [
            (part.reshape(-1), np.repeat(np.arange(each), num_ids))
            for part in np.split(ids, TARGET.num_devices)
        ],
        samples=each,
        cores=2,
        num_cores=TARGET.num_cores,
    )
    load = load_of("t", rows, 32, lookups=lookups)
    option = cost.rows_option(load, Step(global_batch_size=batch_size), TARGET)
    assert option.forward_bytes == pytest.approx(pairs * 32 * 4)
    assert option.backward_bytes == option.forward_bytes
    assert option.id_bytes == pytest.approx(pairs * 4)
    assert option.exchanged_bytes == pytest.approx(pairs * (2 * 128 + 4) * 3 / 4)  # of 4 chips


def test_pooled_ids_travel_once_for_each_shard_and_vectors_once() -> None:
    load = load_of("t", 1000, 64, ids=[16.0])
    step = Step(global_batch_size=1024)
    one, four = (cost.pooled_option(load, step, TARGET, width) for width in (64, 16))
    assert one.id_bytes == 1024 * 16 * 8  # a row and a sample each
    assert four.id_bytes == 4 * one.id_bytes
    assert one.forward_bytes == four.forward_bytes == 1024 * 64 * 4
    assert one.backward_bytes == one.forward_bytes


def test_ids_of_means_and_of_weighted_bags_travel_with_a_gain() -> None:
    step = Step(global_batch_size=1024)
    plain = load_of("t", 1000, 64, ids=[16.0])
    mean = dataclasses.replace(plain, table=dataclasses.replace(plain.table, combiner="mean"))
    weighted = dataclasses.replace(plain, is_weighted=True)
    by_kind = [
        cost.pooled_option(load, step, TARGET, 64).id_bytes for load in (plain, mean, weighted)
    ]
    assert by_kind[1] == by_kind[2] == 1.5 * by_kind[0]


def test_a_frozen_table_sends_no_gradients() -> None:
    frozen = dataclasses.replace(load_of("t", 100, 16, ids=[4.0]), rule=None)
    step = Step(global_batch_size=256)
    assert cost.rows_option(frozen, step, TARGET).backward_bytes == 0
    assert cost.pooled_option(frozen, step, TARGET, 16).backward_bytes == 0
    replica = cost.replicated_option(frozen, step, TARGET)
    assert replica.exchanged_bytes == 0
    assert frozen.logical_bytes == 4 * 100 * 16  # no optimizer state


def test_a_replica_sends_its_gradient_whole_or_the_touched_rows_whichever_is_less() -> None:
    step = Step(global_batch_size=64)
    small = cost.replicated_option(load_of("s", 10, 16, ids=[4.0]), step, TARGET)
    large = cost.replicated_option(load_of("l", 100_000, 16, ids=[1.0]), step, TARGET)
    assert (small.reduced_bytes, small.gathered_bytes) == (10 * 16 * 4, 0)
    assert large.reduced_bytes == 0
    assert 0 < large.gathered_bytes < 2 * 100_000 * 16 * 4 * TARGET.num_chips


@pytest.mark.parametrize(
    ("rule", "width"), [("sgd", 32), ("adagrad", 64), ("rowwise_adagrad", 33), ("adam", 96)]
)
def test_state_is_counted_as_wide_as_it_is(rule: str, width: int) -> None:
    load = dataclasses.replace(load_of("t", 100, 32), rule=rule)
    assert load.logical_bytes == 100 * 4 * width


# --------------------------------------------------------------------------------------- a step


def test_tables_take_the_memory_that_their_layout_pads_them_to() -> None:
    loads = loads_of_sizes([(1000, 12), (33, 16), (5, 1)], ids=[2.0])
    plan = make_plan(loads, Step(global_batch_size=512), TARGET, ways=[Way.ROWS])
    layout = make_layout(
        [load.table for load in loads],
        num_devices=8,
        cores_per_device=2,
        num_local_devices=1,
        stacks=plan.stacks_of("ebc"),
    )
    packed = sum(
        layout.pack_table(t.name, np.zeros((t.num_embeddings, t.embedding_dim), np.float32)).nbytes
        for t in layout.tables
    )
    of_devices = [device.hbm_bytes["row-sharded tables"] for device in plan.cost.devices]
    assert of_devices == [2 * packed / 8] * 8  # weights and Adagrad's sums


def test_devices_send_and_receive_what_leaves_the_chips() -> None:
    loads = loads_of_sizes([(5000, 32), (64, 8), (900, 16)], ids=[20.0])
    step = Step(global_batch_size=1024, dense_parameters=1000)
    for ways in ([Way.ROWS], [Way.POOLED], [Way.REPLICATED], list(Way)):
        found = make_plan(loads, step, TARGET, ways=ways).cost
        both_ways = sum(sum(device.ici_bytes.values()) for device in found.devices)
        assert both_ways / 2 == pytest.approx(found.exchanged_bytes + found.reduced_bytes, rel=1e-3)


def test_the_bound_is_the_slowest_resource_of_the_busiest_device() -> None:
    loads = loads_of_sizes([(5000, 32), (64, 8)], ids=[20.0])
    found = make_plan(loads, Step(global_batch_size=1024, dense_parameters=10), TARGET).cost
    busiest = max(
        sum(ms for cause, ms in device.time_ms.items() if cause.startswith("SparseCore"))
        for device in found.devices
    )
    links = sum(ms for cause, ms in found.devices[0].time_ms.items() if cause.startswith("links"))
    assert found.sparsecore_ms == pytest.approx(busiest)
    assert found.links_ms == pytest.approx(links)
    assert found.bound_ms == max(busiest, links, found.tensorcore_ms)


def test_twice_the_batch_moves_twice_the_pooled_bytes_and_fewer_than_twice_the_rows() -> None:
    load = load_of("t", 10_000, 32, ids=[8.0])
    small, large = Step(global_batch_size=1024), Step(global_batch_size=2048)
    pooled = [cost.pooled_option(load, step, TARGET, 32).exchanged_bytes for step in (small, large)]
    rows = [cost.rows_option(load, step, TARGET).exchanged_bytes for step in (small, large)]
    assert pooled[1] == 2 * pooled[0]
    assert rows[0] < rows[1] < 2 * rows[0]  # more repeats on a core
