"""Search the layouts and settings of a run for the fastest that fits a fleet.

Every legal candidate gets bounds and an estimate in closed form. The most promising are compiled side by side
in worker processes, through the cache, until the budget is spent or nothing promises a saving. Only a
compiled candidate is ever recommended.

Imports: `_candidates`, `_weigh`, `planning`. Used by: `cli`, and users as `mw.plan`, `mw.plan_fleets`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ..compiler import cache_root, declared_by, warm_workers
from ..config import Layout, Overrides, RunConfig, resolve_batch
from ..errors import InputError
from ..hardware import Fleet, list_price
from ..ledger import allowance, usable_bytes
from ..measure import calibration_for, measured_runs_for
from ..planned import STOPPED, FleetPlans, Plan, PlanProgress
from ..planning import (
    FUNCTION_PRIORS,
    Search,
    Space,
    estimate,
    fleet_times,
    function_space,
    inside_slices,
    knobs_of_run,
    parsed_knobs,
    room_of,
    simplest_rows,
    smaller_fleets,
    space_of,
    values_by_knob,
)
from ..predict import checked_price, machine_of
from ..results import Change, ignore
from ..torch_account import is_torch_module
from ._candidates import CandidateRunner, FunctionPrograms, RunPrograms, end_of, usual_workers
from ._known_plans import remember
from ._planned_run import changes_for_tokens
from ._requests import request_of
from ._torch import is_torch_function
from ._weigh import config_of_run, fleet_of, knobs_of, totals_of

MOST_DOUBLINGS = 6  # of a fleet on which nothing fits
LEAST_HOPE = 0.2  # least probability of fitting for which a larger fleet is tried
MOST_SECONDS = 7 * 24 * 3600.0
REST = "rest"  # in `fix`: all knobs that are not named
_BATCH_OF_ONE = "a module's inputs are those of one device: its step is another one on each number of devices"
LEAST_BUDGET = 1.0  # seconds for one of several fleets, when those before it have spent all


@warm_workers()
def plan(
    config: Any,
    *,
    on: str | Fleet,
    fix: Sequence[str] | Mapping[str, Any] = (),
    vary: Sequence[str] | Mapping[str, Any] = (),
    overrides: Overrides = (),
    budget_seconds: float = 60.0,
    smallest_fleet: bool = False,
    tokens: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    num_workers: int | None = None,
    on_event: Callable[[PlanProgress], None] = ignore,
    as_: str | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    loss: Any = None,
    autocast: Any = None,
    tokens_per_step: float | str | None = None,
) -> Plan:
    """Search for the fastest layout, microbatch and settings of a run that fit a fleet.

    The global batch and everything that changes the result of training stay as they are in `config`. Ctrl-C
    ends the search, and the plan holds what was compiled until then. A later call takes compiled candidates
    from the cache.

    Args:
        config: a preset, a TOML file, a run's folder, a `RunConfig`, or "package.module:function". A
            function's mesh axes and knobs are searched, those that it declares. With `as_` a PyTorch module,
            or "package.module:function" that returns one.
        on: the fleet, as for `weigh`.
        fix, vary: the values that a knob may have: "tensor=8", "microbatch=1,2,4", or {"tensor": [4, 8]}.
            Knobs: the six axes, microbatch, remat, zero1, offload, pipeline, pipeline_chunks, inner (the
            innermost axis), and precision, which stays the config's unless it is named. The two arguments
            mean the same. "rest" in `fix` keeps every knob that is not named as it is in the config.
        overrides: {"section.key": value}, or a sequence of "section.key=value"; with `as_` the arguments of
            the function.
        budget_seconds: no candidate is begun after this time but the first ones. What still runs after twice
            the time, or a minute later if that is longer, is cut off.
        smallest_fleet: plan for the smallest fleet of that chip, up to `on`, on which a candidate fits.
        tokens, price_per_device_hour: of the whole run, as for `weigh`. Without a price the catalog's list
            price is used, with its provider and date; if it has none, no cost is given.
        num_workers: compilations side by side; as many as the machine has cores and memory for if None.
        on_event: called with `PlanProgress` whenever the search moves on.
        as_: "jax" plans a PyTorch module as a JAX program, over the knobs data, fsdp, checkpoint (what runs
            again in the backward pass: as the module has it, each repeated block, or nothing) and layers (one
            loop, or unrolled). The inputs are those of one device: the batch is the same in each layout.
        args, kwargs, optimizer, loss, autocast, tokens_per_step: of such a module, as for `weigh`.

    Raises:
        InputError: an input is wrong, the knobs leave no legal candidate, or no time can be predicted for
            the fleet. Also the error of the first candidate if it is one that every candidate would have.

    >>> made = plan("linear", on="2xH100", budget_seconds=1)
    >>> made.winner.fits, made.num_considered > 1
    (True, True)
    """
    fleet = on if isinstance(on, Fleet) else fleet_of(on)
    started = time.monotonic()
    asked = _Asked(
        config=config,
        overrides=overrides,
        fix=fix,
        vary=vary,
        tokens=tokens,
        price=price_per_device_hour,
        num_workers=num_workers or usual_workers(),
        on_event=on_event,
        started=started,
        ends=end_of(started, budget_seconds),
        budget_seconds=budget_seconds,
        as_=as_,
        module={"args": args, "kwargs": kwargs, "optimizer": optimizer, "loss": loss, "autocast": autocast},
        tokens_per_step=tokens_per_step,
    )
    _check_kind(asked)
    if not 0 < budget_seconds <= MOST_SECONDS:
        raise InputError(
            f"a budget of {budget_seconds:g} s cannot be spent", hint="use 60, or more for more candidates"
        )
    if not smallest_fleet:
        return _planned_on(asked, fleet)
    if as_ is not None:
        raise InputError(_BATCH_OF_ONE, hint="plan for each fleet by itself, and compare tokens per second")
    _refuse_batch_per_replica(config, overrides)
    return _smallest(asked, fleet)


@warm_workers()
def plan_fleets(
    config: Any, *, on: Sequence[str | Fleet], budget_seconds: float = 60.0, **others: Any
) -> FleetPlans:
    """Plan the same run for several fleets, and compare them by the time and the cost of a step.

    A fleet for which no plan can be made (its compiler is not installed, say) is listed with the reason.

    Args:
        config: as for `plan`.
        on: the fleets. Each gets an equal share of what is left of the budget.
        budget_seconds: of all fleets together.
        others: further arguments of `plan`, but for a price: it would be one price for different chips.

    Raises:
        InputError: no fleet is named, one is named twice, or no plan can be made for any.

    >>> made = plan_fleets("linear", on=["2xH100", "2xA100-80GB"], budget_seconds=2)
    >>> made.fastest.fleet.name in ("2xH100", "2xA100-80GB")
    True
    """
    fleets = [each if isinstance(each, Fleet) else fleet_of(each) for each in on]
    if not fleets or len({each.name for each in fleets}) < len(fleets):
        raise InputError("name each fleet once", hint="--fleets 64xH100,32xB200")
    if others.get("price_per_device_hour") is not None:
        raise InputError(
            "one price cannot be that of different fleets",
            hint="leave it out: list prices are used; in Python a Fleet may carry its own price",
        )
    if others.get("as_") is None:
        _refuse_batch_per_replica(config, others.get("overrides", ()))
    elif len({each.num_devices for each in fleets}) > 1:
        raise InputError(_BATCH_OF_ONE, hint="compare fleets of one size; or plan for each by itself")
    plans: list[Plan] = []
    refused: dict[str, InputError] = {}
    ends = time.monotonic() + budget_seconds
    for place, fleet in enumerate(fleets):
        share = max((ends - time.monotonic()) / (len(fleets) - place), LEAST_BUDGET)
        try:
            plans.append(plan(config, on=fleet, budget_seconds=share, **others))
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

    config: Any
    overrides: Overrides
    fix: Sequence[str] | Mapping[str, Any]
    vary: Sequence[str] | Mapping[str, Any]
    tokens: float | str | None
    price: float | str | None
    num_workers: int
    on_event: Callable[[PlanProgress], None]
    started: float
    ends: float
    budget_seconds: float
    as_: str | None
    module: Mapping[str, Any]
    tokens_per_step: float | str | None


def _check_kind(asked: _Asked) -> None:
    """Raise if a module is to be planned as PyTorch runs it, or if something else gets its arguments."""
    if asked.as_ is not None:
        return
    name = _name(asked.config)
    if is_torch_module(asked.config) or (
        isinstance(asked.config, str) and ":" in asked.config and is_torch_function(asked.config)
    ):
        raise InputError(
            f"{name} is a PyTorch module, and layouts are searched for JAX programs only",
            hint="plan it as a JAX program, as_='jax' or --as jax; or weigh it in the layouts of your choice",
        )
    for part, value in {**asked.module, "tokens_per_step": asked.tokens_per_step}.items():
        if value is not None:
            raise InputError(
                f"{name} is planned without {part}", hint=f"leave {part} out: it is for a module"
            )


def _name(config: Any) -> str:
    return config if isinstance(config, str) else getattr(config, "name", type(config).__name__)


def _refuse_batch_per_replica(config: str | RunConfig, overrides: Overrides) -> None:
    """Raise if the batch of a run grows with the fleet, so that its step is not the same on each."""
    run = config_of_run(config, overrides, None)
    if run is not None and run.batch.sequences_per_replica is not None:
        raise InputError(
            f"{run.name} has batch.sequences_per_replica: its step is another one on each fleet",
            hint="set the global batch, batch.sequences=..., and leave sequences_per_replica out",
        )


def _planned_on(asked: _Asked, fleet: Fleet, least_hope: float = 0.0) -> Plan:
    """Return the plan for one fleet; without compiling if no candidate fits with probability `least_hope`."""
    price = ""
    if asked.price is not None:
        fleet = dataclasses.replace(fleet, price_per_device_hour=checked_price(asked.price))
    elif fleet.price_per_device_hour is None:
        fleet, price = _priced(fleet)
    run = None if asked.as_ is not None else _run_to_plan(asked)
    if run is None:
        plan_of = _plan_of_function if asked.as_ is None else _plan_of_module
        return dataclasses.replace(plan_of(asked, fleet), price=price)
    of_tokens, notes = changes_for_tokens(run, asked.tokens)
    if run.batch.sequences_per_replica is not None:
        run = resolve_batch(run, Layout.parse(run.layout).resolve(fleet.num_devices))
    knobs = _knobs(run, fleet, asked)
    space = _legal_space(run, fleet, knobs)
    runner = _runner_of(run, fleet, space, of_tokens.get("steps", run.steps), asked)
    if least_hope and runner.search.probability_of_fitting().max() < least_hope:
        return runner.plan("no candidate is likely to fit")
    own = _own_row(run, fleet, space)
    runner.begin_with(own, simplest_rows(space.candidates, fleet, runner.search.promise()))
    ended = runner.search_until_done(asked.num_workers)
    if ended != STOPPED:
        try:
            runner.unroll_best(own)
        except KeyboardInterrupt:
            ended = STOPPED
    made = dataclasses.replace(runner.plan(ended), price=price, of_tokens=of_tokens, notes=notes)
    if made.winner is not None:
        remember(made)
    elif runner.planned and not made.interrupted and not least_hope:
        found = _what_would_fit(run, fleet, knobs, asked)
        made = dataclasses.replace(made, suggestions=found, seconds=time.monotonic() - asked.started)
    return made


def _run_to_plan(asked: _Asked) -> RunConfig | None:
    """Return the config of what is planned; None for a function.

    Raises:
        InputError: it has autotuning results, which are of one step.
    """
    run = config_of_run(asked.config, asked.overrides, None)
    if run is not None and run.autotune_results is not None:
        what = f"autotune_results = {run.autotune_results!r} is of one step, and a plan compares many"
        raise InputError(
            what, hint="leave it out of the plan; let `train` time the kernels of what it chooses"
        )
    return run


def _legal_space(run: RunConfig, fleet: Fleet, knobs: Mapping[str, tuple[str, ...]]) -> Space:
    """Return the candidates of a run on a fleet.

    Raises:
        InputError: none is legal.
    """
    space = inside_slices(run, fleet, space_of(run, fleet, knobs), knobs)
    if not space.num_considered:
        raise _nothing_legal(run, fleet, space)
    return space


def _own_row(run: RunConfig, fleet: Fleet, space: Space) -> int | None:
    """Return the candidate that the run is as it stands; None if it is none on this fleet."""
    try:
        layout = Layout.parse(run.layout).resolve(fleet.num_devices)
    except InputError:  # its layout is for another number of devices
        return None
    return space.row_of(resolve_batch(run, layout), layout)


def _runner_of(
    run: RunConfig, fleet: Fleet, space: Space, num_steps: int | None, asked: _Asked
) -> CandidateRunner:
    """Return the search over a run's candidates on a fleet."""
    machine = machine_of(fleet, calibration_for(fleet), measured=measured_runs_for(fleet))
    estimates = estimate(run, machine, space.candidates)
    programs = RunPrograms(config=run, fleet=fleet, candidates=space.candidates, num_steps=num_steps)
    return CandidateRunner(
        programs=programs,
        fleet=fleet,
        search=Search(space.candidates, estimates, room_of(fleet, space.candidates)),
        num_layouts=space.num_layouts,
        num_considered=space.num_considered,
        illegal=space.illegal,
        budget_seconds=asked.budget_seconds,
        started=asked.started,
        ends=asked.ends,
        on_event=asked.on_event,
    )


