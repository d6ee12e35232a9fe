"""Find the devices of a run, and divide them among its processes.

The devices are attached accelerators, or CPU devices simulated in this process. With several processes, each
takes a share of its host's devices, and all shares together form the fleet.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from meshwright.config import Layout, near_divisors, or_list
from meshwright.errors import InputError, MeshwrightError
from meshwright.extras import how_to_install
from meshwright.hardware import Fleet, chip_of_device_kind, memory_fraction
from meshwright.ledger import allowance
from meshwright.plugins import has_nvidia_gpu
from meshwright.subprocesses import own_python
from meshwright.trainer.launch import processes_of_this_run

FRACTION = "XLA_CLIENT_MEM_FRACTION"
DEPRECATED_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # jax refuses to start if both are set
LOCAL_IDS = "JAX_LOCAL_DEVICE_IDS"  # jax reads it; set only by the user
LIBRARIES = "running on a GPU needs NVIDIA's libraries, which weighing does not"
LAST_LINES = 8
Devices = list[Any]  # of jax.Device, which type checkers treat as a variable
_LIST_DEVICES = "import jax, json; print(json.dumps([[d.platform, d.device_kind] for d in jax.devices()]))"


def local_fleet() -> Fleet:
    """Return the fleet attached to this machine: its accelerators as one host, or else one CPU device.

    With several processes, return the fleet attached to all their hosts, or else one CPU device per process.
    The hosts must be alike.

    A subprocess lists the devices: listing them fixes the share of GPU memory that jax takes, and the right
    share depends on which GPU is found.

    Raises:
        InputError: no chip of the catalog reports the attached kind, the hosts differ, or jax cannot use the
            NVIDIA GPU of this machine and nobody chose the CPU.
        MeshwrightError: jax could not list the devices; the message ends with jax's last lines of output.
    """
    platform, kind, count = _visible()
    peers = processes_of_this_run()
    if platform == "cpu":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if has_nvidia_gpu() and not hidden and not os.environ.get("JAX_PLATFORMS"):
            raise InputError(
                "JAX cannot use the NVIDIA GPU of this machine, so that only the CPU would be trained on",
                hint=f"{LIBRARIES}: {how_to_install('cuda')}; or name the CPU: --on 1xCPU",
            )
        return Fleet.parse(f"{peers.count}xCPU")
    if peers.count == 1:
        return Fleet.local(kind, count)
    return fleet_of_hosts(peers.gathered("devices", [socket.gethostname(), kind, count]))


def fleet_of_hosts(visible: Sequence[Sequence[str | int]]) -> Fleet:
    """Return the fleet that the hosts of several processes form; raise if the hosts differ.

    Args:
        visible: for each process, its host's name, the kind of the devices that it sees, and their number.
    """
    num_processes = Counter(str(host) for host, _, _ in visible)
    by_host: dict[str, tuple[str, int]] = {}
    for host, kind, count in visible:
        here = num_processes[str(host)]
        by_host[str(host)] = str(kind), int(count) * (here if int(count) < here else 1)
    if len(set(by_host.values())) > 1:
        words = "; ".join(f"{host} has {count} x {kind}" for host, (kind, count) in sorted(by_host.items()))
        hint = "ask the scheduler for hosts of one kind"
        raise InputError(f"the hosts of this run differ: {words}", hint=hint)
    kind, count = next(iter(by_host.values()))
    chip = chip_of_device_kind(kind)
    if len(by_host) == 1 or chip.slices is not None:
        return Fleet.local(kind, count * len(by_host))
    return Fleet.parse(f"{len(by_host)}x{count}x{chip.name}")


def devices_of(fleet: Fleet, layout: Layout) -> Devices:
    """Return the fleet's devices in this process, and configure jax for them.

    jax must not have created its devices yet, or must have created them as this run needs them.

    Raises:
        InputError: the attached devices are of another kind or too few; with several processes, also if they
            are too many, or if simulated devices cannot be divided evenly.
        MeshwrightError: jax has already created its devices, and not as this run needs them.
    """
    if fleet.chip.platform == "cpu":
        return _simulated(fleet)
    if fleet.chip.platform == "cuda":
        _take_share()
        if _has_devices():
            _attached(fleet, jax.devices())  # missing devices are reported first
        _set_memory_fraction(fleet, layout)
    return _attached(fleet, jax.devices())


def share_of(num_visible: int, place: int, num_processes: int) -> list[int]:
    """Return the devices of local process `place`, as indices into the devices that it sees.

    A scheduler may show each process only its own devices. Then fewer devices are visible than the host has
    processes, and all visible devices belong to the process.
    """
    if num_visible < num_processes:
        return list(range(num_visible))
    if num_visible % num_processes:
        raise InputError(
            f"{num_processes} processes cannot share the {num_visible} devices of a host evenly",
            hint=f"start {or_list(near_divisors(num_visible, num_processes))} processes on each host",
        )
    count = num_visible // num_processes
    return list(range(place * count, (place + 1) * count))


def _visible() -> tuple[str, str, int]:
    """Return the platform and kind of the first visible device, and how many devices have that kind.

    A process that has created accelerators lists those: it may hold so much of a GPU's memory that no other
    process can start there.
    """
    if processes_of_this_run().count == 1 and _has_devices() and jax.devices()[0].platform != "cpu":
        kinds = [device.device_kind for device in jax.devices()]
        return jax.devices()[0].platform, kinds[0], kinds.count(kinds[0])
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(own_python("-c", _LIST_DEVICES), env=environment, capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip().splitlines()[-LAST_LINES:]
        raise MeshwrightError(
            "jax could not list this machine's devices. Its last words:\n    " + "\n    ".join(words),
            hint="name the fleet, as in --on 1xCPU; `meshwright doctor` shows what is installed",
        )
    devices: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    platform, kind = devices[0]
    return platform, kind, [device_kind for _, device_kind in devices].count(kind)


def _has_devices() -> bool:
    """Return whether jax has created its devices, which fixes their number and memory."""
    configured = _num_cpu_devices()
    try:
        jax.config.update("jax_num_cpu_devices", configured + 1)  # jax refuses this once its devices exist
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", configured)
    return False


def _num_cpu_devices() -> int:
    """Return the configured number of CPU devices; -1 if none was configured."""
    return getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009  no type checker knows the attribute


def _simulated(fleet: Fleet) -> Devices:
    """Return the first simulated CPU devices, and create them if jax has no devices yet."""
    wanted, peers = fleet.num_devices, processes_of_this_run()
    if wanted % peers.count:
        raise InputError(
            f"{peers.count} processes cannot share the {wanted} devices of {fleet.name} evenly",
            hint=f"start {or_list(near_divisors(wanted, peers.count))} processes, or simulate a multiple of "
            f"{peers.count} devices",
        )
    if not _has_devices():
        own = wanted // peers.count if peers.count > 1 else max(wanted, _num_cpu_devices())
        jax.config.update("jax_num_cpu_devices", own)
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices("cpu")
    if len(devices) < wanted:
        raise MeshwrightError(
            f"{fleet.name} needs {wanted} simulated devices, and jax has made {len(devices)} in this process",
            hint=f"use a new process (`meshwright train` does), or set jax_num_cpu_devices to {wanted} first",
        )
    return devices[:wanted]


def _set_memory_fraction(fleet: Fleet, layout: Layout) -> None:
    """Set the share of GPU memory that jax's pool takes, for which the weighed program was scheduled."""
    fraction = str(memory_fraction(fleet.chip, sum(allowance(fleet, layout.axes).values())))
    set_before = os.environ.get(FRACTION) or os.environ.get(DEPRECATED_FRACTION)
    if set_before != fraction and _has_devices():
        raise MeshwrightError(
            f"jax has taken its share of the GPU's memory already, and this run needs {fraction} of it",
            hint=f"use a new process (`meshwright train` does), or set {FRACTION}={fraction} first",
        )
    os.environ.pop(DEPRECATED_FRACTION, None)
    os.environ[FRACTION] = fraction


