"""Write metrics.jsonl, notices.jsonl and TensorBoard's event file during a run.

Each entry is written to disk at once.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.record_writer import masked_crc32c

from ..errors import InputError
from ._run_folder import METRICS, Appended, Writes, write_whole

NOTICES = "notices.jsonl"


class RunFiles:
    """The open files of a run; use it in a `with` statement.

    A full disk does not end the run. Data that the disk refuses waits in memory until there is room. Data
    that cannot be written when the run ends is lost, and its file remains listed in `Writes.refused`.

    Args:
        writes: of the run's folder, which only this process writes.
        keep_to: the step from which an existing run is resumed; lines of later steps are removed. -1 keeps
            none.

    Raises:
        InputError: the files cannot be opened.
    """

    def __init__(self, folder: Path, writes: Writes, *, keep_to: int = -1) -> None:
        self._writes = writes
        try:
            resumed = any([_cut(folder / name, keep_to) for name in (METRICS, NOTICES)])
            self._metrics = Appended(folder / METRICS, writes)
            self._notices = Appended(folder / NOTICES, writes)
            self._events = Appended(_events_file(folder), writes)
        except OSError as refused:
            raise InputError(
                f"cannot write a run to {folder}: {refused.strerror}",
                hint="make room there, or choose a folder that can be written",
            ) from refused
        now = time.time()
        self._events.add(_record(Event(wall_time=now, file_version="brain.Event:2")))
        if resumed:  # TensorBoard then drops the later steps of the earlier files
            start = SessionLog(status=SessionLog.START)
            self._events.add(_record(Event(wall_time=now, step=keep_to + 1, session_log=start)))

    def write(self, step: int, group: str, values: Mapping[str, float | None]) -> None:
        """Append `step` and `values` as one line to metrics.jsonl, and the values to TensorBoard's events.

        TensorBoard's names are "group/name". None represents a value that is not finite; TensorBoard does not
        get it.
        """
        self._metrics.add(_line({"step": step, **values}))
        now = time.time()
        scalars = (
            Event(wall_time=now, step=step, summary=summary.scalar(f"{group}/{name}", value))
            for name, value in values.items()
            if value is not None
        )
        self._events.add(b"".join(map(_record, scalars)))

    def notice(self, step: int, kind: str, message: str, hint: str) -> None:
        """Append one line to notices.jsonl."""
        self._notices.add(_line({"step": step, "kind": kind, "message": message, "hint": hint}))

    def untold(self) -> dict[str, list[str]]:
        """Return the reasons why files cannot be written, each with the names of its files.

        Files that were reported within the last hour are left out.
        """
        return self._writes.untold()

    def retry(self) -> None:
        """Try again to write the waiting documents; waiting lines are retried with each new line."""
        self._writes.retry()

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._metrics, self._notices, self._events):
            each.close()


class NoFiles:
    """The substitute for `RunFiles` in every process but the first, which alone writes."""

    def write(self, step: int, group: str, values: Mapping[str, float | None]) -> None:
        """Do nothing."""

    def notice(self, step: int, kind: str, message: str, hint: str) -> None:
        """Do nothing."""

    def untold(self) -> dict[str, list[str]]:
        """Return no reasons."""
        return {}

    def retry(self) -> None:
        """Do nothing."""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl, parsed; an empty list if the file does not exist."""
    path = folder / METRICS
    return _whole_lines(path.read_bytes()) if path.exists() else []


def _events_file(folder: Path) -> Path:
    """Return the path of a new event file, named as TensorBoard requires.

    A number distinguishes files that are created within the same second.
    """
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
    there = len(list(folder.glob(f"{stem}*")))
    return folder / (f"{stem}.{there}" if there else stem)


def _record(event: Any) -> bytes:
    """Encode an event as a TFRecord: its length, the length's checksum, the event and its checksum."""
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))
    )


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _whole_lines(data: bytes) -> list[dict[str, Any]]:
    """Parse the complete lines of a JSON Lines file.

    A killed process leaves its last line cut short. Such a line is left out.
    """
    found: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found


def _cut(path: Path, keep_to: int) -> bool:
    """Keep only the complete lines of steps up to `keep_to`; return whether the file held anything.

    The file is replaced atomically.
    """
    if not path.is_file():  # missing, or a device
        return False
    data = path.read_bytes()
    kept = (line for line in _whole_lines(data) if line["step"] <= keep_to)
    text = "".join(json.dumps(line) + "\n" for line in kept)
    if text.encode() != data:
        write_whole(path, text)
    return bool(data)
