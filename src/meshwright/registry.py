"""Find what rooms outside the core have registered, by the entry points of the installed package.

The core asks for a group by its name and imports no such room. Groups: `meshwright.programs`, kinds of
program; `meshwright.jobs`, kinds of job files; `meshwright.trackers`, programs that keep figures of runs;
`meshwright.listeners`, what gets a run's events; `meshwright.data`, what reads texts.

Imports: the standard library. Used by: `programs`, `cli`.
"""

from __future__ import annotations

from functools import cache
from typing import Any


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


def load_registered(group: str, name: str) -> Any:
    """Return what is registered under one name of a group, and import nothing else of the group."""
    from importlib.metadata import entry_points

    return entry_points(group=group)[name].load()
