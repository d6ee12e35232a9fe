"""Hold the prediction of a step, and turn it into the hours, the cost and the FLOPs of a run.

All times and costs are estimates with an interval.
Counted for a run: its steps. Not counted: compilation, evaluation, checkpoints, restarts and waiting for the
machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import FlopLedger
from meshwright.units import parse_count

KINDS = ("compute", "communication", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate: as far as is known, the true value is in [low, high] nine times in ten.

    An end is None where no source bounds the error on that side.
    """

    low: float | None
    expected: float
    high: float | None

    def times(self, factor: float) -> Interval:
        """Return the interval multiplied by `factor`: a number of steps, or a price.

        >>> Interval(low=1.0, expected=1.5, high=None).times(10)
        Interval(low=10.0, expected=15.0, high=None)
        """
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Interval(low=low, expected=self.expected * factor, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Seconds of one class of work in one step, on one device.

    `kind`: compute | communication | idle. Idle time is the gaps between kernels, in which nothing runs.
    `exposed_seconds`: the part that the step waits for. For a compute class this is all of it, for a
    collective the part that is not hidden behind computation. The exposed seconds of all slices sum to the
    step. `recomputed_seconds`: the part in which the backward pass runs kernels again (rematerialisation).
    """

    kind: str
    name: str  # matmul | attention | convolution | memory-bound | launch | all-gather[fsdp] ...
    seconds: float
    exposed_seconds: float
    recomputed_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """A difference that would make the step faster, estimated by a walk over the same schedule with it.

    `change`: the option on the command line, where the walk covers its whole effect; "" for a bound, which
    leaves something out.
    `saving_seconds`: the expected saving in one step; for a bound, the largest possible.
    `certainty`: what was walked, or what the bound leaves out.
    """

    what: str
    saving_seconds: float
    certainty: str
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The time of a step on a fleet, from a walk over the compiled schedule.

    `mfu`: model FLOPs / (step seconds x devices x dense peak); `hfu`: the same with executed FLOPs.
    Both are None where they are not known: no format has a peak, or unpriced work leaves the step too short.
    `peak_flops_per_second`: the dense peak that both use; 0 where no format has one.
    `basis`: the sources of the rates, and how the interval was found. `interval_reasons`: why the interval is
    wider than that of published runs, or lacks an end. `what_helps`: changes first, then bounds. Their
    savings do not add up.
    """

    step_seconds: Interval
    tokens_per_second_per_device: float | None
    mfu: float | None
    hfu: float | None
    peak_flops_per_second: float
    slices: tuple[Slice, ...]
    basis: str
    unpriced: tuple[str, ...]
    what_helps: tuple[Speedup, ...] = ()
    interval_reasons: tuple[str, ...] = ()

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """Exposed seconds by compute, communication and idle, which sum to the step."""
        seconds: dict[str, float] = {kind: 0.0 for kind in KINDS}
        for part in self.slices:
            seconds[part.kind] += part.exposed_seconds
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Hold how busy each stream of one device is in equal spans of a step of `seconds`.

    `shares`: by stream (compute | wait | inside | between) and class of work, the share of every span that
    the class takes. Those of `wait` are the exposed parts of collectives. What `compute` and `wait` leave of
    a span is gaps between kernels.
    """

    seconds: float
    shares: dict[str, dict[str, tuple[float, ...]]]


SECONDS_PER_HOUR = 3600
MOST_TOKENS = 10**18  # 10,000 times what the largest published runs have read
MOST_STEPS = 10**18
MOST_PRICE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotal:
    """All steps of a run on a fleet.

    `tokens`: the tokens read in these steps (rows or images where the model has no sequences).
    `device_hours`: hours times devices of the fleet. `cost`: in the currency of the price; None where no
    price is given. The intervals are as wide as that of one step: the error is the same in each step and does
    not average out.
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
    """Return the hours of `steps` steps, and their cost where the price of a device-hour is given.

    Raises:
        InputError: there are more than 1e18 steps.
    """
    if steps > MOST_STEPS:
        raise InputError("a run cannot have more than 1e18 steps", hint="set fewer steps")
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


def whole_run(
    prediction: Prediction | None, num_steps: int | None, tokens_per_step: int | None, fleet: Fleet
) -> RunTotal | None:
    """Return the hours and cost of a run on a fleet; None if its steps or their time are unknown."""
    if prediction is None or num_steps is None or tokens_per_step is None:
        return None
    return run_total(
        prediction.step_seconds,
        steps=num_steps,
        tokens_per_step=tokens_per_step,
        num_devices=fleet.num_devices,
        price_per_device_hour=fleet.price_per_device_hour,
    )


REPORTING_THRESHOLD_FLOPS = 10**26
"""Training FLOPs of one run from which US Executive Order 14110 (2023, section 4.2.b; revoked in 2025)
required a report, and California's SB 53 (2025) does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlops:
    """FLOPs of all steps of a run, whether or not their time is known.

    `model`: the model FLOPs of a step times the steps. `rule_6nd`: 6 x parameters x tokens, as most published
    totals are counted (GPT-3's 3.14e23 among them); None where the step has none. `share_of_threshold`:
    `model` divided by `reporting_threshold`.
    """

    model: int
    rule_6nd: int | None
    reporting_threshold: int
    share_of_threshold: float


def run_flops(step: FlopLedger, num_steps: int | None) -> RunFlops | None:
    """Return the FLOPs of `num_steps` times a step; None if the number of steps is unknown."""
    if num_steps is None:
        return None
    model = step.model * num_steps
    return RunFlops(
        model=model,
        rule_6nd=None if step.rule_6nd is None else step.rule_6nd * num_steps,
        reporting_threshold=REPORTING_THRESHOLD_FLOPS,
        share_of_threshold=model / REPORTING_THRESHOLD_FLOPS,
    )


def steps_for(tokens: float | str, tokens_per_step: int) -> int:
    """Return the smallest number of steps that reads at least `tokens`: a number, or a text such as "15B".

    Raises:
        InputError: the text is no count, or the count is not between 1 and 1e18.

    >>> steps_for("15B", tokens_per_step=4_000_000)
    3750
    """
    count = parse_count(tokens) if isinstance(tokens, str) else tokens
    if not 1 <= count <= MOST_TOKENS:
        given = "more than 1e18 tokens" if count > MOST_TOKENS else f"{count} tokens"
        raise InputError(
            f"{given} cannot be the tokens of a run", hint="write those of the whole run: 15B, 2T or 300e9"
        )
    return -(-int(count) // tokens_per_step)


def checked_price(price: float | str) -> float:
    """Return the price of a device-hour as a number.

    Raises:
        InputError: it is no number, or is not above zero and at most 1e9.

    >>> checked_price("1.80")
    1.8
    """
    try:
        number = float(price)
    except ValueError:
        number = math.nan
    if not 0 < number <= MOST_PRICE:
        raise InputError(
            f"{str(price)[:40]!r} is not a price of a device-hour",
            hint="write a number above zero without its currency: 1.80",
        )
    return number


def checked_seconds(seconds: float) -> float:
    """Return the seconds of a step that takes time.

    Raises:
        InputError: it takes none, since its program is empty.
    """
    if seconds > 0:
        return seconds
    hint = "let it return what it computes: XLA removes all that nothing reads"
    raise InputError("the compiled program runs nothing, and takes no time", hint=hint)
