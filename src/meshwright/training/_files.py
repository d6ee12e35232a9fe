"""A run's files while it runs: metrics.jsonl and TensorBoard's events, each line on disk at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from ..errors import InputError, MeshwrightError

METRICS = "metrics.jsonl"


class RunFiles:
    """The open files of a run; use it in a `with`.

    TensorBoard's file is written here and now: the writer thread of tensorboardX's `SummaryWriter`
    dies on a full disk without a word, and the run would then wait for it forever.

    Raises:
        InputError: the folder cannot be written, or holds a run already.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / METRICS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                raise InputError(
                    f"{folder} holds a run already", hint="choose a folder that is not there yet"
                )
            self._metrics: TextIO = path.open("a", buffering=1)  # a line at a time
            self._events = EventsWriter(str(folder / "events"))
        except OSError as refused:
            raise InputError(
                f"cannot write a run to {folder}: {refused.strerror}",
                hint=f"choose a folder that can be written, below {_existing(folder)} or elsewhere",
            ) from refused
        self._folder = folder

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        """One line of metrics.jsonl: `step` and `values`; TensorBoard's names are "group/name".

        Raises:
            MeshwrightError: the disk is full, or gone.
        """
        try:
            self._metrics.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
            for name, value in values.items():
                scalar = summary.scalar(f"{group}/{name}", value)
                self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar))
            self._events.flush()
        except OSError as refused:
            raise MeshwrightError(
                f"cannot write the metrics of step {step} to {self._folder}: {refused.strerror}",
                hint=f"make room on the disk of {self._folder}; the lines before step {step} are kept",
            ) from refused

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close both. What could not be written was told by `write`; closing would fail on it again."""
        for file in (self._metrics, self._events):
            try:
                file.close()
            except OSError:
                if error is None:
                    raise


def _existing(folder: Path) -> Path:
    return next(parent for parent in folder.absolute().parents if parent.is_dir())
