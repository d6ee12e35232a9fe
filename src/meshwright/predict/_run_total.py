"""A whole run from the time of one step: its hours, its device-hours and its cost, each with an interval.

Counted: the steps. Not counted: compilation, evaluation, checkpoints, restarts and waiting for the machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.units import parse_count

from ._records import Interval

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
