"""Show a document as one HTML page.

A page has no link and no external font, and all its text is escaped. It has a script only where a table can
be sorted, and shows everything without it. It draws each plot twice, for wide and for narrow screens, and the
style sheet shows one of the two: text in a scaled-down plot would be unreadable. matplotlib is
imported when a plot is drawn.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from importlib.resources import files
from typing import Any

from meshwright.report import (
    FAINT,
    INK,
    Bars,
    Block,
    Cards,
    Document,
    Lanes,
    Plot,
    ReportSection,
    ReportTable,
    Scatter,
    TableRow,
    Words,
)

CLASSES = {"good": "verdict fits", "bad": "verdict lacks", "open": "verdict open", "warning": "verdict open"}
MANY_COLUMNS = 5  # with this many or more, a narrow screen shows each row as a card
WIDE, NARROW = 8.6, 4.4  # inches
# From the beginning of a word alone: a long one that is no file's name is then looked at once.
FILE = re.compile(
    r"(?<![\w.-])[\w.-]+\.(?:py|jsonl?|toml|html|txt|md|npy|npz|bin|safetensors|log)\b(?::\d+)?"
)


def page(document: Document) -> str:
    """Return a document as one HTML page that needs no other file."""
    title = escape(document.title)
    style = files("meshwright.contrib.pages").joinpath("report.css").read_text("utf-8")
    facts = _page_words(Words(text=document.facts, tone="faint")) if document.facts else ""
    reload = ""
    if document.reload_seconds is not None:
        reload = f'<meta http-equiv="refresh" content="{document.reload_seconds}">\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{reload}'
        f"<title>{title}: Meshwright</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n<header>\n<h1>{title}</h1>\n{facts}</header>\n"
        f"{''.join(map(page_section, document.sections))}</main>\n{_script(document)}</body>\n</html>\n"
    )


def _script(document: Document) -> str:
    """Return the script that sorts tables, if the document has one to sort."""
    blocks = (block for part in document.sections for block in part.blocks)
    if not any(isinstance(block, ReportTable) and block.sorts for block in blocks):
        return ""
    return f"<script>\n{files('meshwright.contrib.pages').joinpath('sort.js').read_text('utf-8')}</script>\n"


def page_section(part: ReportSection) -> str:
    """Return a section of a page."""
    kind = _class("notes" if part.tone == "warning" else "")
    title = f"<h2>{escape(part.title)}</h2>\n" if part.title else ""
    return f"<section{kind}>\n{title}{''.join(map(_page_block, part.blocks))}</section>\n"


def _page_block(block: Block) -> str:
    match block:
        case Words():
            return _page_words(block)
        case ReportTable():
            return _page_table(block)
        case Bars():
            return f"<figure>{_page_bars(block)}</figure>\n"
        case Plot():
            return f"<figure>\n{_page_plot(block)}</figure>\n"
        case Scatter():
            from ._drawings import scatter_svg

            drawn = scatter_svg(block, "wide") + scatter_svg(block, "narrow")
            return f"<figure>\n{drawn}{_scatter_legend(block)}</figure>\n"
        case Lanes():
            return f"<figure>\n{_page_lanes(block)}{_legend(block.colours)}</figure>\n"
        case Cards():
            cards = "".join(
                f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>\n"
                for value, words in block.items
            )
            return f"<div{_class('cards')}>\n{cards}</div>\n"


def _page_words(words: Words) -> str:
    if words.sample:
        return f"<pre><b>{escape(words.lead)}</b>{escape(words.text)}</pre>\n"
    kind = CLASSES.get(words.tone, "facts" if words.tone == "faint" else "")
    lead = f"<b>{_text(words.lead)}</b>" if words.lead else ""
    return f"<p{_class(kind)}>{lead}{_text(words.text)}</p>\n"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _text(words: str) -> str:
    """Return escaped text in which file names and rates do not break and paths may break after a slash."""
    broken = re.sub(r"(?<=[\w\]])/(?!s\b)(?=[\w\[])", "/<wbr>", escape(words))
    return FILE.sub(lambda name: f"<span class=file>{name[0]}</span>", broken)


def _page_table(table: ReportTable) -> str:
    many = len(table.columns) >= MANY_COLUMNS
    kinds = " ".join(filter(None, ("many" if many else "", "sorts" if table.sorts else "")))
    numbers = [_class("number" if name in table.numbers else "") for name in table.columns]
    names = [f' data-head="{escape(name)}"' if many else "" for name in table.columns]

    def line(row: TableRow) -> str:
        values = ("" if value is None else f' data-value="{value:.6g}"' for value in row.values)
        keys = list(values) or [""] * len(row.cells)
        cells = zip(row.cells, numbers, names, keys, strict=True)
        kind = _class(" ".join(filter(None, (row.tone, "part" if row.is_part else ""))))
        inside = "".join(f"<td{number}{name}{key}>{_text(words)}</td>" for words, number, name, key in cells)
        return f"<tr{kind}>{inside}</tr>\n"

    pairs = zip(table.columns, numbers, strict=True)
    head = "".join(f"<th{number}>{_text(name)}</th>" for name, number in pairs)
    return (
        f"<div class=scroll><table{_class(kinds)}>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{''.join(map(line, table.rows))}</tbody>\n</table></div>\n"
    )


def _page_bars(bars: Bars) -> str:
    """Return one bar with a segment for each part, a line at the limit, an interval below, and a legend."""
    segments = "".join(
        f'<i title="{escape(part.name)}" '
        f'style="width:{100 * part.size / bars.whole:.3f}%;background:{part.colour}"></i>'
        for part in bars.parts
    )
    parts = (*bars.parts, *((bars.free,) if bars.free else ()))
    items = [
        (part.colour, f"{part.name}, {part.amount}, {100 * part.size / bars.base:.1f} %") for part in parts
    ]
    lines: list[tuple[str, str]] = []
    interval = ""
    if bars.limit is not None:
        is_near = bars.limit.size <= bars.whole
        if is_near:
            segments += f'<u style="left:{100 * bars.limit.size / bars.whole:.3f}%"></u>'
        far = "" if is_near else ": far to the right"
        lines.append((INK, f"{bars.limit.name}, {bars.limit.amount}{far}"))
    if bars.interval is not None:
        low, high, words = bars.interval
        left, width = 100 * low / bars.whole, 100 * (high - low) / bars.whole
        interval = f'<div class=range><i style="left:{left:.3f}%;width:{width:.3f}%"></i></div>\n'
        lines.append((INK, words))
    bar = f'<div class=bar role=img aria-label="{escape(bars.label)}">{segments}</div>\n'
    return bar + interval + _legend(items, lines)


def _page_lanes(lanes: Lanes) -> str:
    """Return each lane below its name, and the words of the axis below all of them."""
    from ._drawings import lane_svg

    drawn = "".join(
        f"<p class=facts>{escape(lane.name)}</p>\n{lane_svg(lane, lanes.label)}" for lane in lanes.lanes
    )
    ticks = "".join(
        f'<span style="left:{100 * place:.2f}%">{escape(words)}</span>' for place, words in lanes.ticks
    )
    return f"<div class=lanes>\n{drawn}<div class=ticks>{ticks}</div>\n</div>\n"


def _legend(
    colours: Iterable[tuple[str, str]],
    lines: Iterable[tuple[str, str]] = (),
    shapes: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the legend of a picture: squares of a colour, dashes for lines, and characters for shapes."""
    squares = "".join(f'<li><b style="background:{c}"></b>{_text(words)}</li>' for c, words in colours)
    dashes = "".join(f'<li><b class=dash style="color:{c}"></b>{_text(words)}</li>' for c, words in lines)
    letters = "".join(f"<li>{_text(f'{shape} {words}')}</li>" for shape, words in shapes)
    return f"<ul class=legend>{squares}{dashes}{letters}</ul>\n"


