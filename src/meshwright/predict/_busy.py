"""Divide a walked step into equal spans, and find what share of each span every class of work takes.

A picture of a step needs no more, however long its program is. The walk notes the first round of a loop; here
the further rounds count as often as they run. Where a round takes fewer than `FEW_SPANS` spans, each span of
its loop has the round's mean: spans and rounds would beat against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._prediction_records import Busy
from ._walk import Event

NUM_SPANS = 240  # of a picture
FEW_SPANS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """`rounds` runs of `items`, whose clock is that of the first round, each of `seconds`."""

    begin_seconds: float
    seconds: float
    rounds: int
    items: list[_Item]


_Item = Event | _Loop
_Sums = dict[tuple[str, str], float]  # seconds by stream and class


def busy_of(events: Iterable[Event], seconds: float, num_spans: int) -> Busy:
    """Return how busy each stream is, from the events of a walk that took `seconds`."""
    items, length = _nested(events), seconds / num_spans
    shares: dict[str, dict[str, list[float]]] = {}
    met: list[list[_Item]] = [[] for _ in range(num_spans if length > 0 else 0)]  # by span
    for item in items:
        seconds_of = item.seconds * item.rounds if isinstance(item, _Loop) else item.seconds
        first, last = (int(at / length) for at in (item.begin_seconds, item.begin_seconds + seconds_of))
        for place in range(max(first - 1, 0), min(last + 2, len(met))):
            met[place].append(item)
    for place, there in enumerate(met):
        sums: _Sums = {}
        _add(there, place * length, (place + 1) * length, 1.0, sums, FEW_SPANS * length)
        for (stream, name), taken in sums.items():
            row = shares.setdefault(stream, {}).setdefault(name, [0.0] * num_spans)
            row[place] = taken / length
    return Busy(
        seconds=seconds,
        shares={
            stream: {name: tuple(row) for name, row in rows.items()}
            for stream, rows in sorted(shares.items())
        },
    )


def _nested(events: Iterable[Event]) -> list[_Item]:
    """Return the events with each first round of a loop, and the event after it, as one `_Loop`."""
    done: list[tuple[_Item, int]] = []  # with the number of events that each item stands for
    for event in events:
        if not event.further_rounds:
            done.append((event, 1))
            continue
        items: list[_Item] = []
        taken = 0
        while taken < event.num_events:
            item, size = done.pop()
            items.append(item)
            taken += size
        seconds = event.seconds / event.further_rounds
        loop = _Loop(
            begin_seconds=event.begin_seconds - seconds,
            seconds=seconds,
            rounds=event.further_rounds + 1,
            items=items,
        )
        done.append((loop, taken + 1))
    return [item for item, _ in done]


def _add(items: Sequence[_Item], begin: float, end: float, times: float, sums: _Sums, least: float) -> None:
    """Add `times` the seconds of each class between `begin` and `end` by the clock of `items`.

    `least`: the seconds of a round below which only its mean is seen.
    """
    for item in items:
        if isinstance(item, _Loop):
            _add_loop(item, begin - item.begin_seconds, end - item.begin_seconds, times, sums, least)
            continue
        overlap = min(end, item.end_seconds) - max(begin, item.begin_seconds)
        if overlap > 0:
            key = item.stream, item.name
            sums[key] = sums.get(key, 0.0) + times * overlap


def _add_loop(loop: _Loop, begin: float, end: float, times: float, sums: _Sums, least: float) -> None:
    """Add the rounds of a loop between two times from its beginning."""
    seconds = loop.seconds
    begin, end = max(begin, 0.0), min(end, loop.rounds * seconds)
    if end <= begin:
        return

    def add(first: float, last: float, repeats: float) -> None:
        if last > first and repeats > 0:
            start = loop.begin_seconds
            _add(loop.items, start + first, start + last, times * repeats, sums, least)

    whole_from, whole_to = math.ceil(begin / seconds), math.floor(end / seconds)
    if seconds < least:
        add(0.0, seconds, (end - begin) / seconds)
    elif whole_from > whole_to:  # within one round
        add(begin - whole_to * seconds, end - whole_to * seconds, 1)
    else:
        add(begin - (whole_from - 1) * seconds, seconds, int(begin < whole_from * seconds))
        add(0.0, seconds, whole_to - whole_from)
        add(0.0, end - whole_to * seconds, 1)
