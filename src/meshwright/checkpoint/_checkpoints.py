"""`Checkpoints`: what the training loop uses."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from ..units import format_bytes
from ._copy import HostArray, Tree, copy_off
from ._folder import CheckpointFolder, steps_in
from ._newest import newest_checkpoint
from ._records import Found, Saved, SaveFailed
from ._restore import restore
from ._write import write_checkpoint

Outcome = Saved | SaveFailed


class Checkpoints:
    """The checkpoints of one run, saved in the background; close it when the run is over.

    At most one save is in flight, so the host holds at most one copy of the state (`host_copy_bytes`).

    Args:
        folder: the run's `checkpoints`; made if need be. What a killed save has left there is removed.
        keep_last: how many of the newest stay.
        keep_every: checkpoints of steps that are multiples of this stay as well.

    Raises:
        InputError: the folder cannot be written, or another process writes it.
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, keep_every: int | None = None) -> None:
        assert jax.process_count() == 1, "checkpoints of several processes are not written yet"
        assert keep_last >= 1, f"keep_last = {keep_last} would keep nothing to resume from"
        self._folder = CheckpointFolder(folder)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._bad_steps: set[int] = set()
        self._ended: list[Outcome] = []
        self._in_flight: Future[Outcome] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int, state: Tree, about: Mapping[str, Any]) -> None:
        """Copy the state off the devices, and write it in the background.

        When this returns, the state may be donated. It first waits for the save in flight, if there is one.

        Args:
            about: JSON data that comes back with the checkpoint.
        """
        about = json.loads(json.dumps(dict(about)))  # a copy, and what cannot be written is told here
        jax.block_until_ready(state)  # its computation is the step's time, not the checkpoint's
        begun = time.monotonic()
        self.wait()
        arrays = copy_off(state)
        blocked_seconds = time.monotonic() - begun
        self._in_flight = self._writer.submit(self._write, step, arrays, about, blocked_seconds)

    def finished(self) -> tuple[Outcome, ...]:
        """The saves that have ended since this was last asked. Never waits."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()
        ended, self._ended = tuple(self._ended), []
        return ended

    def wait(self) -> None:
        """Until no save is in flight."""
        if self._in_flight is not None:
            try:
                outcome = self._in_flight.result()
            finally:
                if self._in_flight.done():  # else Ctrl-C ended the wait, and the save goes on
                    self._in_flight = None
            self._ended.append(outcome)

    def close(self) -> None:
        """Wait for the save in flight, and let other processes write the folder."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._folder.close()

    def newest(self) -> Found | None:
        """The newest checkpoint whose every file is what was written, once no save is in flight; None where
        there is none at all.

        Raises:
            MeshwrightError: there are checkpoints, and all are damaged.
        """
        self.wait()
        found = newest_checkpoint(self._folder.path)
        if found is not None:
            self._bad_steps = {each.step for each in found.rejected}
        return found

    def restore(self, found: Found, state: Tree) -> Tree:
        """The checkpoint's state, laid out as the tree of `jax.ShapeDtypeStruct` says; see `restore`."""
        return restore(found, state)

    def _write(
        self, step: int, arrays: list[HostArray], about: Mapping[str, Any], blocked_seconds: float
    ) -> Outcome:
        begun = time.monotonic()
        need = sum(piece.nbytes for array in arrays for piece in array.pieces)
        try:
            self._check_room(need)
            manifest = write_checkpoint(self._folder.begin(step), step, arrays, about)
            self._folder.commit(step)
        except OSError as refused:
            return self._failed(step, need, refused)
        finally:
            arrays.clear()  # before the next save is let in
        return Saved(
            step=step,
            num_bytes=manifest.num_bytes,
            blocked_seconds=blocked_seconds,
            not_removed=self._remove_old(step),
            write_seconds=time.monotonic() - begun,
        )

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._folder.path)
        return disk.f_bavail * disk.f_frsize

    def _check_room(self, need: int) -> None:
        """A disk is not filled to the last byte for a save that cannot end well: others write to it too."""
        if self._free_bytes() < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _failed(self, step: int, need: int, refused: OSError) -> SaveFailed:
        reason = f"the checkpoint of step {step} was not saved: {refused.strerror}"
        try:
            self._folder.abandon(step)
            room = f"it needs {format_bytes(need)}, and {format_bytes(self._free_bytes())} are free"
            reason = f"{reason} ({room} in {self._folder.path})"
        except OSError as again:
            reason = f"{reason}; what was written of it could not be removed: {again.strerror}"
        kept = steps_in(self._folder.path) if self._folder.path.is_dir() else []
        last = f"that of step {kept[-1]} is kept" if kept else "there is none yet"
        return SaveFailed(
            step=step,
            reason=reason,
            hint=f"make room for {format_bytes(need)} or more; of checkpoints, {last}",
        )

    def _remove_old(self, step: int) -> str:
        """Delete what need not stay, now that `step` is committed; what went wrong, in words.

        Newer ones, which a run that went back has left behind, stay until their step is saved again. Ones
        known to be damaged do not count as kept.
        """
        self._bad_steps.discard(step)
        steps = [each for each in steps_in(self._folder.path) if each <= step]
        good = [each for each in steps if each not in self._bad_steps]
        kept = set(good[-self._keep_last :])
        if self._keep_every is not None:
            kept |= {each for each in good if each % self._keep_every == 0}
        old = [each for each in steps if each not in kept]
        try:
            self._folder.drop_replaced(step)
            for each in old:
                self._folder.remove(each)
        except OSError as refused:
            return f"an older checkpoint in {self._folder.path} could not be removed: {refused.strerror}"
        return ""
