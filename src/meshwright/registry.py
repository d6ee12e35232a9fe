"""Find what rooms outside the core have registered, by the entry points of the installed package.

The core asks for a group by its name and imports no such room. Groups: `meshwright.programs`, kinds of
program; `meshwright.jobs`, kinds of job files.

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
