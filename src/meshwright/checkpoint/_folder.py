"""The folder of a run's checkpoints: who may write it, what is whole, what is left over, what is old.

A checkpoint is `STEP/`, renamed to that in one stroke when it is whole. Names that begin with a dot are no
checkpoints: `.lock`; `.STEP.partial`, being written; `.STEP.replaced`, a checkpoint whose step was saved
anew, until the new one has its name; `.STEP.removed`, being deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from pathlib import Path
from typing import IO

from ..errors import InputError
from ._write import sync_folder, write_all

LOCK, PROBE = ".lock", ".probe"
PROBE_BYTES = 1 << 16
_LEFTOVER = re.compile(r"\.(\d+)\.(partial|replaced|removed)")


def steps_in(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint, good or not, oldest first."""
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name))


def partial_folder(folder: Path, step: int) -> Path:
    """Where the files of a checkpoint are written, until all are there."""
    return folder / f".{step}.partial"


class CheckpointFolder:
    """The folder, for the one process that makes checkpoints in it.

    The lock is the kernel's, so it ends with the process that holds it, however that ends. What a killed
    save has left is removed here; a folder that another live process writes is not touched.

    Raises:
        InputError: the folder cannot be written, or another process writes it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(folder, f"checkpoints in {folder} are")
            try:
                write_probe(folder)
                self._tidy()
            except BaseException:
                self._lock.close()
                raise
        except OSError as refused:
            raise InputError(
                f"cannot write checkpoints to {folder}: {refused.strerror}",
                hint="choose a run folder on a disk that can be written and locked",
            ) from refused

    def close(self) -> None:
        """Let another process write."""
        self._lock.close()

    def begin(self, step: int) -> Path:
        """An empty folder for the files of a checkpoint."""
        self.abandon(step)
        partial = partial_folder(self.path, step)
        partial.mkdir()
        return partial

    def commit(self, step: int) -> None:
        """Give the partial folder its name. A checkpoint of that name is put aside, until `drop_replaced`;
        should this process be killed in between, the next one takes it back."""
        self.drop_replaced(step)
        final = self.path / str(step)
        if final.exists():
            final.rename(self._named(step, "replaced"))
        partial_folder(self.path, step).rename(final)
        sync_folder(self.path)

    def drop_replaced(self, step: int) -> None:
        """Delete the checkpoint that `commit` has put aside, if it has."""
        replaced = self._named(step, "replaced")
        if replaced.exists():
            shutil.rmtree(replaced)

    def abandon(self, step: int) -> None:
        """Remove what a failed save has written, and take back what it was to replace."""
        partial, replaced = partial_folder(self.path, step), self._named(step, "replaced")
        if replaced.exists() and not (self.path / str(step)).exists():
            replaced.rename(self.path / str(step))
        if partial.exists():
            shutil.rmtree(partial)

    def remove(self, step: int) -> None:
        """Delete a checkpoint: first its name, so that none is ever half there."""
        removed = self._named(step, "removed")
        (self.path / str(step)).rename(removed)
        shutil.rmtree(removed)

    def _named(self, step: int, what: str) -> Path:
        return self.path / f".{step}.{what}"

    def _tidy(self) -> None:
        """After a process that was killed: take back a checkpoint that was not replaced, remove the rest."""
        for left in list(self.path.iterdir()):
            match = _LEFTOVER.fullmatch(left.name)
            if match is None:
                continue
            final = self.path / match[1]
            if match[2] == "replaced" and not final.exists():
                left.rename(final)
            else:
                shutil.rmtree(left)


def lock_folder(folder: Path, what: str) -> IO[str]:
    """Lock a folder for this process until the returned file is closed or the process ends.

    Args:
        what: the subject and verb of the message if another process holds the lock: "runs/first is".

    Raises:
        InputError: another process holds the lock; the message names it.
        OSError: the folder cannot be written or locked, or its `.lock` is a symbolic link.
    """
    lock = os.fdopen(open_own(folder / LOCK, os.O_RDWR | os.O_APPEND), "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
    except BlockingIOError as held:
        lock.seek(0)
        holder = lock.read() or "another process"
        lock.close()
        raise InputError(
            f"{what} being written by {holder}",
            hint="wait until that run has ended, or choose another run folder",
        ) from held
    except BaseException:
        lock.close()
        raise
    return lock


def open_own(path: Path, flags: int) -> int:
    """Open one of Meshwright's own files by `flags`, made if need be, and return its number.

    Raises:
        OSError: it cannot be opened, or is a symbolic link: what that names is somebody else's file.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as refused:
        if refused.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a symbolic link, which is not followed") from refused
        raise


def write_probe(folder: Path) -> None:
    """Make, fill, sync and delete a file in the folder: permissions alone do not say whether that works.

    Raises:
        OSError: it does not.
    """
    path = folder / PROBE
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_TRUNC), "wb", buffering=0) as file:
        try:
            write_all(file, memoryview(bytes(PROBE_BYTES)))
            os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)
