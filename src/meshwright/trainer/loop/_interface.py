"""Define what a run takes and what it reports: `RunRequest`, the events, and the time of each phase.

The events are listed in the order in which they first occur. The caller of `run_training` receives and shows
them. `PhaseClock` measures on the host's clock how much time the run spends in each phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from meshwright.config import Layout, RunConfig
from meshwright.hardware import Fleet
from meshwright.measure import Percentiles
from meshwright.trainer.data import Dataset, SourceEpochs

from ._run_folder import RunFolder

RunPhase = Literal[
    "start-up", "compile", "restore", "step", "input wait", "evaluation", "checkpoint", "page", "end"
]
FIRST_TRACED, LAST_TRACED = 3, 5
"""The steps of a process that a trace holds: the first two still fill caches."""
NoticeKind = Literal[
    "resumed", "bad step", "loss scale", "spike", "checkpoint", "disk", "held-out", "signal", "autotuning",
    "data", "tracker", "finish",
]  # fmt: skip


class PhaseClock:
    """Seconds spent in each phase, which sum to all elapsed time; a phase within another interrupts it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._seconds: dict[str, float] = {}
        self.current: RunPhase = "start-up"

    def enter(self, phase: RunPhase) -> None:
        """End the current phase, and enter `phase`."""
        now = self._now()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        self.current, self._since = phase, now

    @contextmanager
    def of(self, phase: RunPhase) -> Iterator[None]:
        """Enter `phase` for the block, and return to the previous phase after it."""
        before = self.current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase so far."""
        self.enter(self.current)
        return dict(self._seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Report that the devices are ready and the data is open; compilation begins next.

    `sources`: what the run will read of each source of tokens; empty for other data.
    """

    name: str
    num_parameters: int
    device_kind: str
    num_devices: int
    steps: int
    folder: Path
    sources: tuple[SourceEpochs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompiled:
    """Report that the train step is compiled, which took `seconds` from the start of tracing."""

    seconds: float
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Report that update `step` of `steps` is done.

    `loss`: in nats, of the parameters before the update. `metrics`: the model's other metrics of the batch
    ("accuracy"). `mfu`, `hfu`: model and executed FLOPs of the weighed program, divided by the step's seconds
    times the fleet's dense peak; None if the peak is unknown. `seconds_left`: of the remaining training
    steps, at the median so far; evaluation is not counted. `batch_unit`: what `tokens_per_second` counts.
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
    batch_unit: str = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepsDone:
    """Report that enough steps are timed to compare them, and the live bytes, with the prediction."""

    step_seconds: Percentiles
    argument_bytes_per_device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """Report that every example of the training split has been seen `epoch` times.

    `seconds`: of the epoch's steps and of their waits for input; evaluation and checkpoints are not counted.
    `metrics`: means over the epoch's steps ("loss", "accuracy").
    """

    epoch: int
    step: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Report the held-out metrics of the parameters after `step` updates.

    `held_out_loss`: in nats. `metrics`: the model's other metrics.
    """

    step: int
    held_out_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """Report that a complete checkpoint is on disk.

    `blocked_seconds`: how long the steps waited for it. `write_seconds`: the time in the background.
    """

    step: int
    num_bytes: int
    blocked_seconds: float
    write_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """Report something that a person should know while the run continues; `hint` may be empty."""

    step: int
    kind: NoticeKind
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEstimated:
    """Report when the run will be finished, as expected after `step` updates by what has happened so far.

    `figures`: by their names in metrics.jsonl (docs/explanation/finish.md); a missing end is left out.
    """

    step: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Report the text that the trained model generated after a prompt from the held-out split."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Report that the run is over after `steps` updates, and whether a signal stopped it."""

    steps: int
    interrupted: bool


Event = (
    Started | StepCompiled | StepDone | FirstStepsDone | EpochDone
    | Evaluated | CheckpointSaved | Noticed | FinishEstimated | Sampled | Finished
)  # fmt: skip
Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one step on all devices, as weighed, and the fleet's dense peak."""

    model_flops: int
    executed_flops: int
    peak_flops_per_second: float


@runtime_checkable
class FirstParameters(Protocol):
    """Parameters to begin a run with, in place of random ones.

    `documents`: files of the run's folder, by name, that say where they come from. `notes`: what is left out
    of what was found there.
    """

    notes: tuple[str, ...]

    @property
    def documents(self) -> dict[str, str]:
        """Files of the run's folder by name."""
        ...

    def parameters(self, abstract: Any) -> Any:
        """Return them as `abstract` (a tree of `jax.ShapeDtypeStruct`) lays them out."""
        ...


@runtime_checkable
class Page(Protocol):
    """The page of a run, which is drawn again while the run is under way."""

    def is_due(self) -> bool:
        """Return whether it is time to draw it again."""
        ...

    def draw(self, record: Listener) -> None:
        """Draw it from the run's files; must not raise.

        Args:
            record: takes what is reckoned for the page, writes it to the run's files, and reports it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run that `run_training` is to make: its arguments, checked and resolved.

    `config`: trainable, with its batch resolved for `layout`. `devices`: those of `fleet`, from `devices_of`.
    `folder`: after `make`. `dataset`: the config's, opened. `steps`: of the whole run; the learning rate
    follows the config's number of steps.
    `flops`: for MFU and HFU. `about`: JSON data that the checkpoints carry in addition to the config.
    `documents`: texts to write into the folder, by name. `on_event`: called with each event, in this thread.
    `first_weights`: the parameters to begin with; those of the seed if None.
    `profile`: the folder for a trace of a few steps by jax.profiler; None writes none.
    `times_kernels`: whether to time kernels on the GPU and to write the config's `autotune_results`, where
    that file is otherwise read.
    `page`: drawn between two steps whenever it is due; its time is no step's.
    """

    config: RunConfig
    fleet: Fleet
    layout: Layout
    devices: Sequence[Any]
    folder: RunFolder
    dataset: Dataset
    steps: int
    flops: StepFlops | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)
    on_event: Listener = lambda event: None
    first_weights: FirstParameters | None = None
    profile: Path | None = None
    times_kernels: bool = False
    page: Page | None = None
