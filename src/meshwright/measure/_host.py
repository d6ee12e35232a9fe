"""Which machine this is, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

LOOKED_SECONDS, PERCENT = 0.3, 100
_CPUINFO = Path("/proc/cpuinfo")


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_share() -> float:
    """Return the share of the machine's cores that is busy while this process waits for a moment."""
    return psutil.cpu_percent(interval=LOOKED_SECONDS) / PERCENT


def cpu_model() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_host() -> str:
    """Processor, usable cores and system: "AMD EPYC 7B13, 2 cores, Linux"."""
    return f"{cpu_model()}, {usable_cores()} cores, {platform.system()}"
