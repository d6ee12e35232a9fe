"""What a step will take on a fleet: the record. Times are estimates and carry an interval."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("compute", "communication", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate: the true value lies in [low, high] nine times of ten, as far as is known.

    An end is None where no source says how far the estimate may be wrong on that side.
    """

    low: float | None
    expected: float
    high: float | None

    def times(self, factor: float) -> Interval:
        """Return the interval multiplied by `factor`: a number of steps, or a price."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Interval(low=low, expected=self.expected * factor, high=high)


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
    """A difference that would make the step faster, by a walk over the same schedule with it.

    `change`: as the command line takes it, where the walk covers all that it does; "" of a bound, which
    leaves something out. `saving_seconds`: of one step at the expected value; of a bound at most.
    `certainty`: what was walked, or what the bound leaves out.
    """

    what: str
    saving_seconds: float
    certainty: str
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step's time on a fleet, from a walk over the compiled schedule.

    `mfu`: model FLOPs / (step seconds x devices x dense peak); `hfu`: executed FLOPs likewise.
    `basis` says where the rates come from and how the interval was found, `interval_reasons` why it is wider
    than that of published runs, or lacks an end. `what_helps`: changes
    first, then bounds; savings of several do not add up.
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
    interval_reasons: tuple[str, ...] = ()

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """The step's seconds by compute, communication (its exposed part) and idle; they sum to the step."""
        found: dict[str, float] = {kind: 0.0 for kind in KINDS}
        for each in self.slices:
            found[each.kind] += each.exposed_seconds
        return found
