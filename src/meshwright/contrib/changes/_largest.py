"""Find the longest sequence, or the largest batch, with which a run fits a fleet, by compiled programs.

Both ends are compiled: the largest value that fits, and the next one, which does not. Between them nothing is
estimated. Memory grows nearly in proportion, so each guess is a line through two compiled values.

Used by: users as `mw.largest`, and the command line as `meshwright weigh --longest` and `--largest-batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from meshwright.api import weigh_unkept
from meshwright.config import Layout, Overrides, RunConfig, override_pairs
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.kept_records import keep_weighing
from meshwright.programs import fleet_of
from meshwright.results import Largest, Phase, Weighing, ignore

Quantity = Literal["sequence_length", "batch"]
UNIT_TOKENS = 128  # a length is a multiple of it, and of the axes that split a sequence
SPLITTING = ("context", "tensor")
TOLERANCE = 1 / 64  # of a length, between what fits and what does not
MOST_COMPILED = 20
MOST_GROWTH = 8  # of a value, from one guess to the next
MOST = {"sequence_length": 2**24, "batch": 2**20}


def largest(
    config: str | RunConfig,
    of: Quantity,
    *,
    on: str | Fleet,
    layout: str | None = None,
    overrides: Overrides = (),
    on_event: Callable[[Phase], None] = ignore,
) -> Largest:
    """Return the largest sequence length, or batch without accumulation, with which a run fits.

    Args:
        config, on, layout, overrides: as for `weigh`.
        of: "sequence_length": tokens of a sequence, with the microbatch as it is, to one part in 64. "batch":
            sequences of each replica in one microbatch, which is then the whole step, exactly.
        on_event: called with each `Phase` of the weighings.

    Raises:
        InputError: as for `weigh`; or the memory of the chip is not known; or the data have no sequences.
    """
    fleet = fleet_of(on)
    first = weigh_unkept(config, on=fleet, layout=layout, overrides=overrides, on_event=on_event)
    run = first.config
    if first.fits is None:
        hint = "name a chip of the catalog: `meshwright fleets`"
        raise InputError(f"how much memory {fleet.chip.name} has is not known, so anything fits", hint=hint)
    if run is None or (of == "sequence_length" and run.model.takes != "sequences"):
        raise InputError(f"{first.name} has no sequences", hint="name a Transformer's configuration")
    unit = 1 if of == "batch" else _unit(first.layout)
    weighed: dict[int, Weighing] = {}
    refused: dict[int, str] = {}

    def needed_of(value: int) -> int | None:
        changes = _changes(of, value)
        given = {"layout": str(first.layout), **dict(override_pairs(overrides)), **changes}
        try:
            made = weigh_unkept(config, on=fleet, overrides=given, on_event=on_event)
        except InputError as error:  # the model has fewer positions, or the layout does not divide it
            refused[value] = error.message
            return None
        weighed[value] = made
        return _needed(made)

    batch = run.batch
    start = batch.sequence_length if of == "sequence_length" else batch.microbatch_sequences or 1
    usable = _usable(first)
    assert usable is not None, "it fits or it does not"
    start = max(unit, start // unit * unit)
    fits, above = search(needed_of, usable, start, unit, MOST[of], exact=of == "batch")
    beyond = weighed.get(above) if above is not None else None
    weighing = keep_weighing(weighed[fits] if fits is not None else beyond or first)
    return Largest(
        of=of,
        value=fits,
        above=above,
        above_bytes=None if beyond is None else _needed(beyond),
        above_refused="" if above is None else refused.get(above, ""),
        num_compiled=len(weighed),
        weighing=weighing,
    )


def search(
    needed_of: Callable[[int], int | None], usable: int, start: int, unit: int, most: int, *, exact: bool
) -> tuple[int | None, int | None]:
    """Return the largest value tried that needs at most `usable`, and the least tried that does not.

    Args:
        needed_of: returns what a value needs; None if it cannot be had.
        start, unit, most: the first value; what all are multiples of; the largest.
        exact: go on until the two are neighbours; else until they are close.

    >>> search(lambda value: 10 * value + 5, 400, 8, 1, 1000, exact=True)
    (39, 40)
    """
    tried: dict[int, float] = {}
    low: int | None = None
    high: int | None = None
    value = start
    for _ in range(MOST_COMPILED):
        needed = needed_of(value)
        tried[value] = math.inf if needed is None else needed
        if tried[value] <= usable:
            low = value
        else:
            high = value
        if low is not None and low >= most:
            return low, None
        if high is not None and low is None and high <= unit:
            return None, high
        if low is not None and high is not None:
            step = unit if exact else max(unit, math.ceil(TOLERANCE * low / unit) * unit)
            if high - low <= step:
                break
        value = _guess(tried, usable, low, high, unit, most)
    return low, high


def _guess(
    tried: dict[int, float], usable: int, low: int | None, high: int | None, unit: int, most: int
) -> int:
    """Return the next value to try: where a line through two tried values meets `usable`."""
    if low is None or high is None:
        outer = 2 * low if low is not None else (high or 2) // 2
        finite = [each for each in sorted(tried) if math.isfinite(tried[each])]
        if len(finite) > 1 and low is not None:
            outer = max(2 * low, min(_meeting(finite[-2], finite[-1], tried, usable), MOST_GROWTH * low))
        return max(unit, min(outer // unit * unit, most))
    middle = (low + high) // 2
    if math.isfinite(tried[high]):
        meeting = _meeting(low, high, tried, usable)
        # The line's value and its neighbours close the gap; a bad line must not creep: half is taken in turn.
        middle = meeting if len(tried) % 2 else middle
    return min(max(low + unit, middle // unit * unit), (high - 1) // unit * unit)


def _needed(weighing: Weighing) -> int:
    if weighing.refusal is not None:
        return weighing.refusal.needed_bytes
    memory = weighing.ledger.memory
    return memory.reserved_bytes + memory.allowance_bytes


def _usable(weighing: Weighing) -> int | None:
    refusal = weighing.refusal
    return weighing.ledger.memory.usable_bytes if refusal is None else refusal.usable_bytes


def _meeting(one: int, other: int, tried: dict[int, float], usable: int) -> int:
    slope = (tried[other] - tried[one]) / (other - one)
    return other if slope <= 0 else int(one + (usable - tried[one]) / slope)


def _unit(layout: Layout) -> int:
    """Return what a length is a multiple of: each device along `context` and `tensor` has as many tokens."""
    return UNIT_TOKENS * math.prod(layout.size(axis) for axis in SPLITTING)


def _changes(of: Quantity, value: int) -> dict[str, int]:
    if of == "sequence_length":
        return {"batch.sequence_length": value}
    return {"batch.sequences_per_replica": value, "batch.microbatch_sequences": value}
