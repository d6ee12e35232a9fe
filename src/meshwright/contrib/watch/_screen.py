"""Show runs on a terminal while they run: a live screen, or plain lines in a pipe.

Imports: `_shelf`, `cli`, `units`, rich. Used by: `_watch_command`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from meshwright.cli import console
from meshwright.errors import InputError
from meshwright.units import format_bytes, format_count, format_seconds

from ._live_run import Fields, LiveRun
from ._shelf import Shelf

if TYPE_CHECKING:
    from rich.console import Group

EVERY_SECONDS, LINE_SECONDS = 1.0, 10.0
BARS = "▁▂▃▄▅▆▇█"
WIDEST_SPARK, LABEL = 100, 16  # columns
MOST_OTHERS, MOST_TOLD = 8, 4
LIVE = ("running", "waiting")


def follow(shelf: Shelf) -> None:
    """Show the newest run that is under way, and the others in a line each, until all have ended.

    Raises:
        InputError: there is no run.
    """
    if not shelf.runs:
        raise InputError("no run is there yet", hint="name the folder of a run, or start one first")
    if sys.stdout.isatty():
        _screen(shelf)
    else:
        for line in plain_lines(shelf):
            typer.echo(line)


def plain_lines(shelf: Shelf, sleep: Callable[[float], object] = time.sleep) -> Iterator[str]:
    """Yield a line for each run that has moved on, at intervals, and its end."""
    told: dict[str, tuple[int, str]] = {}
    while True:
        rows = _ordered(shelf.rows())
        for row in rows:
            if told.get(row["id"]) != (row["step"], row["state"]):
                told[row["id"]] = (row["step"], row["state"])
                yield line_of(row)
        if not any(row["state"] in LIVE for row in rows):
            return
        sleep(LINE_SECONDS)
        shelf.refresh()


def _screen(shelf: Shelf) -> None:
    from rich.live import Live

    shown = console(stderr=False)
    with Live(console=shown, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(shelf, shown.width), refresh=True)
            if not any(run.state in LIVE for run in shelf.runs):
                break
            time.sleep(EVERY_SECONDS)
            shelf.refresh()
    shown.print(picture(shelf, shown.width))  # what stays when the screen is gone


def picture(shelf: Shelf, width: int) -> Group:
    """Return the screen: one run in full, the others in a line each."""
    from rich.console import Group
    from rich.text import Text

    rows = _ordered(shelf.rows())
    run = shelf.run(rows[0]["id"])
    assert run is not None, "a row is of a run of the shelf"
    for _ in range(64):  # 64 MiB at once; the rest follows while the screen is shown
        if not run.metrics.read():
            break
    parts = [Text(rows[0]["name"], style="bold"), Text(_facts(rows[0]))]
    parts += map(Text, _lines(run, rows[0], width))
    notices = run.notices()[-MOST_TOLD:]
    if notices:
        parts += [Text(), Text("Notices", style="bold")]
        parts += [Text(f"step {each['step']}: {each['kind']}: {each['message']}") for each in notices]
    others = rows[1 : 1 + MOST_OTHERS]
    if others:
        parts += [Text(), Text("Others", style="bold"), *(Text(line_of(row)) for row in others)]
        parts += [Text(f"and {len(rows) - 1 - len(others)} more")] if len(rows) > 1 + MOST_OTHERS else []
    return Group(*parts)


def _ordered(rows: list[Fields]) -> list[Fields]:
    """Return the rows with those under way first, then the newest."""
    return sorted(rows, key=lambda row: (row["state"] not in LIVE, -(row["begun"] or 0.0)))


def _facts(row: Fields) -> str:
    where = [row["of"], row["on"] and f"on {row['on']}", row["layout"] and f"layout {row['layout']}"]
    state = f"{row['state']} ({row['words']})" if row["words"] else row["state"]
    return ", ".join([state, *filter(None, where)])


def line_of(row: Fields) -> str:
    """Return a run in one line."""
    of = f" of {row['steps']:,}" if row["steps"] else ""
    parts = [f"{row['name']}: {row['state']}", f"step {row['step']:,}{of}"]
    if row["loss"] is not None:
        parts.append(f"loss {row['loss']:.4g}")
    if row["step_seconds"] is not None:
        parts.append(_step_words(row, row["step_seconds"]))
        if row["tokens_per_step"]:
            parts.append(f"{format_count(row['tokens_per_step'] / row['step_seconds'])} {row['unit']}/s")
    if row["mfu"] is not None:
        parts.append(f"MFU {100 * row['mfu']:.1f} %")
    return ", ".join([*parts, *_left(row)])


def _left(row: Fields) -> list[str]:
    left = row["seconds_left"]
    return [] if left is None else [f"{format_seconds(left)} of steps left"]


def _step_words(row: Fields, seconds: float) -> str:
    """Return the time of a step beside its predicted band."""
    band = row["predicted"].get("seconds")
    if band is None:
        return f"{format_seconds(seconds)} a step"
    _, low, high = band
    where = "inside" if low <= seconds <= high else "above" if seconds > high else "below"
    ends = f"{format_seconds(low)} to {format_seconds(high)}"
    return f"{format_seconds(seconds)} a step ({where} the predicted {ends})"


def _lines(run: LiveRun, row: Fields, width: int) -> Iterator[str]:
    spark_width = max(8, min(WIDEST_SPARK, width - LABEL - 34))
    window = run.metrics.tracks["train"].window(spark_width)
    if row["steps"]:
        done = min(1.0, row["step"] / row["steps"])
        bar = "█" * round(done * spark_width)
        left = "".join(f", {words}" for words in _left(row))
        yield f"{'step':{LABEL}}{bar:░<{spark_width}}  {row['step']:,} of {row['steps']:,}{left}"
    texts = {
        "loss": ("loss", lambda value: f"{value:.4g}"),
        "seconds": ("step time", lambda value: _step_words(row, row["step_seconds"] or value)),
        "tokens_per_second": ("throughput", lambda value: f"{format_count(value)} {row['unit']}/s"),
        "mfu": ("MFU", lambda value: f"{100 * value:.1f} %"),
        "memory_in_use_bytes": ("memory", format_bytes),
        "gradient_norm": ("gradient norm", lambda value: f"{value:.4g}"),
        "learning_rate": ("learning rate", lambda value: f"{value:.4g}"),
    }
    for key, (name, words) in texts.items():
        if key in window.curves and (value := _last(window.means(key))) is not None:
            yield f"{name:{LABEL}}{spark(window.means(key)):{spark_width}}  {words(value)}"
    if row["held_out_loss"] is not None:
        yield f"{'held-out loss':{LABEL}}{'':{spark_width}}  {row['held_out_loss']:.4g}"
    if phases := run.phases()[:MOST_TOLD]:
        whole = sum(seconds for _, seconds in run.phases()) or 1.0
        yield f"{'time so far':{LABEL}}{', '.join(f'{name} {100 * s / whole:.0f} %' for name, s in phases)}"
    if row["finish"]:
        yield f"{'finish':{LABEL}}{row['finish']}"


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def spark(values: Sequence[float | None]) -> str:
    """Return values as a row of bars; a space where one is not known.

    >>> spark([0.0, 1.0, None, 2.0])
    '▁▅ █'
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    places = (None if value is None else (value - low) / span if span else 0.0 for value in values)
    return "".join(" " if place is None else BARS[min(7, int(8 * place))] for place in places)
