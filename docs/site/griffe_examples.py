"""Show the examples of docstrings as code: mkdocstrings loads this extension (mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^( *)(>>> .*\n(?:\1\S.*\n)*)", re.M)
"""A prompt, and the lines below it as far as the next empty one."""


class Examples(Extension):
    """Put a fence around each example, which Markdown would take for a quotation."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Change the docstring of one function, class, module or attribute."""
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"\1```pycon\n\1\2\1```\n", obj.docstring.value.rstrip() + "\n")
            obj.docstring.value = text.rstrip("\n")
