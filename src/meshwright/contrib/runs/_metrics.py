"""Read a run's metrics.jsonl as it grows: each byte once, a broken or hostile line passed over.

A line of a step, of an evaluation, of an epoch and of an estimate of the finish have different quantities,
and go into different `Buckets`. A step that is trained again, after a rollback, replaces the lines of all
kinds from there on. The file is begun again only where it is another file or has become shorter, as when a
run resumes. The curves of a large file are kept in the cache, so that it is read once (`_kept_curves`).

Imports: `_buckets`, `_kept_curves`, `files`. Used by: `_run_record`, `contrib.watch`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic_core import from_json

from meshwright.files import open_file, reason

from ._buckets import HIGH, LOW, MEAN, MOST_KEYS, Buckets
from ._kept_curves import LEAST_BYTES, KeptCurves, curves_of, keep_curves

CHUNK_BYTES = 1 << 20  # read and parsed at once, in about 10 ms
LONGEST_LINE = 1 << 16  # a longer one is no line of a run
MOST_STEP = 2**53  # above it a browser's numbers skip whole ones
LARGEST = 1e100  # axes are computed with differences and squares
KINDS = TRAIN, HELD_OUT, EPOCH, FINISH = ("train", "held-out", "epoch", "finish")
PREVIEW_LINES, PREVIEW_BYTES = 150, 2048  # of a file that is not read to its end yet
MOST_POINTS = 1000
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric by step: for each point the last step it stands for, and mean, least and largest value."""

    steps: tuple[int, ...]
    means: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]


