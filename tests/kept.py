"""Keep the executables of a session's programs for the next session, whatever clone it is in.

Jax finds an executable by the program's operations, the compiler, its options and the devices: what is found is
what would be compiled again. A change of the sources that changes no program therefore compiles none. A
session works on a copy and adds to the kept ones at its end, so that one that is killed leaves nothing half
written. They lie in the user's folder for caches, for one kind of processor: XDG_CACHE_HOME moves them, and a
session without any compiles all.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import platformdirs

from meshwright.compiler import _cache

MOST_BYTES = 2**29
MAKING = ".making-"


def kept_folder() -> Path | None:
    """Return the folder of kept executables, or None where this user has no folder for caches."""
    folder = Path(platformdirs.user_cache_dir("meshwright-tests"))
    return folder / _cache._processor() if folder.is_absolute() else None


def bring(session: Path) -> None:
    """Copy what is kept into the session's folder."""
    kept = kept_folder()
    if kept is not None and kept.is_dir():
        shutil.copytree(kept, session, ignore=shutil.ignore_patterns(f"{MAKING}*"), dirs_exist_ok=True)


def keep(session: Path) -> None:
    """Add what is new in the session's folder, each file in one step; the oldest of too many go."""
    kept = kept_folder()
    if kept is None or not session.is_dir():
        return
    for path in session.rglob("*-cache"):
        place = kept / path.relative_to(session)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            making = place.with_name(f"{MAKING}{os.getpid()}-{place.name}")
            shutil.copyfile(path, making)
            making.rename(place)
    stats = [(path.stat(), path) for path in kept.rglob("*-cache")]
    excess = sum(stat.st_size for stat, _ in stats) - MOST_BYTES
    for stat, path in sorted(stats, key=lambda each: each[0].st_mtime):
        if excess > 0:
            path.unlink(missing_ok=True)
            excess -= stat.st_size
