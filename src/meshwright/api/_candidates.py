"""Compile the candidates that a search asks for, side by side, and keep what came of each.

`CandidatePrograms` says what compiling one candidate means: for a run, its configuration with other settings
(`RunPrograms`); for a function of the user's own, a call with another mesh and other knobs
(`FunctionPrograms`); for a PyTorch module, its exported program with another layout (`_plan_module`).
Used by: `_plan`, `_plan_module`.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil

from ..compiler import compiling_until, is_compiled
from ..config import Layout, RunConfig, TransformerModel, overridden
from ..errors import InputError, MeshwrightError
from ..hardware import Fleet
from ..planned import STOPPED, Plan, Planned, PlanProgress
from ..planning import Candidates, FunctionSpace, Search, SearchOutcome, settings_words
from ..results import Weighing, ignore
from ._requests import request_of
from ._weigh import resolved, weigh_resolved

BYTES_PER_WORKER = 3 * 2**30  # of this machine's memory, for a compile worker and its program's text
PROGRESS_SECONDS = 0.5
GRACE_SECONDS = 10.0  # for a compilation that is cut off to end, or for the account of one that just ended
CUT_OFF = "cut off: the budget was spent"
SECONDS_OF_A_LAYER = 0.6  # to compile it in a program without a loop; two cores, llama3-8b and 70b
MOST_RESERVED = 0.5  # of the budget, for such a program
LEAST_GRACE_SECONDS = 60.0  # beyond a small budget, for the first compilations to end
MOST_LOOKED_UP = 200  # candidates that are looked for in the cache before any is compiled


def usual_workers() -> int:
    """Return the compilations that run side by side: as many as the machine has cores and memory for."""
    return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // BYTES_PER_WORKER))


def end_of(started: float, budget_seconds: float) -> float:
    """Return when a plan has its answer at the latest: compilations that then still run are cut off."""
    return started + budget_seconds + max(budget_seconds, LEAST_GRACE_SECONDS)


class CandidatePrograms(Protocol):
    """The candidates of a plan, each by its row, as programs that can be compiled."""

    @property
    def config(self) -> RunConfig | str:
        """The run, or the name of the function or module."""
        ...

    @property
    def are_alike(self) -> bool:
        """Return whether an input error of the first candidate is most likely one that all would have."""
        ...

    def layout(self, row: int) -> Layout:
        """Return the mesh of a candidate."""
        ...

    def words(self, row: int) -> str:
        """Return everything but the layout in words."""
        ...

    def overrides(self, row: int) -> dict[str, Any]:
        """Return what makes the program this candidate, as `weigh` takes it."""
        ...

    def is_cached(self, row: int) -> bool:
        """Return whether a candidate is known to be compiled already."""
        ...

    def weigh(self, row: int) -> Weighing:
        """Compile a candidate and account for it."""
        ...

    def unrolled(self, row: int) -> dict[str, Any] | None:
        """Return the overrides of a candidate without a loop over its layers; None if it has no such loop."""
        ...

    def weigh_with(self, overrides: Mapping[str, Any]) -> Weighing:
        """Compile the program with other overrides than a candidate's, and account for it."""
        ...

    @property
    def unrolling_seconds(self) -> float:
        """About how long one program without its loop over layers compiles; 0 if there is none to try."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunPrograms:
    """The candidates of a run on a fleet.

    They are compiled with loops over layers, which takes seconds, also where the run has `layer_loop =
    "unroll"`. The plan's last compilation tries the best without.
    """

    config: RunConfig
    fleet: Fleet
    candidates: Candidates
    num_steps: int | None

    @property
    def are_alike(self) -> bool:
        """Return True: they share the run's model, data and optimizer."""
        return True

    def layout(self, row: int) -> Layout:
        """Return the mesh of a candidate."""
        return self.candidates.layout(row)

    def words(self, row: int) -> str:
        """Return everything but the layout in words."""
        return self.candidates.words(row)

    def overrides(self, row: int) -> dict[str, Any]:
        """Return the changes to the run that make it this candidate."""
        return self.candidates.overrides(row)

    def is_cached(self, row: int) -> bool:
        """Return whether the cache has this candidate."""
        return is_compiled(request_of(*self._resolved(row)).key())

    def weigh(self, row: int) -> Weighing:
        """Compile a candidate and account for it."""
        return weigh_resolved(*self._resolved(row), num_steps=self.num_steps)

    def unrolled(self, row: int) -> dict[str, Any] | None:
        """Return the overrides of a candidate without a loop over its layers; None if it has no such loop."""
        config, fleet, layout = self._resolved(row)
        model = config.model
        if not self.unrolling_seconds or layout.size("stage") > 1:
            return None
        assert isinstance(model, TransformerModel), "only these have seconds of unrolling"
        if model.unrolls(
            config.layer_loop,
            remat=config.remat,
            platform=fleet.chip.platform,
            num_devices=fleet.num_devices,
            num_layers=model.num_layers,
        ):
            return None
        return {**self.overrides(row), "layer_loop": "unroll"}

    @property
    def unrolling_seconds(self) -> float:
        """About how long one program without its loop over layers compiles; 0 if there is none to try."""
        model, platform = self.config.model, self.fleet.chip.platform
        tries = platform == "cuda" and self.config.layer_loop != "keep"
        if not (tries and isinstance(model, TransformerModel)) or model.unroll:
            return 0.0
        return SECONDS_OF_A_LAYER * model.num_layers

    def weigh_with(self, overrides: Mapping[str, Any]) -> Weighing:
        """Compile the run with other overrides than a candidate's, and account for it."""
        config, layout = resolved(overridden(self.config, overrides), self.fleet)
        return weigh_resolved(config, self.fleet, layout, num_steps=self.num_steps)

    def _resolved(self, row: int) -> tuple[RunConfig, Fleet, Layout]:
        overrides = self.overrides(row)
        if self.config.layer_loop == "unroll":
            overrides = {**overrides, "layer_loop": "auto"}
        config, layout = resolved(overridden(self.config, overrides), self.fleet)
        return config, self.fleet, layout


