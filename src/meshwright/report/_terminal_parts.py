"""Lay out terminal text, and show a device's memory in it.

The layout consists of headings, indents and tables without lines. Memory is shown as categories with bars, as
number formats, and as the largest buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from meshwright.ledger import MemoryLedger
from meshwright.units import format_bytes


def heading(words: str) -> Text:
    """Return a heading in bold."""
    return Text(words, style="bold")


def indented(part: RenderableType) -> Padding:
    """Return `part` indented by two columns, to follow its heading."""
    return Padding(part, (0, 0, 0, 2))


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return a table without lines around its columns; those named in `right` hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: RenderableType, style: str = "") -> None:
    """Add a row whose strings are plain text: rich would read "[tensor]" as markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def spaced(name: str) -> str:
    """Return a name as words: "saved activations"."""
    return name.replace("_", " ")


NUM_LARGEST = 5
BAR_WIDTH = 32
LEAST_SHARE = 0.0005  # rows that would print as 0.0 % are summed in one


MOST_ROWS = 6  # rows of the bar by category


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A segment of a bar of `BAR_WIDTH` columns, from one share of it to another; at least half a cell."""

    begin: float
    end: float
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Draw it, with half cells where the terminal has them."""
        halves = 2 * BAR_WIDTH
        begin = min(round(halves * self.begin), halves - 1)
        end = max(round(halves * self.end), begin + 1)
        if options.ascii_only:
            text = " " * (begin // 2) + "-" * max(1, end // 2 - begin // 2)
        else:
            text = " " * (begin // 2) + "╺" * (begin % 2)
            text += "━" * (end // 2 - (begin + 1) // 2) + "╸" * (end % 2)
        yield Segment(text, Style.parse(self.style))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Request the whole bar's width, so that all rows have the same scale."""
        return Measurement(BAR_WIDTH, BAR_WIDTH)


def memory_bar(memory: MemoryLedger) -> RenderableType:
    """Return one bar of a device's memory in rows: each category begins where the previous one ends.

    The full width is the usable memory. It is the needed memory if that is more, or if the usable memory is
    unknown.
    """
    needed = memory.reserved_bytes + memory.allowance_bytes
    whole = max(memory.usable_bytes or 0, needed, 1)
    shown = list(memory.by_category.items())
    rows = [(spaced(name), size) for name, size in shown[:MOST_ROWS]]
    if rest := shown[MOST_ROWS:]:
        rows.append((f"{len(rest)} smaller ones", sum(size for _, size in rest)))
    if memory.allowance_bytes:
        rows.append(("beside the program", memory.allowance_bytes))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)

    def row(name: str, begin: int, size: int, style: str) -> None:
        bar = Span(begin=begin / whole, end=(begin + size) / whole, style=style)
        share = f"{100 * size / (memory.usable_bytes or whole):.1f} %"
        add_row(table, name, format_bytes(size), share, bar)

    begin = 0
    for name, size in rows:
        beyond = memory.usable_bytes is not None and begin + size > memory.usable_bytes
        row(name, begin, size, "red" if beyond else "cyan")
        begin += size
    if memory.usable_bytes is not None and memory.fits:
        row("free", begin, memory.usable_bytes - begin, "dim")
    elif memory.usable_bytes is not None:
        row("= usable", 0, memory.usable_bytes, "dim")
    return indented(table)


def memory_table(memory: MemoryLedger) -> RenderableType:
    """Return the categories with bars, scaled to usable memory, or to reserved memory if that is unknown."""
    whole = memory.usable_bytes or memory.reserved_bytes
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()

    def row(name: str, num_bytes: int, bar: RenderableType = "", style: str = "") -> None:
        share = f"{100 * num_bytes / whole:.1f} %" if whole else ""
        add_row(table, name, format_bytes(num_bytes), share, bar, style=style)

    def bar(num_bytes: int) -> ProgressBar:
        full = "red" if num_bytes > whole else "cyan"
        return ProgressBar(
            total=max(whole, 1),
            completed=num_bytes,
            width=BAR_WIDTH,
            complete_style="cyan",
            finished_style=full,
        )

    for name, num_bytes in _categories(memory):
        part = name.startswith("  ")
        row(name, num_bytes, "" if part else bar(num_bytes), "dim" if part else "")
    row("= reserved", memory.reserved_bytes, bar(memory.reserved_bytes), "bold")
    for name, num_bytes in memory.allowance.items():
        row(f"+ {name}", num_bytes, "allowance: no compiler counts it", "dim")
    if memory.usable_bytes is not None:
        row("usable", memory.usable_bytes)
    if memory.peak_bytes is not None:
        row("alive at the peak", memory.peak_bytes)
    if memory.host_bytes:
        add_row(table, "in host memory", format_bytes(memory.host_bytes), "", "")
    if memory.on_chip_bytes:
        add_row(table, "on the chip (VMEM)", format_bytes(memory.on_chip_bytes), "", "not reserved")
    for name, num_bytes in memory.host_needs.items():
        add_row(table, f"each host: {name}", format_bytes(num_bytes), "", "of its own memory", style="dim")
    notes = (indented(Text(f"{note[0].upper()}{note[1:]}.", style="dim")) for note in memory.notes)
    return Group(indented(table), *notes)


def _categories(memory: MemoryLedger) -> Iterator[tuple[str, int]]:
    """Yield names and bytes: the categories, the moments below the optimizer state, the sum of small ones."""
    least = LEAST_SHARE * memory.reserved_bytes
    small: list[int] = []
    for name, num_bytes in memory.by_category.items():
        if num_bytes < least:
            small.append(num_bytes)
            continue
        yield spaced(name), num_bytes
        if name == "optimizer_state":
            for moment, size in memory.optimizer_state_by_moment.items():
                if least <= size < num_bytes:
                    yield f"  {moment}", size
    if small:
        yield f"{len(small)} smaller ones", sum(small)


def format_table(memory: MemoryLedger) -> RenderableType:
    """Return the reserved bytes at the peak by number format, each with its categories, largest first."""
    least = LEAST_SHARE * memory.reserved_bytes
    table = plain_table("format", "size", "whose", right=("size",))
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    small: dict[str, int] = {}
    for name, num_bytes in memory.by_format.items():
        if num_bytes < least:
            small[name] = num_bytes
            continue
        whose = {
            category: formats.get(name, 0) for category, formats in memory.by_category_and_format.items()
        }
        words = (
            f"{spaced(category)} {format_bytes(size)}"
            for category, size in sorted(whose.items(), key=lambda item: -item[1])
            if size >= least
        )
        add_row(table, name, format_bytes(num_bytes), ", ".join(words))
    if small:
        add_row(table, ", ".join(small), format_bytes(sum(small.values())), "")
    return indented(table)


def buffer_table(memory: MemoryLedger) -> RenderableType:
    """Return the largest values alive at the peak, each with the module and source line that make it."""
    if not memory.buffers:
        return indented(Text("none"))
    table = plain_table("size", "shape", "what", "made by", right=("size",))
    table.columns[1].no_wrap = True
    table.columns[0].no_wrap = True
    for buffer in memory.buffers[:NUM_LARGEST]:
        place = " ".join(filter(None, (buffer.module, buffer.source_line))) or _last_steps(buffer.operation)
        add_row(table, format_bytes(buffer.num_bytes), buffer.shape, spaced(buffer.category), place)
    return indented(table)


def _last_steps(operation: str) -> str:
    """Return the informative end of an op_name path; an argument's path is kept whole."""
    return operation if "[" in operation else "/".join(operation.split("/")[-2:])
