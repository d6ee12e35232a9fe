"""Find what rooms outside the core have registered, by the entry points of the installed package.

The core asks for a group by its name and imports no such room. pyproject.toml says what each group is.

Imports: `errors`. Used by: `reportable`, `config`, `programs`, `trainer`, `api`, `cli`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def registered(group: str) -> dict[str, Any]:
    """Return what is registered in a group, by name and in order of the names."""
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=group), key=lambda point: point.name)
    return {point.name: point.load() for point in found}


def registered_names(group: str) -> list[str]:
    """Return the names of a group, in order, and import nothing."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=group).names)


def registered_module(group: str, name: str) -> str:
    """Return the name of the module that is registered under one name of a group, and import nothing.

    Raises:
        InputError: the installed package names none.
    """
    return _found(group, name).value


def load_registered(group: str, name: str) -> Any:
    """Return what is registered under one name of a group, and import nothing else of the group.

    Raises:
        InputError: the installed package names none.
    """
    return _found(group, name).load()


def _found(group: str, name: str) -> EntryPoint:
    from importlib.metadata import entry_points

    found = entry_points(group=group)
    if name not in found.names:
        raise InputError(
            f"the installed package has no entry point {name!r} of {group!r}",
            hint="it is older than these sources: install Meshwright again",
        )
    return found[name]
