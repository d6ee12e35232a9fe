"""Keep a curve of any length in a bounded number of buckets, each with its least, mean and largest value.

A bucket holds the lines of `width` neighbouring steps. When there are too many buckets, each two neighbours
become one and the width doubles: a line is added at a constant cost, and a spike of one step stays the
largest value of its bucket. Steps without a line need no bucket. Imports: numpy. Used by: `_metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BUCKETS = 2048  # of a curve
MOST_KEYS = 64  # quantities of one file: a model of ours has ten
COUNT, TOTAL, LEAST, LARGEST = range(4)
LOW, MEAN, HIGH = range(3)
Have = tuple[int, int, int]
"""State of a page: `generation` and `width` of its window, and how many complete buckets it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some steps of all curves of a file, as a page draws them.

    `width`: steps of each bucket. `start`: the number of the first bucket that is sent; earlier ones have not
    changed. `first`, `last`: the first and the last step of each bucket. `curves`: by quantity, the least,
    mean and largest values; NaN where a bucket has none.
    """

    generation: int
    width: int
    start: int
    first: list[int]
    last: list[int]
    curves: dict[str, np.ndarray]

    def means(self, key: str) -> list[float | None]:
        """Return the mean of each bucket, with six digits; None where a bucket has no value."""
        return rounded(self.curves[key][MEAN])

    def to_dict(self) -> dict[str, Any]:
        """Return the window in JSON's types; least and largest values are left out where all are equal."""
        curves = {}
        for key, rows in self.curves.items():
            low, mean, high = (rounded(row) for row in rows)
            curves[key] = [mean] if low == high == mean else [low, mean, high]
        return {
            "generation": self.generation,
            "width": self.width,
            "start": self.start,
            "first": self.first,
            "last": self.last if self.width > 1 else [],
            "curves": curves,
        }


@dataclass(slots=True, kw_only=True)
class _Part:
    """Some buckets: the first and last step of each, and by statistic, quantity and bucket the values.

    Both arrays are never changed in place.
    """

    steps: np.ndarray  # 2 x buckets
    values: np.ndarray  # COUNT to LARGEST x quantities x buckets

    def __len__(self) -> int:
        return self.steps.shape[1]

    def __getitem__(self, chosen: slice) -> _Part:
        return _Part(steps=self.steps[:, chosen], values=self.values[:, :, chosen])

    def joined(self, other: _Part) -> _Part:
        steps = np.concatenate((self.steps, other.steps), axis=1)
        return _Part(steps=steps, values=np.concatenate((self.values, other.values), axis=2))

    def merged(self, width: int) -> _Part:
        """Return the buckets of `width` steps that these buckets fall into."""
        places = self.steps[0] // width
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        if len(starts) == len(self):
            return self
        ends = np.append(starts[1:], len(self)) - 1
        steps = np.stack((self.steps[0, starts], self.steps[1, ends]))
        ways = (np.add, np.add, np.fmin, np.fmax)
        made = [way.reduceat(rows, starts, axis=1) for way, rows in zip(ways, self.values, strict=True)]
        return _Part(steps=steps, values=np.stack(made))


