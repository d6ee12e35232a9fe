"""Read a run's metrics.jsonl as it grows: each byte once, a broken or hostile line passed over.

A line of a step, one of an evaluation and one of an epoch have different quantities, and go into different
`Buckets`. The file is begun again only where it is another file or has become shorter, as when a run resumes.

Imports: `_buckets`, `files`. Used by: `_live_run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic_core import from_json

from meshwright.files import open_file

from ._buckets import MOST_KEYS, Buckets
from ._values import LARGEST, clean

CHUNK_BYTES = 1 << 20  # read and parsed at once, in about 10 ms
LONGEST_LINE = 1 << 16  # a longer one is no line of a run
MOST_STEP = 2**53  # above it a browser's numbers skip whole ones
KINDS = ("train", "held-out", "epoch")
PREVIEW_LINES, PREVIEW_BYTES = 150, 2048  # of a file that is not read to its end yet
Row = dict[str, Any]


class Metrics:
    """The curves of one metrics.jsonl.

    `tracks`: the buckets of each kind of line. `broken`: lines that were passed over. `is_whole`: whether the
    file has been read to its end once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.newest: dict[str, float] = {}  # by quantity, its last value
        self._file: tuple[int, int] | None = None  # device and inode
        self._begin(generation=0)

    def _begin(self, *, generation: int) -> None:
        self.size = self.offset = self.broken = 0
        self.is_whole = False
        self.newest.clear()
        self.tracks = {kind: Buckets(generation) for kind in KINDS}
        self._rest = b""  # the beginning of a line
        self._skips = False  # whether the rest of a line that is too long is passed over

    @property
    def share(self) -> float:
        """The share of the file that is read; 1.0 once all of it was."""
        return 1.0 if self.is_whole else self.offset / max(self.size, 1)

    def read(self, most_bytes: int = CHUNK_BYTES) -> bool:
        """Read on, at most `most_bytes`; return whether anything was new.

        A file that cannot be read holds nothing new.
        """
        try:
            with open_file(self.path) as file:
                return self._read(file, most_bytes)
        except OSError:
            return False

    def _read(self, file: IO[bytes], most_bytes: int) -> bool:
        found = os.fstat(file.fileno())
        is_other = self._file is not None and (found.st_dev, found.st_ino) != self._file
        if is_other or found.st_size < self.offset:
            self._begin(generation=1 + max(track.generation for track in self.tracks.values()))
        self._file, self.size = (found.st_dev, found.st_ino), found.st_size
        if self.offset >= self.size:
            self.is_whole = True
            return is_other
        file.seek(self.offset)
        data = file.read(min(most_bytes, self.size - self.offset))
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skips and lines:
            lines, self._skips = lines[1:], False
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._skips = b"", True
            self.broken += 1
        self._add(lines)
        self.is_whole |= self.offset >= self.size
        return True

    def _add(self, lines: Sequence[bytes]) -> None:
        rows, broken = _rows(lines)
        self.broken += broken
        for kind, chosen in _by_kind(rows):
            columns = _add_to(self.tracks[kind], chosen)
            self.newest |= {key: float(values[-1]) for key, values in columns.items()}

    def preview(self) -> list[Row]:
        """Return some lines of steps from all over the file, in order, to draw while it is being read."""
        try:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                places = np.linspace(0, max(0, size - PREVIEW_BYTES), PREVIEW_LINES)
                rows = [_row_at(file, int(place)) for place in places]
        except OSError:
            return []
        by_step = {row["step"]: row for row in rows if row is not None}
        return [by_step[step] for step in sorted(by_step)]


def preview_buckets(rows: Sequence[Row]) -> Buckets:
    """Return the curves of a preview's lines, which no page goes on from."""
    made = Buckets(generation=-1)
    if rows:
        _add_to(made, rows)
    return made


def _add_to(buckets: Buckets, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Add lines to buckets, and return their values by quantity."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "step"))[:MOST_KEYS]
    columns = {clean(key): _column([row.get(key) for row in rows]) for key in keys}
    buckets.add(np.array([row["step"] for row in rows], np.int64), columns)
    return columns


def _row_at(file: IO[bytes], place: int) -> Row | None:
    """Return the first whole line of a step after a place."""
    file.seek(place)
    rows, _ = _rows(file.read(PREVIEW_BYTES).split(b"\n")[1:-1])
    return next((row for row in rows if kind_of(row) == "train"), None)


def kind_of(row: Row) -> str:
    """Return the kind of a line by its quantities."""
    if "epoch" in row:
        return "epoch"
    return "train" if "loss" in row else "held-out"


def _rows(lines: Sequence[bytes]) -> tuple[list[Row], int]:
    """Return the lines that hold a step, and the number of those that do not."""
    lines = [line for line in lines if line and not line.isspace()]
    try:
        rows = from_json(b"[" + b",".join(lines) + b"]") if lines else []
        if len(rows) == len(lines) and all(map(_is_row, rows)):
            return rows, 0
    except ValueError:
        pass  # a line is cut short: which one is found line by line
    found = [row for line in lines if (row := _row(line)) is not None]
    return found, len(lines) - len(found)


def _row(line: bytes) -> Row | None:
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if _is_row(row) else None


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and type(step := row.get("step")) is int and 0 <= step <= MOST_STEP


def _by_kind(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for kind in KINDS:
        if chosen := [row for row in rows if kind_of(row) == kind]:
            yield kind, chosen


def _column(values: list[Any]) -> np.ndarray:
    """Return a quantity's values as numbers; NaN for what is none, or beyond what an axis can show."""
    try:
        column = np.array(values, np.float64)
        if column.ndim != 1:
            raise ValueError("lists")
    except (ValueError, TypeError, OverflowError):
        column = np.array([value if type(value) in (int, float) else np.nan for value in map(_small, values)])
    return np.where(np.abs(column) <= LARGEST, column, np.nan)


def _small(value: Any) -> Any:
    return np.nan if type(value) is int and abs(value) > LARGEST else value
