"""Plan the same program for several fleets, and compare them; define what comes of it and its command.

Used by: users, as `mw.plan_fleets`; `cli`, by the entry point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import plan
from meshwright.compiler import warm_workers
from meshwright.config import Overrides, RunConfig
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.planned import PLAN_SCHEMA, Plan, PlanProgress
from meshwright.programs import Program, RunLength, fleet_of, program_of, run_length_of
from meshwright.reportable import Reportable
from meshwright.results import ignore

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.report import Document

LEAST_BUDGET = 1.0  # seconds for one of several fleets, when those before it have spent all


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FleetPlans(Reportable):
    """Plans of the same run for several fleets.

    `refused`: fleets for which no plan could be made, each with the reason.
    """

    plans: tuple[Plan, ...]
    refused: dict[str, str]

    @property
    def ranked(self) -> tuple[Plan, ...]:
        """Plans by the seconds of their best step, the fastest first; then those where nothing fits."""

        def seconds(plan: Plan) -> float:
            if plan.winner is None or plan.winner.step_seconds is None:
                return math.inf
            return plan.winner.step_seconds.expected

        return tuple(sorted(self.plans, key=seconds))

    @property
    def fastest(self) -> Plan | None:
        """Plan with the shortest step; None if nothing fits on any fleet."""
        return next((plan for plan in self.ranked if plan.winner is not None), None)

    @property
    def cheapest(self) -> Plan | None:
        """Plan with the lowest price of a step; None if no fleet on which something fits has a price."""
        priced = [plan for plan in self.ranked if plan.price_per_step is not None]
        return min(priced, key=lambda plan: plan.price_per_step or 0.0, default=None)

    @property
    def interrupted(self) -> bool:
        """Tell whether Ctrl-C ended the search."""
        return any(plan.interrupted for plan in self.plans)

    def document(self, more: str = "") -> Document:
        """Return the comparison; `more`: its last line."""
        from ._fleet_comparison import fleets_document

        return fleets_document(self, more)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `plan --fleets --json` prints (docs/how-to/planning.md)."""
        fastest, cheapest = self.fastest, self.cheapest
        return {
            "schema": PLAN_SCHEMA,
            "fastest": None if fastest is None else fastest.fleet.name,
            "cheapest": None if cheapest is None else cheapest.fleet.name,
            "refused": self.refused,
            "plans": [plan.to_dict() for plan in self.ranked],
        }


@warm_workers()
def plan_fleets(
    program: Program | RunConfig | str | Path,
    *,
    on: Sequence[str | Fleet],
    search: Mapping[str, Any] | Sequence[str] = (),
    overrides: Overrides = (),
    run: RunLength | None = None,
    budget_seconds: float = 60.0,
    on_event: Callable[[PlanProgress], None] = ignore,
) -> FleetPlans:
    """Plan the same program for several fleets, and compare them by the time and the cost of a step.

    A fleet for which no plan can be made (its compiler is not installed, say) is listed with the reason.

    Args:
        program, search, overrides, on_event: as for `plan`.
        on: the fleets. Each gets an equal share of what is left of the budget.
        run: the tokens of the whole run. It has no price, which would be one for different chips.
        budget_seconds: of all fleets together.

    Raises:
        InputError: no fleet is named, one is named twice, a price is given, the step is another one on each
            fleet, or no plan can be made for any.

    >>> made = plan_fleets("linear", on=["2xH100", "2xA100-80GB"], budget_seconds=2)
    >>> made.fastest.fleet.name in ("2xH100", "2xA100-80GB")
    True
    """
    if not isinstance(on, Iterable):
        raise InputError(f"on = {on!r} are no fleets", hint='list them: on=["64xH100", "32xB200"]')
    fleets = [fleet_of(each) for each in ([on] if isinstance(on, str) else on)]
    if not fleets or len({each.name for each in fleets}) < len(fleets):
        raise InputError("name each fleet once", hint="--fleets 64xH100,32xB200")
    if run_length_of(run).price_per_device_hour is not None:
        raise InputError(
            "one price cannot be that of different fleets",
            hint="leave it out: list prices are used; in Python a Fleet may carry its own price",
        )
    found = program_of(program)
    found.check_same_step({each.num_devices for each in fleets}, overrides)
    plans: list[Plan] = []
    refused: dict[str, InputError] = {}
    ends = time.monotonic() + budget_seconds
    how: dict[str, Any] = {"search": search, "overrides": overrides, "run": run, "on_event": on_event}
    for place, fleet in enumerate(fleets):
        share = max((ends - time.monotonic()) / (len(fleets) - place), LEAST_BUDGET)
        try:
            plans.append(plan(found, on=fleet, budget_seconds=share, **how))
        except InputError as why:
            refused[fleet.name] = why
        if plans and plans[-1].interrupted:
            break
    if not plans:
        raise next(iter(refused.values()))
    return FleetPlans(plans=tuple(plans), refused={name: why.message for name, why in refused.items()})


def compare(
    config: str,
    program: Program,
    fleets: Iterable[str],
    budget: float,
    common: dict[str, Any],
    html: Path | None,
    *,
    check: bool,
    as_json: bool,
    of_one: Mapping[str, object],
) -> None:
    """Plan for several fleets and print their comparison: what `meshwright plan --fleets` does.

    Args:
        of_one: options that mean one fleet, by name; None is not given.

    Raises:
        InputError: such an option is given.
    """
    _refuse_beside_fleets(of_one)
    from meshwright.cli import answer, end_search, ended_by_signals, plan_progress, say_readings

    several = list(fleets)
    for fleet in several:
        say_readings(config, fleet, None)
    with (
        ended_by_signals() as signals,
        plan_progress(f"planning {config} on {len(several)} fleets") as on_event,
    ):
        made = plan_fleets(program, on=several, budget_seconds=budget, on_event=on_event, **common)
    if html is not None:
        made.to_html(html)
    more = f"One of them in full: meshwright plan {config} --on FLEET"
    answer(as_json, made.to_dict(), lambda: _page(made, more))
    end_search(made.interrupted, signals, nothing_fits=check and made.fastest is None)


def _page(made: FleetPlans, more: str) -> RenderableType:
    from meshwright.report import terminal

    return terminal(made.document(more))


def _refuse_beside_fleets(given: Mapping[str, object]) -> None:
    """Raise if an option is given that means one fleet."""
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"--fleets compares fleets, and {option} is of one",
                hint=f"leave {option} out; then plan for the fleet of your choice with --on",
            )
