"""Estimate when a run is finished, and which share of its time is useful, before and while it runs.

A few thousand runs are drawn by chance, always the same ones: the predicted step, a cluster's rate of faults
and their bursts, the time until steps are made again, incidents that need a person, and what a checkpoint
costs. Their quantiles are the interval, which is meant to hold 8 runs of 10.
Counted: steps, evaluation, checkpoints, start and compilation, faults with the work lost and the restart,
incidents, and waiting for a host in repair if the number of spare hosts is known. Not counted: changes of
plan, announced maintenance, queues of a scheduler, a machine that is slow and not dead, divergence.
Source of the best time between checkpoints: Daly 2006, doi:10.1016/j.future.2004.11.016, eq. 37.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from meshwright.errors import InputError
from meshwright.predict import Interval
from meshwright.units import format_rate, format_seconds

from ._failures import (
    FaultRate,
    LogNormal,
    failures,
    faults_by_chance,
    host_weight,
    parsed_history,
    poisson,
    published,
    work_again,
)
from ._own_history import OwnHistory

if TYPE_CHECKING:
    from meshwright.results import Weighing

DRAWS = 2000
DAY = 86400.0
NORMAL_90 = 1.645  # deviations to the end of an interval that holds nine of ten
MOST = 1e9  # of what an operator may give: seconds, hours or hosts
NEVER = 100.0  # times its steps: a run that takes longer makes no progress
PARTS = {
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "lost": "work lost",
    "restarts": "faults until steps are made again",
    "waiting": "waiting for hosts",
    "start": "start",
}  # what the time of a run goes to beside its steps, in words
LEAST_LIKELY = 0.01  # a kind of restart that one's own restarts make less likely is not drawn
LEAST_NOTED = 0.005  # of the time: what another period of checkpoints must save to be named
Restart = Literal["automatic", "manual"]
KINDS: tuple[Restart, ...] = ("automatic", "manual")
UNKNOWN = OwnHistory()  # of a run that has not begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Hold how a run is operated, as far as it is known, which decides when it is finished.

    Args:
        start: the day on which it begins, "2026-12-01"; now if not given.
        restart: "automatic" if a run that a fault stops begins again without a person, or "manual".
        restart_seconds: from a fault until steps are made again; those of published runs if not given.
        checkpoint_seconds: for which the steps wait at a checkpoint; 0 if one in memory hides behind them.
        spares: hosts that stand ready to replace broken ones. If not given, one always does.
        failures: your own history, "12 in 400 node-days": faults, and hosts times days.
        spot_hours: hours between two interruptions of one spot host, on average.

    >>> Operations(restart="automatic", failures="12 in 400 node-days").rate.mean > 6
    True
    """

    start: str | date | None = None
    restart: Restart | str | None = None
    restart_seconds: float | None = None
    checkpoint_seconds: float | None = None
    spares: int | None = None
    failures: str | None = None
    spot_hours: float | None = None

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """Raise an InputError if an answer is none."""
        _ = self.begins, self.rate
        if self.restart not in (None, *KINDS):
            raise InputError(f"restart {self.restart!r}", hint="automatic, or manual")
        for name in ("restart_seconds", "checkpoint_seconds", "spares", "spot_hours"):
            value = getattr(self, name)
            least = 0 if name != "spot_hours" else 1e-3
            kinds = int if name == "spares" else (int, float)
            if value is not None and not (isinstance(value, kinds) and least <= value <= MOST):
                whole = "a whole number, " if name == "spares" else ""
                words = f"{name.replace('_', ' ')} of {value!r:.40}"
                raise InputError(words, hint=f"{whole}{least:g} to {MOST:g}")

    @property
    def begins(self) -> date | None:
        """The day on which it begins; None for today.

        Raises:
            InputError: the text is no date.
        """
        if self.start is None or isinstance(self.start, date):
            return self.start
        try:
            return date.fromisoformat(self.start)
        except (ValueError, TypeError) as wrong:
            raise InputError(f"start {self.start!r} is no date", hint="write 2026-12-01") from wrong

    def finish_of(self, weighing: Weighing) -> Finish | None:
        """Return when the run of a weighing is finished; None if its steps or their time are not known."""
        from ._workload import workload_of

        if weighing.prediction is None or weighing.num_steps is None:
            return None
        compiled = weighing.compiled if weighing.is_compiled else None
        fleet, config = weighing.fleet, weighing.config
        return finish_of(workload_of(weighing.prediction, weighing.num_steps, fleet, compiled, config), self)

    @property
    def rate(self) -> FaultRate:
        """Return what is known of the faults of its hosts."""
        prior = FaultRate.of_published()
        return prior if self.failures is None else prior.updated(*parsed_history(self.failures))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Hold what is assumed of failures and of their costs, for one kind of restart.

    `recovery`, `person`: seconds until steps are made again, by themselves and where a person is needed.
    `incidents`: of a day that need one. `checkpoint`: seconds for which steps wait.
    """

    rate: FaultRate
    recovery: LogNormal
    person: LogNormal
    incidents: LogNormal
    checkpoint: LogNormal

    @classmethod
    def of(
        cls,
        work: Workload,
        operations: Operations,
        restart: str,
        own: OwnHistory,
        without: Sequence[str] = (),
    ) -> Evidence:
        """Return the answers of the user, else the published figures, updated by `own`."""
        known, person = LogNormal.known, LogNormal.of("manual", without)
        given, waits = operations.restart_seconds, operations.checkpoint_seconds
        recovery = LogNormal.of(restart, without) if given is None else known(given)
        return cls(
            rate=_rate_of(work, operations, own, without),
            recovery=recovery.updated(own.restart_seconds),
            person=person,
            incidents=LogNormal.of("incident", without),
            checkpoint=LogNormal.of("checkpoint", without) if waits is None else known(waits),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Describe the work of a run, and its fleet.

    `steps`: that are left. `extra_share`: seconds of evaluation for each second of steps. `start_seconds`:
    before the first step. `copy_seconds`: for which steps wait while their state is copied off the devices,
    and `checkpoint_bytes`: of one checkpoint; None if not known. `save_every`: steps between two checkpoints
    as the run is configured; None if it is not.
    """

    step_seconds: Interval
    steps: int
    hosts: int
    chips_per_host: int
    extra_share: float = 0.0
    start_seconds: float = 0.0
    copy_seconds: float | None = None
    checkpoint_bytes: float | None = None
    save_every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An estimate that holds eight times in ten; `high` is None where nothing bounds it."""

    low: float
    expected: float
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the tenth, the half and the nine tenths of values."""
        ordered = sorted(values)
        at = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
        return cls(low=next(at), expected=next(at), high=next(at))


