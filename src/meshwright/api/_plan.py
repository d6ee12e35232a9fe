"""Search the layouts and settings of a run for the fastest that fits a fleet.

Every legal candidate gets bounds and an estimate in closed form. The most promising are compiled side by side
in worker processes, through the cache, until the budget is spent or nothing promises a saving. Only a
compiled candidate is ever recommended.

Imports: `_weigh`, `_explain`, `planning`. Used by: `cli`, and users as `mw.plan`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from ..compiler import warm_workers
from ..config import Layout, Overrides, RunConfig, overridden, resolve_batch
from ..errors import InputError, MeshwrightError
from ..hardware import Fleet
from ..ledger import allowance, usable_bytes
from ..planning import Outcome, Search, Space, estimate, parsed_knobs, space_of
from ..predict import checked_price, machine_of, steps_for
from ..results import STOPPED, Plan, Planned, PlanProgress, Weighing, calibration_for, ignore
from ._weigh import config_of_run, fleet_of, resolved, weigh_resolved

BYTES_PER_WORKER = 3 * 2**30  # of this machine's memory, for a compile worker and its program's text
PROGRESS_SECONDS = 0.5
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
        tokens, price_per_device_hour: of the whole run, as for `weigh`.
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
    knobs = _knobs(fix, vary)
    if not 0 < budget_seconds <= MOST_SECONDS:
        raise InputError(
            f"a budget of {budget_seconds:g} s cannot be spent", hint="use 60, or more for more candidates"
        )
    started = time.monotonic()
    space = space_of(run, fleet, knobs)
    if not space.num_considered:
        raise _nothing_legal(run, fleet, space)
    estimates = estimate(run, fleet, machine_of(fleet, calibration_for(fleet)), space.candidates)
    search = Search(space.candidates, estimates, _room(fleet, space))
    runner = _Runner(
        run=run,
        fleet=fleet,
        space=space,
        search=search,
        num_steps=num_steps,
        deadline=started + budget_seconds,
        budget_seconds=budget_seconds,
        started=started,
        on_event=on_event,
    )
    ended = runner.search_until_done(num_workers or _num_workers())
    return runner.plan(ended)


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
    deadline: float
    budget_seconds: float
    started: float
    on_event: Callable[[PlanProgress], None]
    planned: dict[int, Planned] = field(default_factory=dict[int, Planned])
    weighings: dict[int, Weighing] = field(default_factory=dict[int, Weighing])
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
            if self.search.num_begun >= num_workers and time.monotonic() >= self.deadline:
                return f"the budget of {self.budget_seconds:g} s is spent"
            row = self.search.next()
            if row is None:
                return "no other candidate promises a saving"
            self.running[pool.submit(self._weigh, row)] = row
        return ""

    def _weigh(self, row: int) -> Weighing:
        config = overridden(self.run, self.space.candidates.overrides(row))
        config, layout = resolved(config, self.fleet)
        return weigh_resolved(config, self.fleet, layout, num_steps=self.num_steps)

    def _finish(self, row: int, future: Future[Weighing]) -> None:
        """Record a compiled candidate, or why it could not be compiled."""
        weighing, failed = None, ""
        try:
            weighing = future.result()
        except MeshwrightError as error:
            # Before anything compiled, an input error is most likely one that every candidate has.
            if isinstance(error, InputError) and not self.weighings:
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
        if weighing is not None and self.search.best == row:
            self.weighings = {row: weighing}  # only the best is needed whole
        elif weighing is not None and not self.weighings:
            self.weighings[-1] = weighing

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
        best = self.search.best
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
            best=None if best is None else self.weighings.get(best),
            ended=ended,
            seconds=time.monotonic() - self.started,
        )
