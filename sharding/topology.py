"""The slice that a plan is made for: chips, links between them, and how TorchRec's planner sees it.

`Slice` holds the facts and knows how long an exchange takes at least; `TpuTopology` is a TorchRec
`Topology` that carries one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import GeneralizedCommsBandwidth, Topology

from torchrec_tpu.sparsecore.aot.topology import Topology as Form
from torchrec_tpu.sparsecore.aot.topology import slice_of, topology
from torchrec_tpu.sparsecore.chips import CHIPS, Chip
from torchrec_tpu.sparsecore.errors import TopologyError

Bytes = npt.NDArray[np.float64]

ALIASES: Final = {"v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
"""Other names of `chips.CHIPS`."""


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from the fields is kept
class Slice:
    """Chips on a grid, joined to their neighbours along each axis.

    Chips are numbered with the last axis fastest; `devices_per_chip` consecutive devices share a
    chip. Exchange inside a chip costs no link.

    Attributes:
        chip: its generation.
        sides: chips along each axis.
        wraps: whether the ends of each axis are joined too (a torus).
        num_devices: ranks; the last chip may have fewer than a whole one.
        hbm_bytes: of one device.

    >>> s = Slice.named("tpu7x:4x4x2")
    >>> s.num_devices, s.num_links, s.bisection_bytes_per_second / 1e9
    (64, 6, 800.0)
    """

    chip: Chip
    sides: tuple[int, ...]
    wraps: tuple[bool, ...]
    num_devices: int
    hbm_bytes: int

    @classmethod
    def named(cls, name: str, *, torus: bool = False, hbm_bytes: int | None = None) -> Slice:
        """The slice of a name such as "tpu7x:4x4x2".

        Args:
            name: chip and sides, as libtpu takes them.
            torus: whether the ends of each axis are joined. Compiled for a name alone, libtpu
                0.0.52 sees a mesh, and that is the default.
            hbm_bytes: of one device; the chip's when None.

        Raises:
            TopologyError: no slice has that name.
        """
        form = topology(name)
        return cls._of(form, form.num_devices, torus=torus, hbm_bytes=hbm_bytes)

    @classmethod
    def of_devices(
        cls,
        chip: str,
        num_devices: int,
        *,
        torus: bool = False,
        hbm_bytes: int | None = None,
        any_number: bool = False,
    ) -> Slice:
        """The most compact slice with so many devices.

        Args:
            chip: generation, e.g. "tpu7x" or "v7x".
            num_devices: of the slice.
            torus: as of `named`, like `hbm_bytes`.
            hbm_bytes: of one device.
            any_number: take a line of chips where no slice has that number of devices.

        Raises:
            TopologyError: there is no such chip, or no slice with that number of devices.
        """
        name = ALIASES.get(chip, chip)
        if name not in CHIPS:
            raise TopologyError(f"chip {chip!r} is not one of {sorted({*CHIPS, *ALIASES})}")
        if num_devices < 1:
            raise TopologyError(f"num_devices={num_devices}: a slice has at least one")
        try:
            form = slice_of(CHIPS[name], num_devices)
        except TopologyError:
            if not any_number:
                raise
            num_chips = -(-num_devices // CHIPS[name].devices_per_chip)
            form = Form(chip=CHIPS[name], sides=(num_chips,))
        return cls._of(form, num_devices, torus=torus, hbm_bytes=hbm_bytes)

    @classmethod
    def _of(cls, form: Form, num_devices: int, *, torus: bool, hbm_bytes: int | None) -> Slice:
        return cls(
            chip=form.chip,
            sides=form.sides,
            wraps=tuple(torus and side > 2 for side in form.sides),
            num_devices=num_devices,
            hbm_bytes=form.chip.hbm_bytes if hbm_bytes is None else hbm_bytes,
        )

    @property
    def name(self) -> str:
        """As libtpu takes it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.sides)

    @property
    def num_cores(self) -> int:
        """SparseCores of all devices."""
        return self.num_devices * self.chip.cores_per_device

    @property
    def num_links(self) -> int:
        """Links of one chip, two along each axis that its generation has."""
        return 4 if self.chip.name == "v6e" else 6

    @property
    def link_bytes_per_second(self) -> float:
        """One direction of one link: the chip's published figure over its links, both ways."""
        return self.chip.interconnect_bytes_per_second / 2 / self.num_links

    @property
    def injection_bytes_per_second(self) -> float:
        """What one chip can send, or receive, over all its links."""
        return self.chip.interconnect_bytes_per_second / 2

    @property
    def share_between_chips(self) -> float:
        """Share of a uniform exchange between devices that has to leave its chip."""
        return 1 - 1 / self.num_chips

    @cached_property
    def bisection_bytes_per_second(self) -> float:
        """One direction of the links across the middle of the longest side; inf on one chip."""
        longest = max(self.sides)
        if longest == 1:
            return math.inf
        axis = self.sides.index(longest)
        return (
            (self.num_chips // longest)
            * (2 if self.wraps[axis] else 1)
            * self.link_bytes_per_second
        )

    @cached_property
    def _cuts(self) -> tuple[npt.NDArray[np.bool_], Bytes]:
        """Ways to part the chips in two along an axis: (cuts, chips) and bytes/s one way."""
        coordinates = np.indices(self.sides).reshape(len(self.sides), -1)
        inside, speed = [], []
        for axis, side in enumerate(self.sides):
            lines = self.num_chips // side * self.link_bytes_per_second
            for end in range(1, side):
                inside.append(coordinates[axis] < end)
                speed.append(lines)
            if self.wraps[axis]:  # two places are cut
                speed[-(side - 1) :] = [2 * lines] * (side - 1)
                for start in range(1, side // 2 + 1):
                    inside.append((coordinates[axis] - start) % side < side // 2)
                    speed.append(2 * lines)
        return np.array(inside, bool).reshape(len(inside), -1), np.array(speed)

    def per_chip(self, of_device: Bytes) -> Bytes:
        """(num_devices,) -> (num_chips,) sums."""
        padded = np.zeros(self.num_chips * self.chip.devices_per_chip)
        padded[: self.num_devices] = of_device
        sums: Bytes = padded.reshape(self.num_chips, -1).sum(axis=1)
        return sums

    def exchange_seconds(self, sent: Bytes, received: Bytes) -> float:
        """At least so long takes an exchange in which every device's data go to all alike.

        Device s sends device d `sent[s] * received[d] / sum` bytes. Bounds: what a chip can inject
        or take, and the links across every straight cut through the slice, whatever the routing.

        Args:
            sent: bytes of each device, those that stay on its chip included.
            received: likewise; the sums are equal.
        """
        out, into = self.per_chip(sent), self.per_chip(received)
        total = out.sum()
        if self.num_chips == 1 or not total:
            return 0.0
        stays = out * into / total
        ends = max((out - stays).max(), (into - stays).max()) / self.injection_bytes_per_second
        inside, speed = self._cuts
        outgoing = (inside @ out) * (~inside @ into) / total
        incoming = (~inside @ out) * (inside @ into) / total
        return float(max(ends, (np.maximum(outgoing, incoming) / speed).max()))

    def uniform_seconds(self, num_bytes: float) -> float:
        """`exchange_seconds` of so many bytes in all, the same from each device to each."""
        each = np.full(self.num_devices, num_bytes / self.num_devices)
        return self.exchange_seconds(each, each)

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """At least so long takes the sum of a buffer over all devices: each chip's links."""
        return 2 * num_bytes * self.share_between_chips / self.injection_bytes_per_second

    def spread(self, count: int) -> list[int]:
        """`count` device numbers that lie far apart, for shards that draw traffic.

        >>> Slice.named("tpu7x:4x4x2").spread(4)
        [0, 41, 18, 59]
        """
        stride = max(1, round(self.num_devices * 0.6180339887))
        while math.gcd(stride, self.num_devices) != 1:
            stride += 1
        return [index * stride % self.num_devices for index in range(count)]

    def __str__(self) -> str:
        chips = "1 chip" if self.num_chips == 1 else f"{self.num_chips} chips"
        form = "torus" if any(self.wraps) else "mesh"
        return (
            f"{self.name} ({form}): {chips}, {self.num_devices} devices of "
            f"{self.chip.cores_per_device} SparseCores"
        )


class _Ici(GeneralizedCommsBandwidth):
    """What TorchRec's own estimators ask of links: bytes per millisecond of one device."""

    def __init__(self, target: Slice) -> None:
        per_device = target.injection_bytes_per_second / target.chip.devices_per_chip / 1e3
        seconds = target.uniform_seconds(target.num_devices)  # one byte from each device
        self._intra = per_device
        self._inter = 1 / (seconds * 1e3) if seconds else per_device

    @property
    def intra_host_bw(self) -> float:
        return self._intra

    @property
    def inter_host_bw(self) -> float:
        return self._inter

    def get_bw(self, local_world_size: int, world_size: int, collective_type: Any) -> float:  # noqa: ARG002  # noqa: ARG002
        return self._intra if world_size <= local_world_size else self._inter


class TpuTopology(Topology):
    """A TPU slice as a TorchRec `Topology`, for torchrec 1.9.2 and 1.8.0.

    Args:
        name: of the slice, e.g. "tpu7x:4x4x2".
        world_size: devices, instead of a name: the most compact slice that has so many.
        chip: generation, with `world_size`: "tpu7x" or "v7x", "v6e", "v5p".
        compute_device: "tpu"; "cpu" plans the same slice for processes on CPUs, any number of them,
            each with as much memory as a device.
        local_world_size: devices of one host; those of the slice's hosts when None.
        hbm_cap: bytes of one device; the chip's when None.
        torus: whether the ends of each axis are joined.

    Raises:
        TopologyError: no such chip or slice; names some that exist.

    >>> TpuTopology(world_size=64, chip="v7x").slice.name
    'tpu7x:4x4x2'
    """

    slice: Slice

    def __init__(
        self,
        name: str | None = None,
        *,
        world_size: int | None = None,
        chip: str | None = None,
        compute_device: Literal["tpu", "cpu"] = "tpu",
        local_world_size: int | None = None,
        hbm_cap: int | None = None,
        torus: bool = False,
    ) -> None:
        if compute_device not in ("tpu", "cpu"):
            raise TopologyError(f"compute_device={compute_device!r} is neither 'tpu' nor 'cpu'")
        if (name is None) == (world_size is None):
            raise TopologyError("give the name of a slice, or world_size and chip")
        if name is not None:
            self.slice = Slice.named(name, torus=torus, hbm_bytes=hbm_cap)
        else:
            assert world_size is not None
            self.slice = Slice.of_devices(
                chip or "tpu7x",
                world_size,
                torus=torus,
                hbm_bytes=hbm_cap,
                any_number=compute_device == "cpu",
            )
        target, is_tpu = self.slice, compute_device == "tpu"
        if local_world_size is None:
            hosts = Form(chip=target.chip, sides=target.sides).num_hosts
            local_world_size = target.num_devices // hosts if is_tpu else target.num_devices
        # torchrec 1.8.0 knows no "tpu" and gives HBM to "cuda" only; the name is put right below.
        super().__init__(
            world_size=target.num_devices,
            compute_device="cuda" if is_tpu else "cpu",
            hbm_cap=target.hbm_bytes,
            ddr_cap=0 if is_tpu else target.hbm_bytes,
            local_world_size=local_world_size,
            hbm_mem_bw=target.chip.hbm_bytes_per_second / 1e3,
            generalized_comms_bandwidths=_Ici(target),
            created_by_factory=True,
        )
        self._compute_device = compute_device

    def __repr__(self) -> str:
        return f"TpuTopology({self.slice}, compute_device={self.compute_device!r})"


def as_slice(target: TpuTopology | Slice | str) -> Slice:
    """The slice of a topology, of a name, or itself."""
    if isinstance(target, str):
        return Slice.named(target)
    return target.slice if isinstance(target, TpuTopology) else target
