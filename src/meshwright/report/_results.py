"""Choose the terminal text and the page of a result.

`api` passes `text_of` and `page_of` to `results`.
"""

from __future__ import annotations

import io
from html import escape
from typing import Any

from rich.console import Console, RenderableType

from meshwright.results import Changes, Run, Sweep, Weighing

from ._html import run_page, weighing_page
from ._html_parts import page
from ._screen import screen_text
from ._sweep import sweep_page, sweep_text
from ._texts import changes_text, run_text

WIDTH = 100  # columns of the text that `str` returns
MORE = "All of it as a page: to_html(FILE). The schedule: to_perfetto(FILE). What would help: mw.explain."


def text_of(result: Any) -> str:
    """Return the terminal text of a result, without colours, in lines of at most 100 columns."""
    written = io.StringIO()
    Console(file=written, width=WIDTH, color_system=None, highlight=False).print(_renderable(result))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def page_of(result: Any) -> str:
    """Return a result as one HTML page."""
    match result:
        case Weighing():
            return weighing_page(result.to_dict())
        case Run():
            return run_page(result.folder)
        case Sweep():
            return sweep_page(result)
        case _:
            return page("What would help", f"<pre>{escape(text_of(result))}</pre>\n")


def _renderable(result: Any) -> RenderableType:
    match result:
        case Weighing():
            return screen_text(result, MORE)
        case Run():
            return run_text(result.measurement, result.reconciliation)
        case Sweep():
            return sweep_text(result)
        case Changes():
            return changes_text(result)
    raise TypeError(f"{type(result).__name__} has no text of its own")
