"""Record the steps of a run, and detect bad steps and loss spikes.

A step is bad if its update was not applied, because its loss or gradient was not finite. `first_bad_tensor`
finds where the first such value appears. `Recorder` reports each step to a listener, writes it to the run's
files, and keeps what the measurement needs.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..config import FaultConfig, RunConfig
from ..measure import StepClock
from ._events import EpochDone, Evaluated, Event, FirstStepsDone, Noticed, NoticeKind, StepDone
from ._files import NoFiles, RunFiles

Tree = Any
WINDOW_STEPS = 100
LEAST_STEPS = 20  # needed to estimate a deviation
PARTS = ("batch", "parameters", "loss", "gradients")  # in order: a bad value in one spreads to the next


def what_is_bad(values: Mapping[str, float]) -> str:
    """Describe a step whose update was not applied, as in "loss is nan"; return "" for a good step.

    A float16 step that overflows at a loss scale above 1 is not bad: the right scale is still being found.
    """
    if values["applied"] or values.get("loss_scale", 1.0) > 1.0:
        return ""
    name = next((n for n in ("loss", "gradient_norm") if not math.isfinite(values[n])), "loss")
    return f"{name.replace('_', ' ')} is {values[name]}"


class BadSteps:
    """The number of bad steps in a row.

    After a rollback, good steps reset the number only once the run is beyond the last bad step.
    """

    def __init__(self, faults: FaultConfig) -> None:
        self._faults = faults
        self._last = 0
        self.in_row = 0

    def good(self, step: int) -> None:
        if step > self._last:
            self.in_row = 0

    def bad(self, step: int) -> str:
        """Count a bad step, and return "stop", "skip" or "rollback"."""
        self._last = max(self._last, step)
        self.in_row += 1
        return "stop" if self.in_row >= self._faults.most_bad_steps else self._faults.bad_step


class Spikes:
    """Flag a loss that is far above the last hundred."""

    def __init__(self, sigmas: float) -> None:
        self._sigmas = sigmas
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def judge(self, loss: float) -> str:
        """Describe why a finite loss is a spike; return "" if it is not."""
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < LEAST_STEPS:
            return ""
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if not deviation or loss <= mean + self._sigmas * deviation:
            return ""
        above = (loss - mean) / deviation
        return f"loss {loss:.4g} is {above:.1f} standard deviations above the {mean:.4g} before it"


def first_bad_tensor(inspect: Callable[[Tree, Tree], Tree], state: Tree, batch: Tree, steps_ago: int) -> str:
    """Describe the first array that holds values that are not finite.

    The step is repeated without its update, with the current parameters.

    Args:
        steps_ago: the number of steps that the state has made since it read `batch`, that step included.
    """
    try:
        counts = jax.block_until_ready(inspect({**state, "step": state["step"] - steps_ago}, batch))
    except RuntimeError as failed:  # raised by jax, mostly for lack of memory
        return f"which tensor came first could not be looked at: {str(failed).splitlines()[0]}"
    for part in PARTS:
        leaves = jax.tree_util.tree_leaves_with_path({part: counts[part]})
        found = [(path, int(count)) for path, count in leaves if int(count)]
        if found:
            path, count = found[0]
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            numbers = f", {count:,} of its numbers" if count > 1 else ""
            others = f"; and {len(found) - 1} other arrays of the {part}" if len(found) > 1 else ""
            return f"first not finite: {name}{numbers}{others}"
    return "done once more, all is finite: look at the machine's memory"


BASIC = ("loss", "gradient_norm", "learning_rate", "applied", "loss_scale")  # every model has these metrics
FIRST_STEPS = 5  # timed steps before the comparison with the prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one step on all devices, as weighed, and the fleet's dense peak."""

    model_flops: int
    executed_flops: int
    peak_flops_per_second: float


