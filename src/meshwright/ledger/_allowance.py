"""State what a device and its host need beside the program: libraries and NCCL, a checkpoint and batches.

No compiler counts these bytes. Apart from `_memory_ledger`, because a request to the compiler needs them too.
"""

from __future__ import annotations

from meshwright.compiler import Argument
from meshwright.hardware import Fleet

PARAMETERS = ("parameters", "frozen_parameters")
RESERVED = "reserved for another process"
GIBIBYTE, MEBIBYTE = 2**30, 2**20


def usable_bytes(fleet: Fleet) -> int | None:
    """Return the bytes that the chip's runtime allows a process; None for a simulated CPU or if unknown."""
    return None if fleet.chip.platform == "cpu" else fleet.chip.memory_bytes


def allowance(fleet: Fleet, mesh_axes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Return the bytes of one device that no compiler counts, item by item, as prior estimates.

    * CUDA context and loaded kernels: 0.8 GiB (0.47 to 0.92 observed; Stas Bekman's ML Engineering,
      PyTorch's CUDA notes). On an H100 the context took 0.54 GiB and the kernels of a Llama 1B in fp8 another
      0.10 (docs/results/measured.md). With less left, kernels do not load, and the run ends.
    * cuBLAS workspace: 32 MiB from Hopper on, 8.125 MiB before (PyTorch, ATen/cuda/CublasHandlePool.cpp).
    * NCCL, one communicator for every mesh axis of more than one device: 392 MB inside a fast domain
      (342 to 392 MB measured for 2 to 8 GPUs on NVLink, NVIDIA aiconfigurator), and 512 MiB of shared
      network buffer once where an axis leaves the domain (nccl#2363).

    * The fleet's reserve, which is another process's.

    Not counted: cuDNN's handles, for which no figure was found; fragmentation of the runtime's allocator.
    TPU: otherwise empty, because the memory that the runtime reports already excludes its own share. CPU:
    empty, because a simulated device has no memory of its own. Others: empty, because nothing is known.
    """
    chip = fleet.chip
    reserved = {RESERVED: fleet.reserve_bytes} if fleet.reserve_bytes else {}
    if chip.platform != "cuda":
        return reserved
    hopper = chip.target is not None and chip.target.compute_capability >= (9, 0)
    items = {
        "CUDA context and kernels": int(0.8 * GIBIBYTE),
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
    return items | reserved


STATE = (*PARAMETERS, "optimizer_state", "model_state", "keys", "step")
BATCHES_AHEAD = 2  # one in use on the devices, and one being made


def host_needs(fleet: Fleet, arguments: tuple[Argument, ...]) -> dict[str, int]:
    """Return the bytes of one host's memory that a run needs in addition to its program, item by item.

    * A checkpoint: a copy of the state that the host's devices hold, while it is written. Where devices hold
      the same replica, one copy would be enough, so this is an upper bound.
    * Batches: two for the host's devices, one in use and one being made.

    Not counted: the interpreter and its libraries (about 1 GB), the page cache of token files. The result is
    empty if no argument is known to be a parameter, and without batches if none is known to be one: a foreign
    program may name its arguments as it likes.
    """
    devices = min(fleet.chips_per_host, fleet.num_devices)
    state = sum(a.device_bytes for a in arguments if a.role in STATE and not a.host)
    batch = sum(a.device_bytes for a in arguments if a.role == "batch")
    if not any(a.role == "parameters" for a in arguments):
        return {}
    needs = {"a checkpoint's copy of the state": devices * state}
    return needs | ({"batches": BATCHES_AHEAD * devices * batch} if batch else {})
