"""Compare two weighings in Python. Used by: the command `diff`, and users as `mw.diff`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from meshwright.results import Weighing

from ._difference import Difference, difference_of
from ._figures import Figures, figures_of
from ._sides import Side, completed, side_of, weighed


def diff(
    before: Weighing | Path | str,
    after: Weighing | Path | str,
    *,
    common: tuple[str, ...] = (),
    on_event: Callable[[str], object] = lambda words: None,
) -> Difference:
    """Return what differs between two weighings.

    Args:
        before, after: a `Weighing`; the file of one (`weigh --json`); a run's folder; the words of a command,
            "llama3-8b --on 8xH100"; a commit, "@main llama3-8b --on 8xH100"; a set of packages, "llama3-8b
            --on 8xH100 --with jax==0.12.0". A commit or packages alone take the other side's words.
        common: further words of each command: ("--on", "8xH100").
        on_event: called with what is being done.

    Raises:
        InputError: a side cannot be read or weighed.

    >>> import meshwright as mw
    >>> made = diff(mw.weigh("linear", on="8xH100"), mw.weigh("linear", on="4xH100"))
    >>> made.settings["fleet"]
    ('8xH100', '4xH100')
    """
    sides = [_side(each, common) for each in (before, after)]
    if isinstance(sides[0], Side) and isinstance(sides[1], Side):
        sides = list(completed(sides[0], sides[1]))

    def figures(side: Side | Figures) -> Figures:
        return side if isinstance(side, Figures) else weighed(side, on_event)

    with ThreadPoolExecutor(2) as both:
        one, other = both.map(figures, sides)
    if one.label == other.label:
        one, other = replace(one, label=f"{one.label}, before"), replace(other, label=f"{other.label}, after")
    return difference_of(one, other)


def _side(given: Weighing | Path | str, common: tuple[str, ...]) -> Side | Figures:
    if isinstance(given, Weighing):
        return figures_of(given.to_dict(), f"{given.name} on {given.fleet.name}")
    return side_of(str(given), common)