class Recorder:
    """Record losses, step times and epochs, in the run's files and for a listener.

    Args:
        tell: the listener, called with each event.
        work: None if the fleet's peak is unknown; then no MFU is reported.
        steps_per_epoch: None if the data has no epochs.
        memory_in_use: returns the bytes in use on the fullest device, or None if the runtime does not report
            them.
    """

    def __init__(
        self,
        config: RunConfig,
        files: RunFiles | NoFiles,
        tell: Callable[[Event], None],
        steps: int,
        *,
        work: StepFlops | None = None,
        steps_per_epoch: int | None = None,
        memory_in_use: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.clock = StepClock()
        self.losses: dict[int, float] = {}
        self.held_out_losses: dict[int, float] = {}
        self.held_out_metrics: dict[int, dict[str, float]] = {}
        self.argument_bytes = 0
        self.num_bad_steps = 0
        self._config, self._files, self._listener, self._steps = config, files, tell, steps
        self._work, self._memory_in_use = work, memory_in_use
        self._spikes = Spikes(config.faults.spike_sigmas)
        self._per_epoch = steps_per_epoch
        self._epoch: list[dict[str, float]] = []  # metrics of each step of the current epoch
        self._epoch_seconds = 0.0

    def remember(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take over losses and held-out metrics from the lines of a resumed run's metrics.jsonl."""
        for line in lines:
            step = int(line["step"])
            if isinstance(line.get("loss"), float):
                self.losses[step] = line["loss"]
            if isinstance(line.get("held_out_loss"), float):
                names = [name for name in line if name.startswith("held_out_") and name != "held_out_loss"]
                self._keep_held_out(step, line["held_out_loss"], {n[9:]: line[n] for n in names})

    def step(self, step: int, batch_index: int, values: dict[str, float], waited_seconds: float) -> None:
        """Record a good or bad step: its metrics, and how long the devices waited for its batch."""
        seconds = self.clock.tick()
        rate = self._config.batch.tokens_per_step / seconds
        mfu, hfu = self._shares(seconds)
        more = {name: value for name, value in values.items() if name not in BASIC}
        line = {**values, "seconds": seconds, "tokens_per_second": rate, "input_wait_seconds": waited_seconds}
        optional = {"mfu": mfu, "hfu": hfu, "memory_in_use_bytes": self._memory_in_use()}
        line |= {name: float(value) for name, value in optional.items() if value is not None}
        self._files.write(step, "train", _finite(line))
        if what_is_bad(values):
            self.num_bad_steps += 1
        elif math.isfinite(values["loss"]):
            self.losses[step] = values["loss"]
            if spike := self._spikes.judge(values["loss"]):
                self.notice(step, "spike", f"step {step}: {spike}")
        self.tell(
            StepDone(
                step=step,
                steps=self._steps,
                loss=values["loss"],
                gradient_norm=values["gradient_norm"],
                learning_rate=values["learning_rate"],
                tokens_per_second=rate,
                seconds_left=self.clock.usual_seconds() * (self._steps - step),
                mfu=mfu,
                hfu=hfu,
                metrics=more,
            )
        )
        self._first_steps()
        self._count_epoch(step, batch_index + 1, seconds + waited_seconds, {"loss": values["loss"], **more})

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Record the held-out metrics of the parameters after `step` updates."""
        line = {f"held_out_{name}": value for name, value in values.items()}
        self._files.write(step, "held-out", _finite(line))
        if not math.isfinite(values["loss"]):
            hint = "the parameters may have outgrown the format: look at the training loss, lower the rate"
            self.notice(step, "held-out", f"step {step}: the held-out loss is {values['loss']}", hint)
        more = {name: value for name, value in values.items() if name != "loss"}
        self._keep_held_out(step, values["loss"], more)
        self._files.retry()
        self.tell(Evaluated(step=step, held_out_loss=values["loss"], metrics=more))

    def notice(self, step: int, kind: NoticeKind, message: str, hint: str = "") -> None:
        """Report something that a person should know."""
        self.tell(Noticed(step=step, kind=kind, message=message, hint=hint))

    def tell(self, event: Event) -> None:
        """Pass an event to the listener; a notice is written to the files first.

        Files that cannot be written are reported too, each at most once an hour.
        """
        if isinstance(event, Noticed):
            self._files.notice(event.step, event.kind, event.message, event.hint)
        self._listener(event)
        for why, names in self._files.untold().items():
            notice = not_written(max(self.losses, default=0), why, names)
            self._files.notice(notice.step, notice.kind, notice.message, notice.hint)
            self._listener(notice)

    def _keep_held_out(self, step: int, loss: float, more: dict[str, float]) -> None:
        if math.isfinite(loss):
            self.held_out_losses[step] = loss
            if more:
                self.held_out_metrics[step] = more

    def _shares(self, seconds: float) -> tuple[float | None, float | None]:
        """Return the MFU and HFU of a step; None for both if the fleet's peak is unknown."""
        if self._work is None:
            return None, None
        possible = seconds * self._work.peak_flops_per_second
        return self._work.model_flops / possible, self._work.executed_flops / possible

    def _first_steps(self) -> None:
        spread = self.clock.spread()
        if spread is not None and spread.num_steps == FIRST_STEPS:
            self.tell(FirstStepsDone(step_seconds=spread, argument_bytes_per_device=self.argument_bytes))

    def _count_epoch(self, step: int, num_batches: int, seconds: float, values: dict[str, float]) -> None:
        """Add a step to its epoch, and report the epoch when it is complete.

        An epoch that began in another process, or that contains a rollback, is not reported: it was not timed
        as a whole.
        """
        if self._per_epoch is None:
            return
        self._epoch.append(values)
        self._epoch_seconds += seconds
        if num_batches % self._per_epoch:
            return
        steps, seconds = self._epoch, self._epoch_seconds
        self._epoch, self._epoch_seconds = [], 0.0
        if len(steps) != self._per_epoch:
            return
        means = {name: statistics.fmean(each[name] for each in steps) for name in steps[0]}
        done = EpochDone(epoch=num_batches // self._per_epoch, step=step, seconds=seconds, metrics=means)
        line = {"epoch": float(done.epoch), "epoch_seconds": seconds}
        line |= {f"epoch_{name}": value for name, value in means.items()}
        self._files.write(step, "epoch", _finite(line))
        self.tell(done)


def not_written(step: int, why: str, names: Sequence[str]) -> Noticed:
    """Return the notice that files of the run's folder cannot be written."""
    words = f"{', '.join(names)} cannot be written: {why}"
    hint = "make room on that disk: the run goes on, and what waits in memory is written when there is some"
    return Noticed(step=step, kind="disk", message=words, hint=hint)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace values that are not finite by None, because JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
