"""Hold suggestions that make a step's memory smaller, and its rule of thumb; find fleets of other sizes.

Rooms outside the core make the first two. Imports: `errors`, `hardware`. No jax. Used by: `results`,
`report`, `api`, and those rooms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.hardware import Fleet, Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change to what was weighed, and its effect; a field that is None or empty changes nothing.

    `is_enough`: the saving is exact, and as large as what is too much.
    """

    effect: str
    fleet: str | None = None
    layout: str | None = None
    overrides: tuple[str, ...] = ()
    is_enough: bool = False

    @property
    def arguments(self) -> str:
        """Command-line arguments of the change."""
        parts = [Fleet.parse(self.fleet).options] if self.fleet else []
        parts += [f"--layout {self.layout}"] if self.layout else []
        return " ".join([*parts, *(f"--set {override}" for override in self.overrides)])


def fleet_times(fleet: Fleet, times: int) -> Fleet | None:
    """Return a fleet of the same chip with `times` as many devices; None if none exists."""
    return _fleet_of_size(fleet, fleet.num_devices * times)


def smaller_fleets(largest: Fleet) -> list[Fleet]:
    """Return fleets of the same chip from the smallest up to `largest`: 1, 2, 3, 4, 6, 8, 12, 16 devices...

    Sizes that no host or slice of the chip has are left out. More devices than one slice of `largest`
    has are several of those.

    >>> [fleet.name for fleet in smaller_fleets(Fleet.parse("4xv5e-16"))]
    ['v5e-1', 'v5e-4', 'v5e-8', 'v5e-16', '2xv5e-16', '3xv5e-16', '4xv5e-16']
    >>> [fleet.name for fleet in smaller_fleets(Fleet.parse("24xH100"))]
    ['1xH100', '2xH100', '3xH100', '4xH100', '6xH100', '8xH100', '16xH100', '24xH100']
    """
    most = largest.num_devices
    powers = [2**power for power in range(most.bit_length())]
    sizes = sorted(size for size in {*powers, *(3 * power for power in powers)} if size < most)
    found = [_fleet_of_size(largest, size) for size in sizes]
    return [*(each for each in found if each), largest]


def _fleet_of_size(fleet: Fleet, num_devices: int) -> Fleet | None:
    """Return a fleet of that many devices, each as those of `fleet`, which a caller may have changed."""
    chip, price, reserve = fleet.chip, fleet.price_per_device_hour, fleet.reserve_bytes
    named = _catalog_fleet(fleet, num_devices)
    changed = {"chip": chip, "price_per_device_hour": price, "reserve_bytes": reserve}
    return named and dataclasses.replace(named, **changed)


def _catalog_fleet(fleet: Fleet, num_devices: int) -> Fleet | None:
    per_host, name = fleet.chips_per_host, f"{num_devices}x{fleet.chip.name}"
    if fleet.chip.slices is not None:
        return _slices_of_size(fleet, fleet.chip.slices, num_devices)
    if fleet.num_hosts > 1 and num_devices > per_host:
        if num_devices % per_host:
            return None
        name = f"{num_devices // per_host}x{per_host}x{fleet.chip.name}"
    try:
        return Fleet.parse(name)
    except InputError:
        return None  # no host has that size


def _slices_of_size(fleet: Fleet, slices: Slices, num_devices: int) -> Fleet | None:
    """Return one slice of a size, or several of the fleet's; None if neither exists.

    Several come first where the fleet has several.
    """
    slice_size = fleet.chips_per_domain
    count = num_devices // slice_size if num_devices % slice_size == 0 else 1
    for several in dict.fromkeys((1, count) if fleet.num_domains == 1 else (count, 1)):
        cores = num_devices // several * slices.cores_per_chip_in_name // slices.devices_per_chip
        try:
            return Fleet.parse(f"{several}x{fleet.chip.name}-{cores}")
        except InputError:
            continue
    return None


BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HandRow:
    """One quantity: hand-computed bytes on the fleet and on one device, and compiled bytes on one device."""

    quantity: str
    whole_bytes: int
    device_bytes: float
    compiled_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """The rule's counts of numbers over the whole fleet; `rule` says how activations were counted."""

    parameters: int
    activations: int
    gradients: int
    optimizer_state: int
    rule: str
    rows: tuple[HandRow, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes by the rule: 4 x (parameters + activations + gradients + optimizer state)."""
        return BYTES * (self.parameters + self.activations + self.gradients + self.optimizer_state)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the total."""
        return {**dataclasses.asdict(self), "total_bytes": self.total_bytes}