@contextmanager
def loading_plots() -> Iterator[None]:
    """Import matplotlib in a thread beside the block, so that a page drawn later need not wait for it."""
    thread = threading.Thread(target=_load_plots, name="meshwright-plots")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load_plots() -> None:
    with suppress(Exception):  # the page that needs it reports what fails
        import matplotlib.figure  # noqa: F401


def _page_plot(plot: Plot) -> str:
    """Return a plot with its legend, or words in its place: a page is written after hours of training too."""
    from meshwright.extras import absent, how_to_install

    if absent(["matplotlib"]):
        words = (
            f"Not drawn: {plot.label}. It needs matplotlib, which is not installed; {how_to_install('draw')}"
        )
        return f"<p>{_text(words)}</p>\n"
    return svg_of(plot) + _legend(plot.colours, plot.lines, plot.shapes)


def svg_of(plot: Plot) -> str:
    """Return a plot as two `<svg>` elements, `wide` and `narrow`, that reference nothing outside them."""
    return _svg(plot, WIDE, "wide") + _svg(plot, NARROW, "narrow")


def _svg(plot: Plot, width: float, kind: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # keeps text as text: small, sharp, searchable
        "svg.hashsalt": f"{plot.label} {kind}",  # makes the bytes of the same run reproducible
        "font.family": "sans-serif",
        "font.size": 9.5,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "axes.edgecolor": FAINT,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, plot.height))
        plot.draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)  # inline SVG needs no namespaces
    # Keep hundredths of a point in tags: finer detail is invisible. The words between them stay whole.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the ids would repeat among the plots of one page
    label = f'<svg class="{kind}" viewBox="\\1" role="img" aria-label="{escape(plot.label)}">'
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', label, svg)


def _scatter_legend(scatter: Scatter) -> str:
    from ._drawings import DOT_COLOURS

    kinds = dict.fromkeys(dot.kind for dot in scatter.dots)
    lines = [(FAINT, "the front: no other is both faster and smaller")]
    lines += [(INK, scatter.limit[1])] if scatter.limit else []
    return _legend([(DOT_COLOURS[kind], kind) for kind in kinds], lines)
