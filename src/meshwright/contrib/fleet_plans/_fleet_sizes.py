"""Find fleets of the same chip and another size, and the smallest on which a plan finds what fits.

Used by: `api`, by the entry point; `contrib.changes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from meshwright.errors import InputError
from meshwright.hardware import Fleet, Slices
from meshwright.planned import Plan


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


class PlansFleet(Protocol):
    """Plans for one fleet; if `is_largest`, also where no candidate is likely to fit."""

    def __call__(self, fleet: Fleet, *, is_largest: bool) -> Plan:
        """Return the plan."""
        ...


def smallest(largest: Fleet, check_sizes: Callable[[set[int]], None], planned_on: PlansFleet) -> Plan:
    """Return the plan for the first fleet up to `largest` on which a compiled candidate fits.

    Args:
        check_sizes: raises if the step is another one on fleets of these numbers of devices.

    Raises:
        InputError: it does; or no plan can be made for any of the fleets.
    """
    fleets = smaller_fleets(largest)
    check_sizes({each.num_devices for each in fleets})
    smaller: dict[str, str] = {}
    last: InputError | None = None
    for fleet in fleets:
        is_largest = fleet.name == largest.name
        try:
            made = planned_on(fleet, is_largest=is_largest)
        except InputError as why:
            smaller[fleet.name], last = why.message, why
            continue
        made = dataclasses.replace(made, smaller=dict(smaller))
        if made.winner is not None or made.interrupted or is_largest:
            return made
        compiled = sum(not candidate.failed for candidate in made.candidates)
        tried = f"none of {compiled} compiled candidates fits" if compiled else made.ended
        smaller[fleet.name] = tried
    assert last is not None, "the largest fleet has a plan or an error"
    raise last
