"""Import a package's names when they are first used, so that importing the package itself loads nothing.

Imports: the standard library. Used by: `meshwright` and the packages some of whose names bring jax.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_on_first_use(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports each of its names when it is first used.

    The names are those that the package's `__init__` imports below `if TYPE_CHECKING:`. So they are listed
    once, for type checkers and at run time. The returned function raises `AttributeError` for other names.
    """

    @functools.cache
    def homes() -> dict[str, str | None]:
        blocks = (node for node in ast.parse(inspect.getsource(sys.modules[package])).body)
        imports = (node for block in blocks if isinstance(block, ast.If) for node in block.body)
        return {
            alias.name: node.module
            for node in imports
            if isinstance(node, ast.ImportFrom) and node.level
            for alias in node.names
        }

    def named(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes()[name]
        if home is None:  # `from . import name`: a module
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{home}"), name)

    return named