def _plan_of_function(asked: _Asked, fleet: Fleet) -> Plan:
    """Return the plan of a function of the user's own: its meshes and the knobs that it declares."""
    assert isinstance(asked.config, str), "a RunConfig is no function"
    for what, given in (("tokens", asked.tokens), ("overrides", asked.overrides or None)):
        if given is not None:
            raise InputError(
                f"{asked.config} is not a configuration: {what} {given!r} cannot be used",
                hint="fix its knobs with --fix KNOB=VALUE; time and memory of a step need nothing more",
            )
    axes = Layout(axes=(("data", fleet.num_devices),))
    found = declared_by(request_of(asked.config, fleet, axes))
    restricted = _merged(values_by_knob(asked.fix), values_by_knob(asked.vary))
    space = function_space(fleet, found.axes or ("data",), found.knobs, restricted)
    if not len(space):
        raise InputError(
            f"no mesh of {', '.join(space.axes)} has the {fleet.num_devices} devices of {fleet.name}",
            hint="fix fewer sizes",
        )
    usable = usable_bytes(fleet)
    kinds = [sum(allowance(fleet, space.layout(row).axes).values()) for row in range(len(space))]
    room = np.full(len(space), np.inf) if usable is None else usable - np.array(kinds, float)
    runner = CandidateRunner(
        programs=FunctionPrograms(config=asked.config, fleet=fleet, space=space),
        fleet=fleet,
        search=Search(space, space.estimates(), room, FUNCTION_PRIORS),
        num_layouts=space.num_layouts,
        num_considered=len(space),
        illegal={},
        budget_seconds=asked.budget_seconds,
        started=asked.started,
        ends=asked.ends,
        on_event=asked.on_event,
    )
    return runner.plan(runner.search_until_done(asked.num_workers))


