"""A run's checkpoints: when one is due, the data saved beside the state, and how each save ended."""

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
    """Saves and finds a run's checkpoints.

    Without `every_steps` it saves nothing; checkpoints that are there are found and restored all the same.

    Args:
        about: JSON data that every checkpoint carries: what `changes_since` reads, at the least.
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
        self._newest: int | None = None  # the step of the last save that was begun and has not failed
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
        """The newest good checkpoint; None where there is none.

        Raises:
            MeshwrightError: there are some, and all are damaged.
        """
        found = None if self._checkpoints is None else self._checkpoints.newest()
        if found is not None:
            self._newest = found.step
        return found

    def restore(self, found: Found, state: Tree) -> Tree:
        """The checkpoint's state where `state` (of `jax.ShapeDtypeStruct`) wants it."""
        assert self._checkpoints is not None, "what was found was found by them"
        with self._phases.of("restore"):
            return self._checkpoints.restore(found, state)

    def due(self, step: int) -> bool:
        """Whether a step that is a multiple of `every_steps` is not saved yet."""
        return self._every is not None and step % self._every == 0 and step != self._newest

    def save(self, step: int, state: Tree, data_offset: int) -> None:
        """Begin a save, unless this step has one."""
        if self._checkpoints is None or self._every is None:
            return
        # Whether an earlier save has failed is told whenever it is asked for: the first process knows it.
        if self._peers.from_first("saved", lambda: step == self._newest):
            return
        with self._phases.of("checkpoint"):
            self._checkpoints.save(step, state, {**self._about, "data_offset": data_offset})
        self._newest = step

    def finished(self) -> list[Event]:
        """What there is to tell of the saves that have ended since; never waits."""
        ended = () if self._checkpoints is None else self._checkpoints.finished()
        return [event for each in ended for event in self._told(each)]

    def wait(self) -> None:
        """For the save in flight."""
        if self._checkpoints is not None:
            with self._phases.of("checkpoint"):
                self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the save in flight, and let other processes write."""
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
