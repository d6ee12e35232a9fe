"""Keep what a session compiles for the next session, whatever clone it is in.

Jax finds an executable by the program's operations, the compiler, its options and the devices. Meshwright
finds a weighed program by the request and by the sources that make it. So a change compiles what it may
change. A session works on a copy and adds to what is kept at its end: one that is killed leaves nothing half
written. What is kept lies in the user's folder for caches (XDG_CACHE_HOME moves it), for one kind of
processor. `pytest --cache-clear` brings none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import platformdirs

from meshwright.compiler import processor_digest

MOST_BYTES = 2**29
MAKING = ".making-"
DAY_SECONDS = 86400.0


def kept_folder() -> Path | None:
    """Return the folder of what is kept, or None where this user has no folder for caches."""
    folder = Path(platformdirs.user_cache_dir("meshwright-tests"))
    return folder / processor_digest() if folder.is_absolute() else None


def entries_of(folder: Path) -> list[Path]:
    """Return the entries below a folder: a file for each executable, a folder for each weighed program."""
    found = [*folder.glob("executables/*/*"), *folder.glob("compiled/*")]
    return [path for path in found if not path.name.startswith(".")]


def bring(session: Path) -> None:
    """Copy what is kept into the session's folder."""
    kept = kept_folder()
    if kept is None:
        return
    for path in entries_of(kept):
        with contextlib.suppress(OSError):  # another session has just removed it: it is compiled then
            _copy(path, session / path.relative_to(kept))


def keep(session: Path) -> None:
    """Add what is new in the session's folder, each entry in one step; the oldest of too many go."""
    kept = kept_folder()
    if kept is None:
        return
    for path in entries_of(session):
        place = kept / path.relative_to(session)
        if not place.exists():
            making = place.with_name(f"{MAKING}{os.getpid()}-{place.name}")
            _copy(path, making)
            with contextlib.suppress(OSError):  # another session was first
                making.rename(place)
    for path in kept.rglob(f"{MAKING}*"):
        if time.time() - path.stat().st_mtime > DAY_SECONDS:
            _remove(path)
    excess = -MOST_BYTES
    for path in sorted(entries_of(kept), key=lambda path: path.stat().st_mtime, reverse=True):
        excess += sum(file.stat().st_size for file in (path, *path.rglob("*")))
        if excess > 0:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _copy(path: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, place)
    else:
        shutil.copy2(path, place)