def day_words(day: date, today: date) -> str:
    """Return "12 Mar", with the year if it is another one.

    >>> day_words(date(2027, 3, 12), date(2026, 11, 28))
    '12 Mar 2027'
    """
    if day == date.max:
        return "after the year 9999"
    words = f"{day.day} {day:%b}"
    return words if day.year == today.year else f"{words} {day.year}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """When a run is finished, with what takes the time beside its steps.

    `seconds`: from the start. `useful_share`: of them in steps that count. `up_share`: in which the run runs.
    `interruptions`: faults and incidents. `save_every_seconds`: the best time between checkpoints; None where
    the seconds of one are not known, or the run is shorter. `save_every_steps`: the same in steps.
    `restart`: the answer, or "". `shares`: what the time goes to, by name, on average. `questions`: what is
    not known and would narrow it, the most important first. `notes`: what follows for checkpoints.
    """

    seconds: Range
    useful_share: Range
    up_share: Range
    interruptions: Range
    save_every_seconds: float | None
    save_every_steps: int | None
    restart: str
    shares: dict[str, float]
    start: str | None = None
    questions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def never(self) -> bool:
        """Return whether the run cannot be expected to finish at all: faults come faster than checkpoints."""
        return self.shares["steps"] <= (1 - self.shares["start"]) / NEVER

    def texts(self, now: datetime) -> tuple[str, ...]:
        """Return when it is finished, then what the time goes to, what would narrow it, and what follows.

        The first is as "12 Mar (80 %: 9 to 21 Mar), 94.6 % useful, checkpoint every 38.0 min".
        """
        if self.never:
            words = "never: faults come faster than checkpoints and restarts can follow"
        else:
            useful, every = self.useful_share, self.save_every_seconds
            words = f"{self._days_in_words(now)}, {100 * useful.expected:.1f} % useful"
            words += f" ({100 * useful.low:.1f} to {100 * (useful.high or 1):.1f})"
            words += "" if every is None else f", checkpoint every {format_seconds(every)}"
        parts = {name: share for name, share in self.shares.items() if name != "steps" and share >= 5e-4}
        beside = ", ".join(f"{PARTS[name]} {100 * share:.1f} %" for name, share in parts.items())
        beside = f"on average {beside}" if beside else ""
        lines = (beside, *self.notes, f"not known: {'; '.join(self.questions)}" if self.questions else "")
        return (words, *(line for line in lines if line))

    def short_texts(self, now: datetime) -> tuple[str, str]:
        """Return the day by which half of all runs end, and the useful share: ("12 Mar", "94.6 %")."""
        if self.never:
            return "never", "-"
        return self._moment(self.seconds.expected, now), f"{100 * self.useful_share.expected:.1f} %"

    def _moment(self, seconds: float, now: datetime) -> str:
        """Return the date that lies `seconds` after `now`, in words; of a run under a day the clock time."""
        if self.start is None and (self.seconds.high or self.seconds.expected) < DAY:
            return f"{now + timedelta(seconds=seconds):%H:%M}"
        return day_words(self.day(seconds, now), now.date())

    def _days_in_words(self, now: datetime) -> str:
        seconds = self.seconds
        low, expected, high = (
            None if at is None else self._moment(at, now)
            for at in (seconds.low, seconds.expected, seconds.high)
        )
        if expected == low and high in (low, None) and self.day(seconds.expected, now) == date.max:
            return expected or ""
        if high is None:
            return f"{expected} (80 %: from {low}, no upper end)"
        begin, _, month = str(low).partition(" ")
        short = begin if month and high.partition(" ")[2] == month else low  # "9 to 21 Mar"
        return f"{expected} (80 %: {short if low != high else 'on'} {'to ' if low != high else ''}{high})"

    def day(self, seconds: float, now: datetime) -> date:
        """Return the day that comes so many seconds after the start, or the last one of the calendar."""
        begins = now if self.start is None else datetime.fromisoformat(self.start)
        if seconds >= (date.max - begins.date()).days * DAY:
            return date.max
        return (begins + timedelta(seconds=seconds)).date()

    def to_dict(self, now: datetime) -> dict[str, Any]:
        """Return the estimate in JSON's types, with its days."""
        ends = {"low": self.seconds.low, "expected": self.seconds.expected, "high": self.seconds.high}
        days = {end: None if at is None else self.day(at, now).isoformat() for end, at in ends.items()}
        return {**asdict(self), "start": self.start or now.date().isoformat(), "finish_date": days}


