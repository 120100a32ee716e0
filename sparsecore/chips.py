"""Facts about TPU generations that have SparseCores, per device as a program sees it.

A device of v5p and v6e is a chip; a tpu7x chip is two devices. Figures are the vendor's published
ones unless a comment says where else they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One generation.

    >>> CHIPS["tpu7x"].cores_per_device * CHIPS["tpu7x"].devices_per_chip
    4
    """

    name: str  # as topology names begin, e.g. "tpu7x:4x4x2"
    device_kind: str  # as the runtime reports it
    devices_per_chip: int
    cores_per_device: int  # SparseCores
    tiles_per_core: int  # vector subcores of one SparseCore
    lanes: int  # float32 lanes of one tile
    tile_memory_bytes: int  # TileSpmem of one tile
    granule_bytes: int  # smallest SparseCore transfer from HBM; rows are padded to it
    hbm_bytes: int
    hbm_bytes_per_second: float
    bf16_flops_per_second: float
    interconnect_bytes_per_second: float  # one chip's links, both directions together


_GIB = 1 << 30
_KIB = 1 << 10

# Sources. Device kinds, SparseCores, tiles, lanes, tile memory and granule: tpu_info.py of jax
# 0.10.2 (jax/_src/pallas/mosaic) and the topologies that libtpu 0.0.52 describes. HBM, bandwidth,
# FLOP/s and interconnect: the v5p, v6e and TPU7x pages of the Google Cloud documentation, per chip.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5p": Chip(
            name="v5p",
            device_kind="TPU v5",
            devices_per_chip=1,
            cores_per_device=4,
            tiles_per_core=16,
            lanes=8,
            tile_memory_bytes=512 * _KIB,
            granule_bytes=32,
            hbm_bytes=95 * _GIB,
            hbm_bytes_per_second=2765e9,
            bf16_flops_per_second=459e12,
            interconnect_bytes_per_second=1200e9,
        ),
        "v6e": Chip(
            name="v6e",
            device_kind="TPU v6 lite",
            devices_per_chip=1,
            cores_per_device=2,
            tiles_per_core=16,
            lanes=8,
            tile_memory_bytes=256 * _KIB,
            granule_bytes=32,
            hbm_bytes=32 * _GIB,
            hbm_bytes_per_second=1638e9,
            bf16_flops_per_second=918e12,
            interconnect_bytes_per_second=800e9,
        ),
        "tpu7x": Chip(  # half of a chip's 192 GiB, 7380 GB/s and 2307 TFLOP/s
            name="tpu7x",
            device_kind="TPU7x",
            devices_per_chip=2,
            cores_per_device=2,
            tiles_per_core=16,
            lanes=16,
            tile_memory_bytes=512 * _KIB,
            granule_bytes=32,
            hbm_bytes=96 * _GIB,
            hbm_bytes_per_second=7380e9 / 2,
            bf16_flops_per_second=2307e12 / 2,
            interconnect_bytes_per_second=1200e9,
        ),
    }
)
