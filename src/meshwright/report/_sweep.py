"""Show the runs of a sweep on a terminal and as one self-contained HTML page, best held-out loss first.

The page holds a table, plots of held-out loss against each key's values, and training loss by step. A run has
the same colour in every plot. Used by: `api`, which writes the page, and `cli`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.results import Sweep, SweepRun
from meshwright.units import format_count, format_seconds

from ._html_parts import COLOURS, FAINT, legend, page, paragraph, section, svg_of, table, text, thinned
from ._run_files import read_run
from ._terminal_parts import add_row, heading, indented, plain_table

COLUMNS = ("held-out loss", "training loss", "step", "tokens/s")


def number_of(run: SweepRun) -> str:
    """Return the number at the start of the run's folder name."""
    return run.folder.name.partition("-")[0]


def cells(run: SweepRun) -> tuple[str, str, str, str]:
    """Return a run's figures as text, in the order of `COLUMNS`."""
    return (
        "-" if run.held_out_loss is None else f"{run.held_out_loss:.4f}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.step_seconds is None else format_seconds(run.step_seconds),
        "-" if run.tokens_per_second is None else format_count(run.tokens_per_second),
    )


def sweep_title(sweep: Sweep) -> str:
    """Return the numbers of finished, unfinished and unstarted runs, with the config and the fleet."""
    finished = sum(run.held_out_loss is not None for run in sweep.runs)
    title = f"{finished} finished run{'s' if finished != 1 else ''} of {sweep.name} on {sweep.fleet}"
    failed = len(sweep.runs) - finished
    title += f", {failed} not finished" if failed else ""
    return title + (f", {sweep.not_run} not begun" if sweep.not_run else "")


def sweep_text(sweep: Sweep) -> RenderableType:
    """Return a table with a row for each run, the best first, then the reasons of the failed runs."""
    short = [key.rpartition(".")[2] for key in sweep.keys]
    names = short if len(set(short)) == len(short) else list(sweep.keys)
    table = plain_table("run", *names, *COLUMNS, right=(*names, *COLUMNS))
    for column in table.columns[: len(names) + 1]:
        column.no_wrap = True
    failed: list[Text] = []
    for run in sweep.ranked:
        style = "bold" if run is sweep.best else "" if run.held_out_loss is not None else "dim"
        add_row(table, number_of(run), *run.values.values(), *cells(run), style=style)
        if run.failed:
            failed.append(Text(f"{run.label}: {run.failed}"))
    parts: list[RenderableType] = [heading(sweep_title(sweep)), indented(table)]
    if failed:
        parts += [heading("Not finished"), *(indented(line) for line in failed)]
    return Group(*parts)


CURVES = ("#2f6f8f", "#e08e45", "#6a994e", "#8e5ea2", "#c8553d", "#4a5a6a", "#d4a72c")  # the best run first
SHAPES = {"o": "\u25cf", "s": "\u25a0", "^": "\u25b2", "D": "\u25c6", "v": "\u25bc", "*": "\u2605"}
REST = "."  # the marker of all further lines
WIDE_RANGE = 10  # least ratio of the largest to the smallest value for a logarithmic axis


def colours_of_runs(sweep: Sweep) -> dict[Path, str]:
    """Return each run's colour in every plot of the sweep; all but the best few are grey."""
    places = enumerate(sweep.ranked)
    return {run.folder: CURVES[place] if place < len(CURVES) else FAINT for place, run in places}


