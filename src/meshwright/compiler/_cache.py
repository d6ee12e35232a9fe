"""Keep compiled programs and executables on disk between processes.

The disk cache of compiled programs: one folder per key, made aside and renamed into place.

Safe under concurrent use: a reader sees a whole folder or none, and of two writers one wins.
`MESHWRIGHT_CACHE_DIR` moves it, `MESHWRIGHT_CACHE_BYTES` limits it (2 GiB unless told).

Executables that jax keeps between processes, so that a run that is begun again does not compile again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from ..children import is_abandoned, working_folder
from ..errors import InputError, MeshwrightError
from ._record import Compiled, CorruptFolder

DEFAULT_LIMIT_BYTES = 2 * 2**30
MAKING, GONE = ".making-", ".gone-"  # begin the names of folders that are being filled, or deleted


def cache_root() -> Path:
    """The folder that holds everything Meshwright may make again.

    Raises:
        InputError: none is named, and this user has no home folder.
    """
    told = os.environ.get("MESHWRIGHT_CACHE_DIR")
    if told:
        return Path(told).absolute()
    try:
        usual = Path(platformdirs.user_cache_dir("meshwright"))
    except RuntimeError:  # neither HOME nor the user database says where; older releases leave "~" as it is
        usual = Path("~")
    if not usual.is_absolute():
        raise InputError(
            "there is no folder for the cache: HOME is not set, and this user has no home folder",
            hint="set MESHWRIGHT_CACHE_DIR to a folder that can be written",
        )
    return usual


@contextlib.contextmanager
def writing_cache() -> Iterator[None]:
    """Turn the system's refusal to write into words.

    Raises:
        MeshwrightError: the cache cannot be written: no permission, no room, no folder.
    """
    try:
        yield
    except OSError as refused:
        where = refused.filename or cache_root()
        raise MeshwrightError(
            f"the cache cannot be written: {where}: {refused.strerror}",
            hint="make room or give permission there, or set MESHWRIGHT_CACHE_DIR to another folder",
        ) from refused


def entry(key: str) -> Path:
    """Where the program of `key` lies, if it is there."""
    return cache_root() / "compiled" / key


def lookup(key: str) -> Compiled | None:
    """The cached record of `key`, or None. A corrupt entry is removed, to be built again."""
    folder = entry(key)
    if not os.path.exists(folder):
        return None
    try:
        compiled = Compiled.load(folder)
    except CorruptFolder:
        with writing_cache():
            _remove(folder)
        return None
    with contextlib.suppress(
        FileNotFoundError, PermissionError
    ):  # pruned just now; a cache that may only be read
        os.utime(folder)
    return compiled


@contextlib.contextmanager
def aside() -> Iterator[Path]:
    """Make an empty folder beside the entries, to fill and then `publish`; what is not published is removed.

    First removes what processes that were killed have left here.

    Raises:
        MeshwrightError: the cache cannot be written.
    """
    entries = cache_root() / "compiled"
    with contextlib.ExitStack() as held:
        with writing_cache():
            entries.mkdir(parents=True, exist_ok=True)
            for folder in entries.glob(".*"):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    if is_abandoned(folder):
                        shutil.rmtree(folder, ignore_errors=True)
            made = held.enter_context(working_folder(MAKING, entries)) / "program"
            made.mkdir()
        yield made


def publish(made: Path, key: str) -> None:
    """Move a finished folder to its place; if another process was first, its copy stays.

    Raises:
        MeshwrightError: the cache cannot be written.
    """
    with writing_cache():
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
    if not text.isdecimal() or len(text) > 20:
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
        except (FileNotFoundError, NotADirectoryError):  # just removed by another process; a stray file
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
    gone = folder.with_name(f"{GONE}{uuid.uuid4().hex}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:  # another process was first
        return
    shutil.rmtree(gone, ignore_errors=True)


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
