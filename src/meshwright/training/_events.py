"""What a run tells while it runs, in the order in which it happens. Who shows it stands above."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The devices are there and the data is open; compilation begins."""

    name: str
    num_parameters: int
    device_kind: str
    num_devices: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The train step is compiled: seconds from trace to executable, and its fingerprint."""

    seconds: float
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The `step`-th update of `steps` is done; `loss` (nats) is of the parameters before it.

    `seconds_left`: of the training steps that remain, at the median so far; evaluation not counted.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Held-out loss in nats of the parameters after `step` updates."""

    step: int
    held_out_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the trained model wrote (`text`) after a prompt from the held-out part."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over after `steps` updates; `interrupted` where the user stopped it."""

    steps: int
    interrupted: bool


Event = Started | Compiled | StepDone | Evaluated | Sampled | Finished
