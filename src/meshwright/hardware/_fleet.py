"""Describe a fleet by its chip, hosts and links, and parse the text that names one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshwright.errors import InputError

from ._chip import CATALOG, Chip, Link, chip_named, chip_of_device_kind, find_chip

_EXAMPLES = "write it as 64xH100, 16x4xA100-80GB, v5p-512 or 8xCPU"
_COUNTED = re.compile(r"(\d{1,9})\s*[xX]\s*(?:(\d{1,9})\s*[xX]\s*)?(\S.*)", re.ASCII)
_LARGEST = 10**6  # devices: far above any machine, and within the range of the compiler's own integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet of `num_hosts` equal hosts with `chips_per_host` JAX devices each.

    `chips_per_domain`: the number of devices that `inside` joins: a host, a rack of trays, or a whole TPU
    slice. `between` joins the domains. `topology`: libtpu's name of a TPU slice ("v5p:4x8x8"), else "".
    `price_per_device_hour`: the price of one device in the user's currency; None if not set.
    """

    chip: Chip
    num_hosts: int
    chips_per_host: int
    chips_per_domain: int
    topology: str = ""
    price_per_device_hour: float | None = None

    def __post_init__(self) -> None:
        assert self.num_hosts >= 1, f"a fleet of {self.num_hosts} hosts"
        assert self.chips_per_host >= 1, f"a fleet of hosts with {self.chips_per_host} chips"
        assert 1 <= self.chips_per_domain <= self.num_devices, f"a domain of {self.chips_per_domain}"

    @property
    def num_devices(self) -> int:
        """The number of JAX devices in the whole fleet."""
        return self.num_hosts * self.chips_per_host

    @property
    def inside(self) -> Link | None:
        """The link inside a fast domain."""
        return self.chip.inside

    @property
    def between(self) -> Link | None:
        """The link between fast domains; None where no figure is known."""
        return self.chip.between

    @property
    def name(self) -> str:
        """The canonical text: `Fleet.parse(fleet.name)` equals this fleet, except for its price."""
        if self.chip.slices is not None:
            shape = self.topology.partition(":")[2]
            return f"{self.chip.name}-{_number_of(self.chip, shape)}"
        if self.num_hosts == 1 and _fits_one_host(self.chip, self.chips_per_host):
            return f"{self.num_devices}x{self.chip.name}"
        if self.chip.platform != "cpu" and self.chips_per_host == self.chip.chips_per_host:
            return f"{self.num_devices}x{self.chip.name}"
        return f"{self.num_hosts}x{self.chips_per_host}x{self.chip.name}"

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """Read "64xH100", "16x4xA100-80GB" (hosts x chips), "v5p-512" (as Google names it) or "8xCPU".

        Raises:
            InputError: the text cannot be parsed, or no such chip, count or slice exists.
        """
        text = text.strip()
        counted = _COUNTED.fullmatch(text)
        if counted is not None:
            return _counted(text, counted[1], counted[2], counted[3])
        chip = chip_named(text)
        if chip is not None:
            raise InputError(f"fleet {text!r} does not say how many", hint=_example_of(chip))
        sliced = re.fullmatch(r"(.+)-(\d{1,9})", text, re.ASCII)
        if sliced is not None and (chip := chip_named(sliced[1])) is not None and chip.slices is not None:
            return _slice(text, chip, sliced[2])
        raise InputError(f"cannot read the fleet {text!r}", hint=_EXAMPLES)

    @classmethod
    def local(cls, device_kind: str, count: int) -> Fleet:
        """Return the fleet of `count` devices of one kind that are attached to this machine, as one host.

        TPUs become a slice in one of the catalog's shapes, with the hosts of Google's slices.

        Raises:
            InputError: no chip of the catalog reports that kind, or no slice has that many devices.
        """
        assert count >= 1, f"{count} devices are attached"
        chip = chip_of_device_kind(device_kind)
        if chip.slices is None:
            return _hosts(chip, 1, count)
        for shape in chip.slices.shapes:
            if math.prod(_sizes(shape)) * chip.slices.devices_per_chip == count:
                return _of_shape(chip, shape)
        raise InputError(f"no slice of {chip.name} has {count} devices", hint=_known_slices(chip))


