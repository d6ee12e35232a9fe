"""Search the layouts and settings of a program for the fastest that fits a fleet.

A program says what it can choose from. Each candidate of a run has bounds and an estimate in closed form. The
most promising are compiled side by side in worker processes, through the cache, until the budget is spent or
nothing promises a saving. Only a compiled candidate is ever recommended.

Imports: `_plan_runner`, `programs`, `planning`. Used by: `cli`, and users as `mw.plan`;
`contrib.fleet_plans`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from meshwright.compiler import warm_workers
from meshwright.config import Overrides, RunConfig
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.kept_records import keep_plan
from meshwright.planned import STOPPED, Plan, Planned, PlanProgress
from meshwright.planning import values_by_knob
from meshwright.programs import (
    REST,
    Candidates,
    Program,
    RunLength,
    Settings,
    fleet_of,
    program_of,
    run_length_of,
)
from meshwright.registry import room
from meshwright.results import Change, ignore

from ._plan_runner import CandidateRunner, end_of, usual_workers

LEAST_HOPE = 0.2  # least probability of fitting for which a larger fleet is tried
MOST_SECONDS = 7 * 24 * 3600.0
LAYERS_WAIT = ("state", "all")  # values of `offload`
HELD_NOTE = "the layers' parameters wait in the hosts' memory, for nothing else that was compiled fits"
NOT_LOOKED_FOR = (
    "a larger fleet, or a knob less, was not tried: the plan's time is over; give it a larger --budget"
)

Search = Mapping[str, Any] | Sequence[str]
Knobs = Mapping[str, Sequence[str]]  # the values of each, as text
CheckSizes = Callable[[set[int]], None]
FirstFit = Callable[[Fleet, Knobs, str], Planned | None]


@warm_workers()
def plan(
    program: Program | RunConfig | str | Path,
    *,
    on: str | Fleet,
    search: Search = (),
    overrides: Overrides = (),
    run: RunLength | None = None,
    budget_seconds: float = 60.0,
    smallest_fleet: bool = False,
    on_event: Callable[[PlanProgress], None] = ignore,
) -> Plan:
    """Search for the fastest layout and settings of a program that fit a fleet.

    The global batch and everything that changes the result of training stay as they are. Ctrl-C ends the
    search, and the plan holds what was compiled until then. A later call takes compiled candidates from the
    cache. As many are compiled side by side as the machine has cores and memory for, or as the environment's
    MESHWRIGHT_PLAN_WORKERS says.

    Args:
        program: as for `weigh`. Of a run its layout, microbatch and settings are searched; of a function by
            its name the mesh axes and the knobs that it declares; of a PyTorch module as a JAX program
            (`as_jax`) data, fsdp, checkpoint (what runs again in the backward pass) and layers (one loop, or
            unrolled).
        on: the fleet, as for `weigh`.
        search: the values that a knob may have: {"tensor": 8, "microbatch": [1, 2, 4]}, or ["tensor=8",
            "microbatch=1,2,4"]; others are free. A run's knobs: the six axes, microbatch, remat, zero1,
            offload, pipeline, pipeline_chunks, inner (the innermost axis), and precision, which stays the
            run's unless it is named. "rest" keeps every knob that is not named as the run has it.
        overrides: as for `weigh`.
        run: the tokens and the price of the whole run. Without a price the catalog's list price is used,
            with its provider and date; if it has none, no cost is given.
        budget_seconds: no candidate is begun after this time but the first ones. What still runs after twice
            the time, or a minute later if that is longer, is cut off.
        smallest_fleet: plan for the smallest fleet of that chip, up to `on`, on which a candidate fits.
        on_event: called with `PlanProgress` whenever the search moves on.

    Raises:
        InputError: an input is wrong, the knobs leave no legal candidate, or no time can be predicted for
            the fleet. Also the error of the first candidate if it is one that every candidate would have.

    >>> made = plan("linear", on="2xH100", budget_seconds=1)
    >>> made.winner.fits, made.num_considered > 1
    (True, True)
    """
    if not 0 < budget_seconds <= MOST_SECONDS:
        raise InputError(
            f"a budget of {budget_seconds:g} s cannot be spent", hint="use 60, or more for more candidates"
        )
    fleet, started = fleet_of(on), time.monotonic()
    asked = _Asked(
        program=program_of(program),
        settings=Settings(overrides=overrides, run=run_length_of(run)),
        search=_by_knob(search),
        on_event=on_event,
        started=started,
        ends=end_of(started, budget_seconds),
        budget_seconds=budget_seconds,
    )
    if not smallest_fleet:
        made = _planned_on(asked, fleet)
    else:
        made = _other_fleets().smallest(fleet, asked.check_sizes, partial(_planned_on, asked))
    return keep_plan(asked.operated(made))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Hold what a caller of `plan` asks for, without the fleet.

    `started`, and `ends`, when all that runs is cut off: by `time.monotonic`.
    """

    program: Program
    settings: Settings
    search: Knobs
    on_event: Callable[[PlanProgress], None]
    started: float
    ends: float
    budget_seconds: float

    def operated(self, made: Plan) -> Plan:
        """Return a plan whose best says when its run is finished."""
        if made.best is None:
            return made
        return dataclasses.replace(made, best=self.settings.run.operated(made.best))

    def check_sizes(self, sizes: set[int]) -> None:
        """Raise if the step is another one on fleets of these numbers of devices."""
        self.program.check_same_step(sizes, self.settings.overrides)

    def candidates(self, fleet: Fleet) -> Candidates:
        """Return what the program can choose from on a fleet."""
        return self.program.candidates(fleet, self.search, self.settings)

    def runner(self, candidates: Candidates, fleet: Fleet) -> CandidateRunner:
        """Return the search over candidates. The budget begins when the program is made."""
        return CandidateRunner(
            candidates=candidates,
            fleet=fleet,
            budget_seconds=self.budget_seconds,
            started=self.started + candidates.seconds,
            ends=self.ends + candidates.seconds,
            on_event=self.on_event,
            length=self.settings.run,
        )


