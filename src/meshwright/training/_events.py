"""Define the events of a run, and the clock of what its time is spent on.

What a run spends its time on, by the host's clock.

What a run tells while it runs, in the order in which it happens. Who shows it stands above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..reconciliation import Spread

Phase = Literal["start-up", "compile", "restore", "step", "input wait", "evaluation", "checkpoint", "end"]


class Phases:
    """Seconds by phase, which add up to all that has passed; a phase within another interrupts it.

    Args:
        now: the clock in seconds; it never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = self.began = now()
        self._seconds: dict[str, float] = {}
        self.current: Phase = "start-up"

    def enter(self, phase: Phase) -> None:
        """From now on it is this phase."""
        now = self._now()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        self.current, self._since = phase, now

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """This phase within the block, and the one before it after it."""
        before = self.current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """By phase, until now."""
        self.enter(self.current)
        return dict(self._seconds)


NoticeKind = Literal["resumed", "bad step", "spike", "checkpoint", "disk", "held-out", "signal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The devices are there and the data is open; compilation begins. `folder` is the run's."""

    name: str
    num_parameters: int
    device_kind: str
    num_devices: int
    steps: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The train step is compiled: seconds from trace to executable, and its fingerprint."""

    seconds: float
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The `step`-th update of `steps` is done; `loss` (nats) is of the parameters before it.

    `metrics`: what else the model tells of the batch ("accuracy"). `mfu`, `hfu`: model and executed FLOPs of
    the weighed program over the step's seconds and the fleet's dense peak; None where it has none.
    `seconds_left`: of the training steps that remain, at the median so far; evaluation not counted.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float
    seconds_left: float
    mfu: float | None = None
    hfu: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepsDone:
    """Enough steps are timed to set them beside what was predicted; `argument_bytes_per_device` are live."""

    step_seconds: Spread
    argument_bytes_per_device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """Every example of the training part has been seen `epoch` times.

    `seconds`: of its steps and of their waits for input; evaluation and checkpoints are not in it. `metrics`:
    means over its steps ("loss", "accuracy").
    """

    epoch: int
    step: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Held-out loss in nats of the parameters after `step` updates, and what else the model tells."""

    step: int
    held_out_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is on the disk, whole; steps waited `blocked_seconds` for it."""

    step: int
    num_bytes: int
    blocked_seconds: float
    write_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """Something a person should know, though the run goes on; `hint` may be empty."""

    step: int
    kind: NoticeKind
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the trained model wrote (`text`) after a prompt from the held-out part."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over after `steps` updates; `interrupted` where a signal stopped it."""

    steps: int
    interrupted: bool


Event = (
    Started
    | Compiled
    | StepDone
    | FirstStepsDone
    | EpochDone
    | Evaluated
    | CheckpointSaved
    | Noticed
    | Sampled
    | Finished
)