class ForeignPrograms:
    """Answer for programs that are not ours what the search asks of loops, overrides and the cache."""

    def is_cached(self, row: int) -> bool:
        """Return False: the cache has a foreign program under its lowered text, which must be made first."""
        return False

    def unrolled(self, row: int) -> None:
        """Return None: the program's loops are its own."""

    @property
    def unrolling_seconds(self) -> float:
        """Return 0: the program's loops are its own."""
        return 0.0

    def weigh_with(self, overrides: Mapping[str, Any]) -> Weighing:
        """Raise: nothing has other overrides than those of a candidate."""
        raise AssertionError(f"no candidate has {overrides}")


@dataclass(frozen=True, kw_only=True)
class FunctionPrograms(ForeignPrograms):
    """The candidates of a function of the user's own on a fleet."""

    config: str
    fleet: Fleet
    space: FunctionSpace

    @property
    def are_alike(self) -> bool:
        """Return False: a function may well refuse the first mesh alone."""
        return False

    def layout(self, row: int) -> Layout:
        """Return the mesh of a candidate."""
        return self.space.layout(row)

    def words(self, row: int) -> str:
        """Return the knobs of a candidate in words."""
        return self.space.words(row)

    def overrides(self, row: int) -> dict[str, Any]:
        """Return mesh and knobs of a candidate."""
        return self.space.overrides(row)

    def weigh(self, row: int) -> Weighing:
        """Trace and compile a candidate, and account for it."""
        knobs = self.space.chosen(row)
        return weigh_resolved(self.config, self.fleet, self.layout(row), num_steps=None, knobs=knobs)


