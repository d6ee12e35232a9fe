"""Executables that jax keeps between processes, so that a run that is begun again does not compile again."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from ._cache import cache_root, limit_bytes, writing_cache

FOLDER, LEAST_SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
WORTH_KEEPING_SECONDS = "0.1"
_CPUINFO = Path("/proc/cpuinfo")


def keep_executables() -> None:
    """Tell jax, which must not be imported yet, where to keep executables; what the user has set stands.

    They are kept for one kind of processor: an executable of another may hold instructions this one lacks.
    The oldest go once they are more than `MESHWRIGHT_CACHE_BYTES`.
    """
    if FOLDER in os.environ:
        return
    folder = cache_root() / "executables" / _processor()
    os.environ[FOLDER] = str(folder)
    os.environ.setdefault(LEAST_SECONDS, WORTH_KEEPING_SECONDS)
    if os.path.isdir(folder):
        with writing_cache():
            _prune_executables(folder)


def _processor() -> str:
    """Sixteen letters that stand for this processor's instructions."""
    known = [platform.machine()]
    if _CPUINFO.exists():
        known += [
            line for line in _CPUINFO.read_text().splitlines() if line.startswith(("flags", "Features"))
        ]
    return hashlib.sha256("\n".join(known[:2]).encode()).hexdigest()[:16]


def _prune_executables(folder: Path) -> None:
    """Remove the executables made longest ago until the rest is within the limit."""
    stats = [(path.stat(), path) for path in folder.iterdir()]
    found = [(stat.st_mtime, stat.st_size, path) for stat, path in stats]
    excess = sum(size for _, size, _ in found) - limit_bytes()
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)  # another process may have been first
        excess -= size
