"""Keep a curve of any length in a bounded number of buckets, each with its least, mean and largest value.

A bucket holds `width` neighbouring lines of a file of metrics. When all buckets are full, each two become one
and the width doubles: a line is added at a constant cost, and a spike of one step stays the largest value of
its bucket. Imports: numpy. Used by: `_metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BUCKETS = 2048  # of a curve; even, since two become one
MOST_KEYS = 64  # quantities of one file: a model of ours has ten
LOW, MEAN, HIGH = range(3)
Have = tuple[int, int, int]
"""What a page has: `generation` and `width` of its window, and the number of buckets that were complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some steps of all curves of a file, as a page draws them.

    `width`: lines in each bucket. `start`: the number of the first bucket that is sent; earlier ones have not
    changed. `first`, `last`: the steps of each bucket. `curves`: by quantity, the least, mean and largest
    values; a value that is not finite is None.
    """

    generation: int
    width: int
    start: int
    first: list[int]
    last: list[int]
    curves: dict[str, list[list[float | None]]]

    def to_dict(self) -> dict[str, Any]:
        """Return the window in JSON's types; least and largest values are left out where all are equal."""
        curves = {
            key: [rows[MEAN]] if rows[LOW] == rows[HIGH] == rows[MEAN] else rows
            for key, rows in self.curves.items()
        }
        return {
            "generation": self.generation,
            "width": self.width,
            "start": self.start,
            "first": self.first,
            "last": self.last if self.width > 1 else [],
            "curves": curves,
        }


