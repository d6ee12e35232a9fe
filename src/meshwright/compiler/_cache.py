"""The disk cache of compiled programs: one folder per key, made aside and renamed into place.

Safe under concurrent use: a reader sees a whole folder or none, and of two writers one wins.
`MESHWRIGHT_CACHE_DIR` moves it, `MESHWRIGHT_CACHE_BYTES` limits it (2 GiB unless told).
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import platformdirs

from ._record import Compiled, CorruptFolder

DEFAULT_LIMIT_BYTES = 2 * 2**30


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
    except CorruptFolder:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    os.utime(folder)
    return compiled


def aside() -> Path:
    """A new empty folder beside the entries, to fill and then `publish`."""
    folder = cache_root() / "compiled" / f".making-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    return folder


def publish(made: Path, key: str) -> None:
    """Move a finished folder to its place; if another process was first, its copy stays."""
    try:
        os.rename(made, entry(key))
    except OSError:
        if not entry(key).exists():
            raise
        shutil.rmtree(made)
    _prune()


def _prune() -> None:
    """Remove the entries used longest ago until the cache is within its limit."""
    limit = int(os.environ.get("MESHWRIGHT_CACHE_BYTES", DEFAULT_LIMIT_BYTES))
    sizes: dict[Path, int] = {}
    for folder in (cache_root() / "compiled").iterdir():
        if not folder.name.startswith("."):
            sizes[folder] = sum(path.stat().st_size for path in folder.iterdir())
    by_age = sorted(sizes, key=lambda folder: folder.stat().st_mtime)
    while sum(sizes.values()) > limit and len(by_age) > 1:
        oldest = by_age.pop(0)
        sizes.pop(oldest)
        shutil.rmtree(oldest, ignore_errors=True)
