"""What a device gives a process, and what of it no compiler counts."""

from __future__ import annotations

from meshwright.compiler import Argument
from meshwright.hardware import Fleet

GIBIBYTE, MEBIBYTE = 2**30, 2**20


def usable_bytes(fleet: Fleet) -> int | None:
    """What the chip's runtime gives a process; None for a simulated CPU, or where it is not known."""
    return None if fleet.chip.platform == "cpu" else fleet.chip.memory_bytes


def allowance(fleet: Fleet, mesh_axes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Bytes of one device that no compiler counts, item by item; priors until a calibration replaces them.

    * CUDA context and loaded kernels: 0.55 GiB (0.47 to 0.92 seen; Stas Bekman's ML Engineering, PyTorch's
      CUDA notes).
    * cuBLAS workspace: 32 MiB from Hopper on, 8.125 MiB before (PyTorch, ATen/cuda/CublasHandlePool.cpp).
    * NCCL, one communicator for every mesh axis of more than one device: 392 MB inside a fast domain
      (342 to 392 MB measured for 2 to 8 GPUs on NVLink, NVIDIA aiconfigurator), and 512 MiB of shared
      network buffer once where an axis leaves the domain (nccl#2363).

    Not counted: cuDNN's handles, for which no figure was found; fragmentation of the runtime's allocator.
    TPU: nothing, for the runtime's share is already taken from the memory it reports. CPU: nothing, for
    a simulated device has no memory of its own. Others: nothing is known.
    """
    chip = fleet.chip
    if chip.platform != "cuda":
        return {}
    hopper = chip.target is not None and chip.target.compute_capability >= (9, 0)
    items = {
        "CUDA context and kernels": int(0.55 * GIBIBYTE),
        "cuBLAS workspace": 32 * MEBIBYTE if hopper else int(8.125 * MEBIBYTE),
    }
    stride = 1
    crosses = False
    for name, size in reversed(mesh_axes):
        if size > 1:
            items[f"NCCL communicator of {name}"] = 392_000_000
            crosses |= stride * size > fleet.chips_per_domain
        stride *= size
    if crosses:
        items["NCCL network buffer"] = 512 * MEBIBYTE
    return items


STATE = ("parameters", "optimizer_state", "model_state", "keys", "step")
BATCHES_AHEAD = 2  # the one that the devices are given, and the one that is made meanwhile


def host_needs(fleet: Fleet, arguments: tuple[Argument, ...]) -> dict[str, int]:
    """Bytes of one host's memory that a run of this step needs beside its program, item by item.

    * A checkpoint: a copy of what the host's devices hold of the state, while it is written. Where devices
      hold the same replica one copy would do: this is the most it takes.
    * Batches: two of those that the host's devices take, one in use and one being made.

    Not counted: the interpreter and its libraries (about 1 GB), the page cache of token files. Nothing for a
    foreign program, whose arguments' roles are not known.
    """
    devices = min(fleet.chips_per_host, fleet.num_devices)
    state = sum(a.device_bytes for a in arguments if a.role in STATE and not a.host)
    batch = sum(a.device_bytes for a in arguments if a.role == "batch")
    if not any(a.role == "parameters" for a in arguments):
        return {}
    return {"a checkpoint's copy of the state": devices * state, "batches": BATCHES_AHEAD * devices * batch}
