"""Keep compiled programs and jax's executables on disk between processes.

Compiled programs have one folder per key, which is filled in another place and then renamed. This is safe
under concurrent use: a reader sees a complete folder or none, and one of two writers wins. A file to which
several processes add is read and written under its lock (`cache_lock`). Executables are kept by jax, so that
a run that is started again does not compile again. The ledger and the prediction of a program are kept in its
folder, and are deleted with it.
`MESHWRIGHT_CACHE_DIR` moves the cache. `MESHWRIGHT_CACHE_BYTES` limits each kind (default 2 GiB).
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import gzip
import hashlib
import os
import platform
import pwd
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from meshwright.errors import InputError, MeshwrightError
from meshwright.subprocesses import is_abandoned, working_folder

from ._record import Compiled, CorruptFolder

DEFAULT_LIMIT_BYTES = 2 * 2**30
MOST_BESIDE = 8  # texts beside one program, such as its ledgers on fleets with other rates
MOST_BESIDE_BYTES = 64 * 2**20  # of one such text
MAKING, GONE = ".making-", ".gone-"  # prefixes of the names of folders that are being filled, or deleted


def cache_root() -> Path:
    """Return the folder for everything that Meshwright can make again, and for what was measured.

    Raises:
        InputError: the environment names no folder, and this user has no home folder; or everybody may write
            to the folder.
    """
    folder = _named_root()
    with contextlib.suppress(OSError):  # it does not exist yet
        if os.stat(folder).st_mode & stat.S_IWOTH:
            raise InputError(
                f"everybody may write to the cache {folder}, and so change what is read from it",
                hint=f"chmod o-w {folder} if nobody has, or set MESHWRIGHT_CACHE_DIR to a folder of your own",
            )
    return folder


def _named_root() -> Path:
    if chosen := os.environ.get("MESHWRIGHT_CACHE_DIR"):
        return Path(chosen).absolute()
    with contextlib.suppress(RuntimeError):  # neither HOME nor the user database has it
        usual = Path(platformdirs.user_cache_dir("meshwright"))
        if usual.is_absolute():  # older releases of platformdirs keep "~"
            return usual
    raise InputError(
        "there is no folder for the cache: HOME is not set, and this user has no home folder",
        hint="set MESHWRIGHT_CACHE_DIR to a folder that can be written",
    )


def others_who_write(folder: Path) -> str:
    """Say who besides this user and root may write to a folder; "" if nobody may, or it does not exist.

    A group that has this user's name counts as the user's own, as many systems make one for each user.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write to {folder}"
    if status.st_uid not in (os.geteuid(), 0):
        return f"user {_user(status.st_uid)} owns {folder}"
    if status.st_mode & stat.S_IWGRP:
        user = _user(os.geteuid())
        try:
            group = grp.getgrgid(status.st_gid)
        except KeyError:
            return f"group {status.st_gid} may write to {folder}"
        if group.gr_name != user or set(group.gr_mem) - {user}:
            return f"group {group.gr_name} may write to {folder}"
    return ""


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def make_folder(folder: Path) -> None:
    """Create a folder in the cache, and the cache itself for this user alone, if they do not exist.

    Raises:
        OSError: they cannot be created.
    """
    cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def writing_cache() -> Iterator[None]:
    """Raise a readable error if the system refuses a write inside the block.

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


@contextlib.contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file in the cache, which others wait for: to read, change and write it as one step.

    The kernel holds the lock, so the lock ends with its process. The lock has a file of its own, since the
    locked file is replaced. On a file system without locks nothing waits. One thread takes it once.

    Raises:
        MeshwrightError: the cache cannot be written.
    """
    with writing_cache():
        make_folder(path.parent)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_cached(path: Path, content: str | bytes) -> None:
    """Write a file of the cache completely or not at all, even if another process writes it too.

    Raises:
        MeshwrightError: the cache cannot be written.
    """
    with writing_cache():
        make_folder(path.parent)
        making = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            making.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(making, path)
        finally:
            making.unlink(missing_ok=True)


def program_folder(key: str) -> Path:
    """Return the folder of the program of `key`, which may not exist."""
    return cache_root() / "compiled" / key


def is_compiled(key: str) -> bool:
    """Return whether the cache has an entry of `key`; `lookup` finds out whether it can be read."""
    return os.path.exists(program_folder(key))


def cached_program(key: str) -> Compiled | None:
    """Return the cached record of `key`, or None. A corrupt entry is removed, to be compiled again."""
    folder = program_folder(key)
    if not os.path.exists(folder):
        return None
    try:
        compiled = Compiled.load(folder)
    except CorruptFolder:
        with writing_cache():
            _remove(folder)
        return None
    with contextlib.suppress(FileNotFoundError, PermissionError):  # pruned just now; a read-only cache
        os.utime(folder)
    return compiled


@contextlib.contextmanager
def making_program() -> Iterator[Path]:
    """Yield an empty folder next to the entries, to fill and then `publish`. An unpublished one is removed.

    Folders that killed processes left here are removed first.

    Raises:
        MeshwrightError: the cache cannot be written.
    """
    entries = cache_root() / "compiled"
    with contextlib.ExitStack() as held:
        with writing_cache():
            make_folder(entries)
            for folder in entries.glob(".*"):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    if is_abandoned(folder):
                        shutil.rmtree(folder, ignore_errors=True)
            made = held.enter_context(working_folder(MAKING, entries)) / "program"
            made.mkdir()
        yield made


