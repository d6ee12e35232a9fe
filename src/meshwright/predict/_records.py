"""Hold what is predicted: the time of a step, and the hours and the cost of a run.

What a step will take on a fleet: the record. Times are estimates and carry an interval.

A whole run from the time of one step: its hours, its device-hours and its cost, each with an interval.

Counted: the steps. Not counted: compilation, evaluation, checkpoints, restarts and waiting for the machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.units import parse_count

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


SECONDS_PER_HOUR = 3600
MOST_TOKENS = 10**18  # 10,000 times what the largest published runs have read
MOST_STEPS = 10**18
MOST_PRICE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotal:
    """All steps of a run on a fleet.

    `tokens`: read in these steps (rows or images where the model has no sequences). `device_hours`: hours
    times devices of the fleet. `cost`: in the currency of the price; None where no price is given. The
    intervals are as wide as that of one step: its error is the same in each step and does not average out.
    """

    steps: int
    tokens: int
    seconds: Interval
    device_hours: Interval
    price_per_device_hour: float | None
    cost: Interval | None


def run_total(
    step_seconds: Interval,
    *,
    steps: int,
    tokens_per_step: int,
    num_devices: int,
    price_per_device_hour: float | None,
) -> RunTotal:
    """Return what `steps` steps take, and cost where the price of a device-hour is given.

    Raises:
        InputError: there are more than 1e18 steps.
    """
    if steps > MOST_STEPS:
        raise InputError("more than 1e18 steps cannot be a run", hint="set fewer steps")
    device_hours = step_seconds.times(steps * num_devices / SECONDS_PER_HOUR)
    price = price_per_device_hour
    return RunTotal(
        steps=steps,
        tokens=steps * tokens_per_step,
        seconds=step_seconds.times(steps),
        device_hours=device_hours,
        price_per_device_hour=price,
        cost=None if price is None else device_hours.times(price),
    )


def steps_for(tokens: float | str, tokens_per_step: int) -> int:
    """Return how many steps read at least `tokens`: a number, or a text such as "15B".

    Raises:
        InputError: the text is no count, or the count is not between 1 and 1e18.
    """
    count = parse_count(tokens) if isinstance(tokens, str) else tokens
    if not 1 <= count <= MOST_TOKENS:
        found = "more than 1e18 tokens" if count > MOST_TOKENS else f"{count} tokens"
        raise InputError(
            f"{found} cannot be the tokens of a run", hint="write those of the whole run: 15B, 2T or 300e9"
        )
    return -(-int(count) // tokens_per_step)


def checked_price(price: float | str) -> float:
    """Return the price of a device-hour as a number.

    Raises:
        InputError: it is no number, or not between zero and 1e9.
    """
    try:
        number = float(price)
    except ValueError:
        number = math.nan
    if not 0 < number <= MOST_PRICE:
        raise InputError(
            f"{str(price)[:40]!r} is no price of a device-hour",
            hint="write a number above zero without its currency: 1.80",
        )
    return number
