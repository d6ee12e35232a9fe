"""Measure the share of a device's peak FLOP/s that one large square product reaches, by number format.

The peak is a catalog entry for an accelerator. For a CPU it is an estimate from cores, clock and instruction
set. Users call this as `mw.matmul_mfu`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest_name
from ..hardware import chip_of_device_kind
from ..reconciliation import Spread
from ..units import format_rate, format_seconds
from ._calibration import cpu_model, usable_cores
from ._timing import clock

CPU_SIZE, ACCELERATOR_SIZE = 1024, 8192
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CPUINFO = Path("/proc/cpuinfo")
# Float32 lanes of a fused multiply-add unit, by instruction set. A core has two units (Intel's and AMD's
# optimisation manuals). Some server processors have only one 512-bit unit, so this is an upper estimate.
_LANES = (("avx512f", 16), ("avx2", 8), ("asimd", 4))
_UNITS, _FLOPS_PER_MULTIPLY_ADD = 2, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulMFU:
    """One square product of `size`, with 2 x size^3 FLOPs.

    `promised_flops_per_second`: the dense peak in this format; None if unknown, with the reason in
    `promised_source`. `promise_is_estimate`: the peak comes from cores, clock and instruction set, not from a
    data sheet; `mfu` may then exceed 1. `mfu`: achieved over promised, the utilisation of one kernel; a
    model's is lower. It is None without a promise, and if the rate exceeds a data sheet's peak, which
    `promised_source` then says.
    """

    device: str
    format: str
    size: int
    num_flops: int
    seconds: Spread
    achieved_flops_per_second: float
    promised_flops_per_second: float | None
    promised_source: str
    promise_is_estimate: bool
    mfu: float | None

    def __str__(self) -> str:
        rate = format_rate(self.achieved_flops_per_second, "FLOP/s")
        achieved = (
            f"{self.format}, {self.size} x {self.size} on {self.device}: "
            f"{rate} in {format_seconds(self.seconds.median)}"
        )
        if self.promised_flops_per_second is None:
            return f"{achieved}\n  promised: not known, {self.promised_source}"
        promised = format_rate(self.promised_flops_per_second, "FLOP/s")
        share = "promised:" if self.mfu is None else f"{self.mfu:.1%} of"
        return f"{achieved}\n  {share} {promised}, {self.promised_source}"


def matmul_mfu(
    size: int | None = None, *, formats: Sequence[str] = ("fp32", "bf16"), device: Any = None
) -> tuple[MatmulMFU, ...]:
    """Time a square product in each format, and compare its rate with the device's peak.

    Args:
        size: rows and columns; by default 1024 on a CPU and 8192 on an accelerator.
        formats: of fp64, fp32, bf16, fp16. fp32 is computed at full precision, not as tf32.
        device: a `jax.Device`; the first by default.

    Raises:
        InputError: an unknown format, a size below 1, or no device.
    """
    import jax

    device = jax.local_devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise InputError(
            f"{device!r} is no device", hint=f"known: jax.devices(), as {jax.local_devices()[0]!r}"
        )
    if isinstance(formats, str):
        raise InputError(f"formats = {formats!r} is one name", hint=f"use formats = [{formats!r}]")
    if size is None:
        size = CPU_SIZE if device.platform == "cpu" else ACCELERATOR_SIZE
    if size < 1:
        raise InputError(f"a product of size {size}", hint=f"use size = {CPU_SIZE}")
    for name in formats:
        if name not in DTYPES:
            raise InputError(f"no product is timed in format {name!r}", hint=nearest_name(name, DTYPES))
    return tuple(_one(device, name, size) for name in formats)


def _one(device: Any, name: str, size: int) -> MatmulMFU:
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(name == "fp64"):
        square = jnp.full((size, size), 1e-3, DTYPES[name], device=device)
        product = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
        seconds = clock(product, square, square).execution_seconds
    num_flops = 2 * size**3
    achieved = num_flops / seconds.median
    promised, source, estimated = _promise(device, name)
    passed = promised is not None and not estimated and achieved > promised
    return MatmulMFU(
        device=f"{device.platform}:{device.id} ({_kind(device)})",
        format=name,
        size=size,
        num_flops=num_flops,
        seconds=seconds,
        achieved_flops_per_second=achieved,
        promised_flops_per_second=promised,
        promised_source=f"{source}; passed, so the clock or the catalog is wrong" if passed else source,
        promise_is_estimate=estimated,
        mfu=None if promised is None or passed else achieved / promised,
    )


def _kind(device: Any) -> str:
    return cpu_model() if device.platform == "cpu" else str(device.device_kind)


def _promise(device: Any, name: str) -> tuple[float | None, str, bool]:
    """Return the promised FLOP/s, its source or the reason for its absence, and True for an estimate."""
    if device.platform == "cpu":
        return _cpu_promise(name)
    try:
        chip = chip_of_device_kind(device.device_kind)
    except InputError as unknown:
        return None, unknown.message, False
    peak = chip.peak_flops_per_second.get(name)
    if peak is None:
        return None, f"the catalog has no dense peak of {chip.name} in {name}", False
    return peak, f"catalog: {chip.name}, dense", False


def _cpu_promise(name: str) -> tuple[float | None, str, bool]:
    """Estimate cores x clock x multiply-adds per cycle, since a CPU's maker promises no such figure."""
    if name not in ("fp32", "fp64"):
        return None, f"whether this CPU has units for {name} is not known here", True
    if not _CPUINFO.exists():
        return None, "this system does not tell its clock and instruction sets", True
    text = _CPUINFO.read_text()
    flags = set((re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M) or [""])[0].split())
    clocks = [float(found) for found in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.M)]
    found = next(((flag, lanes) for flag, lanes in _LANES if flag in flags), None)
    if found is None or not clocks:
        return None, "this system does not tell its clock and instruction sets", True
    flag, lanes = found
    per_cycle = _UNITS * _FLOPS_PER_MULTIPLY_ADD * (lanes if name == "fp32" else lanes // 2)
    hertz, cores = max(clocks) * 1e6, _cores(text)
    words = f"estimate: {cores} cores x {hertz / 1e9:.2f} GHz x {per_cycle} FLOPs a cycle by {flag}"
    return cores * hertz * per_cycle, words, True


def _cores(text: str) -> int:
    """Return the physical cores that this process may use: two threads of a core share its units."""
    threads, cores = (re.search(rf"^{key}\s*:\s*(\d+)", text, re.M) for key in ("siblings", "cpu cores"))
    per_core = int(threads[1]) // int(cores[1]) if threads and cores else 1
    return max(1, usable_cores() // max(1, per_core))
