"""Find the longest sequence, or the largest batch, with which a run fits a fleet, by compiled programs.

Both ends are compiled: the largest value that fits, and the next one, which does not. Between them nothing is
estimated. Memory grows nearly in proportion, so each guess is a line through two compiled values.

Used by: users as `mw.largest`, and the command line as `meshwright weigh --longest` and `--largest-batch`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.api import weigh_unkept
from meshwright.config import Layout, Overrides, RunConfig, override_pairs
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.kept_records import keep_weighing
from meshwright.programs import Configured, fleet_of, program_named
from meshwright.reportable import OneLine
from meshwright.results import Phase, Weighing, ignore
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

Quantity = Literal["sequence_length", "batch"]
UNIT_TOKENS = 128  # a length is a multiple of it, and of the axes that split a sequence
SPLITTING = ("context", "tensor")
TOLERANCE = 1 / 64  # of a length, between what fits and what does not
MOST_COMPILED = 20
MOST_GROWTH = 8  # of a value, from one guess to the next
MOST = {"sequence_length": 2**24, "batch": 2**20}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Largest(OneLine):
    """The largest sequence length or batch with which a run fits, and its weighing.

    `of`: "sequence_length", in tokens; or "batch", in sequences of each replica in one microbatch. `value` is
    None if none fits; `weighing` is then of the least tried. `above`: the next value tried, which needs
    `above_bytes` on a device; None if the largest that was tried fits. If `above` is refused, `above_refused`
    says why, and `above_bytes` is None.
    """

    of: str
    value: int | None
    above: int | None
    above_bytes: int | None
    above_refused: str
    num_compiled: int
    weighing: Weighing

    @property
    def line(self) -> str:
        """The value, what the next one needs, and how many programs say so."""
        words = "tokens a sequence" if self.of == "sequence_length" else "sequences a replica and microbatch"
        found = "none fits" if self.value is None else f"{self.value:,} {words}"
        above = "" if self.above is None else f"; {self.above:,} is refused: {self.above_refused}"
        if self.above is not None and self.above_bytes is not None:
            above = f"; {self.above:,} need {format_bytes(self.above_bytes)}"
        where = f"{self.weighing.name} on {self.weighing.fleet.name}, layout {self.weighing.layout}"
        return f"LARGEST of {where}: {found}{above} ({self.num_compiled} programs compiled)"

    def __str__(self) -> str:
        return f"{self.line}\n{self.weighing}"

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `weigh --longest --json` prints: these fields, and the weighing's own."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "weighing": self.weighing.to_dict()}


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


def answer_largest(
    words: list[str],
    of: Quantity,
    on: str,
    layout: str | None,
    overrides: list[str],
    as_json: bool,
    verbose: bool,
) -> None:
    """Search the largest sequence length or batch that fits, and print it: `meshwright weigh --longest`.

    Raises:
        InputError: a script or a function is named, whose sequences and batch are its own.
    """
    from meshwright.cli import answer, phases, say_readings

    if not isinstance(program_named(words), Configured):
        hint = "name a preset, a TOML file or the folder of a model"
        raise InputError(f"{' '.join(words)} has a length and a batch of its own", hint=hint)
    say_readings(words[0], on, layout)
    with phases(f"searching with {words[0]} on {on}") as on_phase:

        def on_event(event: Phase) -> None:
            on_phase(event.name)

        made = largest(words[0], of, on=on, layout=layout, overrides=overrides, on_event=on_event)

    def page() -> tuple[RenderableType, ...]:
        from rich.text import Text

        from meshwright.report import renderable

        return Text(made.line, style="bold"), renderable(made.weighing, verbose=verbose)

    answer(as_json, made.to_dict(), page)
