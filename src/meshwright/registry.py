"""Find what rooms outside the core have registered, by the entry points of the installed package.

The core imports no such room. It asks for one by its name (`room`), or for a group of like things to which
others may add: kinds of program, formats of weights, models, mixers, job files, trackers.

Imports: `errors`. Used by: `reportable`, `config`, `programs`, `trainer`, `api`, `cli`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ROOMS = "meshwright.rooms"


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


@cache
def room(name: str) -> Any:
    """Return a room outside the core, as a module.

    >>> room("pages").__name__
    'meshwright.contrib.pages'

    Raises:
        InputError: the installed package names none.
    """
    return load_registered(ROOMS, name)


def room_module(name: str) -> str:
    """Return the name of the module of a room, and import nothing.

    Raises:
        InputError: the installed package names none.
    """
    return _found(ROOMS, name).value


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
