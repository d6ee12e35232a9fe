"""Weigh all budgets of a file side by side, and say which keep their limits.

Status 0: all are within. 1: one is over. 2: one could not be weighed, or has no figure to compare with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.files import read_text
from meshwright.reportable import Reportable

from ._budgets import (
    Budget,
    Limit,
    budget_file,
    limit_words,
    measured,
    read_budgets,
    updated_text,
    write_budgets,
)
from ._difference import LINES_OF_FLOPS, LINES_OF_MEMORY, LINES_OF_TRAFFIC, Difference, difference_of
from ._figures import IDLE, Figures, Place
from ._sides import Side, weighed

if TYPE_CHECKING:
    from meshwright.report import Document

SCHEMA = 1
WITHIN, OVER, NOT_WEIGHED = "within", "over", "not weighed"
STATUS = {WITHIN: 0, OVER: 1, NOT_WEIGHED: 2}
Weigher = Callable[[Side], Figures]
PLACES = {
    "peak": (LINES_OF_MEMORY, "by_place"),
    "fits": (LINES_OF_MEMORY, "by_place"),
    "flops": (LINES_OF_FLOPS, "flops_by_place"),
    "traffic": (LINES_OF_TRAFFIC, "traffic_by_place"),
}
"""By kind of limit: the table of a difference, and the field of figures, that say where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One limit with the figure of today. `state`: within | over | not weighed."""

    limit: Limit
    now: float | None

    @property
    def state(self) -> str:
        """Return whether the figure is within its limit."""
        if self.now is None or self.limit.most is None:
            return NOT_WEIGHED
        return WITHIN if self.now <= self.limit.most else OVER

    @property
    def words(self) -> str:
        """The figure next to its limit."""
        return f"{self.limit.name.replace('.', ' over ')}: {limit_words(self.limit, self.now)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One budget, weighed.

    `failed`: why it could not be weighed. `difference`: from the commit that it was compared with.
    """

    budget: Budget
    figures: Figures | None = None
    held: tuple[Held, ...] = ()
    difference: Difference | None = None
    failed: str = ""

    @property
    def lost_fit(self) -> bool:
        """Return whether it was to fit and does not."""
        return self.budget.fits is True and self.figures is not None and self.figures.fits is False

    @property
    def state(self) -> str:
        """The worst of its limits; where it does not fit as it should, over."""
        states = [*(each.state for each in self.held), OVER if self.lost_fit else WITHIN]
        if self.figures is None:
            return NOT_WEIGHED
        if self.figures.refused:
            return OVER if self.budget.fits is not False else WITHIN
        return max(states, key=lambda state: STATUS[state])

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return what is over, or why it could not be weighed."""
        if self.figures is None:
            return (self.failed,)
        fits = [f"it does not fit{f': {self.figures.refused}' * bool(self.figures.refused)}"]
        over = [each.words for each in self.held if each.state != WITHIN and not self.figures.refused]
        missing = [each.limit.name for each in self.held if each.limit.was is None and each.now is not None]
        hint = [f"no figure to compare {' and '.join(missing)} with: meshwright check --update"]
        is_lost = self.lost_fit or self.figures.refused
        return (*(fits if is_lost else ()), *over, *(hint if missing and not self.figures.refused else ()))

    def places(self, name: str) -> list[tuple[Place, float]]:
        """Return where a quantity is, the most first; where it grew, if there is another commit.

        A predicted time has no place.
        """
        kind = name.partition(".")[0]
        if self.figures is None or kind not in PLACES:
            return []
        title, field = PLACES[kind]
        if self.difference is None:
            found = {
                place: amount for place, amount in getattr(self.figures, field).items() if place[1] != IDLE
            }
        else:  # where what only moved to another line is left out
            rows = (row for table in self.difference.tables if table.title == title for row in table.rows)
            found = {(*row.place.partition(" ")[::2], row.name): row.by for row in rows if row.name != IDLE}
            found = {(line, what, module): by for (line, module, what), by in found.items()}
        return sorted(((p, n) for p, n in found.items() if n > 0), key=lambda item: -item[1])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Check(Reportable):
    """All budgets of a file, weighed. `against`: the commit that they are compared with, or ""."""

    file: Path
    budgets: tuple[Checked, ...]
    against: str = ""

    @property
    def status(self) -> int:
        """0 within, 1 over, 2 not weighed."""
        return max((STATUS[each.state] for each in self.budgets), default=0)

    @property
    def line(self) -> str:
        """How many budgets are within, over and not weighed."""
        counts = {state: sum(each.state == state for each in self.budgets) for state in STATUS}
        parts = [f"{count} {state}" for state, count in counts.items() if count]
        return f"{self.file}: {', '.join(parts)}"

    def document(self) -> Document:
        """Return its report."""
        from ._outputs import check_document

        return check_document(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `check --json` prints."""
        return {
            "schema": SCHEMA,
            "file": str(self.file),
            "against": self.against,
            "status": self.status,
            "budgets": [
                {
                    "name": each.budget.name,
                    "weigh": list(each.budget.words),
                    "state": each.state,
                    "reasons": list(each.reasons),
                    "limits": [
                        {
                            "name": held.limit.name,
                            "unit": held.limit.unit,
                            "was": held.limit.was,
                            "allow": held.limit.allow,
                            "most": held.limit.most,
                            "now": held.now,
                            "state": held.state,
                        }
                        for held in each.held
                    ],
                    "difference": None if each.difference is None else each.difference.to_dict(),
                }
                for each in self.budgets
            ],
        }


