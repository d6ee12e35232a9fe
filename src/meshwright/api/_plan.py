"""Search the layouts and settings of a program for the fastest that fits a fleet.

A program says what it can choose from. Each candidate of a run has bounds and an estimate in closed form. The
most promising are compiled side by side in worker processes, through the cache, until the budget is spent or
nothing promises a saving. Only a compiled candidate is ever recommended.

Imports: `_plan_runner`, `programs`, `planning`. Used by: `cli`, and users as `mw.plan`, `mw.plan_fleets`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.compiler import cache_root, warm_workers
from meshwright.config import Overrides, RunConfig
from meshwright.errors import InputError
from meshwright.hardware import Fleet, list_price
from meshwright.kept_records import keep_plan
from meshwright.planned import STOPPED, FleetPlans, Plan, PlanProgress
from meshwright.planning import fleet_times, smaller_fleets, values_by_knob
from meshwright.programs import REST, Candidates, Program, RunLength, Settings, fleet_of, program_of
from meshwright.results import Change, ignore

from ._plan_runner import CandidateRunner, end_of, usual_workers

MOST_DOUBLINGS = 6  # of a fleet on which nothing fits
LEAST_HOPE = 0.2  # least probability of fitting for which a larger fleet is tried
MOST_SECONDS = 7 * 24 * 3600.0
LAYERS_WAIT = ("state", "all")  # values of `offload`
HELD_NOTE = "the layers' parameters wait in the hosts' memory, for nothing else that was compiled fits"
NOT_LOOKED_FOR = (
    "a larger fleet, or a knob less, was not tried: the plan's time is over; give it a larger --budget"
)
LEAST_BUDGET = 1.0  # seconds for one of several fleets, when those before it have spent all

Search = Mapping[str, Any] | Sequence[str]


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
        settings=Settings(overrides=overrides, run=run or RunLength()),
        search=_by_knob(search),
        on_event=on_event,
        started=started,
        ends=end_of(started, budget_seconds),
        budget_seconds=budget_seconds,
    )
    if not smallest_fleet:
        made = _planned_on(asked, fleet)
    else:
        fleets = tuple(smaller_fleets(fleet))
        asked.program.check_same_step({each.num_devices for each in fleets}, overrides)
        made = _smallest(asked, fleets)
    return keep_plan(asked.operated(made))


@warm_workers()
def plan_fleets(
    program: Program | RunConfig | str | Path,
    *,
    on: Sequence[str | Fleet],
    search: Search = (),
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
    fleets = [fleet_of(each) for each in on]
    if not fleets or len({each.name for each in fleets}) < len(fleets):
        raise InputError("name each fleet once", hint="--fleets 64xH100,32xB200")
    if run is not None and run.price_per_device_hour is not None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Hold what a caller of `plan` asks for, without the fleet.

    `started`, and `ends`, when all that runs is cut off: by `time.monotonic`.
    """

    program: Program
    settings: Settings
    search: Mapping[str, Sequence[str]]
    on_event: Callable[[PlanProgress], None]
    started: float
    ends: float
    budget_seconds: float

    def operated(self, made: Plan) -> Plan:
        """Return a plan whose best says when its run is finished."""
        if made.best is None:
            return made
        return dataclasses.replace(made, best=self.settings.run.operated(made.best))

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


def _planned_on(asked: _Asked, fleet: Fleet, least_hope: float = 0.0) -> Plan:
    """Return the plan for one fleet; without compiling if no candidate fits with probability `least_hope`."""
    price, length = "", asked.settings.run
    if length.price_per_device_hour is not None:
        fleet = length.priced(fleet)
    elif fleet.price_per_device_hour is None:
        fleet, price = _priced(fleet)
    candidates = asked.candidates(fleet)
    runner = asked.runner(candidates, fleet)
    if least_hope and runner.search.probability_of_fitting().max() < least_hope:
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
        if made.winner is None and not made.interrupted and not least_hope:
            found = _what_would_fit(asked, fleet, candidates, workers)
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