def values_svg(sweep: Sweep, key: str) -> str:
    """Return a plot of held-out loss by the value of `key`.

    A line joins runs that differ only in `key`. A point has its run's colour and its line's marker.
    Unfinished runs are crosses at the top. Values that are not numbers are placed at equal distances.
    """
    texts = list(dict.fromkeys(run.values[key] for run in sweep.runs))
    numbers = [_number(text) for text in texts]
    known = [number for number in numbers if number is not None]
    numeric = len(known) == len(texts)
    places = dict(zip(texts, known if numeric else range(len(texts)), strict=True))
    lines: dict[str, list[SweepRun]] = {}
    for run in sweep.runs:
        others = SweepRun.label_of({name: value for name, value in run.values.items() if name != key})
        lines.setdefault(others, []).append(run)
    shapes = dict(zip(lines, SHAPES, strict=False))
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
            axes.scatter(*zip(*points, strict=True), c=dots, marker=shapes.get(others, REST), s=36, zorder=2)
        if crosses:
            top = axes.get_xaxis_transform()
            axes.plot(crosses, [0.97] * len(crosses), "x", color=COLOURS["not finished"], transform=top)
        if numeric and min(known) > 0 and max(known) >= WIDE_RANGE * min(known):
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(list(places.values()), list(places))
        axes.margins(x=0.06)
        axes.set_xlabel(key)
        axes.set_ylabel("held-out loss, nats")
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)

    named = [(SHAPES[shape], others) for others, shape in shapes.items() if others]
    if len(lines) > len(shapes):
        named.append(("\u2022", f"{len(lines) - len(shapes)} more"))
    if crosses:
        named.append(("\u00d7", "not finished"))
    return svg_of(draw, 3.0, f"held-out loss by {key}") + legend((), shapes=named)


def curves_svg(sweep: Sweep, curves: Sequence[tuple[SweepRun, tuple[Sequence[int], Sequence[float]]]]) -> str:
    """Return a plot of each run's training loss in nats by step, the best runs in colour."""
    colours = colours_of_runs(sweep)

    def draw(axes: Any) -> None:
        for run, series in reversed(curves):  # the best on top
            colour = colours[run.folder]
            axes.plot(*thinned(*series), color=colour, linewidth=0.8 if colour == FAINT else 1.2)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)

    named = [(colours[run.folder], run.label) for run, _ in curves if colours[run.folder] != FAINT]
    if others := len(curves) - len(named):
        named.append((FAINT, f"{others} other{'s' if others > 1 else ''}"))
    return svg_of(draw, 3.2, "training loss by step") + legend(named)


def _number(text: str) -> float | None:
    """Return a value as a number; None if it is not a finite number."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def write_sweep(sweep: Sweep) -> Path:
    """Write report.html into the sweep's folder, from its runs' folders, and return its path."""
    path = sweep.folder / "report.html"
    path.write_text(sweep_page(sweep), "utf-8")
    return path


def sweep_page(sweep: Sweep) -> str:
    """Return the sweep as one HTML page: its table, and plots from its runs' folders."""
    title, best = f"Sweep of {sweep.name}", sweep.best
    head = f"<header>\n<h1>{escape(title)}</h1>\n{paragraph(sweep_title(sweep), 'facts')}"
    if best is not None:
        head += paragraph(f"Best: {best.label}, held-out loss {best.held_out_loss:.4f}", "verdict open")
    return page(title, head + "</header>\n", _runs(sweep), _pictures(sweep), _failures(sweep))


def _runs(sweep: Sweep) -> str:
    rows = [(number_of(run), *run.values.values(), *cells(run)) for run in sweep.ranked]
    figures = range(1, 1 + len(sweep.keys) + len(COLUMNS))
    return section("Runs", table(("run", *sweep.keys, *COLUMNS), rows, numbers=figures))


def _pictures(sweep: Sweep) -> str:
    if sweep.best is None:
        return ""
    words = paragraph("A point has the colour of its run's curve below.", "facts")
    parts = [f"<figure>\n{values_svg(sweep, key)}</figure>\n" for key in sweep.keys]
    curves = [(run, read_run(run.folder).series("loss")) for run in sweep.ranked]
    curves = [(run, series) for run, series in curves if series[0]]
    by_step = f"<figure>\n{curves_svg(sweep, curves)}</figure>\n"
    return section("Held-out loss by value", words, *parts) + section("Training loss by step", by_step)


def _failures(sweep: Sweep) -> str:
    failed = [run for run in sweep.runs if run.failed]
    items = "".join(f"<li>{text(f'{run.label}: {run.failed}')}</li>\n" for run in failed)
    return (
        f'<section class="notes">\n<h2>Not finished</h2>\n<ul>\n{items}</ul>\n</section>\n' if items else ""
    )
