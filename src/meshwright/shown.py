"""Show a result: `str` returns its terminal text, a notebook shows its HTML page, `to_html` writes it.

`report`, a higher package, makes text and page; `api` registers its functions with `render_with`.

Imports: `errors`. Used by: `results`, `api`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import InputError

_renderers: dict[str, Callable[[Any], str]] = {}


def render_with(text: Callable[[Any], str], page: Callable[[Any], str]) -> None:
    """Register the functions that make a result's terminal text and its HTML page."""
    _renderers.update(text=text, page=page)


class Shown:
    """A result that prints as its report."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result in JSON's types, as the command's `--json` prints it."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the result as JSON text, as the command's `--json` prints it."""
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the result as one HTML page that needs no other file, and write it to `path` if given.

        Raises:
            InputError: the file cannot be written.
        """
        page = _renderers["page"](self)
        if path is not None:
            write_result(Path(path), page)
        return page

    def __str__(self) -> str:
        return _renderers["text"](self).rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that keeps the styles of page and notebook separate."""
        from html import escape

        return f'<iframe style="width:100%;height:48em;border:0" srcdoc="{escape(self.to_html())}"></iframe>'


def write_result(path: Path, text: str) -> None:
    """Write a text that the user asked for.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as refused:
        hint = "name a file in a folder that exists and can be written"
        raise InputError(f"cannot write {path}: {refused.strerror}", hint=hint) from refused
