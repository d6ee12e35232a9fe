"""Search the layouts and settings of a run for the fastest that fits a fleet.

Every legal candidate gets bounds and an estimate in closed form. The most promising are compiled side by side
in worker processes, through the cache, until the budget is spent or nothing promises a saving. Only a
compiled candidate is ever recommended.

Imports: `_weigh`, `_explain`, `planning`. Used by: `cli`, and users as `mw.plan`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import psutil

from ..compiler import cache_root, is_compiled, warm_workers
from ..config import Layout, Overrides, RunConfig, overridden, resolve_batch
from ..errors import InputError, MeshwrightError
from ..hardware import Fleet, list_price
from ..ledger import allowance, usable_bytes
from ..planning import Outcome, Search, Space, estimate, fleet_times, parsed_knobs, space_of
from ..predict import checked_price, machine_of, steps_for
from ..results import STOPPED, Change, Plan, Planned, PlanProgress, Weighing, calibration_for, ignore
from ._weigh import config_of_run, fleet_of, request_of, resolved, weigh_resolved

BYTES_PER_WORKER = 3 * 2**30  # of this machine's memory, for a compile worker and its program's text
PROGRESS_SECONDS = 0.5
MOST_LOOKED_UP = 200  # candidates that are looked for in the cache before any is compiled
MOST_DOUBLINGS = 6  # of a fleet on which nothing fits
LEAST_HOPE = 0.2  # least probability of fitting for which a larger fleet is tried
MOST_SECONDS = 7 * 24 * 3600.0


@warm_workers()
def plan(
    config: str | RunConfig,
    *,
    on: str | Fleet,
    fix: Sequence[str] | Mapping[str, Any] = (),
    vary: Sequence[str] | Mapping[str, Any] = (),
    overrides: Overrides = (),
    budget_seconds: float = 60.0,
    tokens: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    num_workers: int | None = None,
    on_event: Callable[[PlanProgress], None] = ignore,
) -> Plan:
    """Search for the fastest layout, microbatch and settings of a run that fit a fleet.

    The global batch and everything that changes the result of training stay as they are in `config`. Ctrl-C
    ends the search, and the plan holds what was compiled until then. A later call takes compiled candidates
    from the cache.

    Args:
        config: a preset, a TOML file, a run's folder, or a `RunConfig`.
        on: the fleet, as for `weigh`.
        fix, vary: the values that a knob may have: "tensor=8", "microbatch=1,2,4", or {"tensor": [4, 8]}.
            Knobs: the six axes, microbatch, remat, zero1, offload, pipeline, inner (the innermost axis), and
            precision, which stays the config's unless it is named. The two arguments mean the same.
        overrides: {"section.key": value}, or a sequence of "section.key=value".
        budget_seconds: no candidate is begun after this time but the first ones; those that run then are
            finished.
        tokens, price_per_device_hour: of the whole run, as for `weigh`. Without a price the catalog's list
            price is used, with its provider and date; if it has none, no cost is given.
        num_workers: compilations side by side; as many as the machine has cores and memory for if None.
        on_event: called with `PlanProgress` whenever the search moves on.

    Raises:
        InputError: an input is wrong, the knobs leave no legal candidate, or no time can be predicted for
            the fleet. Also the error of the first candidate if it is one that every candidate would have.

    >>> made = plan("linear", on="2xH100", budget_seconds=1)
    >>> made.winner.fits, made.num_considered > 1
    (True, True)
    """
    run, fleet, num_steps = _read(config, on, overrides, tokens, price_per_device_hour)
    fleet, price = _priced(fleet)
    knobs = _knobs(fix, vary)
    if not 0 < budget_seconds <= MOST_SECONDS:
        raise InputError(
            f"a budget of {budget_seconds:g} s cannot be spent", hint="use 60, or more for more candidates"
        )
    started = time.monotonic()
    space = space_of(run, fleet, knobs)
    if not space.num_considered:
        raise _nothing_legal(run, fleet, space)
    estimates = estimate(run, machine_of(fleet, calibration_for(fleet)), space.candidates)
    search = Search(space.candidates, estimates, _room(fleet, space))
    runner = _Runner(
        run=run,
        fleet=fleet,
        space=space,
        search=search,
        num_steps=num_steps,
        budget_seconds=budget_seconds,
        started=started,
        on_event=on_event,
    )
    workers = num_workers or _num_workers()
    search.prefer(runner.cached_rows())
    ended = runner.search_until_done(workers)
    made = dataclasses.replace(runner.plan(ended), price=price)
    if made.winner is None and not made.interrupted:
        found = _what_would_fit(run, fleet, knobs, workers, budget_seconds)
        made = dataclasses.replace(made, suggestions=found, seconds=time.monotonic() - started)
    return made


def _read(
    config: str | RunConfig,
    on: str | Fleet,
    overrides: Overrides,
    tokens: float | str | None,
    price: float | str | None,
) -> tuple[RunConfig, Fleet, int | None]:
    """Return the run with its batch on its own layout, the fleet with its price, and the steps of the run."""
    fleet = on if isinstance(on, Fleet) else fleet_of(on)
    if price is not None:
        fleet = dataclasses.replace(fleet, price_per_device_hour=checked_price(price))
    run = config_of_run(config, overrides, None)
    if run is None:
        raise InputError(
            f"{config} is not a configuration; `plan` chooses among the layouts of configurations",
            hint="weigh it on the meshes you have in mind: `meshwright weigh ... --layout data=8`",
        )
    if run.batch.sequences_per_replica is not None:
        run = resolve_batch(run, Layout.parse(run.layout).resolve(fleet.num_devices))
    num_steps = run.steps if tokens is None else steps_for(tokens, run.batch.tokens_per_step)
    return run, fleet, num_steps


def _knobs(
    fix: Sequence[str] | Mapping[str, Any], vary: Sequence[str] | Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    fixed, varied = parsed_knobs(fix), parsed_knobs(vary)
    if both := sorted(fixed.keys() & varied.keys()):
        raise InputError(f"{both[0]} is fixed and varied", hint=f"name {both[0]} once")
    return fixed | varied


def _priced(fleet: Fleet) -> tuple[Fleet, str]:
    """Return the fleet with a list price if it has none and one is known, and where that price comes from."""
    if fleet.price_per_device_hour is not None:
        return fleet, ""
    found = list_price(fleet.chip.name, datetime.now(UTC).date(), refreshed=cache_root() / "prices.toml")
    if found is None:
        return fleet, ""
    return dataclasses.replace(fleet, price_per_device_hour=found.usd_per_device_hour), found.words


def _what_would_fit(
    run: RunConfig, fleet: Fleet, knobs: Mapping[str, tuple[str, ...]], workers: int, budget_seconds: float
) -> tuple[Change, ...]:
    """Return the first knob that need not be fixed, and the smallest larger fleet, with which something fits.

    Each is compiled, and fits. Fleets are doubled, up to `MOST_DOUBLINGS` times.
    """
    released = [
        (f"--fix {name}=... left out", fleet, {k: v for k, v in knobs.items() if k != name}) for name in knobs
    ]
    larger = [fleet_times(fleet, 2**power) for power in range(1, MOST_DOUBLINGS + 1)]
    grown = [
        (f"--on {each.name}", dataclasses.replace(each, chip=fleet.chip), knobs) for each in larger if each
    ]
    found: list[Change] = []
    for options in (released, grown):
        tried = (_first_fit(run, *option, workers, budget_seconds) for option in options)
        found += [change for change in itertools.islice(filter(None, tried), 1)]
    return tuple(found)


def _first_fit(
    run: RunConfig,
    arguments: str,
    fleet: Fleet,
    knobs: Mapping[str, tuple[str, ...]],
    workers: int,
    budget_seconds: float,
) -> Change | None:
    """Return a change of fleet or knobs with a compiled candidate that fits; None if none is found."""
    space = space_of(run, fleet, knobs)
    if not space.num_considered:
        return None
    estimates = estimate(run, machine_of(fleet, calibration_for(fleet)), space.candidates)
    search = Search(space.candidates, estimates, _room(fleet, space))
    if search.probability_of_fitting().max() < LEAST_HOPE:
        return None
    runner = _Runner(
        run=run,
        fleet=fleet,
        space=space,
        search=search,
        num_steps=None,
        budget_seconds=budget_seconds,
        started=time.monotonic(),
        on_event=ignore,
        stops_at_first_fit=True,
    )
    best = runner.plan(runner.search_until_done(workers)).winner
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


def _room(fleet: Fleet, space: Space) -> Any:
    """Return what each candidate's program may reserve, by the axes that need a communicator."""
    usable = usable_bytes(fleet)
    if usable is None:
        return np.full(len(space.candidates), np.inf)
    kinds = np.concatenate([space.candidates.sizes > 1, space.candidates.inner[:, None]], axis=1)
    _, first, places = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    by_kind = [sum(allowance(fleet, space.candidates.layout(int(row)).axes).values()) for row in first]
    return usable - np.array(by_kind, float)[places.ravel()]


