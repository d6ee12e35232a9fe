"""What a step will take on a fleet: the record. Times are estimates and carry an interval."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("compute", "communication", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate: the true value lies in [low, high] nine times of ten, as far as is known."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Seconds of one class of work in one step, on one device.

    `kind`: compute | communication | idle; idle are the gaps between kernels, in which nothing runs.
    `exposed_seconds`: the part that the step waits for: all of a compute class; of a collective what
    is not hidden behind computation. The exposed seconds of all slices sum to the step.
    """

    kind: str
    name: str  # matmul | attention | convolution | memory-bound | launch | all-gather[fsdp] ...
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """One thing that would make the step faster, by a walk over the same schedule without it.

    `saving_seconds`: of one step at the expected value, at most: `certainty` says what it leaves out.
    """

    what: str
    saving_seconds: float
    how: str
    certainty: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step's time on a fleet, from a walk over the compiled schedule.

    `mfu`: model FLOPs / (step seconds x devices x dense peak); `hfu`: executed FLOPs likewise.
    `basis` says where the rates come from and how the interval was found. `what_helps`: the largest
    saving first; savings of several do not add up.
    """

    step_seconds: Interval
    tokens_per_second_per_device: float | None
    mfu: float
    hfu: float
    peak_flops_per_second: float
    slices: tuple[Slice, ...]
    basis: str
    unpriced: tuple[str, ...]
    what_helps: tuple[Help, ...] = ()

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """The step's seconds by compute, communication (its exposed part) and idle; they sum to the step."""
        found: dict[str, float] = {kind: 0.0 for kind in KINDS}
        for each in self.slices:
            found[each.kind] += each.exposed_seconds
        return found