def _by_knob(search: Search) -> dict[str, tuple[str, ...]]:
    """Return the values of a search by knob, as text; "rest" as a knob without values.

    Raises:
        InputError: a text is not of the form name=value, or a knob is given twice.
    """
    if isinstance(search, Mapping):
        named = {name: value for name, value in search.items() if name != REST}
        return {**values_by_knob(named), **({REST: ()} if REST in search else {})}
    texts = [search] if isinstance(search, str) else list(search)
    named = values_by_knob([text for text in texts if text != REST])
    return {**named, **({REST: ()} if REST in texts else {})}


class _OtherFleets(Protocol):
    """Plans for fleets of other sizes: a room outside, which an entry point names."""

    def smallest(self, largest: Fleet, check_sizes: CheckSizes, planned_on: Callable[..., Plan]) -> Plan:
        """Return the plan for the first fleet up to `largest` on which a compiled candidate fits."""
        ...

    def what_would_fit(
        self, fleet: Fleet, knobs: Knobs, check_sizes: CheckSizes, first_fit: FirstFit
    ) -> tuple[Change, ...]:
        """Return a knob that need not be fixed, and a larger fleet, with which something fits."""
        ...


def _other_fleets() -> _OtherFleets:
    return room("fleet_plans")


def _planned_on(asked: _Asked, fleet: Fleet, *, is_largest: bool = True) -> Plan:
    """Return the plan for one fleet.

    Unless it is the largest that may be had, nothing is compiled where no candidate is likely to fit.
    """
    price, length = "", asked.settings.run
    if length.price_per_device_hour is not None:
        fleet = length.priced(fleet)
    elif fleet.price_per_device_hour is None:
        with_list_price: Callable[[Fleet], tuple[Fleet, str]] = room("prices").with_list_price
        fleet, price = with_list_price(fleet)
    candidates = asked.candidates(fleet)
    runner = asked.runner(candidates, fleet)
    if not is_largest and runner.search.probability_of_fitting().max() < LEAST_HOPE:
        return runner.plan("no candidate is likely to fit")
    runner.begin_with_simplest()
    ended = runner.search_until_done(workers := usual_workers())
    if ended != STOPPED:
        try:
            runner.unroll_best()
        except KeyboardInterrupt:
            ended = STOPPED
    made = dataclasses.replace(runner.plan(ended), price=price)
    tried = runner.planned or not made.num_open
    if made.winner is None and tried and not made.interrupted:
        made = _with_layers_on_host(asked, fleet, made, workers)
        if made.winner is None and not made.interrupted and is_largest:
            first_fit = partial(_first_fit, asked, workers)
            found = _other_fleets().what_would_fit(fleet, candidates.knobs, asked.check_sizes, first_fit)
            notes = (*made.notes, *([] if found or time.monotonic() < asked.ends else [NOT_LOOKED_FOR]))
            made = dataclasses.replace(made, suggestions=found, notes=notes)
    return dataclasses.replace(made, seconds=time.monotonic() - asked.started)


def _with_layers_on_host(asked: _Asked, fleet: Fleet, made: Plan, num_workers: int) -> Plan:
    """Return a plan in which nothing fits with candidates whose layers wait in the hosts' memory, if any do.

    They take what is left of the plan's time. A search that fixes `offload` stays as it is.
    """
    if not isinstance(made.config, RunConfig) or REST in asked.search or "offload" in asked.search:
        return made
    runner = _runner_of_rest(asked, fleet, {**asked.search, "offload": LAYERS_WAIT})
    if runner is None:
        return made
    runner.of = "what fits with the layers in the hosts' memory"
    more = runner.plan(runner.search_until_done(num_workers))
    return dataclasses.replace(
        more,
        price=made.price,
        ended=more.ended if more.interrupted else made.ended,
        num_considered=made.num_considered + more.num_considered,
        num_open=made.num_open + more.num_open,
        removed={**more.removed, **made.removed},
        candidates=(*made.candidates, *more.candidates),
        notes=(*made.notes, *([HELD_NOTE] if more.winner is not None else [])),
    )


def _first_fit(asked: _Asked, num_workers: int, fleet: Fleet, knobs: Knobs, words: str) -> Planned | None:
    """Return a compiled candidate that fits a fleet with knobs; None if none is found.

    Args:
        words: what is tried.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the search.
    """
    runner = _runner_of_rest(asked, fleet, knobs)
    if runner is None:
        return None
    runner.stops_at_first_fit, runner.of = True, f"what fits with {words}"
    best = runner.plan(ended := runner.search_until_done(num_workers)).winner
    if ended == STOPPED:
        raise KeyboardInterrupt
    return best


def _runner_of_rest(asked: _Asked, fleet: Fleet, knobs: Knobs) -> CandidateRunner | None:
    """Return a search for what is left of the plan's time.

    None if nothing is left, or no candidate is legal or likely to fit.
    """
    now = time.monotonic()
    budget = min(asked.budget_seconds, asked.ends - now)
    if budget <= 0:
        return None
    asked = dataclasses.replace(asked, search=knobs, started=now, budget_seconds=budget)
    try:
        runner = asked.runner(asked.candidates(fleet), fleet)
    except InputError:  # no candidate is legal there
        return None
    return None if runner.search.probability_of_fitting().max() < LEAST_HOPE else runner
