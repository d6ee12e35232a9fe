"""Estimate while a run trains when it will be finished, by what has happened to it so far.

The run's own step seconds, evaluations, checkpoints and restarts replace what was predicted or published, and
its own faults update the rate of faults. The estimate goes to run.json, metrics.jsonl, the page, and, once in
half an hour, to the log.
Imports: `kept_records`, `predict`, `results`; `trainer.loop` late. Used by: `train`, by the entry point.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from meshwright.kept_records import KeptRun
from meshwright.predict import Interval
from meshwright.results import Weighing

from ._finish import Finish, Operations, Range, finish_of
from ._own_history import OwnHistory
from ._workload import workload_of

if TYPE_CHECKING:
    from meshwright.trainer.loop import Event, StepDone

    from ._finish import Workload

LEAST_SECONDS = 3600.0  # left of a run: of a shorter one the log says the time that is left, and no day
EVERY_SECONDS = 1800.0  # between two lines of the log
LEAST_STEPS = 5  # of this process, the first two left out, that replace the prediction
WARM_UP = 2
RECENT_STEPS, RECENT_SAVES = 100, 10


class LiveFinish:
    """A listener that passes each event on, and estimates from them when the run will be finished.

    Args:
        kept: the run's record, with its earlier sessions.
        on_event: gets each event.
        now: the host's clock.
    """

    def __init__(
        self,
        weighing: Weighing,
        kept: KeptRun,
        on_event: Callable[[Any], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weighing, self._kept, self._on_event, self._now = weighing, kept, on_event, now
        self._steps = deque[float](maxlen=RECENT_STEPS)
        self._blocked, self._evaluations = (deque[float](maxlen=RECENT_SAVES) for _ in range(2))
        self._rollbacks: list[float] = []
        self._num_steps = 0
        self._last: StepDone | None = None
        self._at = 0.0  # when the last step was done
        self._said: float | None = None

    def __call__(self, event: Any) -> None:
        """Pass an event on, and note what it says of the run's pace."""
        from meshwright.trainer.loop import CheckpointSaved, Evaluated, StepDone

        match event:
            case CheckpointSaved():
                self._blocked.append(event.blocked_seconds)
            case Evaluated() if self._last is not None and self._last.step == event.step:
                self._evaluations.append(self._now() - self._at)
            case StepDone():
                self._step(event)
            case _:
                pass
        self._on_event(event)

    def _step(self, event: StepDone) -> None:
        seconds = (self._weighing.tokens_per_step or 0) / event.tokens_per_second
        if self._last is None:
            self._kept.stepped()
        elif event.step <= self._last.step:  # the run went back to a checkpoint
            self._rollbacks.append(max(0.0, self._now() - self._at - seconds))
        self._num_steps += 1
        if self._num_steps > WARM_UP:
            self._steps.append(seconds)
        self._last, self._at = event, self._now()

    def estimate(self) -> Iterator[Event]:
        """Yield the estimate, which run.json then has; say it to the listeners if it is time for a line.

        Nothing is yielded while too few steps are timed, or the first checkpoint is near and its seconds are
        not known; without a prediction; and after the last step.
        """
        last, weighing = self._last, self._weighing
        if last is None or len(self._steps) < LEAST_STEPS or last.step >= last.steps:
            return
        work = self._work(last)
        if work is None or self._waits_for_checkpoint(work):
            return
        from meshwright.trainer.loop import FinishEstimated, Noticed

        when = datetime.now(UTC)
        own = OwnHistory.of_sessions(self._kept.sessions(self._rollbacks), when)
        step = work.step_seconds.expected
        finish = finish_of(
            work,
            Operations(checkpoint_seconds=statistics.median(self._blocked) if self._blocked else None),
            own=own,
            period_seconds=work.steps * step if work.save_every is None else work.save_every * step,
        )
        line, *_ = finish.texts(datetime.now())
        node_days = own.up_seconds / 86400 * weighing.fleet.num_hosts
        self._kept.estimated(
            {
                "when": when.isoformat(timespec="seconds"),
                "step": last.step,
                "text": line,
                "finish_time": {end: _time(when, at) for end, at in _ends(finish.seconds)},
                "seconds_left": dataclasses.asdict(finish.seconds),
                "useful_share": dataclasses.asdict(finish.useful_share),
                "save_every_seconds": finish.save_every_seconds,
                "faults": own.faults,
                "node_days": node_days,
                "restart_seconds": statistics.fmean(own.restart_seconds) if own.restart_seconds else None,
            },
            self._rollbacks,
        )
        yield FinishEstimated(step=last.step, figures=_figures(finish, own, when))
        is_due = self._said is None or self._now() - self._said >= EVERY_SECONDS
        if is_due and last.seconds_left >= LEAST_SECONDS:
            self._said = self._now()
            hint = "; ".join(note for note in finish.notes if note.startswith("as configured"))
            self._on_event(Noticed(step=last.step, kind="finish", message=line, hint=hint))

    def _waits_for_checkpoint(self, work: Workload) -> bool:
        """Return whether the first checkpoint will soon say what nothing else does: how long steps wait."""
        if self._blocked or work.copy_seconds is not None or work.save_every is None:
            return False
        soon = work.save_every * work.step_seconds.expected < EVERY_SECONDS
        return soon and self._num_steps < 2 * work.save_every

    def _work(self, last: StepDone) -> Workload | None:
        """Return what is left to do, at the run's own pace; None without a prediction."""
        weighing, left = self._weighing, last.steps - last.step
        if weighing.prediction is None:
            return None
        compiled = weighing.compiled
        predicted = workload_of(weighing.prediction, left, weighing.fleet, compiled, weighing.config)
        step = last.seconds_left / left
        spread = 2 * _drift(list(self._steps))
        extra = predicted.extra_share
        if self._evaluations and weighing.config is not None:
            every = weighing.config.evaluation.every_steps * step
            extra = statistics.median(self._evaluations) / every
        return dataclasses.replace(
            predicted,
            step_seconds=Interval(low=max(step - spread, step / 2), expected=step, high=step + spread),
            start_seconds=0.0,
            extra_share=extra,
        )


def _drift(steps: Sequence[float]) -> float:
    """Return how much the pace varies: the deviation of the means of fifths of the steps, in their order.

    Steps of a machine that is shared are slow for minutes: their own deviation over the root of their number
    would promise more than is known.
    """
    size = len(steps) // LEAST_STEPS
    return statistics.stdev(statistics.fmean(steps[at * size :][:size]) for at in range(LEAST_STEPS))


def _ends(values: Range) -> tuple[tuple[str, float | None], ...]:
    return (("low", values.low), ("expected", values.expected), ("high", values.high))


def _time(when: datetime, seconds: float | None) -> str | None:
    """Return a time in UTC; None beyond the calendar."""
    try:
        return None if seconds is None else (when + timedelta(seconds=seconds)).isoformat(timespec="seconds")
    except OverflowError:
        return None


def _figures(finish: Finish, own: OwnHistory, when: datetime) -> dict[str, float]:
    """Return an estimate by the names that metrics.jsonl has."""
    low, expected, high = (at for _, at in _ends(finish.seconds))
    found = {
        "finish_seconds_left_low": low,
        "finish_seconds_left": expected,
        "finish_seconds_left_high": high,
        "finish_unix_seconds": when.timestamp() + (expected or 0.0),
        "finish_useful_share": finish.useful_share.expected,
        "finish_faults": float(own.faults),
    }
    return {name: value for name, value in found.items() if value is not None}
