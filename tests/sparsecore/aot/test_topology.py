"""Names of slices."""

import json
import os
import subprocess
import sys

import pytest

from torchrec_tpu.sparsecore.aot import adapter
from torchrec_tpu.sparsecore.aot.topology import Topology, topology
from torchrec_tpu.sparsecore.chips import CHIPS
from torchrec_tpu.sparsecore.errors import TopologyError


@pytest.mark.parametrize(
    ("name", "chips", "devices", "cores", "hosts"),
    [
        ("tpu7x:4x4x2", 32, 64, 128, 8),
        ("tpu7x:2x2x1", 4, 8, 16, 1),
        ("tpu7x:1x1x1", 1, 2, 4, 1),
        ("tpu7x:2x2x3", 12, 24, 48, 3),
        ("v6e:8x4", 32, 32, 64, 8),
        ("v6e:1x1", 1, 1, 2, 1),
        ("v5p:4x4x2", 32, 32, 128, 8),
    ],
)
def test_a_name_tells_chips_devices_cores_and_hosts(
    name: str, chips: int, devices: int, cores: int, hosts: int
) -> None:
    slice_ = topology(name)
    assert (slice_.num_chips, slice_.num_devices) == (chips, devices)
    assert (slice_.num_cores, slice_.num_hosts) == (cores, hosts)
    assert str(slice_) == slice_.name == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tpu7x:32", "3 sides, counted in chips. 32 chips: tpu7x:4x4x2 (64 devices)"),
        ("v6e:32", "2 sides, counted in chips. 32 chips: v6e:8x4 (32 devices)"),
        ("v6e:4x4x2", "2 sides"),
        ("v5p:3x4x4", "1 or even"),
        ("v6e:3x3", "9 chips: no form"),
        ("v6e:32x32", "the largest slice has 256 chips. some forms: v6e:2x2"),
        ("tpu7x", "some forms: tpu7x:2x2x1 (8 devices)"),
        ("tpu7x:4X4X2", "3 sides"),
        ("tpu7x:0x2x2", "3 sides"),
        ("tpu7x:2x2x1 ", "3 sides"),
        ("v4:2x2x1", "chip 'v4' is not one of ['v5p', 'v6e', 'tpu7x']"),
        ("", "chip '' is not one of"),
    ],
)
def test_a_name_that_no_slice_has_is_told_what_there_is(name: str, says: str) -> None:
    with pytest.raises(TopologyError) as error:
        topology(name)
    assert says in str(error.value)


DESCRIBE = """
import json, sys
from jax.experimental import topologies
for name in sys.argv[1:]:
    devices = topologies.get_topology_desc(topology_name=name, platform="tpu").devices
    hosts = {device.process_index for device in devices}
    print(json.dumps([len(devices), len(hosts), devices[0].device_kind]))
"""


def test_libtpu_describes_the_same_slices() -> None:
    if reason := adapter.why_unavailable("jax", "jaxlib", "libtpu"):
        pytest.skip(reason)
    names = ["tpu7x:2x2x1", "tpu7x:1x2x4", "tpu7x:4x4x2", "v6e:4x8", "v6e:1x1", "v5p:2x2x3"]
    result = subprocess.run(
        [sys.executable, "-c", DESCRIBE, *names],
        env={**os.environ, **adapter.ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    for name, line in zip(names, result.stdout.splitlines(), strict=True):
        slice_ = topology(name)
        kind = slice_.chip.device_kind
        assert json.loads(line) == [slice_.num_devices, slice_.num_hosts, kind]


def test_every_generation_has_slices() -> None:
    for chip in CHIPS.values():
        assert isinstance(topology(f"{chip.name}:2x2" + "x1" * (chip.name != "v6e")), Topology)
