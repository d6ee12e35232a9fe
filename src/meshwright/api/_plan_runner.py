"""Compile the candidates that a search asks for, side by side, and keep what came of each.

Used by: `_plan`.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import psutil

from meshwright.compiler import compiling_until
from meshwright.config import RunConfig
from meshwright.errors import InputError, MeshwrightError
from meshwright.hardware import Fleet
from meshwright.planned import STOPPED, Plan, Planned, PlanProgress
from meshwright.planning import Search, SearchOutcome, settings_words
from meshwright.programs import CandidatePrograms, Candidates, RunLength
from meshwright.results import Weighing, ignore

WORKERS = "MESHWRIGHT_PLAN_WORKERS"
"""The variable of the environment that says how many programs a plan compiles side by side."""
BYTES_PER_WORKER = 3 * 2**30  # of this machine's memory, for a compile worker and its program's text
PROGRESS_SECONDS = 0.5
GRACE_SECONDS = 10.0  # for a compilation that is cut off to end, or for the account of one that just ended
CUT_OFF = "cut off: the budget was spent"
MOST_RESERVED = 0.5  # of the budget, for such a program
LEAST_GRACE_SECONDS = 60.0  # beyond a small budget, for the first compilations to end
MOST_LOOKED_UP = 200  # candidates that are looked for in the cache before any is compiled


def usual_workers() -> int:
    """Return the compilations that run side by side: as many as the machine has cores and memory for.

    Raises:
        InputError: `MESHWRIGHT_PLAN_WORKERS` is set, and is no whole number above zero.
    """
    if (given := os.environ.get(WORKERS)) is not None:
        if not given.isdecimal() or int(given) < 1:
            raise InputError(f"{WORKERS} is {given!r}", hint="set it to 1 or more, or unset it")
        return int(given)
    return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // BYTES_PER_WORKER))


def end_of(started: float, budget_seconds: float) -> float:
    """Return when a plan has its answer at the latest: compilations that then still run are cut off."""
    return started + budget_seconds + max(budget_seconds, LEAST_GRACE_SECONDS)


@dataclass(kw_only=True)
class CandidateRunner:
    """One search: the candidates, the order in which they are compiled, and what was found.

    `stops_at_first_fit`: nothing is begun after a candidate fits. `planned`: the candidates that were
    compiled or failed, by row; `unrolled`: those of them that were compiled once more, without their loop
    over layers. `best`: the fastest that fits. `ends`: when what still runs is cut off, by `time.monotonic`.
    `length`: of the run, for when each candidate finishes it. `of`: what is searched for, where that is not
    the plan itself.
    """

    candidates: Candidates
    fleet: Fleet
    budget_seconds: float
    started: float
    ends: float
    on_event: Callable[[PlanProgress], None] = ignore
    length: RunLength = field(default_factory=RunLength)
    of: str = ""
    stops_at_first_fit: bool = False
    planned: dict[int, Planned] = field(default_factory=dict[int, Planned])
    unrolled: list[Planned] = field(default_factory=list[Planned])
    best: Weighing | None = None
    running: dict[Future[Weighing], int] = field(default_factory=dict[Future[Weighing], int])

    @property
    def programs(self) -> CandidatePrograms:
        """The candidates as programs that can be compiled."""
        return self.candidates.programs

    @property
    def search(self) -> Search:
        """The order in which candidates are tried."""
        return self.candidates.search

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
                return "no other candidate promises a saving" if self.search.num_begun else "none can fit"
            here = contextvars.copy_context()  # in it compilations are cut off
            self.running[pool.submit(here.run, self.programs.weigh, row)] = row
        return ""

    @property
    def _reserved_seconds(self) -> float:
        """The part of the budget that is kept for one program without its loop over layers."""
        needed = self.programs.unrolling_seconds
        return needed if needed <= self.budget_seconds * MOST_RESERVED else 0.0

    def unroll_best(self) -> None:
        """Compile the best candidate once more without its loop over layers; if that fails, the run.

        Both together may take what is left of the budget, or the time that was kept for one: layers of
        experts compile several times longer than that.
        """
        ends = max(self.started + self.budget_seconds, time.monotonic() + self._reserved_seconds)
        ends = min(ends, self.ends)
        rows = dict.fromkeys(row for row in (self.search.best, self.candidates.own) if row is not None)
        for row in rows if self._reserved_seconds else ():
            overrides = self.programs.unrolled(row)
            if overrides is None or time.monotonic() > ends:
                continue
            weighing, failed = None, ""
            self._tell("the best without its loop over layers")
            try:
                with compiling_until(lambda: time.monotonic() > ends):
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

    def begin_with_simplest(self) -> None:
        """Let the search begin with the run as it stands, the simplest, and what an earlier call compiled.

        So no plan is slower than what the user has, or than what a person would try first. The last are the
        most promising that the cache has, the best first: they cost no compilation.
        """
        own, simplest = self.candidates.own, self.candidates.simplest
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
        if weighing is not None and weighing.prediction is None and weighing.refusal is None:
            raise InputError(
                f"no time is predicted for {self.fleet.name}, and so no order: {weighing.no_prediction}",
                hint="choose a fleet with known rates: `meshwright fleets`",
            )
        self.planned[row] = self._planned(row, weighing, failed)
        made = self.planned[row]
        seconds = None if made.prediction is None else made.prediction.step_seconds.expected
        self.search.finish(row, SearchOutcome(seconds=seconds, reserved_bytes=made.reserved_bytes))
        if self.search.best == row:
            self.best = weighing  # of the others, no more than `Planned` is kept

    def _planned(
        self, row: int, weighing: Weighing | None, failed: str, overrides: Mapping[str, Any] | None = None
    ) -> Planned:
        """Return what is kept of a candidate. `overrides`: where its program has others than the search's."""
        estimates = self.search.estimates
        figures = None if weighing is None else weighing.figures
        memory, refusal = figures and figures.memory, weighing and weighing.refusal
        refused = None if refusal is None else refusal.needed_bytes
        return Planned(
            layout=str(self.programs.layout(row)),
            settings=self.programs.words(row) if overrides is None else settings_words(overrides),
            overrides=dict(self.programs.overrides(row) if overrides is None else overrides),
            estimated_seconds=float(estimates.seconds[row]) if self._is_run else None,
            estimated_bytes=float(estimates.memory[row]) if self._is_run else None,
            model_flops=None if figures is None else figures.flops.model,
            reserved_bytes=refused if memory is None else memory.reserved_bytes,
            allowance_bytes=(None if refused is None else 0) if memory is None else memory.allowance_bytes,
            usable_bytes=(refusal and refusal.usable_bytes) if memory is None else memory.usable_bytes,
            prediction=None if weighing is None else weighing.prediction,
            cached=weighing is not None and weighing.cached,
            failed=failed,
            finish=None if weighing is None else self.length.operated(weighing).finish,
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
                num_considered=self.candidates.num_considered,
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
        these = self.candidates
        removed = dict(these.illegal)
        if too_large := self.search.num_too_large:
            removed[these.too_large] = too_large
        return Plan(
            config=self.programs.config,
            fleet=self.fleet,
            num_layouts=these.num_layouts,
            num_considered=these.num_considered,
            removed=removed,
            num_open=these.num_considered - self.search.num_too_large - len(self.planned),
            candidates=(*self.planned.values(), *self.unrolled),
            best=self.best,
            ended=ended,
            of_tokens=dict(these.changes),
            notes=these.notes,
            seconds=time.monotonic() - self.started,
        )