class Buckets:
    """The curves of lines that have a step and quantities, in at most `MOST_BUCKETS` buckets.

    `generation`: a number that changes whenever buckets that were complete have changed.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.num_lines = 0
        self._width = 1
        self._steps = np.zeros((0, 2), np.int64)  # first and last step of each full bucket
        self._full: dict[str, np.ndarray] = {}  # by quantity: buckets x (least, mean, largest)
        self._open_steps = np.zeros(0, np.int64)  # of the lines that do not fill a bucket yet
        self._open: dict[str, np.ndarray] = {}

    @property
    def keys(self) -> list[str]:
        """The quantities, in the order in which they came."""
        return list(self._full)

    @property
    def last_step(self) -> int:
        """The step of the last line; -1 before the first."""
        if len(self._open_steps):
            return int(self._open_steps[-1])
        return int(self._steps[-1, 1]) if len(self._steps) else -1

    def add(self, steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Add lines. Steps that go back replace the lines from there on, as a run that rolls back does."""
        if not len(steps):
            return
        turns = np.flatnonzero(np.diff(steps) <= 0) + 1
        for start, end in zip((0, *turns), (*turns, len(steps)), strict=True):
            if steps[start] <= self.last_step:
                self._cut(int(steps[start]))
            self._append(steps[start:end], {key: column[start:end] for key, column in columns.items()})

    def _append(self, steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        self.num_lines += len(steps)
        for key in columns:
            if key not in self._full and len(self._full) < MOST_KEYS:
                self._full[key] = np.full((len(self._steps), 3), np.nan)
                self._open[key] = np.full(len(self._open_steps), np.nan)
        absent = np.full(len(steps), np.nan)
        self._open_steps = np.concatenate((self._open_steps, steps))
        for key, open_values in self._open.items():
            self._open[key] = np.concatenate((open_values, columns.get(key, absent)))
        while (filled := min(len(self._open_steps) // self._width, MOST_BUCKETS - len(self._steps))) > 0:
            self._close(filled)
            if len(self._steps) == MOST_BUCKETS:
                self._halve()

    def _close(self, filled: int) -> None:
        """Make the first open lines `filled` full buckets."""
        cut, shape = filled * self._width, (filled, self._width)
        steps = self._open_steps[:cut].reshape(shape)
        self._steps = np.concatenate((self._steps, steps[:, [0, -1]]))
        self._open_steps = self._open_steps[cut:]
        for key, values in self._open.items():
            self._full[key] = np.concatenate((self._full[key], _summary(values[:cut].reshape(shape))))
            self._open[key] = values[cut:]

    def _halve(self) -> None:
        self._width *= 2
        self._steps = _paired_steps(self._steps, 2)
        self._full = {key: _paired(values, 2) for key, values in self._full.items()}

    def _cut(self, step: int) -> None:
        """Forget the lines from `step` on; the values of a full bucket around it are kept."""
        self.generation += 1
        kept_open = int(np.searchsorted(self._open_steps, step))
        self._open_steps = self._open_steps[:kept_open]
        self._open = {key: values[:kept_open] for key, values in self._open.items()}
        kept = int(np.searchsorted(self._steps[:, 0], step))
        self._steps = self._steps[:kept]
        self._full = {key: values[:kept] for key, values in self._full.items()}
        if kept:
            self._steps[-1, 1] = min(self._steps[-1, 1], step - 1)

    def window(
        self, most: int, *, low: int | None = None, high: int | None = None, have: Have | None = None
    ) -> Window:
        """Return all curves, or those of the steps `low` to `high`, in at most about `most` buckets.

        Args:
            have: what the page has of all steps: buckets that have not changed since are left out.
        """
        steps, full = self._steps, self._full
        if len(self._open_steps):
            steps = np.concatenate((steps, self._open_steps[[0, -1]][None]))
            full = {
                key: np.concatenate((values, _summary(self._open[key][None]))) for key, values in full.items()
            }
        begin, end = 0, len(steps)
        if low is not None:
            begin = max(0, int(np.searchsorted(steps[:, 1], low)) - 1)
        if high is not None:
            end = min(end, int(np.searchsorted(steps[:, 0], high, "right")) + 1)
        merged = 1
        while (end - begin) / merged > most:
            merged *= 2
        begin -= begin % merged
        if have is not None and have[:2] == (self.generation, self._width * merged):
            begin = max(begin, min(have[2], len(steps) // merged) * merged)
        chosen = {key: _paired(values[begin:end], merged) for key, values in full.items()}
        pairs = _paired_steps(steps[begin:end], merged)
        return Window(
            generation=self.generation,
            width=self._width * merged,
            start=begin // merged,
            first=pairs[:, 0].tolist(),
            last=pairs[:, 1].tolist(),
            curves={key: [_rounded(column) for column in values.T] for key, values in chosen.items()},
        )


def _summary(values: np.ndarray) -> np.ndarray:
    """Return the least, mean and largest finite value of each row; NaN where a row has none."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return np.stack((np.fmin.reduce(values, axis=1), mean, np.fmax.reduce(values, axis=1)), axis=1)


def _paired(values: np.ndarray, merged: int) -> np.ndarray:
    """Return each `merged` rows of (least, mean, largest) as one; the last one may be of fewer."""
    if merged == 1:
        return values
    rest = -len(values) % merged
    padded = np.concatenate((values, np.full((rest, 3), np.nan))).reshape(-1, merged, 3)
    least, mean, largest = padded[:, :, LOW], padded[:, :, MEAN], padded[:, :, HIGH]
    known = np.isfinite(mean)
    count = known.sum(axis=1)
    means = np.where(known, mean, 0.0).sum(axis=1) / np.maximum(count, 1)
    means = np.where(count > 0, means, np.nan)
    return np.stack((np.fmin.reduce(least, axis=1), means, np.fmax.reduce(largest, axis=1)), axis=1)


def _paired_steps(steps: np.ndarray, merged: int) -> np.ndarray:
    if merged == 1:
        return steps
    ends = np.minimum(np.arange(merged, len(steps) + merged, merged), len(steps)) - 1
    return np.stack((steps[::merged, 0], steps[ends[: len(steps[::merged])], 1]), axis=1)


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return values with six digits, which a picture does not need more of; None for NaN."""
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]
