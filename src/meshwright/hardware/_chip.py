"""Describe chips and links, and read them from the catalog.

A chip here is one JAX device: one GCD of an MI250X card, one core of a TPU v3 or v7x, one GPU of a rack.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from meshwright.errors import InputError, near_names, nearest_name
from meshwright.formats import FORMATS
from meshwright.units import format_bytes

GIB = 2**30
KERNEL_WIDTH = 16
"""A factor that each side of a matrix needs for the kernels of experts, which a matrix unit multiplies."""
KERNEL_CAPABILITY = (8, 0)
"""The first compute capability, Ampere's, for which Triton compiles the kernels of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between devices. The rates are for one direction, per device (half a marketing figure).

    `bytes_per_second`: the rate of a ring over all devices of a domain.
    `by_group`: the lower rates of smaller groups, where a few of a device's links join it to each of its
    neighbours, without a switch: by the number of devices in the domain, then by the number of members. A
    size between two stated ones has the rate of the smaller one. The members are taken as neighbours, such as
    devices 0 to 3: for members far apart, and for exchanges that are no rings, the rate may be too high.
    """

    name: str
    bytes_per_second: float
    by_group: Mapping[int, Mapping[int, float]] = field(
        default_factory=dict[int, Mapping[int, float]], hash=False
    )

    @property
    def through_host(self) -> bool:
        """Return whether devices lack peer-to-peer transfers and so send through the host's memory."""
        return self.name.endswith("(no P2P)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The figures that XLA's compiler needs about an absent NVIDIA GPU. Rates are per second of one device.

    `rendered`: False where XLA has its own spec for the chip, True where the figures are published ones. The
    chip's `sources["target"]` names the source of each figure.
    """

    compute_capability: tuple[int, int]
    rendered: bool
    accelerated_features: bool
    core_count: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes_per_second: int
    l2_bytes: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_optin_bytes: int
    threads_per_core_limit: int
    nvlink_active_links: int

    @property
    def origin(self) -> str:
        """The source of the figures, as `weigh --json` prints it."""
        return "published figures" if self.rendered else "XLA's spec"


# Limits of one multiprocessor, by compute capability: FP32 units; KiB of shared memory; KiB of them that the
# driver keeps from a block; threads; whether XLA uses the accelerated features (sm_90a, not sm_90).
# Source: CUDA C++ programming guide, "Technical specifications per compute capability" and its table of
# arithmetic throughput; XLA's specs for the accelerated features.
_MULTIPROCESSORS = {
    "7.0": (64, 96, 0, 2048, False),
    "7.5": (64, 64, 0, 1024, False),
    "8.0": (64, 164, 1, 2048, False),
    "8.6": (128, 100, 1, 1536, False),
    "8.9": (128, 100, 1, 1536, False),
    "9.0": (128, 228, 1, 2048, True),
    "10.0": (128, 228, 1, 2048, True),
    "10.3": (128, 228, 1, 2048, True),
    "12.0": (128, 100, 1, 1536, False),
}


def rendered_target(
    *,
    compute_capability: str,
    clock_ghz: float,
    l2_bytes: int,
    nvlink_active_links: int,
    num_sms: int,
    memory_bytes_per_second: float,
) -> Target:
    """Return the target of a chip for which XLA has no spec, from published figures.

    The compute capability, such as "8.9", determines the limits of a multiprocessor.
    """
    fpus, shared_kib, reserved_kib, threads, accelerated = _MULTIPROCESSORS[compute_capability]
    return Target(
        compute_capability=_version(compute_capability),
        rendered=True,
        accelerated_features=accelerated,
        core_count=num_sms,
        fpus_per_core=fpus,
        clock_ghz=clock_ghz,
        memory_bytes_per_second=int(memory_bytes_per_second),
        l2_bytes=l2_bytes,
        shared_memory_per_core_bytes=shared_kib * 1024,
        shared_memory_per_block_optin_bytes=(shared_kib - reserved_kib) * 1024,
        threads_per_core_limit=threads,
        nvlink_active_links=nvlink_active_links,
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The names and shapes of the slices of one TPU generation, as Google defines them.

    `cores_per_chip_in_name`: the count per chip in the number of "v5p-512": 2 (TensorCores) or 1.
    `devices_per_chip`: the number of JAX devices per chip. `chip_config_name`: the setting with which libtpu
    makes that many devices; "" for its default.
    """

    topology_prefix: str
    cores_per_chip_in_name: int
    devices_per_chip: int
    shapes: tuple[str, ...]
    chip_config_name: str = ""

    def num_devices(self, shape: str) -> int:
        """Return the number of JAX devices of a slice such as "4x8x8"."""
        return math.prod(map(int, shape.split("x"))) * self.devices_per_chip

    def number_in_name(self, shape: str) -> int:
        """Return the number in Google's name of a slice: its TensorCores, or its chips for v5e and v6e."""
        return math.prod(map(int, shape.split("x"))) * self.cores_per_chip_in_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One JAX device, not one card. Every rate is a dense peak.

    `device_kinds`: exact `jax.Device.device_kind` values; empty if none was ever seen.
    `peak_flops_per_second`: by format name. A missing format is unknown or not native.
    `memory_bytes`: the total that the device's runtime reports; None where it is not known.
    `inside`, `between`, `host`: the links inside the fast domain, between domains, and to host memory.
    `chips_per_host`, `chips_per_domain`: JAX devices of a usual host and of a full fast domain.
    `uncertain_fields`: fields and formats about which sources disagree, or which vary between hosts.
    `sources`: by group of figures (rates, memory, device_kinds, inside, between, target, slices).
    `target`: None where its figures are not known, or where no compiler is available without the chip.
    """

    name: str
    aliases: tuple[str, ...] = ()
    vendor: str
    platform: str  # cuda | rocm | tpu | cpu
    device_kinds: tuple[str, ...]
    peak_flops_per_second: dict[str, float] = field(hash=False)
    memory_bytes: int | None = None
    memory_bytes_per_second: float | None = None
    num_sms: int | None = None
    inside: Link | None = None
    between: Link | None = None
    host: Link | None = None
    chips_per_host: int
    chips_per_domain: int
    watts: float | None = None
    confidence: str  # high | medium | low
    uncertain_fields: tuple[str, ...]
    sources: dict[str, str] = field(hash=False)
    target: Target | None = None
    slices: Slices | None = None


def _target(fields: dict[str, Any], chip: dict[str, Any]) -> Target:
    """Read a target: either all of XLA's own spec, or four figures and two from the chip's table."""
    if "core_count" not in fields:
        known = {name: chip[name] for name in ("num_sms", "memory_bytes_per_second")}
        return rendered_target(**fields, **known)
    return Target(compute_capability=_version(fields.pop("compute_capability")), rendered=False, **fields)


def _chip(name: str, fields: dict[str, Any]) -> Chip:
    """Read one table of catalog.toml as a record. A key that the record lacks is a bug in the catalog."""
    strangers = set(fields["peak_flops_per_second"]) - set(FORMATS)
    assert not strangers, f"catalog.toml: {name} has peaks of unknown formats {strangers}"
    if "target" in fields:
        fields["target"] = _target(fields["target"], fields)
    if "slices" in fields:
        fields["slices"] = Slices(shapes=tuple(fields["slices"].pop("shapes")), **fields["slices"])
    if "memory_gib" in fields:
        fields["memory_bytes"] = int(fields.pop("memory_gib") * GIB)
    for end in {"inside", "between", "host"} & fields.keys():
        by_group = {
            int(domain): {int(members): rate for members, rate in rates.items()}
            for domain, rates in fields[end].pop("by_group", {}).items()
        }
        fields[end] = Link(**fields[end], by_group=by_group)
    for key in {"aliases", "device_kinds", "uncertain_fields"} & fields.keys():
        fields[key] = tuple(fields[key])
    return Chip(name=name, **fields)


_TEXT = files("meshwright.hardware").joinpath("catalog.toml").read_text(encoding="utf-8")
CATALOG: Mapping[str, Chip] = MappingProxyType(
    {name: _chip(name, fields) for name, fields in tomllib.loads(_TEXT).items()}
)
"""Every chip by its canonical name."""


_BRANDS = {"nvidia", "geforce", "tesla", "amd", "instinct", "google", "cloud"}


def _plain(name: str) -> str:
    """Return a chip's name in normal form: "NVIDIA GeForce RTX 4090" becomes "rtx4090".

    Case, spaces, hyphens and the maker's brands are removed, and a final "G" becomes "GB".
    """
    words = re.split(r"[\s_-]+", name.lower())
    return re.sub(r"(\d)g$", r"\1gb", "".join(word for word in words if word not in _BRANDS))


def _index(keys: Callable[[Chip], Iterable[str]]) -> dict[str, Chip]:
    index: dict[str, Chip] = {}
    for chip in CATALOG.values():
        for key in keys(chip):
            assert key not in index, f"catalog.toml: {key!r} names both {chip.name} and {index[key].name}"
            index[key] = chip
    return index


_BY_NAME = _index(lambda chip: {_plain(name) for name in (chip.name, *chip.aliases, *chip.device_kinds)})
_BY_KIND = _index(lambda chip: chip.device_kinds)


def chip_named(name: str) -> Chip | None:
    """Return the chip with that name, alias or device kind, or None.

    Case, spaces, hyphens and the maker's brand are ignored: "RTX4090", "GeForce RTX 4090" and "4090" are the
    same chip.
    """
    return _BY_NAME.get(_plain(name))


def find_chip(name: str) -> Chip:
    """Return the chip with that name, alias or device kind; case, hyphens and the maker's brand are ignored.

    Raises:
        InputError: no chip has that name.

    >>> find_chip("NVIDIA GeForce RTX 4090").name
    'RTX-4090'
    """
    chip = chip_named(name)
    if chip is None:
        known = [written for chip in CATALOG.values() for written in (chip.name, *chip.aliases)]
        hint = nearest_name(name, near_names(name, known) or CATALOG)
        raise InputError(f"unknown chip {name!r}", hint=hint)
    return chip


def chip_of_device_kind(device_kind: str) -> Chip:
    """Return the chip whose runtime reports exactly this `jax.Device.device_kind`.

    Raises:
        InputError: no chip of the catalog reports it.
    """
    if device_kind not in _BY_KIND:
        what = f"no chip of the catalog reports the device kind {device_kind!r}"
        raise InputError(what, hint=nearest_name(device_kind, _BY_KIND))
    return _BY_KIND[device_kind]


def known_memory_bytes(chip: Chip) -> int:
    """Return the memory of a chip.

    Raises:
        InputError: the catalog does not know it.
    """
    if chip.memory_bytes is None:
        what = f"the catalog does not know how much memory {chip.name} has"
        raise InputError(what, hint="choose a chip with a known size")
    return chip.memory_bytes


def memory_fraction(chip: Chip, allowance_bytes: int) -> float:
    """Return the share of the chip's memory that is left for JAX's pool, rounded down to three decimals.

    The pool is all of `memory_bytes` except `allowance_bytes`, which the context, libraries and NCCL take.
    `train` sets the share as XLA_PYTHON_CLIENT_MEM_FRACTION, and `target_config` schedules for it.

    Raises:
        InputError: the chip's memory is not known, or the allowance takes all of it.
    """
    memory_bytes = known_memory_bytes(chip)
    if not 0 <= allowance_bytes < memory_bytes:
        what = (
            f"{format_bytes(allowance_bytes)} beside the program, what is reserved included, do not fit into "
            f"the {format_bytes(memory_bytes)} of one {chip.name}"
        )
        raise InputError(what, hint="reserve less: libraries and NCCL need room too")
    return max((memory_bytes - allowance_bytes) * 1000 // memory_bytes, 1) / 1000  # no pool is empty
