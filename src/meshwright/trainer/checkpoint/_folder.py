"""Manage the folder of a run's checkpoints, and choose the checkpoint to resume from.

A complete checkpoint is named `STEP/`, by one atomic rename. Names that begin with a dot are not checkpoints:
`.lock`; `.probe`, which exists briefly; `.STEP.partial`, being written; `.STEP.replaced`, the old checkpoint
of a step that was saved again, until the new one has its name; `.STEP.removed`, being deleted.

The functions that find a checkpoint only read, because another process may be writing the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meshwright.errors import InputError, MeshwrightError

from ._manifest import Damaged, Manifest, examined, sync_folder, verified

LOCK, PROBE = ".lock", ".probe"
PROBE_BYTES = 1 << 16
_LEFTOVER = re.compile(r"\.(\d+)\.(partial|replaced|removed)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A damaged checkpoint; `why` names the file or entry that is wrong."""

    step: int
    folder: Path
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that was found in a folder.

    `newest_checkpoint` and `checkpoint_of` return it after reading every file and checking its hash;
    `unread_newest` and `found_at` do not read the arrays. `about`: the data that was passed to `save` with
    the state. `rejected`: newer checkpoints that are damaged.
    """

    step: int
    folder: Path
    about: Mapping[str, Any]
    rejected: tuple[Rejected, ...]
    manifest: Manifest

    @property
    def words(self) -> str:
        """Name the checkpoint as messages do: "the checkpoint of step 10 in runs/first/checkpoints"."""
        return f"the checkpoint of step {self.step} in {self.folder.parent}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, good or damaged, oldest first."""
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name))


def partial_folder(folder: Path, step: int) -> Path:
    """Return the folder that holds a checkpoint's files until it is complete."""
    return folder / f".{step}.partial"


class CheckpointFolder:
    """The folder of checkpoints, for the one process that writes it.

    The lock is the kernel's, so it ends with the process that holds it, however that process ends. The
    leftovers of a killed save are removed here. A folder that another live process writes is not touched.

    Raises:
        InputError: the folder cannot be written, or another process writes it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        path_for_arrays(folder)
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
        """Unlock the folder for other processes."""
        self._lock.close()

    def begin(self, step: int) -> Path:
        """Create and return an empty folder for the files of a checkpoint."""
        self.abandon(step)
        partial = partial_folder(self.path, step)
        partial.mkdir()
        return partial

    def commit(self, step: int) -> None:
        """Give the partial folder its final name.

        An existing checkpoint of this step is renamed and kept until `drop_replaced`. If this process is
        killed between the two renames, the next process restores the old name.
        """
        self.drop_replaced(step)
        final = self.path / str(step)
        if final.exists():
            final.rename(self._named(step, "replaced"))
        partial_folder(self.path, step).rename(final)
        sync_folder(self.path)

    def drop_replaced(self, step: int) -> None:
        """Delete the old checkpoint that `commit` renamed, if any."""
        replaced = self._named(step, "replaced")
        if replaced.exists():
            shutil.rmtree(replaced)

    def abandon(self, step: int) -> None:
        """Remove the files of a failed save, and restore the checkpoint that it was to replace."""
        partial, replaced = partial_folder(self.path, step), self._named(step, "replaced")
        if replaced.exists() and not (self.path / str(step)).exists():
            replaced.rename(self.path / str(step))
        if partial.exists():
            shutil.rmtree(partial)

    def remove(self, step: int) -> None:
        """Delete a checkpoint.

        The folder is renamed first, so that no checkpoint is ever half deleted under its own name.
        """
        removed = self._named(step, "removed")
        (self.path / str(step)).rename(removed)
        shutil.rmtree(removed)

    def _named(self, step: int, what: str) -> Path:
        return self.path / f".{step}.{what}"

    def _tidy(self) -> None:
        """Clean up after a killed process.

        A checkpoint that was not replaced gets its name back. Other leftovers are removed.
        """
        for left in list(self.path.iterdir()):
            match = _LEFTOVER.fullmatch(left.name)
            if match is None:
                continue
            final = self.path / match[1]
            if match[2] == "replaced" and not final.exists():
                left.rename(final)
            else:
                shutil.rmtree(left)


def path_for_arrays(folder: Path) -> Path:
    """Return the path by which TensorStore finds a folder: without `..`, and with links followed before it.

    Raises:
        InputError: the path has a backslash, which TensorStore takes for a slash, or is not UTF-8.
    """
    path = Path(os.path.realpath(folder)) if ".." in folder.parts else folder
    why = "TensorStore, which writes the arrays, takes its backslash for a slash" if "\\" in str(path) else ""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        why = "it is not text in UTF-8"
    if why:
        plain = re.sub(r"[^\w./=+,-]+", "_", path.as_posix(), flags=re.ASCII)
        raise InputError(f"checkpoints cannot be kept in {path}: {why}", hint=f"name another folder: {plain}")
    return path


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
        _take(lock)
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


def _take(lock: IO[str]) -> None:
    """Lock a file; one who only asks whether it is locked holds it for an instant, so it is tried again.

    Raises:
        BlockingIOError: another process holds it.
    """
    for pause in (0.001, 0.01, 0.05, None):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if pause is None:
                raise
            time.sleep(pause)


def open_own(path: Path, flags: int) -> int:
    """Open one of Meshwright's own files, create it if needed, and return its descriptor.

    Raises:
        OSError: it cannot be opened, or is a symbolic link, which may point to somebody else's file.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as refused:
        if refused.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a symbolic link, which is not followed") from refused
        raise


