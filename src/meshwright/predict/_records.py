"""What a step will take on a fleet: the record. Times are estimates and carry an interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate: the true value lies in [low, high] nine times of ten, as far as is known."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Seconds of one class of work in one step, on one device.

    `exposed_seconds`: the part that the step waits for: all of a compute class; of a collective what
    is not hidden behind computation. The exposed seconds of all slices sum to the step.
    """

    name: str  # matmul | attention | convolution | memory-bound | launch | all-gather[fsdp] ...
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step's time on a fleet, from a walk over the compiled schedule.

    `mfu`: model FLOPs / (step seconds x devices x dense peak); `hfu`: executed FLOPs likewise.
    `basis` says where the rates come from and how the interval was found.
    """

    step_seconds: Interval
    tokens_per_second_per_device: float | None
    mfu: float
    hfu: float
    peak_flops_per_second: float
    slices: tuple[Slice, ...]
    basis: str
    unpriced: tuple[str, ...]
