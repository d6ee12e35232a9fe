"""Show a sweep: a table of its runs, and plots of their losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.contrib.pages import read_run
from meshwright.report import (
    COLOURS,
    CURVES,
    FAINT,
    GRID,
    Document,
    Plot,
    ReportSection,
    ReportTable,
    Series,
    TableRow,
    Words,
    label_steps,
    section,
    thinned,
)
from meshwright.units import format_count, format_seconds

from ._sweep_records import Sweep, SweepRun

SWEEP_FIGURES = ("held-out loss", "training loss", "step", "{}/s")  # of the unit of a batch
SHAPES = {"o": "\u25cf", "s": "\u25a0", "^": "\u25b2", "D": "\u25c6", "v": "\u25bc", "*": "\u2605"}
REST = "."  # the marker of all further lines
WIDE_RANGE = 10  # least ratio of the largest to the smallest value for a logarithmic axis


def sweep_document(sweep: Sweep) -> Document:
    """Return what a terminal shows of a sweep: its runs, the best first."""
    runs, failures = _sweep_sections(sweep, shortens=True)
    return Document(title=f"Sweep of {sweep.name}", sections=(*runs, *failures))


def _sweep_sections(
    sweep: Sweep, *, shortens: bool
) -> tuple[tuple[ReportSection, ...], tuple[ReportSection, ...]]:
    """Return a table with a row for each run, the best first, then the reasons of the failed runs.

    `shortens`: whether keys are named without their section, where that is unique.
    """
    finished = sum(run.held_out_loss is not None for run in sweep.runs)
    failed = len(sweep.runs) - finished
    title = f"{finished} finished run{'s' if finished != 1 else ''} of {sweep.name} on {sweep.fleet}"
    title += f", {failed} not finished" if failed else ""
    title += f", {sweep.not_run} not begun" if sweep.not_run else ""
    short = tuple(key.rpartition(".")[2] for key in sweep.keys)
    names = short if shortens and len(set(short)) == len(short) else sweep.keys
    rows = tuple(
        TableRow(
            cells=(run.folder.name.partition("-")[0], *run.values.values(), *_sweep_figures(run)),
            tone="strong" if run is sweep.best else "" if run.held_out_loss is not None else "faint",
        )
        for run in sweep.ranked
    )
    numbers = (*names, *(name.format(sweep.batch_unit) for name in SWEEP_FIGURES))
    table = ReportTable(columns=("run", *numbers), rows=rows, numbers=numbers, unbroken=1 + len(names))
    reasons = (Words(text=f"{run.label}: {run.failed}") for run in sweep.ranked if run.failed)
    return section(title, table), section("Not finished", *reasons, tone="warning")


def _sweep_figures(run: SweepRun) -> tuple[str, str, str, str]:
    """Return a run's figures as text, in the order of `SWEEP_FIGURES`."""
    return (
        "-" if run.held_out_loss is None else f"{run.held_out_loss:.4f}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.step_seconds is None else format_seconds(run.step_seconds),
        "-" if run.tokens_per_second is None else format_count(run.tokens_per_second),
    )


def sweep_page(sweep: Sweep) -> Document:
    """Return the page of a sweep: its table, and plots from its runs' folders."""
    runs, failures = _sweep_sections(sweep, shortens=False)
    best, pictures = (), ()
    if sweep.best is not None:
        words = f"Best: {sweep.best.label}, held-out loss {sweep.best.held_out_loss:.4f}"
        best = section("", Words(text=words, tone="open"))
        note = Words(text="A point has the colour of its run's curve below.", tone="faint")
        series = [(run, read_run(run.folder).series("loss")) for run in sweep.ranked]
        curves: list[tuple[SweepRun, Series]] = [(run, points) for run, points in series if points[0]]
        pictures = (
            *section("Held-out loss by value", note, *(values_plot(sweep, key) for key in sweep.keys)),
            *section("Training loss by step", sweep_curves_plot(sweep, curves)),
        )
    return Document(title=f"Sweep of {sweep.name}", sections=(*best, *runs, *pictures, *failures))