def _plan_of_module(asked: _Asked, fleet: Fleet) -> Plan:
    """Return the plan of a PyTorch module as a JAX program."""
    from ._plan_module import plan_module  # which imports jax

    assert asked.as_ is not None, "it is no module"
    return plan_module(
        asked.as_,
        asked.config,
        asked.module,
        knobs_of(asked.overrides),
        fleet,
        _merged(values_by_knob(asked.fix), values_by_knob(asked.vary)),
        known=totals_of(_name(asked.config), asked.tokens_per_step, asked.tokens, None),
        budget_seconds=asked.budget_seconds,
        num_workers=asked.num_workers,
        on_event=asked.on_event,
    )


def _smallest(asked: _Asked, largest: Fleet) -> Plan:
    """Return the plan for the smallest fleet on which a compiled candidate fits, from one device up.

    Raises:
        InputError: no plan can be made for any of the fleets.
    """
    smaller: dict[str, str] = {}
    last: InputError | None = None
    for fleet in smaller_fleets(largest):
        try:
            made = _planned_on(asked, fleet, 0.0 if fleet.name == largest.name else LEAST_HOPE)
        except InputError as why:
            smaller[fleet.name], last = why.message, why
            continue
        made = dataclasses.replace(made, smaller=dict(smaller))
        if made.winner is not None or made.interrupted or fleet.name == largest.name:
            return made
        compiled = sum(not candidate.failed for candidate in made.candidates)
        tried = f"none of {compiled} compiled candidates fits" if compiled else made.ended
        smaller[fleet.name] = tried
    assert last is not None, "the largest fleet has a plan or an error"
    raise last