class Metrics:
    """The curves of one metrics.jsonl.

    `tracks`: the buckets of each kind of line. `broken`: lines that were passed over. `is_whole`: whether the
    file has been read to its end once. `why_not`: why it cannot be read; "" if it can, or is not there.
    `newest`: by quantity, its last value; NaN if that is no number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.why_not = ""
        self.newest: dict[str, float] = {}
        self._file: tuple[int, int] | None = None  # device and inode
        self._begin(generation=0)

    def _begin(self, *, generation: int) -> None:
        self.size = self.offset = self.broken = self._kept = 0
        self.is_whole = False
        self.newest.clear()
        self.tracks = {kind: Buckets(generation) for kind in KINDS}
        self._rest = b""  # the beginning of a line
        self._skips = False  # whether the rest of a line that is too long is passed over

    @property
    def share(self) -> float:
        """The share of the file that is read; 1.0 once all of it was."""
        return 1.0 if self.is_whole else self.offset / max(self.size, 1)

    @property
    def names(self) -> tuple[str, ...]:
        """The quantities of all lines: "loss", "held_out_loss", "seconds"."""
        return tuple(dict.fromkeys(key for track in self.tracks.values() for key in track.keys))

    def curve(self, name: str, most: int = MOST_POINTS) -> Curve:
        """Return a quantity by step, in at most `most` points; none if the run has no such quantity."""
        track = next((track for track in self.tracks.values() if name in track.keys), None)
        if track is None:
            return Curve(steps=(), means=(), lows=(), highs=())
        window = track.window(most)
        rows = window.curves[name]
        known = np.isfinite(rows[MEAN])
        low, mean, high = (tuple(rows[at, known].tolist()) for at in (LOW, MEAN, HIGH))
        return Curve(steps=tuple(np.array(window.last)[known].tolist()), means=mean, lows=low, highs=high)

    def read_whole(self) -> bool:
        """Read all complete lines that were written since; return whether there were any."""
        is_new = False
        while self.read():
            is_new = True
        return is_new

    def read(self, most_bytes: int = CHUNK_BYTES) -> bool:
        """Read on, at most `most_bytes`; return whether anything was new.

        A file that cannot be read holds nothing new.
        """
        try:
            with open_file(self.path) as file:
                self.why_not = ""
                return self._read(file, most_bytes)
        except FileNotFoundError:
            return False
        except OSError as refused:
            self.why_not = f"{self.path.name} cannot be read: {reason(refused)}"
            return False

    def _read(self, file: IO[bytes], most_bytes: int) -> bool:
        found = os.fstat(file.fileno())
        is_other = self._file is not None and (found.st_dev, found.st_ino) != self._file
        if is_other or found.st_size < self.offset:
            self._begin(generation=1 + max(track.generation for track in self.tracks.values()))
        self._file, self.size = (found.st_dev, found.st_ino), found.st_size
        is_new = is_other or (not self.offset and self._take_kept(file))
        if self.offset >= self.size:
            self.is_whole = True
            return is_new
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
        if self.is_whole and not self._skips and self.offset - self._kept >= LEAST_BYTES:
            self._kept = self.offset
            keep_curves(self.path, file, self._state())
        return True

    def _state(self) -> KeptCurves:
        offset = self.offset - len(self._rest)
        return KeptCurves(offset=offset, broken=self.broken, newest=self.newest, tracks=self.tracks)

    def _take_kept(self, file: IO[bytes]) -> bool:
        """Go on from the curves that the cache has of the file; return whether it has them."""
        kept = curves_of(self.path, file)
        if kept is None:
            return False
        generation = self.tracks[TRAIN].generation
        self.offset = self._kept = kept.offset
        self.broken, self.newest, self.tracks = kept.broken, kept.newest, kept.tracks
        for track in self.tracks.values():
            track.generation = generation
        return True

    def _add(self, lines: Sequence[bytes]) -> None:
        """Add lines in their order; a step that is trained again replaces what came after it."""
        rows, broken = _rows(lines)
        self.broken += broken
        names = list(map(tuple, rows))
        kind_by_names = {each: kind_of(each) for each in set(names)}
        kinds = [kind_by_names[each] for each in names]
        trained = [place for place, kind in enumerate(kinds) if kind == TRAIN]
        steps = [self.tracks[TRAIN].last_step, *(rows[place]["step"] for place in trained)]
        turns = [trained[place] for place in np.flatnonzero(np.diff(np.array(steps, np.int64)) <= 0)]
        for start, end in itertools.pairwise((0, *turns, len(rows))):
            if start in turns:
                for track in self.tracks.values():
                    track.cut(rows[start]["step"])
            for kind, track in self.tracks.items():
                if chosen := [rows[place] for place in range(start, end) if kinds[place] == kind]:
                    self.newest |= _add_to(track, chosen)

    def preview(self) -> Buckets:
        """Return the curves of some lines of steps from all over the file, to draw while it is being read."""
        made = Buckets(generation=-1)  # no page goes on from it
        try:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                places = np.linspace(0, max(0, size - PREVIEW_BYTES), PREVIEW_LINES)
                rows = [_row_at(file, int(place)) for place in places]
        except OSError:
            return made
        by_step = {row["step"]: row for row in rows if row is not None}
        if by_step:
            _add_to(made, [by_step[step] for step in sorted(by_step)])
        return made


def _add_to(buckets: Buckets, rows: Sequence[Row]) -> dict[str, float]:
    """Add lines to buckets, and return the last value of each quantity."""
    by_names: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(rows):
        by_names.setdefault(tuple(row), []).append(place)
    keys = list(dict.fromkeys(key for names in by_names for key in names))[: MOST_KEYS + 1]
    columns = {key: column for column, key in enumerate(keys)}
    values = np.full((len(rows), len(keys)), np.nan)
    for names, places in by_names.items():
        taken = [place for place, name in enumerate(names) if name in columns]
        numbers = _numbers([rows[place] for place in places], len(names))
        values[np.ix_(places, [columns[names[place]] for place in taken])] = numbers[:, taken]
    at = columns.pop("step")
    buckets.add(
        np.array([row["step"] for row in rows], np.int64), list(columns), np.delete(values, at, axis=1)
    )
    return {key: float(values[-1, column]) for key, column in columns.items()}


def _numbers(rows: Sequence[Row], width: int) -> np.ndarray:
    """Return the values of lines with the same quantities: NaN for what is no number that can be drawn."""
    cells = [value for row in rows for value in row.values()]
    try:
        numbers = np.array(cells, np.float64)
        if numbers.ndim != 1:
            raise ValueError("lists")
    except (ValueError, TypeError, OverflowError):
        numbers = np.array([_number(cell) for cell in cells])
    return np.where(np.abs(numbers) <= LARGEST, numbers, np.nan).reshape(len(rows), width)


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) <= LARGEST else np.nan


def _row_at(file: IO[bytes], place: int) -> Row | None:
    """Return the first whole line of a step after a place."""
    file.seek(place)
    rows, _ = _rows(file.read(PREVIEW_BYTES).split(b"\n")[1:-1])
    return next((row for row in rows if kind_of(row) == TRAIN), None)


def kind_of(names: Collection[str]) -> str:
    """Return the kind of a line by the names of its quantities."""
    if "epoch" in names:
        return EPOCH
    if "loss" in names:
        return TRAIN
    return FINISH if any(name.startswith("finish_") for name in names) else HELD_OUT


def _rows(lines: Sequence[bytes]) -> tuple[list[Row], int]:
    """Return the lines that hold a step, and the number of those that do not."""
    lines = [line for line in lines if line and not line.isspace()]
    if not lines:
        return [], 0
    try:
        rows = from_json(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and _are_rows(rows):
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
    return row if _are_rows([row]) else None


def _are_rows(rows: Sequence[Any]) -> bool:
    if not set(map(type, rows)) <= {dict}:
        return False
    steps = [row.get("step") for row in rows]
    return set(map(type, steps)) <= {int} and all(0 <= end <= MOST_STEP for end in (min(steps), max(steps)))
