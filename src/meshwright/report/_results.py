"""Show a result: choose the document of its kind, and let a terminal show it.

A module that makes the document of one kind of result is imported when such a result is shown. Used by:
`reportable`, whose results print themselves, `cli`, and the pages of results.
"""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rich.console import Console, RenderableType

from meshwright.results import Weighing

from ._render import terminal
from ._weighing import full_document, screen_document
from ._weighing_facts import facts_of

if TYPE_CHECKING:
    from meshwright.planned import Plan

    from ._model import Document

WIDTH = 100  # columns of the text that `str` returns
MORE = "All of it: --verbose. Pictures: --html FILE. What would help: --explain."
MORE_IN_PYTHON = (
    "All of it as a page: to_html(FILE). The schedule: to_perfetto(FILE). What would help: mw.explain."
)
EAGER_MORE = "All of it: --verbose. Pictures: --html FILE."
EAGER_MORE_IN_PYTHON = "All of it as a page: to_html(FILE)."
DOCUMENTS = {
    "Calibration": ("calibration", "calibration_document"),
    "Plan": ("_plan_report", "plan_document"),
    "Reconciliation": ("_run_report", "reconciliation_document"),
    "Run": ("_run_report", "run_document"),
}
"""By kind of result: the module here or the room outside, and the function that makes its document."""


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
        if not result.is_compiled:
            more = {MORE: EAGER_MORE, MORE_IN_PYTHON: EAGER_MORE_IN_PYTHON}.get(more, more)
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