def _num_workers() -> int:
    return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // BYTES_PER_WORKER))


@dataclass(kw_only=True)
class _Runner:
    """Compile what the search asks for, side by side, and keep what came of it."""

    run: RunConfig
    fleet: Fleet
    space: Space
    search: Search
    num_steps: int | None
    budget_seconds: float
    started: float
    on_event: Callable[[PlanProgress], None]
    stops_at_first_fit: bool = False
    planned: dict[int, Planned] = field(default_factory=dict[int, Planned])
    best: Weighing | None = None
    running: dict[Future[Weighing], int] = field(default_factory=dict[Future[Weighing], int])

    def search_until_done(self, num_workers: int) -> str:
        """Compile until the budget is spent, nothing promises a saving, or Ctrl-C. Return which."""
        pool = ThreadPoolExecutor(num_workers)
        try:
            while True:
                ended = self._begin(pool, num_workers)
                if not self.running:
                    return ended
                self._tell()
                done, _ = wait(self.running, timeout=PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    self._finish(self.running.pop(future), future)
        except KeyboardInterrupt:
            return STOPPED
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, pool: ThreadPoolExecutor, num_workers: int) -> str:
        """Begin compilations while workers are free. Return why no more would begin."""
        while len(self.running) < num_workers:
            if self.stops_at_first_fit and self.search.best is not None:
                return "a candidate fits"
            spent = time.monotonic() - self.started >= self.budget_seconds
            if spent and self.search.num_begun >= num_workers:
                return f"the budget of {self.budget_seconds:g} s is spent"
            row = self.search.next()
            if row is None:
                return "no other candidate promises a saving"
            self.running[pool.submit(self._weigh, row)] = row
        return ""

    def cached_rows(self) -> list[int]:
        """Return the candidates among the most promising that an earlier call compiled, the best first."""
        rows = self.search.most_promising(MOST_LOOKED_UP)
        return [row for row in rows if is_compiled(request_of(*self._resolved(row)).key())]

    def _resolved(self, row: int) -> tuple[RunConfig, Fleet, Layout]:
        config = overridden(self.run, self.space.candidates.overrides(row))
        config, layout = resolved(config, self.fleet)
        return config, self.fleet, layout

    def _weigh(self, row: int) -> Weighing:
        return weigh_resolved(*self._resolved(row), num_steps=self.num_steps)

    def _finish(self, row: int, future: Future[Weighing]) -> None:
        """Record a compiled candidate, or why it could not be compiled."""
        weighing, failed = None, ""
        try:
            weighing = future.result()
        except MeshwrightError as error:
            # Before anything compiled, an input error is most likely one that every candidate has.
            if isinstance(error, InputError) and all(each.failed for each in self.planned.values()):
                raise
            failed = error.message
        if weighing is not None and weighing.prediction is None:
            raise InputError(
                f"no time is predicted for {self.fleet.name}, and so no order: {weighing.no_prediction}",
                hint="choose a fleet with known rates: `meshwright fleets`",
            )
        self.planned[row] = self._planned(row, weighing, failed)
        memory = None if weighing is None else weighing.ledger.memory
        outcome = Outcome(
            seconds=None if weighing is None else weighing.step_seconds,
            reserved_bytes=None if memory is None else memory.reserved_bytes,
        )
        self.search.finish(row, outcome)
        if self.search.best == row:
            self.best = weighing  # of the others, no more than `Planned` is kept

    def _planned(self, row: int, weighing: Weighing | None, failed: str) -> Planned:
        estimates = self.search.estimates
        memory = None if weighing is None else weighing.ledger.memory
        room = None
        if memory is not None and memory.usable_bytes is not None:
            room = memory.usable_bytes - memory.allowance_bytes
        return Planned(
            layout=str(self.space.candidates.layout(row)),
            overrides=self.space.candidates.overrides(row),
            estimated_seconds=float(estimates.seconds[row]),
            estimated_bytes=float(estimates.memory[row]),
            reserved_bytes=None if memory is None else memory.reserved_bytes,
            room_bytes=room,
            prediction=None if weighing is None else weighing.prediction,
            cached=weighing is not None and weighing.cached,
            failed=failed,
        )

    def _tell(self) -> None:
        best = self.search.best
        running = tuple(
            f"{planned.layout(row)} {planned.overrides(row)['remat']}"
            for planned in (self.space.candidates,)
            for row in self.running.values()
        )
        self.on_event(
            PlanProgress(
                num_considered=self.space.num_considered,
                num_compiled=sum(not each.failed for each in self.planned.values()),
                num_failed=sum(bool(each.failed) for each in self.planned.values()),
                best=None if best is None else self.planned[best],
                running=running,
                seconds=time.monotonic() - self.started,
                budget_seconds=self.budget_seconds,
            )
        )

    def plan(self, ended: str) -> Plan:
        """Return the plan of what was compiled."""
        removed = dict(self.space.illegal)
        if too_large := self.search.num_too_large:
            removed["state and block inputs alone do not fit"] = too_large
        return Plan(
            config=self.run,
            fleet=self.fleet,
            num_layouts=self.space.num_layouts,
            num_considered=self.space.num_considered,
            removed=removed,
            num_open=self.space.num_considered - self.search.num_too_large - len(self.planned),
            candidates=tuple(self.planned.values()),
            best=self.best,
            ended=ended,
            seconds=time.monotonic() - self.started,
        )