def write_probe(folder: Path) -> None:
    """Create, fill, sync and delete a file in the folder: permissions alone do not show whether this works.

    Raises:
        OSError: it does not work.
    """
    path = folder / PROBE
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        try:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)


Complaint = Callable[[Mapping[str, Any]], str]
"""Describes what is wrong with the data that was saved with a state; returns "" if nothing is."""


def newest_checkpoint(folder: Path, complaint: Complaint = lambda about: "") -> Found | None:
    """Return the newest checkpoint whose files all have the right hashes; None if no checkpoint exists.

    Args:
        complaint: describes what is wrong with `about`; if it returns any text, the checkpoint counts as
            damaged.

    Raises:
        MeshwrightError: checkpoints exist, and all are damaged.
    """
    found, rejected = _newest(folder, complaint, verified)
    if found is None and rejected:
        which = "; ".join(f"step {each.step}: {each.why}" for each in rejected)
        raise MeshwrightError(
            f"none of the {len(rejected)} checkpoints in {folder} is whole. {which}",
            hint=f"restore a copy of one of them; or remove {folder} and begin again at step 0 with "
            "--resume --discard-steps",
        )
    return found


def unread_newest(folder: Path, complaint: Complaint = lambda about: "") -> Found | None:
    """Return the newest checkpoint whose manifest is valid; None if none exists.

    Its arrays are not read. They may still be damaged, and `newest_checkpoint` would then skip this
    checkpoint.

    Args:
        complaint: as in `newest_checkpoint`.
    """
    return _newest(folder, complaint, examined)[0]


def found_at(folder: Path, step: int) -> Found:
    """Return a checkpoint that another process of the run has just verified.

    Raises:
        MeshwrightError: it is missing or incomplete here: the processes do not see the same folder.
    """
    found = _read(folder, step, examined)
    if isinstance(found, Rejected):
        raise MeshwrightError(
            f"the first process resumes from {found.folder}, which is not whole for process {os.getpid()} on "
            f"{socket.gethostname()}: {found.why}",
            hint="put the run's folder on a disk that every host can read",
        )
    return found


def checkpoint_of(run: Path, step: int | None = None) -> Found:
    """Return a run's checkpoint of `step`, or by default its newest good one.

    Raises:
        InputError: the run has no checkpoints, or none of that step.
        MeshwrightError: the requested checkpoint is damaged, or all are.
    """
    folder = run / "checkpoints"
    steps = steps_in(folder) if folder.is_dir() else []
    if not steps:
        raise InputError(
            f"{run} has no checkpoints",
            hint="name the folder of a run that was trained with checkpoint.every_steps set",
        )
    if step is None:
        found = newest_checkpoint(folder)
        assert found is not None, f"checkpoints {steps} went away while they were read"
        return found
    if step not in steps:
        nearest = min(steps, key=lambda there: abs(there - step))
        raise InputError(f"{run} has no checkpoint of step {step}", hint=f"the nearest is of step {nearest}")
    found = _read(folder, step, verified)
    if isinstance(found, Rejected):
        raise MeshwrightError(
            f"the checkpoint of step {step} is damaged: {found.why}",
            hint="leave --step out to take the newest that is whole",
        )
    return found


def _newest(
    folder: Path, complaint: Complaint, read: Callable[[Path, int], Manifest]
) -> tuple[Found | None, list[Rejected]]:
    """Return the newest checkpoint that passes, and the newer ones that do not."""
    rejected: list[Rejected] = []
    for step in reversed(steps_in(folder) if folder.is_dir() else []):
        found = _read(folder, step, read, tuple(rejected), complaint)
        if isinstance(found, Found):
            return found, rejected
        rejected.append(found)
    return None, rejected


def _read(
    folder: Path,
    step: int,
    read: Callable[[Path, int], Manifest],
    rejected: tuple[Rejected, ...] = (),
    complaint: Complaint = lambda about: "",
) -> Found | Rejected:
    path = folder / str(step)
    try:
        manifest = read(path, step)
    except Damaged as damaged:
        return Rejected(step=step, folder=path, why=str(damaged))
    if why := complaint(manifest.about):
        return Rejected(step=step, folder=path, why=why)
    return Found(step=step, folder=path, about=manifest.about, rejected=rejected, manifest=manifest)