def _knobs(run: RunConfig, fleet: Fleet, asked: _Asked) -> dict[str, tuple[str, ...]]:
    """Return the values that each knob of a run may have; a knob that is not named has all."""
    given: Mapping[str, Any] | list[str]
    if isinstance(asked.fix, Mapping):
        keeps_rest, given = REST in asked.fix, {k: v for k, v in asked.fix.items() if k != REST}
    else:
        texts = [asked.fix] if isinstance(asked.fix, str) else asked.fix
        keeps_rest, given = REST in texts, [text for text in texts if text != REST]
    named = _merged(parsed_knobs(given), parsed_knobs(asked.vary))
    return {**(knobs_of_run(run, fleet, named) if keeps_rest else {}), **named}


def _merged(
    fixed: Mapping[str, tuple[str, ...]], varied: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    if both := sorted(fixed.keys() & varied.keys()):
        raise InputError(f"{both[0]} is fixed and varied", hint=f"name {both[0]} once")
    return {**fixed, **varied}


def _priced(fleet: Fleet) -> tuple[Fleet, str]:
    """Return the fleet with a list price if it has none and one is known, and where that price comes from."""
    found = list_price(fleet.chip.name, datetime.now(UTC).date(), refreshed=cache_root() / "prices.toml")
    if found is None:
        return fleet, ""
    return dataclasses.replace(fleet, price_per_device_hour=found.usd_per_device_hour), found.words


def _what_would_fit(
    run: RunConfig, fleet: Fleet, knobs: Mapping[str, tuple[str, ...]], asked: _Asked
) -> tuple[Change, ...]:
    """Return the first knob that need not be fixed, and the smallest larger fleet, with which something fits.

    Each is compiled, and fits. Fleets are doubled, up to `MOST_DOUBLINGS` times. All that is tried takes what
    is left of the plan's time, and no longer; Ctrl-C ends it too.
    """
    released = [
        (f"--fix {name}=... left out", fleet, {k: v for k, v in knobs.items() if k != name}) for name in knobs
    ]
    larger = [fleet_times(fleet, 2**power) for power in range(1, MOST_DOUBLINGS + 1)]
    grown = [
        (f"--on {each.name}", dataclasses.replace(each, chip=fleet.chip), knobs) for each in larger if each
    ]
    found: list[Change] = []
    with contextlib.suppress(KeyboardInterrupt):
        for options in (released, grown):
            tried = (_first_fit(run, *option, asked) for option in options)
            found += [change for change in itertools.islice(filter(None, tried), 1)]
    return tuple(found)


def _first_fit(
    run: RunConfig, arguments: str, fleet: Fleet, knobs: Mapping[str, tuple[str, ...]], asked: _Asked
) -> Change | None:
    """Return a change of fleet or knobs with a compiled candidate that fits; None if none is found."""
    now = time.monotonic()
    asked = dataclasses.replace(
        asked, started=now, budget_seconds=min(asked.budget_seconds, asked.ends - now)
    )
    try:
        runner = _runner_of(run, fleet, _legal_space(run, fleet, knobs), None, asked)
    except InputError:  # no candidate is legal there
        return None
    if runner.search.probability_of_fitting().max() < LEAST_HOPE:
        return None
    runner.stops_at_first_fit, runner.of = True, f"what fits with {arguments}"
    best = runner.plan(ended := runner.search_until_done(asked.num_workers)).winner
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


def _nothing_legal(run: RunConfig, fleet: Fleet, space: Space) -> InputError:
    reasons = "; ".join(
        f"{rule} ({count:,})" for rule, count in sorted(space.illegal.items(), key=lambda r: -r[1])
    )
    reasons = reasons or "the sizes that are fixed do not multiply to its devices"
    return InputError(
        f"no layout of {run.name} on {fleet.name} is legal: {reasons}",
        hint=f"fix fewer knobs, or use a batch.sequences (now {run.batch.sequences}) that more sizes divide",
    )
