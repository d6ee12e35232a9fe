"""Read the text below each key of a section, which documents it, from the source of the section's class.

pydantic can do that as it makes a class. It then parses 35 classes each time that Meshwright starts, although
only the reference and a file's comments show these texts.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator

from pydantic import BaseModel

from meshwright.config import Section


@functools.cache
def texts_of(record: type[BaseModel]) -> dict[str, str]:
    """Return what documents each key of a section: a field's own description, or the text below the key."""
    below: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if issubclass(base, Section):
            below.update(_below(base))
    fields = record.model_fields.items()
    return {key: field.description or below.get(key, "") for key, field in fields}


def _below(record: type[Section]) -> Iterator[tuple[str, str]]:
    """Yield each key that a class itself defines and has a text below, and that text."""
    body = _classes(record.__module__)[record.__qualname__].body
    for definition, text in itertools.pairwise(body):
        if not isinstance(definition, ast.AnnAssign) or not isinstance(definition.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield definition.target.id, inspect.cleandoc(str(text.value.value))


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
