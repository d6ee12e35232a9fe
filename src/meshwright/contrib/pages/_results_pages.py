"""Show a result as a page: the long form of a result, with pictures."""

from __future__ import annotations

from typing import Any

from meshwright.planned import Plan
from meshwright.report import Document, MakesDocument, document_of, plan_page
from meshwright.results import Run, Weighing

from ._page import page
from ._run_page import page_of_run, weighing_page
from ._schedule_lanes import schedule_lanes


def page_of(result: object) -> str:
    """Return a result as one HTML page."""
    return page(_document_of(result))


def _document_of(result: Any) -> Document:
    match result:
        case MakesDocument():
            return getattr(result, "page_document", result.document)()
        case Run():
            return page_of_run(result)
        case Weighing(refusal=None):
            return weighing_page(result)
        case Plan():
            return plan_page(result, None if result.best is None else schedule_lanes(result.best))
        case _:
            return document_of(result)
