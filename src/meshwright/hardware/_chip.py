"""Describe chips and links, and read them from the catalog.

A chip here is one JAX device: one GCD of an MI250X card, one core of a TPU v3 or v7x, one GPU of a rack.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from meshwright.errors import InputError, near_names, nearest_name
from meshwright.formats import FORMATS

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between devices. The rate is for one direction, per device (half a marketing figure)."""

    name: str
    bytes_per_second: float


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiprocessor:
    """The limits of one streaming multiprocessor, which are the same for all chips of a compute capability.

    `fpus`: FP32 units. `shared_memory_bytes`: those of the multiprocessor. From capability 8.0 on the driver
    reserves 1 KiB of it, so that a block can have 1 KiB less. `accelerated_features`: XLA compiles for
    sm_90a, not sm_90.
    """

    fpus: int
    shared_memory_bytes: int
    shared_memory_per_block_bytes: int
    threads: int
    accelerated_features: bool


_KIB = 2**10
MULTIPROCESSORS: Mapping[str, Multiprocessor] = MappingProxyType(
    {
        capability: Multiprocessor(
            fpus=fpus,
            shared_memory_bytes=shared_kib * _KIB,
            shared_memory_per_block_bytes=(shared_kib - reserved_kib) * _KIB,
            threads=threads,
            accelerated_features=accelerated,
        )
        for capability, fpus, shared_kib, reserved_kib, threads, accelerated in (
            ("7.0", 64, 96, 0, 2048, False),
            ("7.5", 64, 64, 0, 1024, False),
            ("8.0", 64, 164, 1, 2048, False),
            ("8.6", 128, 100, 1, 1536, False),
            ("8.9", 128, 100, 1, 1536, False),
            ("9.0", 128, 228, 1, 2048, True),
            ("10.0", 128, 228, 1, 2048, True),
            ("10.3", 128, 228, 1, 2048, True),
            ("12.0", 128, 100, 1, 1536, False),
        )
    }
)
"""By compute capability. Source: CUDA C++ programming guide, "Technical specifications per compute
capability" and, for FP32 units, its table of arithmetic throughput; accelerated features: XLA's specs."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One JAX device, not one card. Every rate is a dense peak.

    `device_kinds`: exact `jax.Device.device_kind` values; empty if none was ever seen.
    `peak_flops_per_second`: by format name. A missing format is unknown or not native.
    `memory_bytes`: the total that the device's runtime reports; None where it is not known.
    `inside`, `between`, `host`: the links inside the fast domain, between domains, and to host memory.
    `chips_per_host`, `chips_per_domain`: JAX devices of a usual host and of a full fast domain.
    `uncertain_fields`: fields and formats about which sources disagree, or which vary between hosts.
    `sources`: by group of figures (rates, memory, device_kinds, between, target, slices).
    `target`: None where its figures are not known, or where no compiler is available without the chip.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    platform: str  # cuda | rocm | tpu | cpu
    device_kinds: tuple[str, ...]
    peak_flops_per_second: dict[str, float] = field(hash=False)
    memory_bytes: int | None
    memory_bytes_per_second: float | None
    num_sms: int | None
    inside: Link | None
    between: Link | None
    host: Link | None
    chips_per_host: int
    chips_per_domain: int
    watts: float | None
    confidence: str  # high | medium | low
    uncertain_fields: tuple[str, ...]
    sources: dict[str, str] = field(hash=False)
    target: Target | None
    slices: Slices | None


def _link(fields: dict[str, Any] | None) -> Link | None:
    return None if fields is None else Link(**fields)


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
    each = MULTIPROCESSORS[compute_capability]
    major, minor = compute_capability.split(".")
    return Target(
        compute_capability=(int(major), int(minor)),
        rendered=True,
        accelerated_features=each.accelerated_features,
        core_count=num_sms,
        fpus_per_core=each.fpus,
        clock_ghz=clock_ghz,
        memory_bytes_per_second=int(memory_bytes_per_second),
        l2_bytes=l2_bytes,
        shared_memory_per_core_bytes=each.shared_memory_bytes,
        shared_memory_per_block_optin_bytes=each.shared_memory_per_block_bytes,
        threads_per_core_limit=each.threads,
        nvlink_active_links=nvlink_active_links,
    )


def _target(fields: dict[str, Any] | None, chip: dict[str, Any]) -> Target | None:
    """Read a target: either all of XLA's own spec, or four figures and two from the chip's table."""
    if fields is None:
        return None
    if "core_count" not in fields:
        known = {name: chip[name] for name in ("num_sms", "memory_bytes_per_second")}
        return rendered_target(**fields, **known)
    major, minor = fields.pop("compute_capability").split(".")
    return Target(compute_capability=(int(major), int(minor)), rendered=False, **fields)


def _slices(fields: dict[str, Any] | None) -> Slices | None:
    return None if fields is None else Slices(shapes=tuple(fields.pop("shapes")), **fields)


def _chip(name: str, fields: dict[str, Any]) -> Chip:
    """Read one table of catalog.toml as a record. A key that the record lacks is a bug in the catalog."""
    memory_gib = fields.pop("memory_gib", None)
    target = _target(fields.pop("target", None), fields)
    chip = Chip(
        name=name,
        aliases=tuple(fields.pop("aliases", ())),
        device_kinds=tuple(fields.pop("device_kinds")),
        peak_flops_per_second=fields.pop("peak_flops_per_second"),
        memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
        memory_bytes_per_second=fields.pop("memory_bytes_per_second", None),
        num_sms=fields.pop("num_sms", None),
        inside=_link(fields.pop("inside", None)),
        between=_link(fields.pop("between", None)),
        host=_link(fields.pop("host", None)),
        watts=fields.pop("watts", None),
        uncertain_fields=tuple(fields.pop("uncertain_fields")),
        sources=fields.pop("sources"),
        target=target,
        slices=_slices(fields.pop("slices", None)),
        **fields,
    )
    strangers = set(chip.peak_flops_per_second) - set(FORMATS)
    assert not strangers, f"catalog.toml: {name} has peaks of unknown formats {strangers}"
    return chip


def _read_catalog() -> Mapping[str, Chip]:
    text = files("meshwright.hardware").joinpath("catalog.toml").read_text(encoding="utf-8")
    return MappingProxyType({name: _chip(name, fields) for name, fields in tomllib.loads(text).items()})


CATALOG: Mapping[str, Chip] = _read_catalog()
"""Every chip by its canonical name."""


_BRANDS = {"nvidia", "geforce", "tesla", "amd", "instinct", "google", "cloud"}


def _plain(name: str) -> str:
    """Return a chip's name in normal form: "NVIDIA GeForce RTX 4090" becomes "rtx4090".

    Case, spaces, hyphens and the maker's brands are removed, and a final "G" becomes "GB".
    """
    words = re.split(r"[\s_-]+", name.lower())
    return re.sub(r"(\d)g$", r"\1gb", "".join(word for word in words if word not in _BRANDS))


def _index(keys_of: Mapping[str, Iterable[str]]) -> dict[str, Chip]:
    index: dict[str, Chip] = {}
    for name, keys in keys_of.items():
        for key in keys:
            assert key not in index, f"catalog.toml: {key!r} names both {name} and {index[key].name}"
            index[key] = CATALOG[name]
    return index


_BY_NAME = _index(
    {c.name: {_plain(n) for n in (c.name, *c.aliases, *c.device_kinds)} for c in CATALOG.values()}
)
_BY_KIND = _index({c.name: c.device_kinds for c in CATALOG.values()})


def chip_named(name: str) -> Chip | None:
    """Return the chip with that name, alias or device kind, or None.

    Case, spaces, hyphens and the maker's brand are ignored: "RTX4090", "GeForce RTX 4090" and "4090" are the
    same chip.
    """
    return _BY_NAME.get(_plain(name))


def find_chip(name: str) -> Chip:
    """Return the chip that `chip_named` finds.

    Raises:
        InputError: no chip has that name.
    """
    chip = chip_named(name)
    if chip is None:
        known = [n for c in CATALOG.values() for n in (c.name, *c.aliases)]
        hint = nearest_name(name, near_names(name, known) or CATALOG)
        raise InputError(f"unknown chip {name!r}", hint=hint)
    return chip


def chip_of_device_kind(device_kind: str) -> Chip:
    """Return the chip whose runtime reports exactly this `jax.Device.device_kind`.

    Raises:
        InputError: no chip of the catalog reports it.
    """
    chip = _BY_KIND.get(device_kind)
    if chip is None:
        raise InputError(
            f"no chip of the catalog reports the device kind {device_kind!r}",
            hint=nearest_name(device_kind, _BY_KIND),
        )
    return chip


def memory_fraction(chip: Chip, allowance_bytes: int) -> float:
    """Return the share of the chip's memory that is left for JAX's pool, rounded down to three decimals.

    The pool is all of `memory_bytes` except `allowance_bytes`, which the context, libraries and NCCL take.
    `train` sets the share as XLA_PYTHON_CLIENT_MEM_FRACTION, and `target_config` schedules for it.

    Raises:
        InputError: the chip's memory is not known, or the allowance takes all of it.
    """
    if chip.memory_bytes is None:
        raise InputError(
            f"the catalog does not know how much memory {chip.name} has",
            hint="choose a chip with a known size",
        )
    if not 0 <= allowance_bytes < chip.memory_bytes:
        raise InputError(
            f"{allowance_bytes} bytes beside the pool do not fit into {chip.memory_bytes} of {chip.name}",
            hint=f"allow at least 0 and less than {chip.memory_bytes} bytes",
        )
    return (chip.memory_bytes - allowance_bytes) * 1000 // chip.memory_bytes / 1000
