"""Weigh what a job would run on what it asks for, and say whether it may go.

It is refused if it does not fit, costs more than it may, or takes longer than it may, its own time limit
included. Then changes are weighed too, the most promising first, until one is found with which it may go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import weigh
from meshwright.config import Overrides, RunConfig, load_config, overridden
from meshwright.contrib.prices import with_list_price
from meshwright.errors import InputError, MeshwrightError
from meshwright.hardware import Fleet, fleet_reading
from meshwright.planning import Suggestion
from meshwright.predict import Interval
from meshwright.programs import RunLength, run_length_of
from meshwright.reportable import Reportable
from meshwright.results import Weighing
from meshwright.units import format_bytes, format_price, format_seconds, parse_count

from ._jobs import Job, read_job
from ._recipe import Recipe, described, first_words
from ._trainers import Configured, Reading

if TYPE_CHECKING:
    from meshwright.report import Document

SCHEMA = 1
REFUSED = 3  # the exit status of a job that may not go
MOST_TRIED = 3  # changes that are weighed
DAY = 86_400.0
Weigher = Callable[..., Weighing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a job may cost, in the currency of the price, and how many days it may take; None is no limit."""

    max_cost: float | None = None
    max_days: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_cost", self.max_cost), ("max_days", self.max_days)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} = {value} is no limit", hint="write a number above zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """A change with which a job may go. `is_weighed`: a weighing of it says so, and not arithmetic alone."""

    change: str
    words: str
    is_weighed: bool


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Gate(Reportable):
    """A job, weighed.

    `reasons`: why it may not go; empty if it may. `cures`: changes with which it may. `notes`: what was
    assumed. `price_words`: the price and where it is from.
    """

    job: Job
    weighing: Weighing
    limits: Limits
    reasons: tuple[str, ...]
    cures: tuple[Cure, ...] = ()
    notes: tuple[str, ...] = ()
    price_words: str = ""

    @property
    def may_go(self) -> bool:
        """Return whether nothing refuses it."""
        return not self.reasons

    @property
    def seconds_asked(self) -> float | None:
        """The job's own time limit."""
        return None if self.job.launch is None else self.job.launch.seconds

    @property
    def seconds(self) -> float | None:
        """Expected seconds of the whole run; None if its steps or their time are not known."""
        total = self.weighing.run_total
        return None if total is None else total.seconds.expected

    @property
    def line(self) -> str:
        """The verdict."""
        verdict = "may go" if self.may_go else "refused"
        return f"{self.job.file} on {self.weighing.fleet.name}: {verdict}"

    def document(self) -> Document:
        """Return its report."""
        from ._gate_page import gate_document

        return gate_document(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `gate --json` prints."""
        launch, program = self.job.launch, self.job.program
        total = self.weighing.run_total
        seen = {} if isinstance(program, Configured) else program.seen.understood
        left = {} if isinstance(program, Configured) else program.seen.ignored
        return {
            "schema": SCHEMA,
            "job": self.job.file,
            "may_go": self.may_go,
            "reasons": list(self.reasons),
            "changes": [dataclasses.asdict(cure) for cure in self.cures],
            "launcher": None if launch is None else {
                "kind": launch.kind, "understood": dict(launch.seen.understood),
                "ignored": dict(launch.seen.ignored),
                "time_limit_seconds": launch.seconds,
            },
            "program": {
                "kind": "a configuration" if isinstance(program, Configured) else program.kind,
                "file": program.line if isinstance(program, Configured) else program.file,
                "understood": dict(seen),
                "ignored": dict(left),
            },
            "limits": dataclasses.asdict(self.limits),
            "price": self.price_words,
            "fits": self.weighing.fits,
            "hours": None if self.seconds is None else self.seconds / 3600,
            "cost": None if total is None or total.cost is None else total.cost.expected,
            "notes": list(self.notes),
            "weighing": self.weighing.to_dict(),
        }  # fmt: skip


def gate(
    job: Path | str,
    *,
    on: str | None = None,
    overrides: Overrides = (),
    run: RunLength | None = None,
    limits: Limits | None = None,
    reading: Reading | None = None,
    weigher: Weigher = weigh,
    on_event: Callable[[str], object] = lambda words: None,
) -> Gate:
    """Read a job, weigh what it would run on what it asks for, and say whether it may go.

    Args:
        job: a launcher's file (sbatch, Kubernetes, SkyPilot) or a recipe's (torchtitan, axolotl,
            LLaMA-Factory, TrainingArguments, Megatron-LM's arguments).
        on: the fleet, or the chip alone with the job's counts; the job's own if not given.
        overrides: settings that count more than the recipe's.
        run: the tokens of the run, and the price of a device-hour; the list price if not given.
        limits: what it may cost and take.
        reading: what the job trains, and keys to weigh without.
        weigher: weighs a configuration, as `mw.weigh` does.
        on_event: called with what is being done.

    Raises:
        InputError: the job is not understood; or a limit needs what is not known: the length, or a price.
        CompileError: the compiler failed.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".sh") as job:
    ...     _ = job.write("#SBATCH --gpus=h100:8\\nmeshwright train linear --steps 10\\n")
    ...     job.flush()
    ...     gate(job.name, limits=Limits(max_cost=100)).may_go
    True
    """
    return gate_of(
        read_job(Path(job), reading or Reading()),
        on=on, overrides=overrides, run=run, limits=limits, weigher=weigher, on_event=on_event,
    )  # fmt: skip


def gate_of(
    job: Job,
    *,
    on: str | None = None,
    overrides: Overrides = (),
    run: RunLength | None = None,
    limits: Limits | None = None,
    weigher: Weigher = weigh,
    on_event: Callable[[str], object] = lambda words: None,
) -> Gate:
    """Weigh a job that was read; see `gate`."""
    limits, length = limits or Limits(), run_length_of(run)
    if job.launch is None and on is None:
        what = f"{job.file} is a recipe, and does not say what it runs on"
        raise InputError(what, hint="name the fleet: --on 8xH100")
    name = on if job.launch is None else job.launch.fleet_on(on)
    assert name is not None, "a recipe has a fleet of the caller's"
    fleet, price_words = _priced(Fleet.parse(name), length)
    tokens = None if length.tokens is None else str(length.tokens)
    config, layout, notes = _config(job.program, fleet, overrides, tokens)
    on_event(f"weighing {config.name} on {fleet.name}")
    made = weigher(config, on=fleet, layout=layout)
    launched = () if job.launch is None else job.launch.notes
    reading = fleet_reading(name)
    notes = first_words([*notes, *launched, *([reading] if reading else [])])
    gated = Gate(job=job, weighing=made, limits=limits, reasons=(), notes=notes, price_words=price_words)
    gated = dataclasses.replace(gated, reasons=tuple(_reasons(gated)))
    if gated.may_go:
        return gated
    return dataclasses.replace(gated, cures=tuple(_cures(gated, fleet, weigher, on_event)))


def _priced(fleet: Fleet, length: RunLength) -> tuple[Fleet, str]:
    """Return the fleet with a price, and where that is from."""
    if length.price_per_device_hour is not None:
        priced = length.priced(fleet)
        return priced, f"{priced.price_per_device_hour} per {fleet.chip.name} and hour, as given"
    return with_list_price(fleet)


def _config(
    program: Recipe | Configured, fleet: Fleet, overrides: Overrides, tokens: str | None
) -> tuple[RunConfig, str | None, tuple[str, ...]]:
    """Return the run that a program is on a fleet, its layout, and what was assumed."""
    if isinstance(program, Recipe):
        made = described(program, fleet.num_devices, overrides, tokens)
        said = f"weighed as Meshwright's own step with the sizes and settings of {program.kind}"
        return made.config, made.layout, (said, *made.notes)
    config = overridden(load_config(program.name, list(program.overrides)), overrides)
    if (count := tokens or program.tokens) is not None:
        steps = max(1, math.ceil(parse_count(count) / config.batch.tokens_per_step))
        config = overridden(config, [f"steps={steps}"])
    return config, program.layout, ()


def _reasons(gated: Gate) -> Iterator[str]:
    """Yield why a job may not go.

    Raises:
        InputError: a limit needs the length of the run, its time or a price, which is not known.
    """
    made, limits = gated.weighing, gated.limits
    if made.fits is False:
        yield f"it does not fit: {_memory(made)}"
        return
    total = made.run_total
    if total is None:
        _check_limits(gated)
        return
    days, asked = total.seconds.expected / DAY, gated.seconds_asked
    if limits.max_days is not None and days > limits.max_days:
        yield f"it takes {days:.3g} days{_range(total.seconds, DAY)}, and may take {limits.max_days:g}"
    if asked is not None and total.seconds.expected > asked:
        hours = f"{total.seconds.expected / 3600:,.3g} hours{_range(total.seconds, 3600)}"
        yield f"it takes {hours}, and its own time limit is {format_seconds(asked)}"
    if limits.max_cost is None:
        return
    if total.cost is None:
        what = f"no list price of {made.fleet.chip.name} is known, and --max-cost needs one"
        raise InputError(what, hint="give it: --price 2.50")
    if total.cost.expected > limits.max_cost:
        costs = f"it costs {format_price(total.cost.expected)}{_range(total.cost)}, "
        yield f"{costs}and may cost {format_price(limits.max_cost)}"


def _check_limits(gated: Gate) -> None:
    """Raise if a limit needs the length of the run, which is not known."""
    made, limits = gated.weighing, gated.limits
    if limits.max_cost is None and limits.max_days is None:
        return
    if made.prediction is None:
        what = f"no time is predicted, and so no cost and no days: {made.no_prediction}"
        raise InputError(what, hint="leave --max-cost and --max-days out")
    what = f"{gated.job.file} does not say how long it trains, and a limit needs that"
    raise InputError(what, hint="state it: --tokens 15M, or --set steps=1000")


def _range(interval: Interval, unit: float = 1.0) -> str:
    """Return the ends of an interval in parentheses; "" if it has none."""
    if interval.low is None or interval.high is None:
        return ""
    return f" ({interval.low / unit:,.3g} to {interval.high / unit:,.3g})"


def _memory(made: Weighing) -> str:
    if made.refusal is not None:
        return made.refusal.line
    memory = made.ledger.memory
    needed = format_bytes(memory.reserved_bytes + memory.allowance_bytes)
    return f"a device needs {needed} of {format_bytes(memory.usable_bytes or 0)}"


def _cures(gated: Gate, fleet: Fleet, weigher: Weigher, on_event: Callable[[str], object]) -> Iterator[Cure]:
    """Yield the smallest change that is found: of memory by weighing it, of time and cost by arithmetic."""
    made, limits = gated.weighing, gated.limits
    if made.fits is False:
        for each in made.suggestions[:MOST_TRIED]:
            on_event(f"weighing it with {each.arguments}")
            if (cure := _tried(gated, each, fleet, weigher)) is not None:
                yield cure
                return
        return
    total = made.run_total
    assert total is not None, "only a run with a length is refused for its time or its cost"
    shares = [1.0]
    if limits.max_days is not None:
        shares.append(limits.max_days * DAY / total.seconds.expected)
    if limits.max_cost is not None and total.cost is not None:
        shares.append(limits.max_cost / total.cost.expected)
    asked = gated.seconds_asked
    launch = gated.job.launch
    if min(shares) >= 1 and asked is not None and launch is not None:
        limit = launch.limit_of(total.seconds.high or total.seconds.expected)
        yield Cure(change=limit, words="a time limit of the upper end of its interval", is_weighed=False)
        return
    if asked is not None:
        shares.append(asked / total.seconds.expected)
    if (steps := math.floor(total.steps * min(shares))) >= 1:
        words = f"as many steps as the limits allow, of {total.steps:,}"
        yield Cure(change=f"--set steps={steps}", words=words, is_weighed=False)


def _tried(gated: Gate, each: Suggestion, fleet: Fleet, weigher: Weigher) -> Cure | None:
    """Return a suggestion as a cure if the job may go with it, weighed."""
    config = gated.weighing.config
    if config is None:
        return None
    if each.fleet is not None:
        price = fleet.price_per_device_hour
        fleet = dataclasses.replace(Fleet.parse(each.fleet), price_per_device_hour=price)
    layout = each.layout or (config.layout if each.fleet is None else None)
    try:
        made = weigher(overridden(config, list(each.overrides)), on=fleet, layout=layout)
        again = dataclasses.replace(gated, weighing=made, reasons=())
        if made.fits is not True or any(_reasons(again)):
            return None
    except MeshwrightError:
        return None
    return Cure(change=each.arguments, words=f"{each.effect}: {_memory(made)}", is_weighed=True)
