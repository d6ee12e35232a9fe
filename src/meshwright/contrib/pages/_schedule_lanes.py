"""Turn the predicted schedule of a weighing into lanes: what a step does from its beginning to its end.

The walk over the schedule gives shares of equal spans. Neighbours that hardly differ become one column, so
that the picture stays small however long the program is. Used by: `_results_pages`, `_run_page`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from meshwright.errors import InputError
from meshwright.report import FREE, GAPS, Column, Lane, Lanes, colours_of, second_ticks
from meshwright.results import Compilation, Weighing
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.predict import Busy

ALIKE = 0.03  # difference of shares below which neighbours become one column
LEAST_DRAWN, LEAST_NAMED = 0.002, 0.01  # shares of a column
MOST_TICKS = 7
LAST_TICK = 0.78  # share of the step; on a narrow page a round time beyond it would touch the last words

_Rows = dict[str, tuple[float, ...]]  # by class of work, its share of every span


def schedule_lanes(weighing: Weighing) -> Lanes | None:
    """Return lanes of what a device does in a step, and of its links; None if no time is predicted.

    None also if the cache no longer has the compiled program.
    """
    busy = schedule_of(weighing)
    return None if busy is None else lanes_of({"": busy})


def schedule_of(weighing: Weighing) -> Busy | None:
    """Return how busy a device is predicted to be from the beginning of a step to its end.

    None where `schedule_lanes` is None.
    """
    from meshwright.ledger import executions_in  # imported late: they load numpy
    from meshwright.predict import NUM_SPANS, predicted_busy

    if weighing.prediction is None:
        return None
    made = weighing.made_by
    if not isinstance(made, Compilation):
        return weighing.account.busy
    try:
        executions = executions_in(made.folder, made.compiled)
    except (InputError, OSError):
        return None
    known = made.rates.calibration, made.rates.measured
    return predicted_busy(executions, made.compiled, weighing.fleet, *known, num_spans=NUM_SPANS)


def lanes_of(schedules: Mapping[str, Busy]) -> Lanes | None:
    """Return the lanes of schedules by name, above one another on the axis of the longest.

    Of each a lane of the device, and one of each kind of link it uses. None if one of them has no work.
    """
    rows = {(title, *lane): shares for title, busy in schedules.items() for lane, shares in _rows(busy)}
    if {title for title, _, _ in rows} != set(schedules):
        return None
    longest = max(busy.seconds for busy in schedules.values())
    colours = colours_of([name for shares in rows.values() for name in shares])
    lanes: list[Lane] = []
    for (title, name, waits), shares in rows.items():
        seconds = schedules[title].seconds
        order = sorted(shares, key=lambda key: (key == GAPS, -sum(shares[key])))
        ordered = {key: shares[key] for key in order}
        columns = _columns(ordered, seconds, longest, colours, waits)
        words = f"{title}, {format_seconds(seconds)}: {name}" if title else name
        lanes.append(Lane(name=words, columns=tuple(columns)))
    ends = second_ticks(0, longest, MOST_TICKS)
    has_links = len(rows) > len(schedules)
    return Lanes(
        label="one step from its beginning to its end",
        lanes=tuple(lanes),
        ticks=(
            *((place / longest, words) for place, words in ends if place < LAST_TICK * longest),
            (1.0, format_seconds(longest)),
        ),
        colours=tuple(
            (colours[name], name) for name in colours if any(name in shares for shares in rows.values())
        )
        + (((FREE, "link not used"),) if has_links else ()),
    )


def _rows(busy: Busy) -> Iterator[tuple[tuple[str, frozenset[str]], _Rows]]:
    """Yield the name of each lane with the classes for which it waits, and its shares; none without work."""
    from meshwright.predict import TRACKS

    streams = {stream: _by_class(named) for stream, named in busy.shares.items()}
    waits = streams.pop("wait", {})
    device = streams.pop("compute", {}) | waits
    if not device:
        return
    device[GAPS] = tuple(max(0.0, 1 - sum(shares)) for shares in zip(*device.values(), strict=True))
    yield ("computing, or waiting for messages", frozenset(waits)), device
    for stream, shares in streams.items():
        yield (TRACKS.get(stream, stream), frozenset()), shares


def _by_class(named: Mapping[str, tuple[float, ...]]) -> _Rows:
    """Return the shares, with one collective's shares summed over its axes."""
    rows: _Rows = {}
    for name, shares in named.items():
        key = name.partition("[")[0]
        rows[key] = tuple(map(sum, zip(rows[key], shares, strict=True))) if key in rows else shares
    return rows


def _columns(
    rows: _Rows, seconds: float, longest: float, colours: Mapping[str, str], awaited: Collection[str]
) -> Iterator[Column]:
    """Yield a column for each run of spans that hardly differ, with the mean of their shares.

    `longest`: the seconds of the axis.
    """
    spans = list(zip(*rows.values(), strict=True))
    begin = 0
    for end in range(1, len(spans) + 1):
        if end < len(spans) and all(
            abs(a - b) < ALIKE for a, b in zip(spans[begin], spans[end], strict=True)
        ):
            continue
        means = [sum(shares) / (end - begin) for shares in zip(*spans[begin:end], strict=True)]
        parts = [(name, share) for name, share in zip(rows, means, strict=True) if share >= LEAST_DRAWN]
        if parts:
            first, last = begin / len(spans), end / len(spans)
            words = ", ".join(
                f"{'waiting for ' if name in awaited else ''}{name} {100 * share:.0f} %"
                for name, share in parts
                if share >= LEAST_NAMED
            )
            between = (
                f"{format_seconds(first * seconds) if begin else '0'} to {format_seconds(last * seconds)}"
            )
            yield Column(
                begin=first * seconds / longest,
                end=last * seconds / longest,
                parts=tuple((colours[name], share) for name, share in parts),
                words=f"{between}: {words or 'hardly anything'}",
            )
        begin = end
