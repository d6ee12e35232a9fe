"""Describe a report as sections of paragraphs, tables and pictures, independent of where it is shown.

`_costs`, `_weighing` and `_results` make the `Document` of a result; `_results` and `contrib.pages` show it.
Strings are plain text, which the renderers escape. A terminal leaves out `Cards`, `Plot`, `Scatter` and
`Lanes`.

The pictures of a page are bars by category, curves by step, memory and work through a step, the runs of a
sweep, and the candidates of a plan. A name has the same colour in every picture and on every page:
colours.toml. matplotlib is imported by `contrib.pages`, when it draws.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from meshwright.ledger import MemoryLedger
from meshwright.units import format_rate, format_seconds

Tone = Literal["", "strong", "faint", "good", "bad", "open", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A paragraph; `lead` is its beginning, in bold type. `sample`: its spaces and lines are kept."""

    text: str
    tone: Tone = ""
    lead: str = ""
    sample: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a table.

    `is_part`: whether the row is a part of one above it. `values`: for each cell the number by which a page
    sorts it, None for its text; empty if all are sorted by their text. `bar`: a share of the whole that a
    terminal draws in place of the last cell, red if it is more than 1.
    """

    cells: tuple[str, ...]
    tone: Tone = ""
    is_part: bool = False
    bar: float | None = None
    values: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table whose columns in `numbers` are right-aligned.

    `unbroken`: how many of the first columns a terminal keeps on one line. `head`: whether a terminal shows
    the names of the columns. `sorts`: whether a click on the name of a column sorts the rows on a page.
    """

    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    numbers: tuple[str, ...] = ()
    unbroken: int = 0
    head: bool = True
    sorts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """A segment of `Bars`; `amount` is its size in words, `colour` that of a page."""

    name: str
    size: float
    amount: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Parts of a whole: one bar on a page, and on a terminal one row for each part.

    `whole` is the length of the bar, `base` the size that is 100 %. `limit`: the size that the parts may
    have; `free` is what they leave of it. `interval`: the ends of an estimate of their sum, with its words.
    """

    label: str
    parts: tuple[BarPart, ...]
    whole: float
    base: float
    limit: BarPart | None = None
    free: BarPart | None = None
    interval: tuple[float, float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture that `draw` makes on matplotlib axes of `height` inches.

    The legend's entries are pairs: a colour and words, for `lines` too, and for `shapes` a character and
    words.
    """

    label: str
    height: float
    draw: Callable[[Any], None]
    colours: tuple[tuple[str, str], ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    shapes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """The few most important figures, each a value with its meaning."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point of a `Scatter`, and the words that appear when the pointer rests on it.

    `kind`: best | fits | does not fit. `joined`: whether the line of the front goes through it.
    """

    x: float
    y: float
    words: str
    kind: str
    joined: bool = False


Ticks = Sequence[tuple[float, str]]  # places on an axis, each with its words


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Points in a plane, for a page only; `limit`: a height above which nothing fits, with its words.

    `x_ticks` and `y_ticks` are called with both ends of an axis and the most ticks that it has room for.
    """

    label: str
    dots: tuple[Dot, ...]
    x_ticks: Callable[[float, float, int], Ticks]
    y_ticks: Callable[[float, float, int], Ticks]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A span of a `Lane` from one share of its length to another, as colours with their shares of the span.

    `words` appear when the pointer rests on it.
    """

    begin: float
    end: float
    parts: tuple[tuple[str, float], ...]
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Show what one stream does from the beginning of a step to its end; between columns it is idle."""

    name: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Lanes above one another on one axis, for a page only.

    `ticks` are places from 0 to 1, the last at 1. The legend's entries are pairs: a colour and words.
    """

    label: str
    lanes: tuple[Lane, ...]
    ticks: Ticks
    colours: tuple[tuple[str, str], ...]


Block = Words | ReportTable | Bars | Plot | Cards | Scatter | Lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """Blocks below a title. Without a title they belong to the head or the end of the document."""

    title: str
    blocks: tuple[Block, ...]
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report: a title, facts that continue it, and sections.

    Without facts a terminal leaves the title out, because the first section says the same.
    `reload_seconds`: after which a page loads itself again; None for never.
    """

    title: str
    facts: str = ""
    sections: tuple[ReportSection, ...]
    reload_seconds: int | None = None


def section(title: str, *blocks: Block | None, tone: Tone = "") -> tuple[ReportSection, ...]:
    """Return a section of the blocks that are not None; nothing if none is left."""
    kept = tuple(block for block in blocks if block is not None)
    return (ReportSection(title=title, blocks=kept, tone=tone),) if kept else ()


def plain_rows(rows: Iterable[tuple[str, ...]]) -> tuple[TableRow, ...]:
    """Return table rows of the given cells."""
    return tuple(TableRow(cells=cells) for cells in rows)


def flop_words(count: float) -> str:
    """Return "1.20 PFLOP"."""
    return format_rate(count, "FLOP")


def spaced(name: str) -> str:
    """Return a name as words: "saved activations"."""
    return name.replace("_", " ")


def percent(part: float, whole: float) -> str:
    """Return "31.8 %", the share of `part` in `whole`; "" if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def share_of_peak(share: float | None) -> str:
    """Return "31.8 %", a utilisation of the peak; "unknown" where no format has one or work is unpriced."""
    return "unknown" if share is None else percent(share, 1)


Series = tuple[Sequence[int], Sequence[float]]  # steps and values

INK, FAINT, FREE, GRID = "#1f2933", "#9aa5b1", "#f0f3f6", "#e4e7eb"
SMALLER, BESIDE, GAPS = "smaller ones", "beside the program", "gaps between kernels"
COLOURS: dict[str, str] = {
    name: colour
    for group in tomllib.loads(
        files("meshwright.report").joinpath("colours.toml").read_text("utf-8")
    ).values()
    for name, colour in group.items()
}
# For names that only a foreign program has: the arguments of its step.
SPARE = ("#00695c", "#ef6c00", "#5d4037", "#ad1457", "#283593", "#9e9d24", "#0097a7", "#f48fb1")
CURVES = ("#2f6f8f", "#e08e45", "#6a994e", "#8e5ea2", "#c8553d", "#4a5a6a", "#d4a72c")  # the best run first
DASHED = (0, (4, 3))
MOST_POINTS = 2000
MOST_LAYERS = 10  # of the timeline: smaller ones are summed


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return `COLOURS` extended by a spare colour for each unknown name.

    No two names share a colour. Unknown names beyond the number of spare colours get none.
    """
    unknown = dict.fromkeys(name for name in names if name not in COLOURS)
    return {**COLOURS, **dict(zip(unknown, SPARE, strict=False))}


def memory_colours(memory: MemoryLedger) -> dict[str, str]:
    """Return the colours that the bar and the timeline of a memory share."""
    return colours_of([*memory.by_category, *memory.timeline.by_category])


ALWAYS_SHOWN = 0.05  # share of all sizes


def parts_of(
    sizes: Mapping[str, float],
    colours: Mapping[str, str],
    format_size: Callable[[float], str],
    *,
    least: float = 0,
    most: int | None = None,
) -> tuple[BarPart, ...]:
    """Return a part for each of the first `most` sizes of at least `least`, then the sum of the others.

    A size of 5 % of all is always shown.
    """
    named = [name for name, size in sizes.items() if name in colours and size >= least]
    large = ALWAYS_SHOWN * sum(sizes.values())
    shown = [name for place, name in enumerate(named) if most is None or place < most or sizes[name] >= large]
    entries = [(spaced(name), sizes[name], colours[name]) for name in shown]
    if rest := [size for name, size in sizes.items() if name not in shown]:
        entries.append((f"{len(rest)} {SMALLER}", sum(rest), COLOURS[SMALLER]))
    return tuple(
        BarPart(name=name, size=size, amount=format_size(size), colour=colour)
        for name, size, colour in entries
    )


def curves_plot(
    name: str,
    training: Series,
    held_out: Series,
    *,
    unit: str = "",
    height: float = 2.6,
    level: tuple[float, str] | None = None,
) -> Plot:
    """Return a plot of a metric by step, in training and on the held-out data.

    `level`: a horizontal line, with its words.
    """

    def draw(axes: Any) -> None:
        axes.plot(*thinned(*training), color=COLOURS["training"], linewidth=1.1)
        if held_out[0]:
            axes.plot(*held_out, color=COLOURS["held out"], linewidth=1.6, marker="o", markersize=4)
        if level is not None:
            axes.axhline(level[0], color=INK, linewidth=1, linestyle=DASHED)
        label_steps(axes, name + unit)

    names = ("training", "held out") if held_out[0] else ("training",)
    return Plot(
        label=f"{name} by step",
        height=height,
        draw=draw,
        colours=tuple((COLOURS[curve], curve) for curve in names),
        lines=() if level is None else ((INK, level[1]),),
    )


def label_steps(axes: Any, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return every n-th point and the last one, so that the page of a long run stays small."""
    stride = max(1, math.ceil(len(steps) / MOST_POINTS))
    places = list(range(0, len(steps), stride))
    if places and places[-1] != len(steps) - 1:
        places.append(len(steps) - 1)
    return [steps[place] for place in places], [values[place] for place in places]


def timeline_plot(memory: MemoryLedger) -> Plot | None:
    """Return a plot of the bytes alive through a step, stacked by category.

    An instant is the position of an instruction in the schedule. None for a program with fewer than two.
    """
    if len(memory.timeline.instants) < 2:
        return None
    timeline, colours = memory.timeline, memory_colours(memory)
    sizes = timeline.by_category
    largest = sorted((name for name in sizes if name in colours), key=lambda n: -max(sizes[n]))[:MOST_LAYERS]
    layers = {name: sizes[name] for name in sizes if name in largest}
    if rest := [name for name in sizes if name not in largest]:
        layers[SMALLER] = tuple(sum(column) for column in zip(*(sizes[name] for name in rest), strict=True))

    def draw(axes: Any) -> None:
        used = [colours[name] for name in layers]
        axes.stackplot(timeline.instants, *layers.values(), colors=used, step="post")
        axes.axvline(timeline.peak_instant, color=INK, linewidth=1, linestyle=DASHED)
        axes.set_xlim(timeline.instants[0], timeline.instants[-1])
        axes.set_xlabel("instruction of the schedule; loops once")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        _label_bytes(axes)

    names = tuple((colours[name], spaced(name)) for name in layers)
    label = "memory of one device through a step"
    return Plot(label=label, height=2.8, draw=draw, colours=names, lines=((INK, "peak"),))


def _label_bytes(axes: Any) -> None:
    """Set at most six ticks above zero."""
    ticks = byte_ticks(0, axes.get_ylim()[1], 6)
    axes.set_yticks([place for place, _ in ticks], [words for _, words in ticks])


def byte_ticks(low: float, high: float, most: int) -> Ticks:
    """Return multiples of 1, 2 or 5 times a power of ten of a binary unit, at most `most` above zero."""
    power = min(max(0, math.floor(math.log(max(high / 3, 1), 1024))), 4)
    unit, name = 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    counts = (round(place / unit) for place in _multiples(low, high, most, unit))
    return [(count * unit, f"{count} {name}" if count else "0") for count in counts]


def second_ticks(low: float, high: float, most: int) -> Ticks:
    """Return multiples of 1, 2 or 5 times a power of ten of a second."""
    places = _multiples(low, high, most, 0.0)
    return [(place, format_seconds(place) if place else "0") for place in places]


def _multiples(low: float, high: float, most: int, least: float) -> list[float]:
    """Return the multiples from `low` to `high` of a step of at least `least`: 1, 2 or 5 powers of ten."""
    unit = least or 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(
        s * 10**n * unit for n in range(9) for s in (1, 2, 5) if s * 10**n * unit * most >= high - low
    )
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
