"""Slices by name, e.g. "tpu7x:4x4x2": which forms exist, and how many devices they have."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torchrec_tpu.sparsecore.chips import CHIPS, Chip
from torchrec_tpu.sparsecore.errors import TopologyError

_HOST_SIDES: Final = (2, 2, 1)
"""Chips of one host along each side; libtpu 0.0.52 wants each side to be 1 or divisible by it."""

# Sides of a slice, and chips of the largest: v5p, v6e and TPU7x pages of the Google Cloud
# documentation. libtpu itself accepts larger ones, and a v6e with three sides.
_NUM_SIDES: Final[Mapping[str, int]] = MappingProxyType({"v5p": 3, "v6e": 2, "tpu7x": 3})
_MAX_CHIPS: Final[Mapping[str, int]] = MappingProxyType({"v5p": 6144, "v6e": 256, "tpu7x": 9216})


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A slice. Get one from `topology`."""

    chip: Chip
    sides: tuple[int, ...]  # in chips

    @property
    def name(self) -> str:
        """As libtpu takes it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.sides)

    @property
    def num_devices(self) -> int:
        """Devices, as a program sees them; replicas of a compiled step."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def num_cores(self) -> int:
        """SparseCores of all devices."""
        return self.num_devices * self.chip.cores_per_device

    @property
    def num_hosts(self) -> int:
        """Machines that the chips are attached to."""
        return math.prod(
            max(1, side // of_host) for side, of_host in zip(self.sides, _HOST_SIDES, strict=False)
        )

    def __str__(self) -> str:
        return self.name


def topology(name: str) -> Topology:
    """The slice of that name.

    Raises:
        TopologyError: there is none; says which forms exist.

    >>> slice_ = topology("tpu7x:4x4x2")
    >>> slice_.num_chips, slice_.num_devices, slice_.num_cores, slice_.num_hosts
    (32, 64, 128, 8)
    """
    chip_name, _, form = name.partition(":")
    chip = CHIPS.get(chip_name)
    if chip is None:
        raise TopologyError(
            f"topology {name!r}: chip {chip_name!r} is not one of {list(CHIPS)}; a name is "
            "CHIP:SIDES with the sides in chips, e.g. 'tpu7x:4x4x2' or 'v6e:8x4'"
        )
    sides = tuple(map(int, form.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", form) else ()
    if problem := _problem(chip, sides):
        raise TopologyError(f"topology {name!r}: {problem}. {_forms(chip, math.prod(sides))}")
    return Topology(chip=chip, sides=sides)


def _problem(chip: Chip, sides: tuple[int, ...]) -> str | None:
    """Why there is no slice of `chip` with these sides, or None."""
    if len(sides) != _NUM_SIDES[chip.name]:
        return f"a {chip.name} slice has {_NUM_SIDES[chip.name]} sides, counted in chips"
    if any(s > 1 and s % of_host for s, of_host in zip(sides, _HOST_SIDES, strict=False)):
        return "the first two sides must be 1 or even, a host has 2x2 chips"
    if math.prod(sides) > _MAX_CHIPS[chip.name]:
        return f"the largest slice has {_MAX_CHIPS[chip.name]:,} chips"
    return None


def slice_of(chip: Chip, num_devices: int) -> Topology:
    """The most compact slice with so many devices.

    Raises:
        TopologyError: no slice of this chip has that number; names some that exist.

    >>> slice_of(CHIPS["tpu7x"], 64).name
    'tpu7x:4x4x2'
    """
    num_chips, rest = divmod(num_devices, chip.devices_per_chip)
    if not rest and num_chips and (found := _slices(chip, num_chips)):
        return found[0]
    raise TopologyError(
        f"no {chip.name} slice has {num_devices} devices of which {chip.devices_per_chip} make a "
        f"chip. {_forms(chip, num_chips)}"
    )


def _slices(chip: Chip, num_chips: int) -> list[Topology]:
    """All slices with so many chips, the most compact first."""
    if num_chips > _MAX_CHIPS[chip.name]:
        return []
    divisors = [n for n in range(1, num_chips + 1) if num_chips % n == 0]
    valid = [
        sides
        for sides in itertools.product(divisors, repeat=_NUM_SIDES[chip.name])
        if math.prod(sides) == num_chips and _problem(chip, sides) is None
    ]
    most_compact = sorted(valid, key=lambda sides: (max(sides), sides[::-1]))
    return [Topology(chip=chip, sides=sides) for sides in most_compact]


def _forms(chip: Chip, num_chips: int) -> str:
    """Names of some slices with so many chips (2 to 32 when that says nothing)."""
    counts = [num_chips] if 1 < num_chips <= _MAX_CHIPS[chip.name] else [4, 8, 16, 32]
    found = []
    for count in counts:
        slices = _slices(chip, count)[: 4 // len(counts)]
        found += [f"{s.name} ({s.num_devices} devices)" for s in slices]
    what = f"{num_chips} chips" if counts == [num_chips] else "some forms"
    return f"{what}: {', '.join(found) or 'no form'}"
