"""A sweep's pictures as inline SVG: held-out loss against a key's values, training loss by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ._plots import COLOURS, FAINT, svg_of, thinned
from ._sweep import Sweep, SweepRun

MOST_CURVES = 7  # with more colours they cannot be told apart: the others are grey
WIDE = 10  # largest over smallest value: from here on the axis is logarithmic

BESIDE: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8.5,
    "loc": "upper left",
    "bbox_to_anchor": (1.0, 1.0),
}  # where a legend stands


def values_svg(sweep: Sweep, key: str) -> str:
    """Held-out loss by the value of `key`; a line joins runs that differ in it alone.

    Runs that were not finished are crosses at the top. Values that are no numbers stand side by side.
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

    def draw(axes: Any) -> None:
        for place, (others, runs) in enumerate(lines.items()):
            points = sorted(
                (places[r.values[key]], r.held_out_loss) for r in runs if r.held_out_loss is not None
            )
            colour = COLOURS[place] if place < MOST_CURVES else FAINT
            label = {"label": others} if others and place < MOST_CURVES else {}
            axes.plot(
                *zip(*points, strict=True), color=colour, marker="o", markersize=4.5, **label
            ) if points else None
        crosses = [places[run.values[key]] for run in sweep.runs if run.held_out_loss is None]
        if crosses:
            top = axes.get_xaxis_transform()
            axes.plot(
                crosses, [0.97] * len(crosses), "x", color=COLOURS[4], transform=top, label="not finished"
            )
        if numeric and min(known) > 0 and max(known) >= WIDE * min(known):
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(list(places.values()), list(places))
        axes.margins(x=0.06)
        axes.set_xlabel(key)
        axes.set_ylabel("held-out loss, nats")
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(**BESIDE)

    return svg_of(draw, 8.6, 3.2, f"held-out loss by {key}")


def curves_svg(curves: Sequence[tuple[SweepRun, tuple[Sequence[int], Sequence[float]]]]) -> str:
    """Training loss in nats by step of each run, the best ones in colour."""

    def draw(axes: Any) -> None:
        for place, (run, series) in reversed(list(enumerate(curves))):  # the best on top
            coloured = place < MOST_CURVES
            axes.plot(
                *thinned(*series),
                color=COLOURS[place] if coloured else FAINT,
                linewidth=1.2 if coloured else 0.8,
                label=run.label if coloured else None,
            )
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1],
            labels[::-1],
            frameon=False,
            fontsize=8.5,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
        )

    return svg_of(draw, 8.6, 3.4, "training loss by step")


def _number(text: str) -> float | None:
    """A value as a number; None where it is none, or not finite."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