def check(
    path: Path | str | None = None,
    *,
    only: Sequence[str] = (),
    against: str = "",
    update: bool = False,
    weigher: Weigher = weighed,
    on_event: Callable[[str], object] = lambda words: None,
) -> Check:
    """Weigh the budgets of a file, each in a process, and return which keep their limits.

    Args:
        path: the file; by default meshwright.toml or pyproject.toml of the working directory.
        only: names of budgets; all if empty.
        against: a commit to weigh too, whose figures stand in where a limit has none of its own.
        update: write the figures of today into the file, which keeps its comments and its order.
        weigher: weighs one side.
        on_event: called with the name of each budget that is done.

    Raises:
        InputError: the file cannot be read, or a name is no budget of it.
    """
    file = budget_file(None if path is None else Path(path))
    budgets = read_budgets(file)
    names = [budget.name for budget in budgets]
    for name in only:
        if name not in names:
            raise InputError(f"{file} has no budget {name!r}", hint=f"it has {', '.join(names)}")
    chosen = [budget for budget in budgets if not only or budget.name in only]

    def one(budget: Budget) -> Checked:
        made = _checked(budget, against, weigher)
        on_event(budget.name)
        return made

    with ThreadPoolExecutor(max(1, min(len(chosen), os.cpu_count() or 1))) as side_by_side:
        made = Check(file=file, budgets=tuple(side_by_side.map(one, chosen)), against=against)
    if update:
        figures = {each.budget.name: each.figures for each in made.budgets if each.figures is not None}
        write_budgets(file, updated_text(read_text(file), figures))
        fresh = {budget.name: budget for budget in read_budgets(file)}
        renew = partial(_held, before=None)
        return replace(
            made,
            budgets=tuple(
                replace(
                    each, budget=fresh[each.budget.name], held=renew(fresh[each.budget.name], each.figures)
                )
                for each in made.budgets
            ),
        )
    return made


def _checked(budget: Budget, against: str, weigher: Weigher) -> Checked:
    side = Side(text=budget.name, words=budget.words)
    try:
        now = weigher(side)
        before = None
        if against:
            before = weigher(replace(side, text=f"{budget.name} at {against}", revision=against))
    except MeshwrightError as error:
        return Checked(budget=budget, failed=str(error))
    difference = None if before is None else difference_of(before, now)
    return Checked(budget=budget, figures=now, held=_held(budget, now, before), difference=difference)


def _held(budget: Budget, now: Figures | None, before: Figures | None) -> tuple[Held, ...]:
    """Return each limit with its figure; one without a figure of its own has that of the other commit."""
    if now is None:
        return ()
    made: list[Held] = []
    for limit in budget.limits:
        was = limit.was if limit.was is not None or before is None else measured(before, limit.name)
        made.append(Held(limit=replace(limit, was=was), now=measured(now, limit.name)))
    return tuple(made)
