"""Describe a fleet by its chip and hosts, parse the text that names one, and describe it to XLA's compilers.

Figures. The compiler receives those of a chip's `Target`: XLA's own spec where it has one, else published
figures, rendered by one rule for all. tests/hardware/test_target.py also renders the chips of XLA's specs by
that rule and compares them field by field, and one chip by its compiled program. These figures steer fusion,
tiling and the order of collectives. None of them changes how many bytes a device has: that is the pool.

Memory. XLA's GPU scheduler keeps a program within `GetSchedulerMemoryLimit`
(openxla/xla, xla/service/gpu/gpu_hlo_schedule.cc). This is a base limit, less the program's arguments and
results (aliased ones once), times `xla_gpu_memory_limit_slop_factor` (95) / 100. In a process that has the
device, the base limit is the pool's size (`HloModuleConfig::device_memory_size`, which the client sets to its
allocator's `bytes_limit`). In a process without the device, it is 80 % of the target's `device_memory_size`.
Seen on jax 0.10.2: a target of 10,000,000,000 bytes reports "exceeds the base limit (8000000000)". So
`device_memory_size` is rendered as the pool / 0.8, and both processes schedule alike.
Not covered: passes that read `device_memory_size` without the 80 % (the collective combiners'
suggested thresholds, xla/service/gpu/transforms/collectives/collective_combiner_utils.cc).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import InputError
from meshwright.units import exact_bytes, format_bytes, parse_bytes

from ._chip import (
    CATALOG,
    Chip,
    Link,
    Slices,
    Target,
    chip_named,
    chip_of_device_kind,
    find_chip,
    known_memory_bytes,
)

_EXAMPLES = "write it as 64xH100, 16x4xA100-80GB, v5p-512, 4xv5e-256 (four slices) or 8xCPU"
_COUNTED = re.compile(r"(\d{1,9})\s*[xX]\s*(?:(\d{1,9})\s*[xX]\s*)?(\S.*)", re.ASCII)
_SLICED = re.compile(r"(.+)-(\d{1,9})", re.ASCII)
MORE_RACKS = 1.25  # than the fewest, at most, for a fleet with as many devices of each
RESERVE = " reserve "  # between a fleet and the memory of each device that is left to another process
_LARGEST = 10**6  # devices: far above any machine, and within the range of the compiler's own integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet of `num_hosts` equal hosts with `chips_per_host` JAX devices each.

    `chips_per_domain`: the number of devices that `inside` joins: a host, a rack of trays, or a whole TPU
    slice. Of a rack, those that the fleet has in it (`_of_a_rack`). `between` joins the domains. `topology`:
    libtpu's name of one TPU slice ("v5p:4x8x8"), else "". A fleet of several slices has as many domains, and
    all slices have the same shape.
    `price_per_device_hour`: the price of one device in the user's currency; None if not set.
    `reserve_bytes`: the memory of each device that another process uses: a rollout engine, a display.
    """

    chip: Chip
    num_hosts: int
    chips_per_host: int
    chips_per_domain: int
    topology: str = ""
    price_per_device_hour: float | None = None
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        counts = self.num_hosts, self.chips_per_host, self.chips_per_domain
        assert min(counts) >= 1, f"a fleet of {counts} hosts, chips per host and chips per domain"
        assert self.chips_per_domain <= self.num_devices, f"a domain of {self.chips_per_domain} devices"

    @property
    def num_devices(self) -> int:
        """The number of JAX devices in the whole fleet."""
        return self.num_hosts * self.chips_per_host

    @property
    def domain(self) -> str:
        """Kind of the fast domain: host | rack | slice."""
        if self.chip.slices is not None:
            return "slice"
        return "rack" if self.chips_per_domain > self.chips_per_host else "host"

    @property
    def num_domains(self) -> int:
        """The number of fast domains: hosts, racks or TPU slices. A partly filled last one counts."""
        return -(-self.num_devices // self.chips_per_domain)

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
        reserved = f"{RESERVE}{exact_bytes(self.reserve_bytes)}" if self.reserve_bytes else ""
        return f"{self._devices_name}{reserved}"

    @property
    def options(self) -> str:
        """The options of a command that name this fleet, except for its price."""
        reserve = f" --reserve {exact_bytes(self.reserve_bytes)}" if self.reserve_bytes else ""
        return f"--on {self._devices_name}{reserve}"

    @property
    def _devices_name(self) -> str:
        chip = self.chip
        if chip.slices is not None:
            one = f"{chip.name}-{chip.slices.number_in_name(self.topology.partition(':')[2])}"
            return one if self.num_domains == 1 else f"{self.num_domains}x{one}"
        one_host = self.num_hosts == 1 and _fits_one_host(chip, self.chips_per_host)
        usual_hosts = chip.platform != "cpu" and self.chips_per_host == chip.chips_per_host
        if self.domain == "rack" and self.chips_per_domain != _of_a_rack(chip, self.num_devices):
            return f"{self.num_domains}x{self.chips_per_domain}x{chip.name}"
        if one_host or usual_hosts:
            return f"{self.num_devices}x{chip.name}"
        return f"{self.num_hosts}x{self.chips_per_host}x{chip.name}"

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """Read "64xH100", "16x4xA100-80GB" (hosts x chips), "v5p-512" (as Google names it) or "8xCPU".

        "4xv5e-256" is four slices of that shape, joined by the network between them. "256xGB200" has 64
        devices of each of four racks (`_of_a_rack`); "2x72xGB200" is two whole racks, "3x48xGB200" three.
        "8xH100 reserve 20GiB" leaves so much of each device to another process.

        Raises:
            InputError: the text cannot be parsed, or no such chip, count or slice exists, or a device has no
                such memory.

        >>> Fleet.parse("64xH100").num_hosts
        8
        """
        text, reserve = split_reserve(text)
        if reserve:
            return cls.parse(text).reserving(reserve)
        if counted := _COUNTED.fullmatch(text):
            return _counted(text, *counted.groups())
        if chip := chip_named(text):
            raise InputError(f"fleet {text!r} does not say how many {chip.name}", hint=_example_of(chip))
        if sliced := _sliced(text):
            return _slice(text, *sliced)
        raise InputError(f"cannot read the fleet {text!r}", hint=_meant(text))

    def reserving(self, reserve: str | int) -> Fleet:
        """Return the fleet with memory of each device left to another process: "20GiB", or a number of bytes.

        Raises:
            InputError: the amount cannot be read, or is not less than a device's memory.
        """
        num_bytes = parse_bytes(reserve) if isinstance(reserve, str) else reserve
        if self.chip.platform == "cpu":
            what = f"{self.name} has no memory of its own of which {reserve} could be reserved"
            raise InputError(what, hint="name a fleet of GPUs or TPUs, as in 8xH100")
        whole = known_memory_bytes(self.chip)
        if not 0 <= num_bytes < whole:
            what = f"a reserve of {format_bytes(num_bytes)} does not fit into the {format_bytes(whole)} of"
            raise InputError(f"{what} one {self.chip.name}", hint="reserve less, for example 20GiB")
        return replace(self, reserve_bytes=num_bytes)

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
            if chip.slices.num_devices(shape) == count:
                return _of_shape(chip, chip.slices, shape)
        what = f"no slice of {chip.name} has {count} devices"
        raise InputError(what, hint=_known_slices(chip, chip.slices))


def split_reserve(text: object) -> tuple[str, str]:
    """Return the text of a fleet without its reserve, and the reserve: "8xH100 reserve 20GiB"; "" if none.

    Raises:
        InputError: it is no text.

    >>> split_reserve("local reserve 20GiB")
    ('local', '20GiB')
    """
    if not isinstance(text, str):  # from Python, where anything can be given
        what = f"{type(text).__name__} {text!r} is no fleet"
        raise InputError(what, hint='name it in text, on="8xH100"; `meshwright fleets` lists chips')
    fleet, _, reserve = text.strip().partition(RESERVE)
    return fleet.strip(), reserve.strip()


def fleet_reading(text: str) -> str:
    """Return in words how the chip in a fleet's text is read; "" if the text has the catalog's name.

    An alias such as "A100" means one of several chips: the others are listed.

    Raises:
        InputError: as `Fleet.parse`.
    """
    fleet = Fleet.parse(text)
    text = split_reserve(text)[0]
    written, name = text.lower(), fleet.chip.name.lower()
    if written.endswith(name) or re.match(rf"(\d+\s*x\s*)?{re.escape(name)}-", written):
        return ""
    counted = _COUNTED.fullmatch(text.strip())
    family = counted[3].lower() if counted else ""
    others = [n for n in CATALOG if n != fleet.chip.name and family and n.lower().startswith(f"{family}-")]
    listed = f" (the others of that name: {', '.join(others)})" if others else ""
    return f"fleet {text.strip()!r} read as {fleet.name}{listed}"


def _meant(text: str) -> str:
    """Return a hint for a fleet that cannot be read: its count and chip, if it has them in another order."""
    count_first = r"(?P<count>\d{1,9})\W*(?P<name>[A-Za-z].*)"
    name_first = r"(?P<name>.+?)\s*[xX*:]\s*(?P<count>\d{1,9})"
    for pattern in (count_first, name_first):
        if (found := re.fullmatch(pattern, text)) and (name := _canonical(found["name"].strip())):
            return f"did you mean {found['count']}x{name}? {_EXAMPLES}"
    return _EXAMPLES


def _canonical(name: str) -> str:
    """Return the catalog's name of a chip or of a TPU slice; "" if there is none."""
    if (chip := chip_named(name)) is not None:
        return chip.name
    sliced = _sliced(name)
    return f"{sliced[0].name}-{sliced[2]}" if sliced else ""


def _sliced(name: str) -> tuple[Chip, Slices, str] | None:
    """Return the chip of a name such as "v5e-256", its slices and the number; None for any other name."""
    found = _SLICED.fullmatch(name)
    chip = chip_named(found[1]) if found else None
    return (chip, chip.slices, found[2]) if found and chip and chip.slices else None


def _fits_one_host(chip: Chip, count: int) -> bool:
    """Return True if a bare count of chips means one host, which may be partly filled."""
    return chip.platform == "cpu" or count <= chip.chips_per_host


def _example_of(chip: Chip) -> str:
    if chip.slices is not None:
        return f"write {chip.name}-{chip.slices.number_in_name(chip.slices.shapes[-1])}"
    return f"write {chip.chips_per_host}x{chip.name}"


def _hosts(chip: Chip, num_hosts: int, chips_per_host: int) -> Fleet:
    """Return a fleet of equal hosts. A domain spans hosts only where the chip's does (a rack of trays)."""
    spans = chip.chips_per_domain > chip.chips_per_host
    domain = _of_a_rack(chip, num_hosts * chips_per_host) if spans else chips_per_host
    return Fleet(chip=chip, num_hosts=num_hosts, chips_per_host=chips_per_host, chips_per_domain=domain)


def _of_a_rack(chip: Chip, count: int) -> int:
    """Return how many devices of each rack a fleet of `count` has, if nothing else is said.

    All of them if they come out even. Otherwise as many trays of each rack, so that no group of devices lies
    unevenly over racks, unless that needs more than a quarter more racks.

    >>> [_of_a_rack(CATALOG["GB200"], count) for count in (8, 72, 144, 256, 1024, 100)]
    [8, 72, 72, 64, 64, 72]
    """
    most, tray = chip.chips_per_domain, chip.chips_per_host
    if count <= most or count % most == 0:
        return min(count, most)
    even = max((size for size in range(tray, most + 1, tray) if count % size == 0), default=most)
    return even if count / even <= MORE_RACKS * math.ceil(count / most) else most


def _racks(text: str, chip: Chip, num_racks: int, each: int) -> Fleet:
    """Return the fleet of a text such as "4x64xGB200"."""
    tray, most = chip.chips_per_host, chip.chips_per_domain
    if each > most or each % tray:
        below = min(each, most) // tray * tray
        raise InputError(
            f"fleet {text!r}: a rack of {chip.name} has {most} devices in trays of {tray}",
            hint=f"write {num_racks}x{below}x{chip.name} for {below} of each of {num_racks} racks",
        )
    return Fleet(chip=chip, num_hosts=num_racks * each // tray, chips_per_host=tray, chips_per_domain=each)


def _counted(text: str, first: str, second: str | None, name: str) -> Fleet:
    if sliced := _sliced(name):
        return _several_slices(text, first, second, *sliced)
    chip = find_chip(name)
    if chip.slices is not None:
        what = f"fleet {text!r}: a TPU slice has a shape, and a count of chips does not determine it"
        raise InputError(what, hint=_known_slices(chip, chip.slices))
    counts = [int(first)] if second is None else [int(first), int(second)]
    if not 1 <= math.prod(counts) <= _LARGEST:
        raise InputError(f"fleet {text!r} has {math.prod(counts)} devices", hint=_example_of(chip))
    if len(counts) == 2 and chip.chips_per_host < counts[1] and chip.chips_per_domain > chip.chips_per_host:
        return _racks(text, chip, *counts)
    if len(counts) == 2:
        return _hosts(chip, *counts)
    count, usual = counts[0], chip.chips_per_host
    if _fits_one_host(chip, count):
        return _hosts(chip, 1, count)
    if count % usual:
        below = count - count % usual
        raise InputError(
            f"fleet {text!r}: {count} is not a multiple of {usual}, the {chip.name} of one host",
            hint=f"use {below}x{chip.name}, {below + usual}x{chip.name}, or one host: 1x{count}x{chip.name}",
        )
    return _hosts(chip, count // usual, usual)


def _known_slices(chip: Chip, slices: Slices) -> str:
    names = [f"{chip.name}-{slices.number_in_name(shape)}" for shape in slices.shapes]
    several = "" if chip.between is None else f"; several of them: 2x{names[-1]}"
    return f"slices: {', '.join(names)}{several}"


def _slice(text: str, chip: Chip, slices: Slices, number: str, count: int = 1) -> Fleet:
    shapes = {slices.number_in_name(shape): shape for shape in slices.shapes}
    asked = int(number)
    if asked in shapes:
        return _of_shape(chip, slices, shapes[asked], count)
    prefix = "" if count == 1 else f"{count}x"
    near = min(shapes, key=lambda known: abs(math.log(known / max(asked, 1))))
    hint = f"the nearest is {prefix}{chip.name}-{near}"
    whole = max((known for known in shapes if asked % known == 0), default=0)
    if asked > max(shapes) and whole and chip.between is not None:
        hint = f"as several slices: {count * asked // whole}x{chip.name}-{whole}"
    what = f"fleet {text!r}: Google has no such slice in one of its standard shapes"
    raise InputError(what, hint=f"{hint}; {_known_slices(chip, slices)}")


def _several_slices(
    text: str, first: str, second: str | None, chip: Chip, slices: Slices, number: str
) -> Fleet:
    """Return the fleet of a text such as "4xv5e-256"."""
    name, count = f"{chip.name}-{number}", int(first)
    if second is not None:
        what = f"fleet {text!r}: several TPU slices are one count and one slice, which says its own hosts"
        raise InputError(what, hint=f"write {count * int(second)}x{name} for so many slices")
    if chip.between is None and count != 1:
        what = f"fleet {text!r}: Google joins several slices from v4 on; no link joins those of {chip.name}"
        raise InputError(what, hint=_known_slices(chip, slices))
    one = _slice(text, chip, slices, number, count=max(count, 1))
    if not 1 <= count * one.chips_per_domain <= _LARGEST:
        what = f"fleet {text!r} has {count * one.chips_per_domain} devices"
        raise InputError(what, hint=f"write {name} for one slice, or 4x{name} for four")
    return one


def _of_shape(chip: Chip, slices: Slices, shape: str, count: int = 1) -> Fleet:
    num_devices = slices.num_devices(shape)
    chips_per_host = min(chip.chips_per_host, num_devices)
    return Fleet(
        chip=chip,
        num_hosts=count * (num_devices // chips_per_host),
        chips_per_host=chips_per_host,
        chips_per_domain=num_devices,
        topology=f"{slices.topology_prefix}:{shape}",
    )


DEFAULT_MEMORY_FRACTION = 0.75
"""JAX's own share of a GPU's memory for its pool (docs.jax.dev, "GPU memory allocation")."""

OLDEST_COMPUTE_CAPABILITY = (7, 5)
"""CUDA 13 dropped what is older (CUDA Toolkit 13.0 release notes)."""

SIMULATE_INSTEAD = (
    "add --simulate to let the CPU's compiler stand in, every figure marked; `meshwright fleets` lists the "
    "chips that compile"
)

# The same for every compute capability from 7.0 on (CUDA C++ programming guide, "Compute Capabilities").
_COMMON = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
    "thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64"
)

DNN_VERSION = (9, 10, 0)  # of cuDNN: the oldest that the nvidia extra installs


def why_simulated(chip: Chip) -> str:
    """Return the reason why no compiler can compile for this chip without one present; "" where one can.

    Packages that are missing on this machine do not count: `meshwright doctor` names those.

    >>> why_simulated(CATALOG["H100"])
    ''
    """
    if chip.platform in ("tpu", "cpu"):
        return ""
    if chip.platform != "cuda":
        return "JAX's compiler for AMD needs an installed ROCm, which its packages do not bring"
    if chip.target is None:
        return "neither its number of multiprocessors nor the size of its memory is published"
    if chip.target.compute_capability < OLDEST_COMPUTE_CAPABILITY:
        major, minor = chip.target.compute_capability
        oldest = ".".join(map(str, OLDEST_COMPUTE_CAPABILITY))
        return f"it has compute capability {major}.{minor}, and CUDA 13's compiler (ptxas) starts at {oldest}"
    return ""


def check_compilable(chip: Chip) -> None:
    """Raise if no compiler can compile for this chip without one present.

    Raises:
        InputError: `why_simulated` returns a reason, which is in the message.
    """
    if why := why_simulated(chip):
        raise InputError(f"cannot compile for {chip.name} without one: {why}", hint=SIMULATE_INSTEAD)


def pool_bytes(fleet: Fleet, memory_fraction: float = DEFAULT_MEMORY_FRACTION) -> int:
    """Return the bytes of one device's pool: a share of the memory that its runtime reports, as in JAX.

    Raises:
        InputError: the chip's memory is not known, or the fraction is not in (0, 1].
    """
    memory_bytes = known_memory_bytes(fleet.chip)
    if not 0 < memory_fraction <= 1:
        what = f"the memory fraction {memory_fraction} is not above 0 and at most 1"
        raise InputError(what, hint="use 0.75, or up to 1")
    return int(memory_bytes * memory_fraction)


def target_config(fleet: Fleet, memory_fraction: float = DEFAULT_MEMORY_FRACTION) -> str:
    """Return the text of a `GpuTargetConfigProto` for the fleet's chip, with that share of its memory.

    Raises:
        InputError: the chip is not an NVIDIA GPU, or no compiler supports it (`why_simulated`).
    """
    chip, target = fleet.chip, fleet.chip.target
    check_compilable(chip)
    if target is None:
        what = f"{chip.name} has no target for the GPU compiler: it is a {chip.platform} device"
        raise InputError(what, hint="choose an NVIDIA GPU: `meshwright fleets` lists them")
    major, minor = target.compute_capability
    limit_bytes = pool_bytes(fleet, memory_fraction)
    device_memory_bytes = -(-limit_bytes * 100 // 80)  # rounded up, so that 80 % of it is no byte short
    features = "ACCELERATED_FEATURES" if target.accelerated_features else "NONE"
    kind = chip.device_kinds[0] if chip.device_kinds else chip.name
    # The versions are those of the compiler that the nvidia extra installs, not of a machine's driver.
    return (
        f"gpu_device_info {{ {_COMMON} "
        f"shared_memory_per_core: {target.shared_memory_per_core_bytes} "
        f"shared_memory_per_block_optin: {target.shared_memory_per_block_optin_bytes} "
        f"threads_per_core_limit: {target.threads_per_core_limit} "
        f"core_count: {target.core_count} fpus_per_core: {target.fpus_per_core} "
        f"memory_bandwidth: {target.memory_bytes_per_second} l2_cache_size: {target.l2_bytes} "
        f"clock_rate_ghz: {target.clock_ghz} device_memory_size: {device_memory_bytes} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }} "
        f'name: "{kind}" driver_version: "13.0.0" runtime_version: "13.0.0" '
        f'compile_time_toolkit_version: "13.0.0" dnn_version: "{".".join(map(str, DNN_VERSION))}" '
        f"device_interconnect_info {{ active_links: {target.nvlink_active_links} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ {_version_of(DNN_VERSION)} }} '
        f'device_description_str: "{kind}"'
    )


def _version_of(numbers: tuple[int, int, int]) -> str:
    return " ".join(
        f"{part}: {number}" for part, number in zip(("major", "minor", "patch"), numbers, strict=True)
    )


def gpu_description(target: Target) -> str:
    """Return the words in which XLA describes the target, and by which it finds autotuning results.

    They are those of XLA's `DeviceDescriptionToCacheKey`.
    """
    major, minor = target.compute_capability
    return (
        f"CUDA: {major}.{minor}, Cores: {target.core_count}, GPU clock: {target.clock_ghz:g} GHz, "
        f"Memory bandwidth: {round(target.memory_bytes_per_second / 1e9)} GB/s, "
        f"L2 cache: {target.l2_bytes / 2**20:g} MB, DNN version: {'.'.join(map(str, DNN_VERSION))}"
    )


def topology_arguments(fleet: Fleet, memory_fraction: float = DEFAULT_MEMORY_FRACTION) -> dict[str, Any]:
    """Return the keyword arguments of `jax.experimental.topologies.get_topology_desc` for an absent fleet.

    Args:
        fleet: a fleet of NVIDIA GPUs or TPUs. libtpu lists the devices of several slices one slice after
            another.
        memory_fraction: for GPUs only; a TPU's compiler knows its memory.

    Raises:
        InputError: no compiler supports the fleet's platform without a device.
    """
    slices = fleet.chip.slices
    if slices is None:
        return {
            "platform": "cuda",
            "topology_name": "",
            "target_config": target_config(fleet, memory_fraction),
            "topology": f"1x{fleet.num_hosts}x{fleet.chips_per_host}",  # partitions, hosts, devices per host
        }
    arguments: dict[str, Any] = {"platform": "tpu", "topology_name": fleet.topology}
    if slices.chip_config_name:
        arguments["chip_config_name"] = slices.chip_config_name
    if fleet.chips_per_domain // slices.devices_per_chip == 1:
        arguments["chips_per_host_bounds"] = (1, 1, 1)  # libtpu's default host has four chips
    if fleet.num_domains > 1:
        arguments["num_slices"] = fleet.num_domains
    return arguments