class Buckets:
    """The curves of lines that have a step and quantities, in at most `MOST_BUCKETS` buckets.

    `generation`: a number that changes whenever buckets that were complete have changed. `width`: the steps
    of a bucket.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation, self.width = generation, 1
        self._places: dict[str, int] = {}
        self._part = _Part(steps=np.zeros((2, 0), np.int64), values=np.zeros((4, 0, 0)))

    @property
    def keys(self) -> list[str]:
        """The quantities, in the order in which they came."""
        return list(self._places)

    @property
    def last_step(self) -> int:
        """The step of the last line; -1 before the first."""
        return int(self._part.steps[1, -1]) if len(self._part) else -1

    def add(self, steps: np.ndarray, keys: Sequence[str], values: np.ndarray) -> None:
        """Add lines, whose values are `lines x keys`: NaN for one that is not known.

        Steps that go back, or that come again, replace the lines from there on.
        """
        turns = np.flatnonzero(np.diff(steps) <= 0) + 1
        for start, end in zip((0, *turns), (*turns, len(steps)), strict=True):
            if start < end:
                self.cut(int(steps[start]))
                self._append(steps[start:end], keys, values[start:end])

    def cut(self, step: int) -> None:
        """Forget the lines from `step` on; the extremes of a wide bucket around it are kept."""
        if step > self.last_step:
            return
        self.generation += 1
        part = self._part[: int(np.searchsorted(self._part.steps[0], step))]
        self._part = _Part(
            steps=np.stack((part.steps[0], np.minimum(part.steps[1], step - 1))), values=part.values
        )

    def _append(self, steps: np.ndarray, keys: Sequence[str], values: np.ndarray) -> None:
        self._make_room(keys)
        taken = [column for column, key in enumerate(keys) if key in self._places]
        places, values = [self._places[keys[column]] for column in taken], values[:, taken].T
        known = np.isfinite(values)
        made = _empty(len(self._places), len(steps))
        made[COUNT, places], made[TOTAL, places] = known, np.where(known, values, 0.0)
        made[LEAST, places] = made[LARGEST, places] = values
        new = _Part(steps=np.stack((steps, steps)), values=made)
        part = self._part
        self._part = part[:-1].joined(part[-1:].joined(new).merged(self.width))
        while len(self._part) > MOST_BUCKETS:
            self.width *= 2
            self._part = self._part.merged(self.width)

    def _make_room(self, keys: Sequence[str]) -> None:
        """Give the new ones among the quantities a place, as far as there are any left."""
        new = [key for key in keys if key not in self._places][: MOST_KEYS - len(self._places)]
        if new:
            self._places |= {key: place for place, key in enumerate(new, start=len(self._places))}
            values = np.concatenate((self._part.values, _empty(len(new), len(self._part))), axis=1)
            self._part = _Part(steps=self._part.steps, values=values)

    def window(
        self, most: int, *, low: int | None = None, high: int | None = None, have: Have | None = None
    ) -> Window:
        """Return all curves, or those of the steps `low` to `high`, in at most about `most` buckets.

        Args:
            have: what the page has of all steps: buckets that have not changed since are left out.
        """
        part, width = self._part, self.width
        begin = 0 if low is None else max(0, int(np.searchsorted(part.steps[1], low)) - 1)
        end = len(part) if high is None else int(np.searchsorted(part.steps[0], high, "right")) + 1
        part = part[begin:end]
        while len(part) > most:
            width *= 2
            part = part.merged(width)
        is_known = have is not None and have[:2] == (self.generation, width)
        start = min(have[2], len(part)) if have is not None and is_known else 0
        part = part[start:]
        count, total, least, largest = part.values
        with np.errstate(invalid="ignore"):
            means = total / count  # of no values: NaN
        return Window(
            generation=self.generation,
            width=width,
            start=start,
            first=part.steps[0].tolist(),
            last=part.steps[1].tolist(),
            curves={key: np.stack((least[at], means[at], largest[at])) for key, at in self._places.items()},
        )

    def to_bytes(self) -> tuple[dict[str, Any], bytes]:
        """Return what JSON and bytes hold of the buckets, of which `from_bytes` makes the same."""
        about = {"keys": self.keys, "width": self.width, "buckets": len(self._part)}
        return about, self._part.steps.astype("<i8").tobytes() + self._part.values.astype("<f8").tobytes()

    @classmethod
    def from_bytes(cls, about: Mapping[str, Any], numbers: bytes) -> tuple[Buckets, bytes]:
        """Return the buckets of `to_bytes`, and the bytes that follow theirs."""
        made, keys, count = cls(), about["keys"], about["buckets"]
        at = 8 * 2 * count
        end = at + 8 * 4 * len(keys) * count
        steps = np.frombuffer(numbers[:at], "<i8").reshape(2, count)
        values = np.frombuffer(numbers[at:end], "<f8").reshape(4, len(keys), count)
        made.width, made._part = about["width"], _Part(steps=steps, values=values)
        made._places = {key: place for place, key in enumerate(keys)}
        return made, numbers[end:]


def _empty(num_keys: int, num_buckets: int) -> np.ndarray:
    """Return the values of buckets that hold none."""
    made = np.full((4, num_keys, num_buckets), np.nan)
    made[[COUNT, TOTAL]] = 0.0
    return made


def rounded(values: np.ndarray) -> list[float | None]:
    """Return values with six digits, which a picture does not need more of; None for NaN."""
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]
