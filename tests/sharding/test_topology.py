import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_tpu.sharding.topology import Slice, TpuTopology, as_slice
from torchrec_tpu.sparsecore.errors import TopologyError


def test_a_named_slice_has_the_published_figures() -> None:
    target = Slice.named("tpu7x:4x4x2")
    assert (target.num_chips, target.num_devices, target.num_cores) == (32, 64, 128)
    assert target.link_bytes_per_second == 100e9  # 1200 GB/s both ways over six links
    assert target.bisection_bytes_per_second == 8 * 100e9
    assert target.hbm_bytes == 96 << 30
    assert Slice.named("v6e:8x4").link_bytes_per_second == 100e9  # 800 GB/s over four


def test_a_uniform_exchange_is_bound_by_the_middle_of_the_longest_side() -> None:
    target = Slice.named("tpu7x:4x4x2")
    total = 32 * 143e6  # 143 MB of rows a chip: half of them cross, half of those each way
    assert target.uniform_seconds(total) == pytest.approx(total / 4 / 800e9)
    assert 2e3 * target.uniform_seconds(total) == pytest.approx(2.86, abs=0.01)


def test_joined_ends_halve_what_the_middle_has_to_carry() -> None:
    mesh, torus = Slice.named("tpu7x:4x4x4"), Slice.named("tpu7x:4x4x4", torus=True)
    assert mesh.wraps == (False,) * 3
    assert torus.wraps == (True,) * 3
    assert torus.uniform_seconds(1e9) == pytest.approx(mesh.uniform_seconds(1e9) / 2)


def test_two_chips_along_an_axis_have_one_link_between_them_with_or_without_wrap() -> None:
    assert Slice.named("tpu7x:4x4x2", torus=True).wraps == (True, True, False)


def test_a_device_that_gets_all_is_bound_by_the_links_of_its_chip() -> None:
    target = Slice.named("tpu7x:4x4x4")
    sent, received = np.full(128, 1e6), np.zeros(128)
    received[77] = sent.sum()
    assert target.exchange_seconds(sent, received) >= 63 / 64 * 128e6 / 600e9
    assert target.exchange_seconds(sent, received) > target.uniform_seconds(sent.sum())


def test_inside_one_chip_an_exchange_is_free() -> None:
    target = Slice.of_devices("v7x", 2)
    assert target.num_chips == 1
    assert target.uniform_seconds(1e12) == 0.0
    assert target.all_reduce_seconds(1e12) == 0.0


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["tpu7x:2x2x1", "tpu7x:2x4x4", "v6e:4x2", "v5p:4x4x2"]),
    torus=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_an_exchange_takes_what_its_worst_cut_or_chip_takes(
    name: str, torus: bool, seed: int
) -> None:
    """Against the traffic of every pair of chips, added up one by one."""
    target = Slice.named(name, torus=torus)
    rng = np.random.default_rng(seed)
    sent, received = rng.random(target.num_devices), rng.random(target.num_devices) ** 4
    received *= sent.sum() / received.sum()
    each = target.chip.devices_per_chip
    chips = list(itertools.product(*map(range, target.sides)))
    traffic = {
        (a, b): sum(
            sent[s] * received[d] / sent.sum()
            for s in range(i * each, (i + 1) * each)
            for d in range(j * each, (j + 1) * each)
        )
        for i, a in enumerate(chips)
        for j, b in enumerate(chips)
        if a != b
    }
    bounds = [
        sum(load for pair, load in traffic.items() if pair[end] == chip)
        / target.injection_bytes_per_second
        for chip in chips
        for end in (0, 1)
    ]
    for axis, side in enumerate(target.sides):
        for cut in range(1, side):
            links = target.num_chips // side * (2 if target.wraps[axis] else 1)
            for up in (True, False):
                load = sum(
                    load
                    for (a, b), load in traffic.items()
                    if (a[axis] < cut) is up and (b[axis] < cut) is not up
                )
                bounds.append(load / links / target.link_bytes_per_second)
    found = target.exchange_seconds(sent, received)
    assert found >= max(bounds) * (1 - 1e-9)
    if not torus:  # a torus has more cuts than those that begin at its first chip
        assert found == pytest.approx(max(bounds))


def test_devices_that_follow_one_another_in_spread_are_all_devices() -> None:
    for devices in (1, 2, 3, 8, 64, 512):
        target = Slice.of_devices("v7x", devices, any_number=True)
        assert sorted(target.spread(devices)) == list(range(devices))


@pytest.mark.parametrize("device", ["tpu", "cpu"])
def test_torchrec_sees_devices_and_their_memory(device: str) -> None:
    topology = TpuTopology(world_size=64, chip="v7x", compute_device=device)
    assert topology.slice.name == "tpu7x:4x4x2"
    assert topology.compute_device == device
    assert topology.world_size == 64
    assert [d.rank for d in topology.devices] == list(range(64))
    storage = topology.devices[0].storage
    assert (storage.hbm, storage.ddr) == ((96 << 30, 0) if device == "tpu" else (0, 96 << 30))
    assert topology.local_world_size == (8 if device == "tpu" else 64)
    assert topology.inter_host_bw < topology.intra_host_bw
    assert "tpu7x:4x4x2" in repr(topology)


def test_a_name_and_a_world_size_give_the_same_slice() -> None:
    by_name = TpuTopology("tpu7x:4x4x2")
    assert by_name.slice == TpuTopology(world_size=64, chip="tpu7x").slice
    assert as_slice(by_name) is by_name.slice
    assert as_slice("tpu7x:4x4x2") == by_name.slice


def test_processes_on_cpus_may_be_any_number() -> None:
    topology = TpuTopology(world_size=3, chip="v7x", compute_device="cpu", hbm_cap=1 << 30)
    assert topology.slice.num_chips == 2
    assert topology.devices[2].storage.ddr == 1 << 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 7, "chip": "v7x"}, "no tpu7x slice has 7 devices"),
        ({"world_size": 64, "chip": "h100"}, "'h100' is not one of"),
        ({"name": "tpu7x:32"}, "sides"),
        ({}, "give the name of a slice, or world_size"),
        ({"name": "v6e:2x2", "world_size": 4}, "give the name of a slice, or world_size"),
        ({"world_size": 0, "chip": "v6e"}, "at least one"),
        ({"world_size": 4, "chip": "v6e", "compute_device": "cuda"}, "neither 'tpu' nor 'cpu'"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        TpuTopology(**arguments)
