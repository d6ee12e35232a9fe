"""Writes to a run's folder that the disk may refuse without ending the run: told once, tried again later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..checkpoint import open_own

TOLD_AGAIN_SECONDS = 3600.0  # a disk that is full now and then is not told of at every step


class Writes:
    """The files of a run's folder that are not on the disk yet, and why.

    `refused`: by name of a file the reason for which it could not be written the last time.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.refused: dict[str, str] = {}
        self._folder, self._now = folder, now
        self._documents: dict[str, str] = {}  # that wait
        self._told: dict[str, float] = {}  # when each name was told

    def document(self, name: str, text: str) -> None:
        """Write a file of that text, now or when `retry` finds room."""
        self._documents[name] = text
        self._write(name)

    def documents(self, texts: Mapping[str, str]) -> None:
        """Write a file for each name."""
        for name, text in texts.items():
            self.document(name, text)

    def retry(self) -> None:
        """Try again what waits."""
        for name in list(self._documents):
            self._write(name)

    def attempt(self, name: str, write: Callable[[], object]) -> bool:
        """Call `write`, which makes the file `name`, and keep the reason where the system refuses it."""
        try:
            write()
        except OSError as refused:
            self.refused[name] = refused.strerror or str(refused)
            return False
        self.refused.pop(name, None)
        return True

    def untold(self) -> dict[str, list[str]]:
        """Return the reasons not told within the last hour, each with the names of its files."""
        found: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            if self._now() - self._told.get(name, -TOLD_AGAIN_SECONDS) >= TOLD_AGAIN_SECONDS:
                self._told[name] = self._now()
                found.setdefault(why, []).append(name)
        return found

    def _write(self, name: str) -> None:
        text = self._documents[name]
        if self.attempt(name, lambda: write_whole(self._folder / name, text)):
            del self._documents[name]


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one stroke: whoever reads it finds the old text or the new one.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(open_own(new, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


class Appended:
    """A file that grows; what the disk does not take waits in memory, and goes first the next time."""

    def __init__(self, path: Path, writes: Writes) -> None:
        self.path = path
        self._writes = writes
        self._waiting = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def add(self, data: bytes) -> None:
        """Append `data`, after what waits."""
        self._waiting += data
        self._writes.attempt(self.path.name, self._flush)

    def close(self) -> None:
        """Try what waits for the last time; the rest is lost, and stays among `Writes.refused`."""
        if self._writes.attempt(self.path.name, self._flush):
            self._writes.attempt(self.path.name, lambda: os.close(self._file))
            return
        self._writes.refused[self.path.name] += f" ({len(self._waiting):,} bytes are lost)"
        os.close(self._file)

    def _flush(self) -> None:
        while self._waiting:
            del self._waiting[: os.write(self._file, self._waiting)]