def _attached(fleet: Fleet, devices: Devices) -> Devices:
    """Return the fleet's devices among the attached ones."""
    of_kind = [device for device in devices if device.device_kind in fleet.chip.device_kinds]
    if len(of_kind) < fleet.num_devices:
        counts = Counter(device.device_kind for device in devices)
        attached = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
        hint = f"use --on local for attached devices, or simulate: --on {min(fleet.num_devices, 8)}xCPU"
        if fleet.chip.platform == "cuda" and has_nvidia_gpu() and not of_kind:
            hint = f"if the GPU is here, {LIBRARIES}: {how_to_install('cuda')}. Else {hint}"
        raise InputError(f"{fleet.name} is not attached: this machine has {attached}", hint=hint)
    peers = processes_of_this_run()
    if peers.count > 1 and len(of_kind) != fleet.num_devices:
        raise InputError(
            f"{peers.count} processes have {len(of_kind)} devices, and {fleet.name} has {fleet.num_devices}",
            hint="train on all of them with --on local, or start processes on fewer hosts",
        )
    return _slice_by_slice(fleet, of_kind)[: fleet.num_devices]


def _slice_by_slice(fleet: Fleet, devices: Devices) -> Devices:
    """Return devices of several TPU slices one slice after another, as the step was weighed.

    Raises:
        InputError: the attached slices are not those of the fleet.
    """
    if fleet.domain != "slice" or fleet.num_domains == 1:
        return devices
    by_slice = Counter(device.slice_index for device in devices)
    if set(by_slice.values()) != {fleet.chips_per_domain} or len(by_slice) < fleet.num_domains:
        attached = ", ".join(str(count) for _, count in sorted(by_slice.items()))
        what = f"{fleet.name} has {fleet.num_domains} slices of {fleet.chips_per_domain} devices"
        raise InputError(
            f"{what}, and the attached ones have {attached}", hint="name the slices that are attached"
        )
    return sorted(devices, key=lambda device: device.slice_index)


def _take_share() -> None:
    """Restrict this process to its share of the host's GPUs, which all its processes share equally.

    Does nothing if the run has one process, the user has chosen the devices, or jax has created its devices.
    """
    peers = processes_of_this_run()
    if peers.count == 1 or LOCAL_IDS in os.environ or _has_devices():
        return
    hosts = peers.gathered("places", socket.gethostname())
    here = [index for index, host in enumerate(hosts) if host == socket.gethostname()]
    share = share_of(_visible()[2], here.index(peers.index), len(here))
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, share)))
