"""Save and find a run's checkpoints: decide when one is due, and report how each save ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoints, Found, Saved, SaveFailed, steps_in
from ..config import CheckpointConfig
from ..launch import Alone
from ._events import CheckpointSaved, Event, Noticed, Phases
from ._resume import about_complaint

Tree = Any
ALONE = Alone()


class Saving:
    """Save and find a run's checkpoints.

    Without `every_steps` nothing is saved, but existing checkpoints are still found and restored.

    Args:
        about: JSON data that every checkpoint carries; it includes at least what `changes_since` reads.
        peers: the processes of the run; all call the same methods in the same order.

    Raises:
        InputError: the folder cannot be written, or another process writes it.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        about: Mapping[str, Any],
        phases: Phases,
        peers: Alone = ALONE,
    ) -> None:
        self._every = config.every_steps
        self._about, self._phases, self._peers = about, phases, peers
        self._newest: int | None = None  # the step of the last save that began and has not failed
        self._checkpoints = None
        path = folder / "checkpoints"
        there = peers.from_first("checkpoints there", lambda: path.is_dir() and bool(steps_in(path)))
        if self._every is not None or there:
            self._checkpoints = Checkpoints(
                path,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                peers=peers,
                complaint=about_complaint,
            )

    def newest(self) -> Found | None:
        """Return the newest good checkpoint; None if the run has no checkpoints.

        Raises:
            MeshwrightError: checkpoints exist, and all are damaged.
        """
        found = None if self._checkpoints is None else self._checkpoints.newest()
        if found is not None:
            self._newest = found.step
        return found

    def restore(self, found: Found, state: Tree) -> Tree:
        """Restore the checkpoint's state, laid out as `state` (of `jax.ShapeDtypeStruct`) specifies."""
        assert self._checkpoints is not None, "what was found was found by them"
        with self._phases.of("restore"):
            return self._checkpoints.restore(found, state)

    def due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every_steps` and not saved yet."""
        return self._every is not None and step % self._every == 0 and step != self._newest

    def save(self, step: int, state: Tree, data_offset: int) -> None:
        """Begin to save the state, unless a save of this step has begun."""
        if self._checkpoints is None or self._every is None:
            return
        # Processes may learn at different steps that a save has failed, so the first one decides for all.
        if self._peers.from_first("saved", lambda: step == self._newest):
            return
        with self._phases.of("checkpoint"):
            self._checkpoints.save(step, state, {**self._about, "data_offset": data_offset})
        self._newest = step

    def finished(self) -> list[Event]:
        """Return the events of the saves that have ended since the last call; never wait."""
        ended = () if self._checkpoints is None else self._checkpoints.finished()
        return [event for each in ended for event in self._told(each)]

    def wait(self) -> None:
        """Wait for the save in flight."""
        if self._checkpoints is not None:
            with self._phases.of("checkpoint"):
                self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the save in flight, and unlock the folder for other processes."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _told(self, ended: Saved | SaveFailed) -> list[Event]:
        step = ended.step
        if isinstance(ended, SaveFailed):
            if self._newest == step:
                self._newest = None
            return [Noticed(step=step, kind="checkpoint", message=ended.reason, hint=ended.hint)]
        saved = CheckpointSaved(
            step=step,
            num_bytes=ended.num_bytes,
            blocked_seconds=ended.blocked_seconds,
            write_seconds=ended.write_seconds,
        )
        if not ended.not_removed:
            return [saved]
        hint = "remove it by hand, or the disk will fill"
        return [saved, Noticed(step=step, kind="checkpoint", message=ended.not_removed, hint=hint)]