def _smallest(asked: _Asked, fleets: Sequence[Fleet]) -> Plan:
    """Return the plan for the first fleet on which a compiled candidate fits; `fleets`: the smallest first.

    Raises:
        InputError: no plan can be made for any of the fleets.
    """
    smaller: dict[str, str] = {}
    last: InputError | None = None
    for fleet in fleets:
        is_largest = fleet.name == fleets[-1].name
        try:
            made = _planned_on(asked, fleet, 0.0 if is_largest else LEAST_HOPE)
        except InputError as why:
            smaller[fleet.name], last = why.message, why
            continue
        made = dataclasses.replace(made, smaller=dict(smaller))
        if made.winner is not None or made.interrupted or is_largest:
            return made
        compiled = sum(not candidate.failed for candidate in made.candidates)
        tried = f"none of {compiled} compiled candidates fits" if compiled else made.ended
        smaller[fleet.name] = tried
    assert last is not None, "the largest fleet has a plan or an error"
    raise last


def _priced(fleet: Fleet) -> tuple[Fleet, str]:
    """Return the fleet with a list price if it has none and one is known, and where that price comes from."""
    found = list_price(fleet.chip.name, datetime.now(UTC).date(), refreshed=cache_root() / "prices.toml")
    if found is None:
        return fleet, ""
    return dataclasses.replace(fleet, price_per_device_hour=found.usd_per_device_hour), found.words


def _what_would_fit(
    asked: _Asked, fleet: Fleet, candidates: Candidates, num_workers: int
) -> tuple[Change, ...]:
    """Return the first knob that need not be fixed, and the smallest larger fleet, with which something fits.

    Each is compiled, and fits. Fleets are doubled, up to `MOST_DOUBLINGS` times. All that is tried takes what
    is left of the plan's time, and no longer; Ctrl-C ends it too.
    """
    knobs = candidates.knobs
    released = [
        (f"--fix {name}=... left out", fleet, {k: v for k, v in knobs.items() if k != name}) for name in knobs
    ]
    larger = [fleet_times(fleet, 2**power) for power in range(1, MOST_DOUBLINGS + 1)]
    sizes = {each.num_devices for each in (fleet, *larger) if each}
    try:
        asked.program.check_same_step(sizes, asked.settings.overrides)
    except InputError:  # on another number of devices it would be another step
        larger = []
    grown = [(each.options, each, knobs) for each in larger if each]
    found: list[Change] = []
    with contextlib.suppress(KeyboardInterrupt):
        for options in (released, grown):
            tried = (_first_fit(asked, *option, num_workers) for option in options)
            found += [change for change in itertools.islice(filter(None, tried), 1)]
    return tuple(found)


def _first_fit(
    asked: _Asked, arguments: str, fleet: Fleet, knobs: Mapping[str, Sequence[str]], num_workers: int
) -> Change | None:
    """Return a change of fleet or knobs with a compiled candidate that fits; None if none is found."""
    runner = _runner_of_rest(asked, fleet, knobs)
    if runner is None:
        return None
    runner.stops_at_first_fit, runner.of = True, f"what fits with {arguments}"
    best = runner.plan(ended := runner.search_until_done(num_workers)).winner
    if ended == STOPPED:
        raise KeyboardInterrupt
    if best is None or best.step_seconds is None:
        return None
    return Change(
        arguments=arguments,
        effect=f"{best.layout}, {best.settings} then fits",
        reserved_bytes=best.reserved_bytes,
        saved_bytes=None,
        fits=True,
        extra_executed_flops=None,
        step_seconds=best.step_seconds.expected,
        extra_seconds=None,
        failed="",
    )


def _runner_of_rest(
    asked: _Asked, fleet: Fleet, knobs: Mapping[str, Sequence[str]]
) -> CandidateRunner | None:
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