def values_plot(sweep: Sweep, key: str) -> Plot:
    """Return a plot of held-out loss by the value of `key`.

    A line joins runs that differ only in `key`. A point has its run's colour and its line's marker.
    Unfinished runs are crosses at the top. Values that are not numbers are placed at equal distances.
    """
    texts = list(dict.fromkeys(run.values[key] for run in sweep.runs))
    known = [number for text in texts if (number := _number(text)) is not None]
    is_numeric = len(known) == len(texts)
    places = dict(zip(texts, known if is_numeric else range(len(texts)), strict=True))
    lines: dict[str, list[SweepRun]] = {}
    for run in sweep.runs:
        others = SweepRun.label_of({name: value for name, value in run.values.items() if name != key})
        lines.setdefault(others, []).append(run)
    markers = dict(zip(lines, SHAPES, strict=False))
    crosses = [places[run.values[key]] for run in sweep.runs if run.held_out_loss is None]
    colours = colours_of_runs(sweep)

    def draw(axes: Any) -> None:
        for others, runs in lines.items():
            finished = [run for run in runs if run.held_out_loss is not None]
            finished.sort(key=lambda run: places[run.values[key]])
            points = [(places[run.values[key]], run.held_out_loss) for run in finished]
            if not points:
                continue
            axes.plot(*zip(*points, strict=True), color="#cbd2d9", linewidth=1, label=others, zorder=1)
            dots = [colours[run.folder] for run in finished]
            axes.scatter(*zip(*points, strict=True), c=dots, marker=markers.get(others, REST), s=36, zorder=2)
        if crosses:
            top = axes.get_xaxis_transform()
            axes.plot(crosses, [0.97] * len(crosses), "x", color=COLOURS["not finished"], transform=top)
        if is_numeric and min(known) > 0 and max(known) >= WIDE_RANGE * min(known):
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(list(places.values()), [_tick(text) for text in places])
        axes.margins(x=0.06)
        axes.set_xlabel(key)
        axes.set_ylabel("held-out loss, nats")
        axes.grid(axis="y", color=GRID, linewidth=0.8)

    shapes = [(SHAPES[marker], others) for others, marker in markers.items() if others]
    if len(lines) > len(markers):
        shapes.append(("\u2022", f"{len(lines) - len(markers)} more"))
    if crosses:
        shapes.append(("\u00d7", "not finished"))
    return Plot(label=f"held-out loss by {key}", height=3.0, draw=draw, shapes=tuple(shapes))


LONGEST_TICK = 24  # signs below an axis: longer words cover their neighbours, and take minutes to lay out


def _tick(text: str) -> str:
    return text if len(text) <= LONGEST_TICK else f"{text[: LONGEST_TICK - 4]} ..."


def sweep_curves_plot(sweep: Sweep, curves: Sequence[tuple[SweepRun, Series]]) -> Plot:
    """Return a plot of each run's training loss in nats by step, the best runs in colour."""
    colours = colours_of_runs(sweep)

    def draw(axes: Any) -> None:
        for run, series in reversed(curves):  # the best on top
            colour = colours[run.folder]
            axes.plot(*thinned(*series), color=colour, linewidth=0.8 if colour == FAINT else 1.2)
        label_steps(axes, "loss, nats")

    named = [(colours[run.folder], run.label) for run, _ in curves if colours[run.folder] != FAINT]
    if others := len(curves) - len(named):
        named.append((FAINT, f"{others} other{'s' if others > 1 else ''}"))
    return Plot(label="training loss by step", height=3.2, draw=draw, colours=tuple(named))


def colours_of_runs(sweep: Sweep) -> dict[Path, str]:
    """Return each run's colour in every plot of the sweep; all but the best few are grey."""
    places = enumerate(sweep.ranked)
    return {run.folder: CURVES[place] if place < len(CURVES) else FAINT for place, run in places}


def _number(text: str) -> float | None:
    """Return a value as a number; None if it is not a finite number."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
