"""What a device gives a process, and what of it no compiler counts."""

from __future__ import annotations

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
