"""Say in a run's log when it will be finished, by its own steps: after the first ones, then every half hour.

Imports: `finishing`, `predict`, `results`; `trainer.loop` late. Used by: `_train`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Any

from meshwright.finishing import Operations, finish_of, workload_of
from meshwright.predict import Interval
from meshwright.results import Weighing

LEAST_SECONDS = 3600.0  # left of a run: of a shorter one the time that is left says enough
EVERY_SECONDS = 1800.0
LEAST_STEPS = 5  # of this process, the first two left out, that replace the prediction
WARM_UP = 2


class LiveFinish:
    """A listener that passes each event on, and says when the run will be finished if that is far.

    The predicted step is replaced by the run's own, with the spread of its recent steps, and a checkpoint's
    seconds by those that were measured.
    """

    def __init__(self, weighing: Weighing, on_event: Callable[[Any], None]) -> None:
        self._weighing, self._on_event = weighing, on_event
        self._steps, self._num_steps = deque[float](maxlen=100), 0
        self._blocked: float | None = None
        self._said: float | None = None

    def __call__(self, event: Any) -> None:
        """Pass an event on, and say the finish if it is time."""
        from meshwright.trainer.loop import CheckpointSaved, StepDone

        self._on_event(event)
        if isinstance(event, CheckpointSaved):
            self._blocked = event.blocked_seconds
        elif isinstance(event, StepDone):
            self._num_steps += 1
            if self._num_steps > WARM_UP:
                self._steps.append((self._weighing.tokens_per_step or 0) / event.tokens_per_second)
            self._say(event.step, event.steps - event.step, event.seconds_left)

    def _say(self, step: int, steps_left: int, seconds_left: float) -> None:
        now = time.monotonic()
        is_due = self._said is None or now - self._said >= EVERY_SECONDS
        prediction = self._weighing.prediction
        if prediction is None or len(self._steps) < LEAST_STEPS or seconds_left < LEAST_SECONDS or not is_due:
            return
        from meshwright.trainer.loop import Noticed

        self._said = now
        weighing = self._weighing
        work = workload_of(prediction, steps_left, weighing.fleet, weighing.compiled, weighing.config)
        own = seconds_left / steps_left
        spread = statistics.stdev(self._steps) / len(self._steps) ** 0.5
        known = Interval(low=max(own - 2 * spread, own / 2), expected=own, high=own + 2 * spread)
        work = dataclasses.replace(work, step_seconds=known, start_seconds=0.0)
        finish = finish_of(work, Operations(checkpoint_seconds=self._blocked))
        line, *more = finish.texts(datetime.now())
        self._on_event(Noticed(step=step, kind="finish", message=line, hint="; ".join(more[-1:])))
