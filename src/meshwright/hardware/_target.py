"""Describe absent devices to XLA's compilers.

Figures. They are those of a chip's `Target`: XLA's own spec where it has one, else published figures,
rendered by one rule for all. tests/hardware/test_target.py also renders the chips of XLA's specs by that rule
and compares them field by field, and one chip by its compiled program. These figures steer fusion, tiling and
the order of collectives. None of them changes how many bytes a device has: that is the pool, below.

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

from typing import Any

from meshwright.errors import InputError

from ._chip import Chip
from ._fleet import Fleet

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


def why_simulated(chip: Chip) -> str:
    """Return the reason why no compiler can compile for this chip without one present; "" where one can.

    Packages that are missing on this machine do not count: `meshwright doctor` names those.
    """
    if chip.platform in ("tpu", "cpu"):
        return ""
    if chip.platform != "cuda":
        return "JAX's compiler for AMD needs an installed ROCm, which its packages do not bring"
    if chip.target is None:
        return "neither its number of multiprocessors nor the size of its memory is published"
    if chip.target.compute_capability < OLDEST_COMPUTE_CAPABILITY:
        has, oldest = (
            ".".join(map(str, each)) for each in (chip.target.compute_capability, OLDEST_COMPUTE_CAPABILITY)
        )
        return f"it has compute capability {has}, and the compiler of CUDA 13 (ptxas) starts at {oldest}"
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
    if fleet.chip.memory_bytes is None:
        raise InputError(
            f"the catalog does not know how much memory {fleet.chip.name} has",
            hint="choose a chip with a known size",
        )
    if not 0 < memory_fraction <= 1:
        raise InputError(f"a memory fraction of {memory_fraction} is no share", hint="use 0.75, or up to 1")
    return int(fleet.chip.memory_bytes * memory_fraction)


def target_config(fleet: Fleet, memory_fraction: float = DEFAULT_MEMORY_FRACTION) -> str:
    """Return the text of a `GpuTargetConfigProto` for the fleet's chip, with that share of its memory.

    Raises:
        InputError: the chip is no NVIDIA GPU, or no compiler supports it (`why_simulated`).
    """
    chip, target = fleet.chip, fleet.chip.target
    check_compilable(chip)
    if target is None:
        raise InputError(
            f"{chip.name} has no target for the GPU compiler: it is a {chip.platform} device",
            hint="choose an NVIDIA GPU: `meshwright fleets` lists them",
        )
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
        f'compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" '
        f"device_interconnect_info {{ active_links: {target.nvlink_active_links} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} '
        f'device_description_str: "{kind}"'
    )


def target_topology(fleet: Fleet) -> str:
    """Return partitions x hosts x devices per host, as the GPU compiler reads it: "1x64x8"."""
    return f"1x{fleet.num_hosts}x{fleet.chips_per_host}"


def topology_arguments(fleet: Fleet, memory_fraction: float = DEFAULT_MEMORY_FRACTION) -> dict[str, Any]:
    """Return the keyword arguments of `jax.experimental.topologies.get_topology_desc` for an absent fleet.

    Args:
        fleet: a fleet of NVIDIA GPUs or TPUs.
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
            "topology": target_topology(fleet),
        }
    arguments: dict[str, Any] = {"platform": "tpu", "topology_name": fleet.topology}
    if slices.chip_config_name:
        arguments["chip_config_name"] = slices.chip_config_name
    if fleet.num_devices // slices.devices_per_chip == 1:
        arguments["chips_per_host_bounds"] = (1, 1, 1)  # libtpu's default host has four chips
    return arguments