def best_period(checkpoint_seconds: float, fault_seconds: float) -> float:
    """Return the seconds of steps between two checkpoints that lose the least.

    Args:
        checkpoint_seconds: for which the steps wait at one.
        fault_seconds: between two faults of the run, on average.

    >>> round(best_period(30, 24 * 3600))  # Young: the root of 2 x 30 x 86,400, 2277 s
    2257
    """
    if checkpoint_seconds >= 2 * fault_seconds:
        return fault_seconds
    half = checkpoint_seconds / (2 * fault_seconds)
    young = math.sqrt(2 * checkpoint_seconds * fault_seconds)
    return young * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint_seconds


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One run by chance: seconds by what they go to, and how often it is interrupted."""

    steps: float
    evaluation: float
    checkpoints: float
    lost: float
    restarts: float
    waiting: float
    start: float
    interruptions: float

    @property
    def seconds(self) -> float:
        parts = (self.evaluation, self.checkpoints, self.lost, self.restarts, self.waiting, self.start)
        return self.steps + sum(parts)

    @property
    def down(self) -> float:
        return self.restarts + self.waiting + self.start


def finish_of(
    work: Workload,
    operations: Operations,
    *,
    own: OwnHistory = UNKNOWN,
    without: Sequence[str] = (),
    period_seconds: float | None = None,
) -> Finish:
    """Estimate when a run is finished.

    Args:
        own: what has happened to the run so far, which updates the published figures.
        without: sources of failures.toml to leave out, as for a score of a run that is among them.
        period_seconds: between two checkpoints; the best one if not given.
    """
    if operations.checkpoint_seconds is None:
        operations = replace(operations, checkpoint_seconds=work.copy_seconds)
    by_kind = {
        kind: _runs(
            work, operations, Evidence.of(work, operations, kind, own, without), period_seconds, draws
        )
        for kind, draws in _kinds(operations, own, without).items()
    }
    runs = [run for some in by_kind.values() for run in some]
    between = _between(work, operations, _rate_of(work, operations, own, without))
    period = _known_period(work, operations, between)
    step, total = work.step_seconds.expected, sum(run.seconds for run in runs)
    seconds = Range.of([run.seconds for run in runs])
    names = ("steps", "evaluation", "checkpoints", "lost", "restarts", "waiting", "start")
    begins = operations.begins
    made = Finish(
        seconds=seconds if work.step_seconds.high is not None else replace(seconds, high=None),
        useful_share=Range.of([run.steps / run.seconds for run in runs]),
        up_share=Range.of([1 - run.down / run.seconds for run in runs]),
        interruptions=Range.of([run.interruptions for run in runs]),
        save_every_seconds=period,
        save_every_steps=None if period is None or not step else max(1, round(period / step)),
        restart=str(operations.restart or ""),
        shares={name: sum(getattr(run, name) for run in runs) / total for name in names},
        start=None if begins is None else begins.isoformat(),
    )
    return replace(
        made,
        questions=tuple(_questions(operations, between, by_kind)),
        notes=tuple(_notes(work, operations, made, own, without, period_seconds)),
    )


def _rate_of(work: Workload, operations: Operations, own: OwnHistory, without: Sequence[str]) -> FaultRate:
    """Return what is known of the faults of 1,000 hosts of 8 accelerators, by what these hosts had."""
    rate, weight = FaultRate.of_published(without), host_weight(work.chips_per_host)
    if operations.failures is not None:
        faults, node_days = parsed_history(operations.failures)
        rate = rate.updated(faults, node_days * weight)
    return rate.updated(own.faults, own.up_seconds / DAY * work.hosts * weight)


def _kinds(operations: Operations, own: OwnHistory, without: Sequence[str]) -> dict[str, int]:
    """Return how many runs to draw of each kind of restart: as many, but for what one's own restarts say."""
    if operations.restart is not None:
        return {str(operations.restart): DRAWS}
    likely = {kind: LogNormal.of(kind, without).log_likelihood(own.restart_seconds) for kind in KINDS}
    most = max(likely.values())
    weights = {kind: math.exp(each - most) for kind, each in likely.items()}
    shares = {kind: weight / sum(weights.values()) for kind, weight in weights.items()}
    return {kind: round(2 * DRAWS * share) for kind, share in shares.items() if share >= LEAST_LIKELY}