def keep_program(made: Path, key: str) -> None:
    """Move a finished folder to its place. If another process was first, its copy stays.

    Raises:
        MeshwrightError: the cache cannot be written.
    """
    with writing_cache():
        os.utime(made)
        try:
            os.rename(made, program_folder(key))
        except OSError:
            if not program_folder(key).exists():
                raise
            shutil.rmtree(made)
        _prune()


def kept_beside(folder: Path, name: str) -> str | None:
    """Return the text that `keep_beside` kept in a program's folder; None if it is missing or damaged."""
    try:
        with gzip.open(folder / _beside(name)) as file:
            whole = file.read(MOST_BESIDE_BYTES + 1)
    except (OSError, EOFError, zlib.error):
        return None
    digest, _, text = whole.partition(b"\n")
    if len(whole) > MOST_BESIDE_BYTES or hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    return text.decode(errors="replace")


def keep_beside(folder: Path, name: str, text: str) -> None:
    """Keep a text that can be made again in the folder of a program, in one step; the oldest of many goes.

    It is removed with the program. A cache that cannot be written, or a program that was pruned just now,
    keeps nothing: the text is then made again.
    """
    body = text.encode()
    content = gzip.compress(hashlib.sha256(body).hexdigest().encode() + b"\n" + body, 1, mtime=0)
    with contextlib.suppress(OSError):
        making = folder / f"{_beside(name)}.{uuid.uuid4().hex}"
        try:
            making.write_bytes(content)
            os.replace(making, folder / _beside(name))
        finally:
            making.unlink(missing_ok=True)
        kept = sorted(folder.glob(_beside("*") + "*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[MOST_BESIDE:]:  # with those that killed processes left half made
            path.unlink(missing_ok=True)


def _beside(name: str) -> str:
    return f"beside-{name}.gz"


def limit_bytes() -> int:
    """Return the largest number of bytes for each kind of cached program.

    Raises:
        InputError: `MESHWRIGHT_CACHE_BYTES` is no number.
    """
    text = os.environ.get("MESHWRIGHT_CACHE_BYTES", str(DEFAULT_LIMIT_BYTES))
    if not text.isdecimal() or len(text) > 20:
        raise InputError(
            f"MESHWRIGHT_CACHE_BYTES = {text!r} is not a number of bytes",
            hint=f"set it to a whole number such as {DEFAULT_LIMIT_BYTES}, or leave it unset",
        )
    return int(text)


def _prune() -> None:
    """Remove the least recently used entries until the cache is within its limit, but never the newest."""
    entries: list[tuple[float, int, Path]] = []  # time of last use, bytes, folder
    for folder in (cache_root() / "compiled").iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # just removed; a stray file
            used = folder.stat().st_mtime
            if not folder.name.startswith("."):
                entries.append((used, sum(path.stat().st_size for path in folder.iterdir()), folder))
    for folder in _excess(entries):
        if folder != max(entries)[2]:
            _remove(folder)


def _excess(entries: list[tuple[float, int, Path]]) -> Iterator[Path]:
    """Yield the oldest entries until the rest is within the limit."""
    excess = sum(num_bytes for _, num_bytes, _ in entries) - limit_bytes()
    for _, num_bytes, path in sorted(entries):
        if excess <= 0:
            return
        yield path
        excess -= num_bytes


def _remove(folder: Path) -> None:
    """Remove an entry atomically, so that its place is free and no reader sees a part of it."""
    gone = folder.with_name(f"{GONE}{uuid.uuid4().hex}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:  # another process was first
        return
    shutil.rmtree(gone, ignore_errors=True)


JAX_CACHE_FOLDER, LEAST_SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
WORTH_KEEPING_SECONDS = "0.1"
_CPUINFO = Path("/proc/cpuinfo")


def keep_executables() -> str:
    """Set the folder in which jax keeps executables; if none is set, say why. Call before importing jax.

    Executables are code. So none are kept where others may write. Settings of the user take precedence. The
    folder is for one kind of processor, because an executable for another may use instructions that this one
    lacks. The oldest executables are removed once all of them exceed `MESHWRIGHT_CACHE_BYTES`.
    """
    if JAX_CACHE_FOLDER in os.environ:
        return ""
    folder = cache_root() / "executables" / processor_digest()
    for each in (cache_root(), folder.parent, folder):
        if others := others_who_write(each):
            return f"no executables are kept, since they are code and {others}: each run compiles again"
    with contextlib.suppress(OSError):
        make_folder(folder.parent)
    os.environ[JAX_CACHE_FOLDER] = str(folder)
    os.environ.setdefault(LEAST_SECONDS, WORTH_KEEPING_SECONDS)
    if os.path.isdir(folder):
        with writing_cache():
            stats = [(path.stat(), path) for path in folder.iterdir()]
            for path in _excess([(stat.st_mtime, stat.st_size, path) for stat, path in stats]):
                path.unlink(missing_ok=True)  # another process may have been first
    return ""


def processor_digest() -> str:
    """Return sixteen hexadecimal digits that identify this processor's instruction set."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    features = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()[:16]
