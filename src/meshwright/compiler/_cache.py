"""The disk cache of compiled programs: one folder per key, made aside and renamed into place.

Safe under concurrent use: a reader sees a whole folder or none, and of two writers one wins.
`MESHWRIGHT_CACHE_DIR` moves it, `MESHWRIGHT_CACHE_BYTES` limits it (2 GiB unless told).
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path

import platformdirs

from ..errors import InputError
from ._record import Compiled, CorruptFolder

DEFAULT_LIMIT_BYTES = 2 * 2**30
ABANDONED_SECONDS = 86_400.0  # what nobody finished for a day was left by a process that was killed


def cache_root() -> Path:
    """The folder that holds everything Meshwright may make again."""
    told = os.environ.get("MESHWRIGHT_CACHE_DIR")
    return Path(told) if told else Path(platformdirs.user_cache_dir("meshwright"))


def entry(key: str) -> Path:
    """Where the program of `key` lies, if it is there."""
    return cache_root() / "compiled" / key


def lookup(key: str) -> Compiled | None:
    """The cached record of `key`, or None. A corrupt entry is removed, to be built again."""
    folder = entry(key)
    if not folder.exists():
        return None
    try:
        compiled = Compiled.load(folder)
        os.utime(folder)
    except CorruptFolder:
        _remove(folder)
        return None
    except FileNotFoundError:  # another process has just pruned it
        return None
    return compiled


def aside() -> Path:
    """A new empty folder beside the entries, to fill and then `publish`."""
    folder = cache_root() / "compiled" / f".making-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    return folder


def publish(made: Path, key: str) -> None:
    """Move a finished folder to its place; if another process was first, its copy stays."""
    os.utime(made)
    try:
        os.rename(made, entry(key))
    except OSError:
        if not entry(key).exists():
            raise
        shutil.rmtree(made)
    _prune()


def limit_bytes() -> int:
    """How much each kind of cached program may take.

    Raises:
        InputError: `MESHWRIGHT_CACHE_BYTES` is no number.
    """
    text = os.environ.get("MESHWRIGHT_CACHE_BYTES", str(DEFAULT_LIMIT_BYTES))
    if not text.isdecimal():
        raise InputError(
            f"MESHWRIGHT_CACHE_BYTES = {text!r} is no number of bytes",
            hint=f"set it to a whole number such as {DEFAULT_LIMIT_BYTES}, or leave it unset",
        )
    return int(text)


def _prune() -> None:
    """Remove the entries used longest ago until the cache is within its limit, but never the newest."""
    entries: list[tuple[float, int, Path]] = []  # when used, bytes, where
    for folder in (cache_root() / "compiled").iterdir():
        try:
            used = folder.stat().st_mtime
            if not folder.name.startswith("."):
                entries.append((used, sum(path.stat().st_size for path in folder.iterdir()), folder))
            elif time.time() - used > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:  # another process has just removed it
            continue
    entries.sort()
    excess = sum(num_bytes for _, num_bytes, _ in entries) - limit_bytes()
    for _, num_bytes, folder in entries[:-1]:
        if excess <= 0:
            break
        _remove(folder)
        excess -= num_bytes


def _remove(folder: Path) -> None:
    """Take an entry away at one instant, so that its place is free and no reader sees a part of it."""
    gone = folder.with_name(f".gone-{uuid.uuid4().hex}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:  # another process was first
        return
    shutil.rmtree(gone, ignore_errors=True)