def _runs(
    work: Workload, operations: Operations, known: Evidence, period: float | None, draws: int
) -> list[_Drawn]:
    """Draw runs with one kind of restart."""
    chance = random.Random(45)
    return [_drawn(work, operations, known, period, chance) for _ in range(draws)]


def _drawn(
    work: Workload, operations: Operations, known: Evidence, period: float | None, chance: random.Random
) -> _Drawn:
    """Draw one run."""
    steps = work.steps * _step(work.step_seconds, chance)
    rate = known.rate.draw(chance) * host_weight(work.chips_per_host)
    between = DAY / ((rate + _of_spot(operations)) * work.hosts)
    saving = known.checkpoint.draw(chance)
    # The period follows from what is expected of the faults, not from how they come.
    best = best_period(saving, _between(work, operations, known.rate))
    running = steps * (1 + work.extra_share)
    every = period or max(best, work.step_seconds.expected)
    saves = running * saving / every
    rework = work_again((min(every, running) + saving) / between)  # a shorter run loses at most itself
    faults = faults_by_chance((running + saves) * rework / between, chance)
    lost = faults * between * (1 - 1 / rework)
    recovery = known.recovery.draw(chance)
    restarts = _sum_of(faults, recovery, chance)
    days = (running + saves + lost + restarts) / DAY
    incidents = poisson(known.incidents.draw(chance) * days, chance)
    restarts += _sum_of(incidents, known.person.draw(chance), chance)
    so_far = running + saves + lost + restarts
    absent = _absent_share(rate, work.hosts, operations.spares)
    return _Drawn(
        steps=steps,
        evaluation=running - steps,
        checkpoints=saves,
        lost=lost,
        restarts=restarts,
        waiting=min(so_far * absent / (1 - absent), NEVER * steps),
        start=work.start_seconds,
        interruptions=faults + incidents,
    )


def _sum_of(count: float, mean: float, chance: random.Random) -> float:
    """Return the sum of so many waiting times by chance, which are exponential."""
    return chance.gammavariate(count, mean) if count > 0 and mean > 0 else 0.0


