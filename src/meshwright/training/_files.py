"""A run's files while it runs: metrics.jsonl, notices.jsonl and TensorBoard's events, on disk at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)

from ..errors import InputError, MeshwrightError
from ..processes import Alone

METRICS, NOTICES = "metrics.jsonl", "notices.jsonl"
SHARED = ".shared"  # there for a moment: by it the processes of a run see whether they see one folder


class RunFiles:
    """The open files of a run; use it in a `with`.

    A full disk does not end the run: lines wait in memory until there is room (`trouble` says so), and only
    what could not be written when the run ends is an error.

    Args:
        keep_to: the step a run that is there is resumed from: later lines are taken out. -1 keeps none; None
            is for a new run.

    Raises:
        InputError: the folder cannot be written, or holds a run already and `keep_to` is None.
    """

    def __init__(self, folder: Path, *, keep_to: int | None = None) -> None:
        self._folder = folder
        self._no_events = ""
        prepare_folder(folder, resume=keep_to is not None)
        try:
            for name in (METRICS, NOTICES):
                _cut(folder / name, -1 if keep_to is None else keep_to)
            self._metrics, self._notices = _Lines(folder / METRICS), _Lines(folder / NOTICES)
            self._events = EventsWriter(str(folder / "events"))
            if keep_to is not None:  # TensorBoard then forgets the later steps of the files before
                self._events.write_event(
                    Event(
                        wall_time=time.time(),
                        step=keep_to + 1,
                        session_log=SessionLog(status=SessionLog.START),
                    )
                )
        except OSError as refused:
            raise _unwritable(folder, refused) from refused

    def write(self, step: int, group: str, values: Mapping[str, float | None]) -> None:
        """One line of metrics.jsonl: `step` and `values`; TensorBoard's names are "group/name".

        None is a value that is no finite number; TensorBoard does not see it.
        """
        self._metrics.add({"step": step, **values})
        scalars = {name: value for name, value in values.items() if value is not None}
        try:
            for name, value in scalars.items() if not self._no_events else ():
                scalar = summary.scalar(f"{group}/{name}", value)
                self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar))
            self._events.flush()
        except OSError as refused:  # a record may be half written: TensorBoard would read no further
            self._no_events = refused.strerror or "the disk is gone"

    def notice(self, step: int, kind: str, message: str, hint: str) -> None:
        """One line of notices.jsonl."""
        self._notices.add({"step": step, "kind": kind, "message": message, "hint": hint})

    @property
    def trouble(self) -> str:
        """Why lines are waiting, or TensorBoard's are left out; empty where all is on the disk."""
        return self._metrics.trouble or self._notices.trouble or self._no_events

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all.

        Raises:
            MeshwrightError: lines could not be written to the end, and nothing else has gone wrong.
        """
        lost = [lines for lines in (self._metrics, self._notices) if not lines.close()]
        try:
            self._events.close()
        except OSError as refused:
            self._no_events = refused.strerror or "the disk is gone"
        if lost and error is None:
            raise MeshwrightError(
                f"{lost[0].num_waiting} lines of {lost[0].path} could not be written: {lost[0].trouble}",
                hint=f"make room on the disk of {self._folder}, and resume the run: it trains again what was "
                "not written",
            )


class NoFiles:
    """In place of `RunFiles` in all processes of a run but the first, which alone writes."""

    trouble = ""

    def write(self, step: int, group: str, values: Mapping[str, float | None]) -> None:
        """Nothing."""

    def notice(self, step: int, kind: str, message: str, hint: str) -> None:
        """Nothing."""


class _Lines:
    """JSON lines in a file; what the disk does not take waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""
        self._waiting = b""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    @property
    def num_waiting(self) -> int:
        return self._waiting.count(b"\n")

    def add(self, line: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._flush()

    def close(self) -> bool:
        """Whether all is written."""
        self._flush()
        os.close(self._file)
        return not self._waiting

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            self.trouble = ""
        except OSError as refused:
            self.trouble = refused.strerror or str(refused)


def prepare_folder(folder: Path, *, resume: bool) -> None:
    """Make a run's folder; one with a run is written only by that run's continuation.

    Raises:
        InputError: the folder cannot be made, or holds a run that is not to be resumed.
    """
    metrics = folder / METRICS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holds_run = metrics.exists() and metrics.stat().st_size > 0
    except OSError as refused:
        raise _unwritable(folder, refused) from refused
    if holds_run and not resume:
        raise InputError(
            f"{folder} holds a run already",
            hint="go on with it: --resume; or choose a folder that is not there yet",
        )


def check_shared(folder: Path, peers: Alone) -> None:
    """Each process must see the first one's folder.

    Raises:
        InputError: one does not.
    """
    if peers.count == 1:
        return
    mark = folder / SHARED
    token = peers.from_first("mark", lambda: _marked(mark))
    seen = mark.is_file() and mark.read_text() == token
    names = peers.gathered("seen", "" if seen else peers.name)
    if peers.is_first:
        mark.unlink()
    if absent := [name for name in names if name]:
        raise InputError(
            f"{folder} of the first process is not that of {', '.join(absent[:3])}"
            + (f" and {len(absent) - 3} more" if len(absent) > 3 else ""),
            hint="name a folder on a disk that all hosts share: --folder DIR",
        )


def _marked(mark: Path) -> str:
    token = os.urandom(8).hex()
    try:
        mark.write_text(token)
    except OSError as refused:
        raise _unwritable(mark.parent, refused) from refused
    return token


def write_document(folder: Path, name: str, text: str) -> None:
    """Write one of a run's files.

    Raises:
        InputError: it cannot be written.
    """
    try:
        (folder / name).write_text(text, "utf-8")
    except OSError as refused:
        raise InputError(
            f"cannot write {folder / name}: {refused.strerror}",
            hint="make room there, or choose a folder that can be written",
        ) from refused


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, as written; none where there is no file."""
    path = folder / METRICS
    return _whole_lines(path.read_bytes()) if path.exists() else []


def _whole_lines(data: bytes) -> list[dict[str, Any]]:
    """A process that was killed leaves its last line half written: it is left out."""
    found: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found


def _cut(path: Path, keep_to: int) -> None:
    """Leave the whole lines of steps up to `keep_to`; the file is replaced in one stroke, or not at all."""
    if not path.is_file():  # not there, or a device
        return
    data = path.read_bytes()
    kept = (line for line in _whole_lines(data) if line["step"] <= keep_to)
    text = "".join(json.dumps(line) + "\n" for line in kept).encode()
    if text != data:
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(text)
        new.replace(path)


def _unwritable(folder: Path, refused: OSError) -> InputError:
    return InputError(
        f"cannot write a run to {folder}: {refused.strerror}",
        hint=f"choose a folder that can be written, below {_existing(folder)} or elsewhere",
    )


def _existing(folder: Path) -> Path:
    return next(parent for parent in folder.absolute().parents if parent.is_dir())
