"""Read the metrics of a run that may be under way: as much as a screen can show, and only what is new.

A file of 100,000 steps becomes at most `2 * most` points: steps next to one another share one, with their
mean, least and largest value. A file that was cut, as a resumed run cuts it, is read again from its start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from meshwright.files import open_file, reason

METRICS = "metrics.jsonl"
MOST_POINTS = 1000
MOST_KEYS = 200  # different metrics of one run
LONGEST_LINE = 2**20  # bytes; a line of a run has some hundreds
BLOCK_BYTES = 2**22
WHOLE_BYTES = 8 * 2**20  # of a file of which each line is parsed; of a larger one every n-th
RARE = (b'"held_out_', b'"epoch')  # lines of evaluations and epochs, which are all parsed
LARGEST = 1e100  # axes are computed with differences and squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric by step: for each point the last step it stands for, and mean, least and largest value."""

    steps: tuple[int, ...]
    means: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]


@dataclass(slots=True)
class _Point:
    last: int
    total: float
    count: int
    low: float
    high: float

    def add(self, other: _Point) -> None:
        self.last = max(self.last, other.last)
        self.total, self.count = self.total + other.total, self.count + other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass(slots=True)
class RunCurves:
    """The metrics of a run's folder, by name; `update` reads what was written since.

    Args:
        folder: of the run.
        most: points of a curve, above which neighbours share one; a curve has up to twice as many.

    `broken`: how many lines could not be read. `is_sampled`: whether lines of a large file were passed over.
    `why_not`: why the file cannot be read; "" if it can, or if there is none yet.
    """

    folder: Path
    most: int = MOST_POINTS
    broken: int = 0
    is_sampled: bool = False
    why_not: str = ""
    last_step: int = 0
    _offset: int = 0
    _file: tuple[int, int] = (0, 0)
    _width: int = 1  # steps that share a point
    _stride: int = 1
    _count: int = 0
    _points: dict[str, dict[int, _Point]] = field(default_factory=dict[str, dict[int, _Point]])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics that were found: "loss", "held_out_loss", "seconds"."""
        return tuple(self._points)

    def curve(self, name: str) -> Curve:
        """Return a metric by step; an empty curve if the run has none of that name."""
        points = sorted(self._points.get(name, {}).items())
        return Curve(
            steps=tuple(point.last for _, point in points),
            means=tuple(point.total / point.count for _, point in points),
            lows=tuple(point.low for _, point in points),
            highs=tuple(point.high for _, point in points),
        )

    def update(self) -> bool:
        """Read the complete lines that were written since; return whether there were any.

        A file that is gone or cannot be read leaves the curves as they are.
        """
        try:
            with open_file(self.folder / METRICS) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._restart(status)
                if status.st_size == self._offset:
                    return False
                file.seek(self._offset)
                rest, before = b"", self._offset
                while block := file.read(BLOCK_BYTES):
                    *lines, rest = (rest + block).split(b"\n")
                    self._offset += sum(map(len, lines)) + len(lines)
                    self._add(lines)
                    if len(rest) > LONGEST_LINE:  # no run writes such a line
                        self.broken, self._offset, rest = self.broken + 1, self._offset + len(rest), b""
        except FileNotFoundError:
            return False
        except OSError as refused:
            self.why_not = f"{METRICS} cannot be read: {reason(refused)}"
            return False
        self._stride = 1  # what is written from now on is little
        return self._offset > before

    def _restart(self, status: os.stat_result) -> None:
        self._file, self._offset, self._width, self._count = (status.st_dev, status.st_ino), 0, 1, 0
        self.broken, self.why_not, self.last_step = 0, "", 0
        self._points.clear()
        self._stride = max(1, -(-status.st_size // WHOLE_BYTES))
        self.is_sampled = self._stride > 1

    def _add(self, lines: list[bytes]) -> None:
        for line in lines:
            self._count += 1
            if self._stride > 1 and self._count % self._stride and not any(word in line for word in RARE):
                continue
            try:
                entry = json.loads(line)
                step = entry["step"]
            except (ValueError, RecursionError, KeyError, TypeError):
                self.broken += bool(line)
                continue
            if type(step) is not int or not 0 <= step < 2**53:
                self.broken += 1
                continue
            self._entry(step, cast("Mapping[str, Any]", entry))

    def _entry(self, step: int, entry: Mapping[str, Any]) -> None:
        if step < self.last_step and "loss" in entry:  # rolled back: these steps are trained again
            for points in self._points.values():
                for bucket in [bucket for bucket in points if bucket > step // self._width]:
                    del points[bucket]
            self.last_step = step
        self.last_step = max(step, self.last_step)
        for name, value in entry.items():
            if name == "step" or not _is_drawn(value):
                continue
            if name not in self._points and len(self._points) >= MOST_KEYS:
                continue
            points = self._points.setdefault(name, {})
            bucket = step // self._width
            made = _Point(last=step, total=float(value), count=1, low=float(value), high=float(value))
            if bucket in points and self._width > 1:  # at width 1 it is a step that was trained again
                points[bucket].add(made)
            else:
                points[bucket] = made
            if len(points) > 2 * self.most:
                self._merge()

    def _merge(self) -> None:
        """Let twice as many steps share a point."""
        self._width *= 2
        for name, points in self._points.items():
            merged: dict[int, _Point] = {}
            for bucket, point in sorted(points.items()):
                if bucket // 2 in merged:
                    merged[bucket // 2].add(point)
                else:
                    merged[bucket // 2] = point
            self._points[name] = merged


def _is_drawn(value: object) -> bool:
    """Return whether a value is a number that a curve can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
