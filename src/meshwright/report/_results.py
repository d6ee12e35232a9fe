"""Show a result: choose the document of its kind, and show it in a terminal of 80 columns or more, by rich.

A module that makes the document of one kind of result is imported when such a result is shown. A page is made
by a room outside the core. Used by: `reportable`, whose results print themselves, `cli`, and the pages of
results.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from meshwright.results import Weighing

from ._model import Bars, Document, ReportSection, ReportTable, Words
from ._weighing import full_document, screen_document
from ._weighing_facts import facts_of

if TYPE_CHECKING:
    from meshwright.planned import Plan

WIDTH = 100  # columns of the text that `str` returns
MORE = "All of it: --verbose. Pictures: --html FILE. What would help: --explain."
MORE_IN_PYTHON = (
    "All of it as a page: to_html(FILE). The schedule: to_perfetto(FILE). What would help: mw.explain."
)
FUNCTION_MORE = "All of it: --verbose. Pictures: --html FILE."
FUNCTION_MORE_IN_PYTHON = "All of it as a page: to_html(FILE). The schedule: to_perfetto(FILE)."
EAGER_MORE_IN_PYTHON = "All of it as a page: to_html(FILE)."
DOCUMENTS = {
    "Calibration": ("calibration", "calibration_document"),
    "Plan": ("_plan_report", "plan_document"),
    "Reconciliation": ("_run_report", "reconciliation_document"),
    "Run": ("_run_report", "run_document"),
}
"""By kind of result: the module here or the room outside, and the function that makes its document."""
BAR_WIDTH = 32  # columns of a terminal
STYLES = {
    "": "", "strong": "bold", "faint": "dim", "open": "bold", "good": "bold green", "bad": "bold red",
    "warning": "bold yellow",
}  # fmt: skip
LEAST_BAR = 4  # columns
NARROW_COLUMNS = 76  # of a terminal, below which names may be folded
MOST_KEPT = 16  # letters of a figure that is never broken


@runtime_checkable
class MakesDocument(Protocol):
    """A result of a room outside the core, which makes its own report.

    Its page is made by `page_document`, if it has that too.
    """

    def document(self) -> Document:
        """Return its report."""
        ...


def renderable(result: object, *, verbose: bool = False, more: str = MORE) -> RenderableType:
    """Return what a terminal of 80 columns or more shows of a result.

    Args:
        verbose: whether a weighing is shown in full, not on one screen.
        more: the last line of that screen, which says how to see the rest.
    """
    return terminal(document_of(result, verbose=verbose, more=more))


def plan_renderable(plan: Plan, most_rows: int | None, more: str) -> RenderableType:
    """Return what a terminal shows of a plan.

    Args:
        most_rows: of the ranked table; `MOST_ROWS` if None.
        more: the last line, which says how to use the plan.
    """
    from ._plan_report import MOST_ROWS, plan_document

    return terminal(plan_document(plan, most_rows=most_rows or MOST_ROWS, more=more))


def text_of(result: object) -> str:
    """Return the terminal text of a result, without colours, in lines of at most 100 columns."""
    written = io.StringIO()
    console = Console(file=written, width=WIDTH, color_system=None, highlight=False)
    console.print(renderable(result, more=MORE_IN_PYTHON))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def document_of(result: object, *, verbose: bool = False, more: str = MORE) -> Document:
    """Return the document of a result for a terminal; most results have the same one on a page."""
    if isinstance(result, Weighing) and result.refusal is not None:
        return _made("_refused", "refused_document", result)
    if isinstance(result, Weighing):
        facts = facts_of(result, in_full=verbose)
        if result.config is None:  # there are no keys to change
            in_python = FUNCTION_MORE_IN_PYTHON if result.is_compiled else EAGER_MORE_IN_PYTHON
            more = {MORE: FUNCTION_MORE, MORE_IN_PYTHON: in_python}.get(more, more)
        return full_document(facts) if verbose else screen_document(facts, more)
    if isinstance(result, MakesDocument):
        return result.document()
    kind = type(result).__name__
    if kind not in DOCUMENTS:
        raise TypeError(f"{kind} has no report")
    return _made(*DOCUMENTS[kind], result)


def _made(module: str, function: str, result: object) -> Document:
    home: Any
    if module.startswith("_"):
        home = import_module(f"{__package__}.{module}")
    else:
        from meshwright.registry import room  # a weighing needs none

        home = room(module)
    make: Any = getattr(home, function)
    return make(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A segment of a bar, from one share of it to another; at least half a cell.

    A bar has `BAR_WIDTH` columns, or what a narrow terminal leaves beside the figures.
    """

    begin: float
    end: float
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Draw it, with half cells where the terminal has them."""
        halves = 2 * min(BAR_WIDTH, options.max_width)
        begin = min(round(halves * self.begin), halves - 1)
        end = min(max(round(halves * self.end), begin + 1), halves)
        if options.ascii_only:
            text = " " * (begin // 2) + "-" * max(1, end // 2 - begin // 2)
        else:
            text = " " * (begin // 2) + "╺" * (begin % 2)
            text += "━" * (end // 2 - (begin + 1) // 2) + "╸" * (end % 2)
        yield Segment(text, Style.parse(self.style))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Request a whole bar; all rows of a column get the same width, and so the same scale."""
        return Measurement(LEAST_BAR, BAR_WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A table that keeps its figures whole: on a narrow terminal names and words are folded instead."""

    table: ReportTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Lay the table out for the width that it has."""
        yield _terminal_table(self.table, is_narrow=options.max_width < NARROW_COLUMNS)


def terminal(document: Document) -> RenderableType:
    """Return a document for rich's consoles; words in brackets are no markup."""
    parts: list[RenderableType] = []
    if document.facts:
        parts.append(Text.assemble((document.title, "bold"), f" {document.facts}"))
    for place, part in enumerate(document.sections):
        if place or (document.facts and part.title):
            parts.append(Text())
        parts += _terminal_section(part)
    return Group(*parts)


def _terminal_section(part: ReportSection) -> Iterator[RenderableType]:
    if part.title:
        yield Text(part.title, style=STYLES[part.tone or "strong"])
    for before, block in pairwise((None, *part.blocks)):
        match block:
            case Words():
                text = _printable(block.text) if block.sample else block.text
                line = Text.assemble((block.lead, "bold"), (text, STYLES[block.tone]))
                yield _indented(line) if part.title else line if block.sample else _hanging(line)
            case ReportTable():
                if isinstance(before, ReportTable):
                    yield Text()
                yield _indented(Fitted(table=block))
            case Bars():
                yield _indented(_terminal_bars(block))
            case _:
                pass


def _hanging(line: Text) -> RenderableType:
    """Return a paragraph whose further lines are as far from the edge as the first one."""
    spaces = len(line.plain) - len(line.plain.lstrip(" "))
    return Padding(line[spaces:], (0, 0, 0, spaces), expand=False) if spaces else line


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def _printable(text: str) -> str:
    """Replace control characters, which an untrained model may write and a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}"
        for letter in text.replace("\t", "    ")
    )


def _terminal_table(table: ReportTable, *, is_narrow: bool) -> RichTable:
    made = RichTable(
        box=None, show_header=table.head, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim"
    )
    for place, name in enumerate(table.columns):
        is_number = name in table.numbers
        longest = max((len(row.cells[place]) for row in table.rows), default=0)
        keeps = is_narrow and is_number and longest <= MOST_KEPT
        made.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=keeps or (place < table.unbroken and not is_narrow),
            min_width=longest if keeps else None,
        )
    for row in table.rows:
        first, *others = row.cells
        cells: list[RenderableType] = [Text("  " * row.is_part + first), *map(Text, others)]
        if row.bar is not None:
            colour = "red" if row.bar > 1 else "cyan"
            cells[-1] = Span(begin=0, end=row.bar, style=colour)
        made.add_row(*cells, style=STYLES[row.tone])
    return made


def _terminal_bars(bars: Bars) -> RichTable:
    """Return a row for each part, whose bar begins where the one above it ends."""
    made = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(overflow="fold")
    for _ in ("amount", "share"):
        made.add_column(justify="right", no_wrap=True)
    made.add_column()  # which gives way first on a narrow terminal, before the names

    def add(name: str, amount: str, begin: float, size: float, style: str) -> None:
        span = Span(begin=begin / bars.whole, end=(begin + size) / bars.whole, style=style)
        made.add_row(Text(name), Text(amount), Text(f"{100 * size / bars.base:.1f} %"), span)

    begin, limit = 0.0, bars.limit
    for part in bars.parts:
        is_beyond = limit is not None and begin + part.size > limit.size
        add(part.name, part.amount, begin, part.size, "red" if is_beyond else "cyan")
        begin += part.size
    if bars.free is not None:
        add(bars.free.name, bars.free.amount, begin, bars.free.size, "dim")
    elif limit is not None:
        add(f"= {limit.name}", limit.amount, 0, limit.size, "dim")
    return made