@dataclass(kw_only=True)
class CandidateRunner:
    """One search: the programs, the order in which they are compiled, and what was found.

    `illegal`: by rule, what was left out before. `stops_at_first_fit`: nothing is begun after a candidate
    fits. `too_large`: the rule that removes a candidate by its bound of memory. `planned`: the candidates
    that were compiled or failed, by row; `unrolled`: those of them that were compiled once more, without
    their loop over layers. `best`: the fastest that fits. `ends`: when what still runs is cut off, by
    `time.monotonic`. `of`: what is searched for, where that is not the plan itself.
    """

    programs: CandidatePrograms
    fleet: Fleet
    search: Search
    num_layouts: int
    num_considered: int
    illegal: Mapping[str, int]
    budget_seconds: float
    started: float
    ends: float
    on_event: Callable[[PlanProgress], None] = ignore
    of: str = ""
    stops_at_first_fit: bool = False
    too_large: str = "state and block inputs alone do not fit"
    planned: dict[int, Planned] = field(default_factory=dict[int, Planned])
    unrolled: list[Planned] = field(default_factory=list[Planned])
    best: Weighing | None = None
    running: dict[Future[Weighing], int] = field(default_factory=dict[Future[Weighing], int])

    def search_until_done(self, num_workers: int) -> str:
        """Compile until the budget is spent, nothing promises a saving, or Ctrl-C. Return which.

        What still runs when `ends` has come is cut off, and counts as failed.
        """
        pool, is_left = ThreadPoolExecutor(num_workers), threading.Event()
        try:
            with compiling_until(lambda: is_left.is_set() or time.monotonic() > self.ends):
                while True:
                    ended = self._begin(pool, num_workers)
                    if not self.running:
                        return ended
                    self._tell()
                    done, _ = wait(self.running, timeout=PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._finish(self.running.pop(future), future)
                    if self.running and time.monotonic() > self.ends + GRACE_SECONDS:
                        return self._cut_off()
        except KeyboardInterrupt:
            return STOPPED
        finally:
            is_left.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _cut_off(self) -> str:
        """Give up what still runs: a compilation that was cut off and has not ended, or an account of one."""
        for row in self.running.values():
            self.planned[row] = self._planned(row, None, CUT_OFF)
            self.search.finish(row, SearchOutcome(seconds=None, reserved_bytes=None))
        self.running.clear()
        return self._spent

    @property
    def _spent(self) -> str:
        return f"the budget of {self.budget_seconds:g} s is spent"

    def _begin(self, pool: ThreadPoolExecutor, num_workers: int) -> str:
        """Begin compilations while workers are free. Return why no more would begin."""
        while len(self.running) < num_workers:
            if self.stops_at_first_fit and self.search.best is not None:
                return "a candidate fits"
            spent = time.monotonic() - self.started >= self.budget_seconds - self._reserved_seconds
            if spent and self.search.num_begun >= num_workers and not self.search.has_preferred:
                return self._spent
            if time.monotonic() > self.ends:
                return self._spent
            row = self.search.next()
            if row is None:
                return "no other candidate promises a saving"
            here = contextvars.copy_context()  # in it compilations are cut off
            self.running[pool.submit(here.run, self.programs.weigh, row)] = row
        return ""

    @property
    def _reserved_seconds(self) -> float:
        """The part of the budget that is kept for one program without its loop over layers."""
        needed = self.programs.unrolling_seconds
        return needed if needed <= self.budget_seconds * MOST_RESERVED else 0.0

    def unroll_best(self, own: int | None) -> None:
        """Compile the best candidate once more without its loop over layers; if that fails, the run itself.

        Args:
            own: the candidate that the run is as it stands.
        """
        rows = dict.fromkeys(row for row in (self.search.best, own) if row is not None)
        for row in rows if self._reserved_seconds else ():
            overrides = self.programs.unrolled(row)
            if overrides is None or time.monotonic() > self.ends:
                continue
            weighing, failed = None, ""
            self._tell("the best without its loop over layers")
            try:
                with compiling_until(lambda: time.monotonic() > self.ends):
                    weighing = self.programs.weigh_with(overrides)
            except MeshwrightError as error:
                failed = error.message
            made = self._planned(row, weighing, failed, overrides)
            self.unrolled.append(made)
            if weighing is not None and made.fits is not False:
                before = math.inf if self.best is None else self.best.step_seconds
                if before is None or (weighing.step_seconds or math.inf) < before:
                    self.best = weighing
                return

    def begin_with(self, own: int | None, simplest: Sequence[int]) -> None:
        """Let the search begin with the run as it stands, the simplest, and what an earlier call compiled.

        So no plan is slower than what the user has, or than what a person would try first. The last are the
        most promising that the cache has, the best first: they cost no compilation.
        """
        promising = self.search.most_promising(MOST_LOOKED_UP)
        cached = [row for row in promising if self.programs.is_cached(row)]
        first: list[int] = [*([] if own is None else [own]), *simplest, *cached]
        self.search.prefer(dict.fromkeys(first), uncounted=set(simplest) - {own})

    def _finish(self, row: int, future: Future[Weighing]) -> None:
        """Record a compiled candidate, or why it could not be compiled."""
        weighing, failed = None, ""
        try:
            weighing = future.result()
        except MeshwrightError as error:
            nothing_compiled = all(each.failed for each in self.planned.values())
            if isinstance(error, InputError) and nothing_compiled and self.programs.are_alike:
                raise
            failed = error.message
        if weighing is not None and weighing.prediction is None:
            raise InputError(
                f"no time is predicted for {self.fleet.name}, and so no order: {weighing.no_prediction}",
                hint="choose a fleet with known rates: `meshwright fleets`",
            )
        self.planned[row] = self._planned(row, weighing, failed)
        memory = None if weighing is None else weighing.ledger.memory
        outcome = SearchOutcome(
            seconds=None if weighing is None else weighing.step_seconds,
            reserved_bytes=None if memory is None else memory.reserved_bytes,
        )
        self.search.finish(row, outcome)
        if self.search.best == row:
            self.best = weighing  # of the others, no more than `Planned` is kept

    def _planned(
        self, row: int, weighing: Weighing | None, failed: str, overrides: Mapping[str, Any] | None = None
    ) -> Planned:
        """Return what is kept of a candidate. `overrides`: where its program has others than the search's."""
        estimates = self.search.estimates
        memory = None if weighing is None else weighing.ledger.memory
        return Planned(
            layout=str(self.programs.layout(row)),
            settings=self.programs.words(row) if overrides is None else settings_words(overrides),
            overrides=dict(self.programs.overrides(row) if overrides is None else overrides),
            estimated_seconds=float(estimates.seconds[row]) if self._is_run else None,
            estimated_bytes=float(estimates.memory[row]) if self._is_run else None,
            model_flops=None if weighing is None else weighing.ledger.flops.model,
            reserved_bytes=None if memory is None else memory.reserved_bytes,
            allowance_bytes=None if memory is None else memory.allowance_bytes,
            usable_bytes=None if memory is None else memory.usable_bytes,
            prediction=None if weighing is None else weighing.prediction,
            cached=weighing is not None and weighing.cached,
            failed=failed,
        )

    @property
    def _is_run(self) -> bool:
        return isinstance(self.programs.config, RunConfig)

    def _tell(self, *others: str) -> None:
        """Report how far the search is, and what is being compiled."""
        best = self.search.best
        running = (
            f"{self.programs.layout(row)} {self.programs.words(row)}".strip() for row in self.running.values()
        )
        self.on_event(
            PlanProgress(
                num_considered=self.num_considered,
                num_compiled=sum(not each.failed for each in self.planned.values()),
                num_failed=sum(bool(each.failed) for each in self.planned.values()),
                best=None if best is None else self.planned[best],
                running=(*running, *others),
                seconds=time.monotonic() - self.started,
                budget_seconds=self.budget_seconds,
                of=self.of,
            )
        )

    def plan(self, ended: str) -> Plan:
        """Return the plan of what was compiled."""
        removed = dict(self.illegal)
        if too_large := self.search.num_too_large:
            removed[self.too_large] = too_large
        return Plan(
            config=self.programs.config,
            fleet=self.fleet,
            num_layouts=self.num_layouts,
            num_considered=self.num_considered,
            removed=removed,
            num_open=self.num_considered - self.search.num_too_large - len(self.planned),
            candidates=(*self.planned.values(), *self.unrolled),
            best=self.best,
            ended=ended,
            seconds=time.monotonic() - self.started,
        )
