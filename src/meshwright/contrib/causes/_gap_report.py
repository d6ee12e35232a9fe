"""Turn a gap into a report: the answer in one sentence, its causes with their cures, and the classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshwright.contrib.pages import lanes_of, schedule_of
from meshwright.report import (
    CURVES,
    Bars,
    Document,
    Lanes,
    Plot,
    ReportTable,
    TableRow,
    Words,
    colours_of,
    parts_of,
    section,
)
from meshwright.units import format_bytes, format_rate, format_seconds

from ._cause import Cause, Gap

MOST_CAUSES = 6  # of a screen
MOST_MODULES = 8
LONGEST_MODULE = 60  # letters of its path
ROUNDING = 1e-6
TIMELINES = (
    "From the beginning of a step to its end: of the trace, the step of median length on its first device."
)


def gap_document(gap: Gap) -> Document:
    """Return the answer, the causes, and the classes of work, on one screen."""
    return Document(
        title=f"{gap.program} on {gap.fleet}",
        sections=(
            *section("", Words(text=_answer(gap), tone="strong"), *_inside(gap)),
            *(section("Causes, in seconds of a step", _causes(gap)) if gap.causes else ()),
            *(section("What would cure them", *_cures(gap.causes[:MOST_CAUSES])) if gap.causes else ()),
            *(section("Changes that were weighed", _changes(gap)) if gap.changes else ()),
            *(
                section("What it could be", *(Words(text=each) for each in gap.could_be))
                if gap.could_be
                else ()
            ),
            *(section("By class of work", _classes(gap)) if gap.classes else ()),
            *(
                section("By module: seconds of kernels, hidden ones too", *_modules(gap))
                if gap.modules
                else ()
            ),
            *(section("", *(Words(text=each, tone="faint") for each in gap.notes)) if gap.notes else ()),
        ),
    )


def gap_page(gap: Gap) -> Document:
    """Return the report with the predicted step above the measured one, and each step of the trace."""
    whole = gap_document(gap)
    drawn = (*_bars(gap), *_lanes(gap)) if gap.classes and gap.predicted else tuple(_lanes(gap))
    pictures = section("Predicted above measured" if gap.predicted else "Measured", *drawn) if drawn else ()
    steps = section("Each step of the trace", _steps(gap)) if len(gap.step_seconds) > 1 else ()
    return replace(whole, sections=(whole.sections[0], *pictures, *steps, *whole.sections[1:]))


def _answer(gap: Gap) -> str:
    """Return the answer in one sentence.

    A step that is faster than predicted has a rest below zero, which is said in other words.
    """
    parts = [f"{format_seconds(each.seconds)} {_phrase(each)}" for each in gap.causes[:MOST_CAUSES]]
    rest = gap.unexplained_seconds
    if gap.predicted is None:
        parts.append(f"{format_seconds(rest)} the step itself")
    elif rest >= -ROUNDING * gap.measured_seconds:
        parts.append(f"{format_seconds(max(rest, 0.0))} unexplained")
    else:
        parts.append(f"the rest is {format_seconds(-rest)} faster than predicted")
    return f"Takes {format_seconds(gap.measured_seconds)}, {gap.should_take}: {', '.join(parts)}."


def _phrase(cause: Cause) -> str:
    name = f" [{cause.name}]" if cause.name else ""
    where = f" ({cause.where})" if cause.where else ""
    return f"{cause.words}{name}{where}"


def _inside(gap: Gap) -> tuple[Words, ...]:
    row = gap.rows[0] if gap.rows else None
    if row is None or row.inside is None or gap.causes:
        return ()
    words = "The measured step lies in the predicted interval." if row.inside else ""
    words = words or "The measured step lies outside of the predicted interval."
    return (Words(text=words, tone="good" if row.inside else "warning"),)


def _causes(gap: Gap) -> ReportTable:
    rows = [
        TableRow(
            cells=(
                format_seconds(each.seconds),
                f"{100 * each.seconds / gap.measured_seconds:.0f} %",
                f"{each.words}{f': {each.name}' if each.name else ''}",
                each.where,
                each.evidence,
            )
        )
        for each in gap.causes
    ]
    share = f"{100 * gap.unexplained_seconds / gap.measured_seconds:.0f} %"
    name = "the step itself" if gap.predicted is None else "unexplained"
    rest = (format_seconds(gap.unexplained_seconds), share, name, "", "")
    rows.append(TableRow(cells=rest, tone="faint"))
    if gap.predicted is not None:
        gap_share = f"{100 * gap.gap_seconds / gap.measured_seconds:.0f} %"
        rows.append(
            TableRow(cells=(format_seconds(gap.gap_seconds), gap_share, "the gap", "", ""), tone="strong")
        )
    columns = ("time", "of the step", "what", "where", "evidence")
    return ReportTable(columns=columns, rows=tuple(rows), numbers=("time", "of the step"), unbroken=2)


def _cures(causes: Sequence[Cause]) -> Iterator[Words]:
    """Yield a line for each kind of cause, with what its cure saves at each place."""
    for kind in dict.fromkeys(each.kind for each in causes):
        mine = [each for each in causes if each.kind == kind]
        change = ", ".join(dict.fromkeys(each.change for each in mine if each.change))
        saving = "; ".join(dict.fromkeys(each.saving for each in mine if each.saving))
        text = mine[0].cure + (f": {change}" if change else "") + (f" ({saving})" if saving else "")
        yield Words(lead=f"{kind}: ", text=text)


def _changes(gap: Gap) -> ReportTable:
    """Return the changes that were weighed, beside the step as it is predicted."""
    rows = [
        TableRow(
            cells=(
                each.arguments,
                "" if each.step_seconds is None else format_seconds(each.step_seconds),
                "" if each.reserved_bytes is None else format_bytes(each.reserved_bytes),
                each.failed or ("fits" if each.fits else "does not fit" if each.fits is False else ""),
            )
        )
        for each in gap.changes
    ]
    columns = ("change", "predicted step", "memory of a device", "fits")
    return ReportTable(columns=columns, rows=tuple(rows), numbers=columns[1:3])


def _classes(gap: Gap) -> ReportTable:
    rows = [
        TableRow(
            cells=(
                each.name,
                "" if each.predicted is None else format_seconds(each.predicted),
                format_seconds(each.measured),
            )
        )
        for each in gap.classes
    ]
    return ReportTable(
        columns=("class", "predicted", "measured"), rows=tuple(rows), numbers=("predicted", "measured")
    )


def _modules(gap: Gap) -> Iterator[ReportTable | Words]:
    """Yield the longest modules, and a line on kernels that were not matched."""
    whole = sum(each.seconds for each in gap.modules)
    shown = gap.modules[:MOST_MODULES]
    cells = [
        (
            _shortened(each.name),
            format_seconds(each.seconds),
            f"{100 * each.seconds / whole:.0f} %" if whole else "",
            f"{each.num_kernels:.0f}",
            format_seconds(each.exposed_seconds) if each.exposed_seconds else "",
            "" if each.flops is None else format_rate(float(each.flops), "FLOP"),
        )
        for each in shown
    ]
    if rest := gap.modules[MOST_MODULES:]:
        seconds = sum(each.seconds for each in rest)
        number = sum(each.num_kernels for each in rest)
        share = f"{100 * seconds / whole:.0f} %" if whole else ""
        bare = sum(each.exposed_seconds for each in rest)
        waited = format_seconds(bare) if bare else ""
        name = f"{len(rest)} smaller ones"
        cells.append((name, format_seconds(seconds), share, f"{number:.0f}", waited, ""))
    columns = ("module", "kernels' time", "of kernels", "number", "messages not hidden", "weighed work")
    if not any(each.exposed_seconds for each in gap.modules):
        columns, cells = (*columns[:4], columns[5]), [(*row[:4], row[5]) for row in cells]
    yield ReportTable(
        columns=columns, rows=tuple(TableRow(cells=each) for each in cells), numbers=columns[1:]
    )
    for words, rows in (
        ("belong to no module", [each for each in gap.modules if each.name.startswith("(")]),
        ("are of modules that the weighed program does not have by that name",
         [each for each in gap.modules if each.is_weighed is False]),
    ):  # fmt: skip
        number, seconds = sum(each.num_kernels for each in rows), sum(each.seconds for each in rows)
        if rows and whole:
            share = f"{100 * seconds / whole:.0f} % of their time"
            yield Words(text=f"{number:.0f} kernels of a step, {share}, {words}", tone="faint")


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_MODULE else "…" + name[1 - LONGEST_MODULE :]


def _bars(gap: Gap) -> tuple[Words | Bars, ...]:
    """Return a bar of the predicted step above one of the measured step, on one scale."""
    colours = colours_of(each.name for each in gap.classes)
    expected = 0.0 if gap.predicted is None else gap.predicted.expected
    longest = max(gap.measured_seconds, expected)
    parts: list[Words | Bars] = []
    for name, base in (("predicted", expected), ("measured", gap.measured_seconds)):
        sizes = {each.name: max(getattr(each, name) or 0.0, 0.0) for each in gap.classes}
        parts.append(Words(lead=f"{name}: ", text=format_seconds(base)))
        drawn = parts_of(sizes, colours, format_seconds)
        parts.append(Bars(label=name, parts=drawn, whole=longest, base=base or longest))
    return tuple(parts)


def _lanes(gap: Gap) -> Iterator[Words | Lanes]:
    """Yield the predicted step above the measured one from their beginnings to their ends, on one axis."""
    predicted = None if gap.asked is None else schedule_of(gap.asked.weighing)
    both = {"predicted": predicted, "measured": gap.busy}
    known = {name: busy for name, busy in both.items() if busy is not None}
    lanes = lanes_of(known) if gap.busy is not None else None
    if lanes is not None:
        yield Words(text=TIMELINES, tone="faint")
        yield lanes


def _steps(gap: Gap) -> Plot:
    def draw(axes: Any) -> None:
        axes.bar(range(1, len(gap.step_seconds) + 1), gap.step_seconds, color=CURVES[0])
        if gap.predicted is not None:
            axes.axhline(gap.predicted.expected, color=CURVES[1], linewidth=1.4)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step of the trace")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("seconds")

    lines = ((CURVES[1], "predicted"),) if gap.predicted is not None else ()
    return Plot(label="seconds of each step", height=2.4, draw=draw, lines=lines)