def fleet_reading(text: str) -> str:
    """Return in words how the chip in a fleet's text is read; "" if the text has the catalog's name.

    An alias such as "A100" means one of several chips: the others are listed.

    Raises:
        InputError: as `Fleet.parse`.
    """
    fleet = Fleet.parse(text)
    written, name = text.strip().lower(), fleet.chip.name.lower()
    if written.endswith(name) or written.startswith(f"{name}-"):
        return ""
    counted = _COUNTED.fullmatch(text.strip())
    family = counted[3].lower() if counted else ""
    others = [n for n in CATALOG if n != fleet.chip.name and family and n.lower().startswith(f"{family}-")]
    listed = f" (the others of that name: {', '.join(others)})" if others else ""
    return f"fleet {text.strip()!r} read as {fleet.name}{listed}"


def _fits_one_host(chip: Chip, count: int) -> bool:
    """Return True if a bare count of chips means one host, which may be partly filled."""
    return chip.platform == "cpu" or count <= chip.chips_per_host


def _example_of(chip: Chip) -> str:
    if chip.slices is not None:
        return f"write {chip.name}-{_number_of(chip, chip.slices.shapes[-1])}"
    return f"write {chip.chips_per_host}x{chip.name}"


def _hosts(chip: Chip, num_hosts: int, chips_per_host: int) -> Fleet:
    """Return a fleet of equal hosts. A domain spans hosts only where the chip's does (a rack of trays)."""
    spans = chip.chips_per_domain > chip.chips_per_host
    domain = min(chip.chips_per_domain, num_hosts * chips_per_host) if spans else chips_per_host
    return Fleet(chip=chip, num_hosts=num_hosts, chips_per_host=chips_per_host, chips_per_domain=domain)


def _counted(text: str, first: str, second: str | None, name: str) -> Fleet:
    chip = find_chip(name)
    if chip.slices is not None:
        raise InputError(
            f"fleet {text!r}: a TPU slice has a shape, not only a count", hint=_known_slices(chip)
        )
    counts = [int(first)] if second is None else [int(first), int(second)]
    if not 1 <= math.prod(counts) <= _LARGEST:
        raise InputError(f"fleet {text!r} has {math.prod(counts)} devices", hint=_example_of(chip))
    if len(counts) == 2:
        return _hosts(chip, counts[0], counts[1])
    count, usual = counts[0], chip.chips_per_host
    if _fits_one_host(chip, count):
        return _hosts(chip, 1, count)
    if count % usual:
        below, above = count - count % usual, count - count % usual + usual
        raise InputError(
            f"fleet {text!r}: {count} is no multiple of the {usual} {chip.name} of a host",
            hint=f"use {below}x{chip.name} or {above}x{chip.name}; or one host: 1x{count}x{chip.name}",
        )
    return _hosts(chip, count // usual, usual)


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.split("x")]


def _number_of(chip: Chip, shape: str) -> int:
    """Return the number in Google's name of a slice: its TensorCores, or its chips for v5e and v6e."""
    assert chip.slices is not None, f"{chip.name} has no slices"
    return math.prod(_sizes(shape)) * chip.slices.cores_per_chip_in_name


def _known_slices(chip: Chip) -> str:
    assert chip.slices is not None, f"{chip.name} has no slices"
    return "slices: " + ", ".join(f"{chip.name}-{_number_of(chip, shape)}" for shape in chip.slices.shapes)


def _slice(text: str, chip: Chip, number: str) -> Fleet:
    assert chip.slices is not None, f"{chip.name} has no slices"
    shapes = {str(_number_of(chip, shape)): shape for shape in chip.slices.shapes}
    if number not in shapes:
        near = min(shapes, key=lambda known: abs(math.log(int(known) / max(int(number), 1))))
        raise InputError(
            f"fleet {text!r}: Google has no such slice in one of its standard shapes",
            hint=f"the nearest is {chip.name}-{near}; {_known_slices(chip)}",
        )
    return _of_shape(chip, shapes[number])


def _of_shape(chip: Chip, shape: str) -> Fleet:
    assert chip.slices is not None, f"{chip.name} has no slices"
    num_devices = math.prod(_sizes(shape)) * chip.slices.devices_per_chip
    chips_per_host = min(chip.chips_per_host, num_devices)
    return Fleet(
        chip=chip,
        num_hosts=num_devices // chips_per_host,
        chips_per_host=chips_per_host,
        chips_per_domain=num_devices,
        topology=f"{chip.slices.topology_prefix}:{shape}",
    )
