"""Import a package's names when they are first used, so that importing the package itself loads nothing.

Imports: the standard library, most of it late: when `python -m meshwright` imports this module, the working
directory is still on the module path. Used by: `meshwright` and the packages some of whose names bring jax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def names_on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports each of its names on first use.

    The names are those that the package's `__init__` imports below `if TYPE_CHECKING:`. So they are listed
    once, for type checkers and at run time, where `__all__` and `dir` hold them; `dir` has nothing else but
    Python's own names. `__version__` is that of the installed distribution. `__getattr__` raises
    `AttributeError` for other names.
    """

    def import_name(name: str) -> Any:
        from importlib import import_module

        homes = _homes(package)
        if name == "__all__":
            return sorted(homes)
        if name == "__version__":
            from importlib.metadata import version

            return version("meshwright")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, own_name = homes[name]
        if home is None:  # `from . import name`: a module
            return import_module(f"{package}.{own_name}")
        return getattr(import_module(f"{package}.{home}"), own_name)

    def names() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, "__all__", "__version__", *_homes(package)})

    return import_name, names


def _homes(package: str) -> dict[str, tuple[str | None, str]]:
    """Return, for each name that the package imports for type checkers, its module and its name there."""
    if package in _known:
        return _known[package]
    import ast

    loader: Any = sys.modules[package].__loader__
    blocks = (node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body)
    _known[package] = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    return _known[package]


_known: dict[str, dict[str, tuple[str | None, str]]] = {}
