"""Lay a comparison out: its figures in one table, what differs in settings, and curves over one another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.errors import printable
from meshwright.report import (
    CURVES,
    Document,
    Plot,
    ReportTable,
    TableRow,
    Words,
    byte_ticks,
    plain_rows,
    section,
)
from meshwright.units import format_bytes, format_count, format_seconds

from ._metrics import Curve

if TYPE_CHECKING:
    from ._comparison import ComparedSide, Comparison

MOST_SETTINGS = 14  # rows on a terminal
LONGEST_VALUE = 40
NUM_STEPS = 5  # at which losses are compared on a terminal
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = 16  # columns of a curve on a terminal
TITLES = {
    "loss": "training loss, nats",
    "held_out_loss": "held-out loss, nats",
    "gradient_norm": "norm of the gradient",
    "learning_rate": "learning rate",
    "seconds": "time of a step",
    "memory_in_use_bytes": "memory in use",
}


def _money(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("state", "state", str),
    ("fits", "verdict", str),
    ("steps", "steps", lambda value: f"{value:,}"),
    ("tokens", "{unit}", format_count),
    ("loss", "training loss", lambda value: f"{value:.4f}"),
    ("held_out_loss", "held-out loss", lambda value: f"{value:.4f}"),
    ("step_seconds", "step, measured", format_seconds),
    ("predicted_seconds", "step, predicted", format_seconds),
    ("interval", "its interval", str),
    ("tokens_per_second", "{unit} per second", format_count),
    ("mfu", "MFU", lambda value: f"{100 * value:.1f} %"),
    ("needed_bytes", "memory, predicted", format_bytes),
    ("peak_bytes", "memory, measured peak", format_bytes),
    ("seconds", "time in all", format_seconds),
    ("device_hours", "device-hours", lambda value: f"{value:.3g}"),
    ("cost", "cost", _money),
    ("price", "at the price", str),
)
"""By name of a figure: its words, and how it is written."""


def comparison_document(made: Comparison) -> Document:
    """Return figures, settings and losses side by side, then what `diff` says, for a terminal."""
    return Document(title="", sections=(*_sections(made, most=MOST_SETTINGS), *_ends(made, is_page=False)))


def comparison_page(made: Comparison) -> Document:
    """Return the same with curves over one another and all settings."""
    figures, *others = _sections(made, most=None)
    return Document(
        title=" and ".join(side.label for side in made.sides),
        sections=(figures, *section("Curves", *_plots(made)), *others, *_ends(made, is_page=True)),
    )


def _sections(made: Comparison, *, most: int | None) -> Iterator[Any]:
    names = tuple(side.label for side in made.sides)
    rows = list(_figure_rows(made.sides))
    columns = ("", *names)
    yield from section("", ReportTable(columns=columns, rows=tuple(rows), numbers=names, unbroken=1))
    settings = [(name, *map(_short, values)) for name, values in made.settings.items()]
    rest = 0 if most is None else len(settings) - most
    left = Words(text=f"and {rest} more: --html FILE and --json have all", tone="faint") if rest > 0 else None
    table = ReportTable(columns=("setting", *names), rows=plain_rows(settings[:most]), unbroken=1)
    yield from section("What differs in the settings", table if settings else None, left)
    if not settings:
        yield from section("", Words(text="No setting differs.", tone="faint"))
    yield from section("Training loss by step", _losses(made.sides))


def _ends(made: Comparison, *, is_page: bool) -> Iterator[Any]:
    difference = made.difference
    if difference is not None:
        yield from section(
            "What moved between the weighings", *(Words(text=each) for each in difference.sentences)
        )
    if difference is not None and is_page:
        for part in difference.document().sections:
            if part.title and part.title != "What differs in the settings":
                yield part
    notes = [note for side in made.sides for note in side.notes]
    yield from section("To know", *(Words(text=note) for note in notes), tone="warning")


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _figure_rows(sides: Sequence[ComparedSide]) -> Iterator[TableRow]:
    """Yield a row for each figure that a side has; the best of several measured ones is not marked."""
    units = {side.batch_unit for side in sides}
    unit = units.pop() if len(units) == 1 else "units"
    for name, words, written in ROWS:
        cells = [_cell(side, name, written) for side in sides]
        if any(cell != "-" for cell in cells):
            yield TableRow(cells=(words.format(unit=unit), *cells))


def _cell(side: ComparedSide, name: str, written: Callable[[Any], str]) -> str:
    value = side.amounts.get(name)
    low, high = side.amounts.get("predicted_low"), side.amounts.get("predicted_high")
    if name == "interval" and isinstance(low, float) and isinstance(high, float):
        value = f"{format_seconds(low)} to {format_seconds(high)}"
    return "-" if value is None else written(value)


def _losses(sides: Sequence[ComparedSide]) -> ReportTable | None:
    """Return the training loss of each run at the same steps, with its curve in a few letters."""
    curves = [(side.label, curve) for side in sides if (curve := side.curves.get("loss")) and curve.steps]
    if not curves:
        return None
    last = min(curve.steps[-1] for _, curve in curves)
    steps = sorted({max(1, round(last * part / NUM_STEPS)) for part in range(1, NUM_STEPS + 1)})
    values = [value for _, curve in curves for value in curve.means]
    low, high = min(values), max(values)
    rows = [
        (label, _spark(curve, low, high), *(f"{_at(curve, step):.4g}" for step in steps))
        for label, curve in curves
    ]
    numbers = tuple(f"step {step:,}" for step in steps)
    return ReportTable(columns=("run", "curve", *numbers), rows=plain_rows(rows), numbers=numbers, unbroken=1)


def _at(curve: Curve, step: int) -> float:
    """Return the value of the point that holds a step: the first that ends at it or later."""
    return curve.means[min(bisect_left(curve.steps, step), len(curve.steps) - 1)]


def _spark(curve: Curve, low: float, high: float) -> str:
    """Return a curve as blocks of eight heights, on a scale that all curves share."""
    count = min(SPARK, len(curve.means))
    places = [round(place * (len(curve.means) - 1) / max(1, count - 1)) for place in range(count)]
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int(8 * (curve.means[place] - low) / span))] for place in places)


def _plots(made: Comparison) -> Iterator[Plot]:
    names = dict.fromkeys(name for side in made.sides for name in side.curves)
    for name in (each for each in TITLES if each in names):
        yield _plot(made.sides, name)


def _plot(sides: Sequence[ComparedSide], name: str) -> Plot:
    """Return one metric of all runs by step; a band shows values between which several steps lie."""
    drawn = [
        (colour, side, side.curves[name])
        for side, colour in zip(sides, (*CURVES, *CURVES), strict=False)
        if name in side.curves and side.curves[name].steps
    ]

    def draw(axes: Any) -> None:
        for colour, _, curve in drawn:
            marker = "o" if name == "held_out_loss" else ""
            axes.plot(curve.steps, curve.means, color=colour, linewidth=1.3, marker=marker, markersize=4)
            if curve.lows != curve.highs:
                axes.fill_between(curve.steps, curve.lows, curve.highs, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel(TITLES[name])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        if name == "learning_rate":
            axes.set_yticks(ticks := axes.get_yticks(), [f"{place:.3g}" for place in ticks])
        if name == "memory_in_use_bytes":
            ticks = byte_ticks(0, axes.get_ylim()[1], 6)
            axes.set_yticks([place for place, _ in ticks], [words for _, words in ticks])
        if name == "seconds":
            _draw_seconds(axes, [(colour, side) for colour, side, _ in drawn])

    colours = tuple((colour, side.label) for colour, side, _ in drawn)
    lines = (("#1f2933", "dashed: predicted"),) if name == "seconds" else ()
    return Plot(label=f"{TITLES[name]} by step", height=2.8, draw=draw, colours=colours, lines=lines)


def _draw_seconds(axes: Any, sides: Sequence[tuple[str, ComparedSide]]) -> None:
    """Draw the predicted time of a step and its interval, on an axis on which the first steps do not rule."""
    tops = [0.0]
    for colour, side in sides:
        seconds = side.curves["seconds"]
        later = sorted(seconds.means[2:] or seconds.means)
        tops.append(later[int(0.98 * (len(later) - 1))])
        expected = side.amounts.get("predicted_seconds")
        if isinstance(expected, float):
            axes.axhline(expected, color=colour, linewidth=1, linestyle=(0, (4, 3)))
            tops.append(expected)
        low, high = side.amounts.get("predicted_low"), side.amounts.get("predicted_high")
        if isinstance(low, float) and isinstance(high, float):
            axes.axhspan(low, high, color=colour, alpha=0.08, linewidth=0)
    axes.set_ylim(0, 1.25 * max(tops) or 1)
    ticks = axes.get_yticks()
    axes.set_yticks(ticks, [format_seconds(place) if place else "0" for place in ticks])
