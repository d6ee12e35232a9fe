"""Show a result: `print` writes its text, `repr` is one line, a notebook shows its HTML page.

`report`, a higher package, makes the text: it is imported when the first result is shown. A room outside the
core makes the page.

Imports: `errors`, `registry`. Used by: `results` and the packages whose records print as a table.
"""

from __future__ import annotations

import errno
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import InputError


class OneLine:
    """A result whose `repr` is one line: a list of results, or the value of a cell, stays readable.

    A dataclass must be declared with `repr=False`, or it writes its own.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.line}>"

    @property
    def line(self) -> str:
        """The result in one line: by default the first of its text."""
        return str(self).strip().partition("\n")[0].strip()


class Reportable(OneLine):
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
        from .registry import room  # a room outside the core draws pages

        page: str = room("pages").page_of(self)
        if path is not None:
            write_result(Path(path), page)
        return page

    def __str__(self) -> str:
        report: Any = import_module("meshwright.report")  # imports the records that it shows
        return report.text_of(self).rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that keeps the styles of page and notebook separate.

        There it takes the whole width of the cell's output.
        """
        from html import escape

        page = self.to_html().replace("<body>", "<body class=framed>", 1)
        return f'<iframe style="width:100%;height:48em;border:0" srcdoc="{escape(page)}"></iframe>'


def write_result(path: Path, text: str) -> None:
    """Write a text that the user asked for.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as refused:
        raise _not_written(path, refused) from refused


def check_place(*paths: Path | None) -> None:
    """Raise, before long work, if its text cannot be written to one of these places; None is no place.

    Raises:
        InputError: one is a folder, or in none that exists.
    """
    for path in paths:
        if path is not None and (os.path.isdir(path) or not os.path.isdir(path.parent)):
            number = errno.EISDIR if os.path.isdir(path) else errno.ENOENT
            raise _not_written(path, OSError(number, os.strerror(number)))


def _not_written(path: Path, refused: OSError) -> InputError:
    hint = "name a file in a folder that exists and can be written"
    return InputError(f"cannot write {path}: {refused.strerror}", hint=hint)