def _step(seconds: Interval, chance: random.Random) -> float:
    """Return the seconds of a step by chance: normal in the logarithm, with a deviation for each side.

    A side without an end has that of the other one, and none without either.
    """
    at = chance.gauss(0.0, 1.0)
    expected = seconds.expected
    up = None if seconds.high is None else seconds.high / expected
    down = None if not seconds.low else expected / seconds.low
    ratio = (up or down) if at > 0 else (down or up)
    return expected * (ratio or 1.0) ** (at / NORMAL_90)


def _between(work: Workload, operations: Operations, rate: FaultRate) -> float:
    """Return the expected seconds between two faults of the run."""
    faults = rate.mean / 1000 * host_weight(work.chips_per_host) + _of_spot(operations)
    return DAY / (faults * work.hosts)


def _of_spot(operations: Operations) -> float:
    """Return how often in a day a spot host is taken away."""
    return 0.0 if operations.spot_hours is None else 24 / operations.spot_hours


def _known_period(work: Workload, operations: Operations, between: float) -> float | None:
    """Return the best time between two checkpoints; None of unknown seconds, and of a run that is shorter."""
    if operations.checkpoint_seconds is None:
        return None
    step = work.step_seconds.expected
    best = max(best_period(operations.checkpoint_seconds, between), step)  # no two of them lie in one step
    return best if best < work.steps * step * (1 + work.extra_share) else None


def _absent_share(rate: float, hosts: int, spares: int | None) -> float:
    """Return the share of time in which more hosts are in repair than there are spares (an M/G/inf queue)."""
    if spares is None:
        return 0.0
    repair = failures()["repair"]
    mean = rate * repair["hardware_share"] * hosts * repair["mean_seconds"] / DAY
    if mean > 500:  # far beyond what spares are kept for: the normal tail
        return min(0.99, 0.5 * math.erfc((spares + 0.5 - mean) / math.sqrt(2 * mean)))
    term = within = math.exp(-mean)
    for number in range(1, min(spares, 1000) + 1):  # more than 20 deviations above any mean of this branch
        term *= mean / number
        within += term
    return min(0.99, max(0.0, 1 - within))


def _questions(operations: Operations, between: float, by_kind: Mapping[str, Sequence[_Drawn]]) -> list[str]:
    """Return what is not known, with what would follow from an answer."""
    found: list[str] = []
    if len(by_kind) > 1:
        useful = [Range.of([run.steps / run.seconds for run in runs]).expected for runs in by_kind.values()]
        shares = [f"{100 * share:.3g} %" for share in useful]
        if len({*shares}) > 1:  # else the answer changes nothing
            found.append(f"--restart automatic or manual: {' and '.join(shares)} useful")
    if operations.checkpoint_seconds is None:
        every = format_seconds(math.sqrt(2 * between))
        found.append(
            f"--checkpoint-seconds S, for which steps wait at one: then one every {every} x root of S"
        )
    if operations.failures is None:
        rates = published("rate")
        span = f"{min(rates):.3g} to {max(rates):.3g} a day of 1,000 hosts"
        found.append(f'--failures "N in M node-days", your own faults (published: {span})')
    return found


def _notes(
    work: Workload,
    operations: Operations,
    made: Finish,
    own: OwnHistory,
    without: Sequence[str],
    period: float | None,
) -> Iterator[str]:
    """Yield what follows for the run's checkpoints."""
    every = made.save_every_seconds
    if every is None:
        return
    if work.checkpoint_bytes and every > 0:
        rate = format_rate(work.checkpoint_bytes / every, "B/s")
        size = format_rate(work.checkpoint_bytes, "B")
        yield f"checkpoints of {size} so often need storage that takes {rate}"
    if work.save_every is None:
        return
    configured = period or work.save_every * work.step_seconds.expected
    if 0.5 <= configured / every <= 2:
        return
    alone = replace(work, save_every=None)
    useful = [
        finish_of(alone, operations, own=own, without=without, period_seconds=each).useful_share.expected
        for each in (configured, every)
    ]
    if useful[0] < useful[1] - LEAST_NOTED:
        yield (
            f"as configured, a checkpoint every {format_seconds(configured)}, {100 * useful[0]:.3g} % are "
            f"useful: --set checkpoint.every_steps={made.save_every_steps}"
        )
