"""A sweep's pictures as inline SVG: held-out loss against a key's values, training loss by step.

A run has the same colour in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._html_parts import COLOURS, FAINT, legend
from ._plots import svg_of, thinned
from ._sweep import Sweep, SweepRun

CURVES = ("#2f6f8f", "#e08e45", "#6a994e", "#8e5ea2", "#c8553d", "#4a5a6a", "#d4a72c")  # the best run first
SHAPES = {"o": "\u25cf", "s": "\u25a0", "^": "\u25b2", "D": "\u25c6", "v": "\u25bc", "*": "\u2605"}
REST = "."  # the shape of all further lines
WIDE_RANGE = 10  # largest over smallest value: from here on the axis is logarithmic


def colours_of_runs(sweep: Sweep) -> dict[Path, str]:
    """Return each run's colour in every picture of the sweep; all but the best few are grey."""
    places = enumerate(sweep.ranked)
    return {run.folder: CURVES[place] if place < len(CURVES) else FAINT for place, run in places}


def values_svg(sweep: Sweep, key: str) -> str:
    """Held-out loss by the value of `key`; a line joins runs that differ in it alone.

    A point has its run's colour, and the shape of its line. Runs that were not finished are crosses at the
    top. Values that are no numbers stand side by side.
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
    """Training loss in nats by step of each run, the best ones in colour."""
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
    """A value as a number; None where it is none, or not finite."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
