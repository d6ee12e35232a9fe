"""Save and find the checkpoints of one run, for the training loop."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from pydantic import TypeAdapter

from meshwright.trainer.launch import SingleProcess
from meshwright.units import format_bytes

from ._folder import CheckpointFolder, Complaint, Found, found_at, newest_checkpoint, partial_folder, steps_in
from ._manifest import (
    FORMAT,
    Damaged,
    Manifest,
    StoredArray,
    StoredFile,
    check_holds_arrays,
    files_below,
    parsed,
    stored_files,
    write_manifest,
)
from ._stored_arrays import HostArray, Tree, check_written, copy_off, merge_processes, write_shards

SINGLE_PROCESS = SingleProcess()
PART = "part-{}.json"  # the files of one process, until the first process has read it
PARTS = TypeAdapter(list[StoredFile])


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint on disk.

    `blocked_seconds`: how long `save` blocked the caller after the state was ready: the wait for an earlier
    save, and the copy off the devices. `write_seconds`: of writing, hashing and syncing in the background.
    `not_removed`: why an older checkpoint could not be deleted; empty if nothing went wrong.
    """

    step: int
    num_bytes: int
    blocked_seconds: float
    write_seconds: float
    not_removed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint that could not be written; earlier checkpoints are unchanged."""

    step: int
    reason: str
    hint: str


Outcome = Saved | SaveFailed


class Checkpoints:
    """The checkpoints of one run, saved in the background; close it when the run is over.

    At most one save is in flight, so the host holds at most one copy of the shards of this process.

    With several processes, each writes its own shards, and only the first combines them into a checkpoint.
    The first process owns the folder, which all must see. All call the same methods in the same order, and
    all receive the same results.

    Args:
        folder: the run's `checkpoints`, created if needed. The leftovers of a killed save are removed.
        keep_last: the number of newest checkpoints that are kept.
        keep_every: checkpoints of steps that are multiples of this are kept as well.
        peers: the processes of the run.
        num_layers: of the model; stacked layers beyond them are a pipeline's padding, which is not stored.
        complaint: describes what is wrong with the `about` of a checkpoint; if it returns any text, the
            checkpoint counts as damaged.

    Raises:
        InputError: the folder cannot be written, or another run writes it.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()) / "checkpoints")
        >>> checkpoints.save(10, {"weights": jax.numpy.ones(3)}, {"note": "kept beside the state"})
        >>> found = checkpoints.newest()
        >>> found.step, found.about["note"], [array.path for array in found.manifest.arrays]
        (10, 'kept beside the state', ['weights'])
        >>> checkpoints.close()
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        peers: SingleProcess = SINGLE_PROCESS,
        num_layers: int | None = None,
        complaint: Complaint = lambda about: "",
    ) -> None:
        assert keep_last >= 1, f"keep_last = {keep_last} would keep no checkpoint to resume from"
        self._path, self._peers, self._complaint = folder, peers, complaint
        self._owned: list[CheckpointFolder] = []  # filled in the first process alone
        peers.broadcast("checkpoints", lambda: self._owned.append(CheckpointFolder(folder)))
        self._keep_last, self._keep_every, self._num_layers = keep_last, keep_every, num_layers
        self._bad_steps: set[int] = set()
        self._ended: list[Outcome] = []
        self._in_flight: Future[Outcome] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int, state: Tree, about: Mapping[str, Any]) -> None:
        """Copy the state off the devices, and write it in the background.

        First waits for the save in flight, if one exists. When this returns, the state may be donated.

        Args:
            about: JSON data that is stored with the checkpoint.
        """
        about = json.loads(json.dumps(dict(about)))  # a copy; data that is not JSON raises here
        jax.block_until_ready(state)  # its computation counts as the step's time, not the checkpoint's
        begun = time.monotonic()
        self.wait()
        arrays = copy_off(state, self._num_layers)
        blocked_seconds = time.monotonic() - begun
        self._in_flight = self._writer.submit(self._write, step, arrays, about, blocked_seconds)

    def finished(self) -> tuple[Outcome, ...]:
        """Return the saves that have ended since the last call; never wait."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()
        ended, self._ended = tuple(self._ended), []
        return ended

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self._in_flight is not None:
            try:
                outcome = self._in_flight.result()
            finally:
                if self._in_flight.done():  # otherwise Ctrl-C ended the wait, and the save continues
                    self._in_flight = None
            self._ended.append(outcome)

    def close(self) -> None:
        """Wait for the save in flight, and unlock the folder for other processes."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            for owned in self._owned:
                owned.close()

    def newest(self) -> Found | None:
        """Return the newest checkpoint whose files all have the right hashes; None if no checkpoint exists.

        First waits for the save in flight.

        Raises:
            MeshwrightError: checkpoints exist, and all are damaged.
        """
        self.wait()
        read: list[Found | None] = []  # filled in the first process alone

        def step_of_newest() -> int | None:
            found = newest_checkpoint(self._path, self._complaint)
            read.append(found)
            if found is None:
                return None
            self._bad_steps = {each.step for each in found.rejected}
            return found.step

        step = self._peers.broadcast("newest", step_of_newest)
        if read:
            return read[0]
        return None if step is None else found_at(self._path, step)

    def _write(
        self, step: int, arrays: list[HostArray], about: Mapping[str, Any], blocked_seconds: float
    ) -> Outcome:
        begun, peers, folder = time.monotonic(), self._peers, partial_folder(self._path, step)
        described = [dataclasses.replace(array, starts=(), pieces=()) for array in arrays]
        try:
            need = sum(peers.gathered("save/need", sum(p.nbytes for array in arrays for p in array.pieces)))
            why = peers.broadcast("save/begin", lambda: _refusal(lambda: self._begin(step, need)))
            if not why:
                whys = peers.gathered("save/part", _refusal(lambda: write_part(folder, arrays, peers.index)))
                why = next((each for each in whys if each), "")
        finally:
            arrays.clear()  # frees the copy before the next save begins

        def end() -> dict[str, Any]:
            num_bytes: list[int] = []
            refused = why or _refusal(lambda: num_bytes.append(self._commit(step, described, about)))
            if refused:
                return self._failed(step, need, refused)
            return {"num_bytes": num_bytes[0], "not_removed": self._remove_old(step)}

        ended = peers.broadcast("save/end", end)
        if "reason" in ended:
            return SaveFailed(step=step, **ended)
        seconds = time.monotonic() - begun
        return Saved(step=step, blocked_seconds=blocked_seconds, write_seconds=seconds, **ended)

    def _begin(self, step: int, need: int) -> None:
        """Create the folder of a save.

        Others write to the disk too, so a save that cannot succeed must not fill it.
        """
        if self._free_bytes() < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._owned[0].begin(step)

    def _commit(self, step: int, arrays: Sequence[HostArray], about: Mapping[str, Any]) -> int:
        """Combine the parts of all processes into a checkpoint, in the first process; return its bytes."""
        folder = partial_folder(self._path, step)
        files = [file for process in range(1, self._peers.count) for file in take_part(folder, process)]
        merge_processes(folder, self._peers.count, arrays)
        there = {file.name for file in files}
        own = [name for name, _ in files_below(folder) if name not in there]
        files += stored_files(folder, own, sync=True)
        stored = tuple(StoredArray(path=array.path, shape=array.shape, dtype=array.dtype) for array in arrays)
        manifest = Manifest(format=FORMAT, step=step, about=dict(about), arrays=stored, files=tuple(files))
        check_holds_arrays(manifest)
        check_written(folder, stored)
        write_manifest(folder, manifest)
        self._owned[0].commit(step)
        return sum(file.num_bytes for file in files)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._path).free

    def _failed(self, step: int, need: int, refused: str) -> dict[str, Any]:
        reason = f"the checkpoint of step {step} was not saved: {refused}"
        try:
            self._owned[0].abandon(step)
            room = f"it needs {format_bytes(need)}, and {format_bytes(self._free_bytes())} are free"
            reason = f"{reason} ({room} in {self._path})"
        except OSError as again:
            reason = f"{reason}; the part already written could not be removed: {again.strerror}"
        kept = steps_in(self._path) if self._path.is_dir() else []
        last = f"that of step {kept[-1]} is kept" if kept else "there is none yet"
        hint = f"make room for {format_bytes(need)} or more; of checkpoints, {last}"
        return {"reason": reason, "hint": hint}

    def _remove_old(self, step: int) -> str:
        """Delete checkpoints that need not be kept, now that `step` is saved; return any failure in words.

        Newer checkpoints, which a rollback leaves behind, are kept until their step is saved again.
        Checkpoints that are known to be damaged do not count towards `keep_last`.
        """
        self._bad_steps.discard(step)
        steps = [each for each in steps_in(self._path) if each <= step]
        good = [each for each in steps if each not in self._bad_steps]
        kept = set(good[-self._keep_last :])
        if self._keep_every is not None:
            kept |= {each for each in good if each % self._keep_every == 0}
        old = [each for each in steps if each not in kept]
        try:
            self._owned[0].drop_replaced(step)
            for each in old:
                self._owned[0].remove(each)
        except OSError as refused:
            return f"an older checkpoint in {self._path} could not be removed: {refused.strerror}"
        return ""


def write_part(folder: Path, arrays: Sequence[HostArray], process: int) -> None:
    """Write the pieces of one process.

    A process other than the first leaves the sizes and hashes of its files for the first, which reads them
    once all have written.
    """
    own = write_shards(folder, arrays, process)
    if process:
        names = [f"{own.relative_to(folder)}/{name}" for name, _ in files_below(own)]
        (folder / PART.format(process)).write_bytes(PARTS.dump_json(stored_files(folder, names, sync=True)))


def take_part(folder: Path, process: int) -> list[StoredFile]:
    """Read and delete a process's list of files; a complete checkpoint contains no such list.

    Raises:
        OSError: it is missing: the processes do not see the same folder.
        Damaged: it is not valid.
    """
    path = folder / PART.format(process)
    files = parsed(PARTS, path.read_bytes(), path.name)
    path.unlink()
    return files


def _refusal(action: Callable[[], object]) -> str:
    """Return the reason why an action failed; an empty text if it succeeded."""
    try:
        action()
    except OSError as refused:
        return refused.strerror or str(refused)
    except Damaged as damaged:  # in the part that another process left
        return str(damaged)
    return ""
