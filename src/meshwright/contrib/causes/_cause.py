"""Hold the answer to "why is it slow": the gap between a measured and a predicted step, and its causes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.config import Overrides
from meshwright.measure import STEP_SECONDS, Reconciliation, Row
from meshwright.predict import Busy, Interval
from meshwright.results import Change, Phase, Weighing, ignore
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.programs import Program
    from meshwright.report import Document

    from ._modules import ModuleRow

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of cause: what it is in words, and the change that would cure it."""

    words: str
    cure: str


KINDS: Mapping[str, Kind] = {
    "input": Kind(
        words="the devices wait for the next batch",
        cure="read batches ahead in a thread or in processes, and put them on the device early",
    ),
    "compilation": Kind(
        words="a program is traced and compiled again",
        cure="give every step arrays of the same shapes and types (pad the last batch), and jit functions "
        "once, outside the loop; if it is the first step alone, trace later ones",
    ),
    "copy": Kind(
        words="arrays are copied between host and device",
        cure="keep the loss and metrics on the device, and fetch them once in many steps, of an earlier step",
    ),
    "small programs": Kind(
        words="many small programs run between the steps, launched one by one",
        cure="put these operations into the jitted step, or into one jitted function",
    ),
    "host": Kind(
        words="Python runs between the steps while the devices wait",
        cure="move it out of the loop or into a thread; do not wait for each step: block once in many",
    ),
    "synchronization": Kind(
        words="the host waits for the devices, and then they wait for it",
        cure="take .item(), print(loss) and synchronize() out of the loop, or do it once in many steps",
    ),
    "update": Kind(
        words="the optimizer launches kernels slower than the devices run them",
        cure="one kernel for many parameters: foreach=True or fused=True in the optimizer",
    ),
    "save": Kind(
        words="the devices wait while something is saved, logged or evaluated",
        cure="do it less often, or in the background (asynchronous checkpoints, a thread for logs)",
    ),
    "differing steps": Kind(
        words="some steps take longer than the others",
        cure="do what they do besides less often, or in the background",
    ),
    "collect": Kind(
        words="Python collects garbage",
        cure="gc.freeze() after the start, and gc.disable() with a collection once in many steps",
    ),
    "callback": Kind(
        words="the program waits for a function of the host",
        cure="compute it on the device, or call it once in many steps (jax.lax.cond), or take it out",
    ),
    "recomputation": Kind(
        words="the backward pass computes again what the weighed program keeps",
        cure="take jax.checkpoint (activation checkpointing) out, or keep more by a policy (remat=...)",
    ),
    "wide product": Kind(
        words="products run in a wider number format",
        cure="cast both operands to the narrower format where they meet: one wide operand widens the product",
    ),
    "extra message": Kind(
        words="devices send what the weighed program does not send, or elsewhere",
        cure="give the value and its gradient the layout's sharding: with_sharding_constraint",
    ),
    "extra work": Kind(
        words="the program does work that the weighed program does not have",
        cure="take it out of the step, or weigh the program with it to see what it should take",
    ),
    "exposed message": Kind(
        words="messages are not hidden behind computation",
        cure="let the compiler overlap them (latency-hiding scheduler, prefetch), or use another layout",
    ),
    "slow message": Kind(
        words="messages take longer than their links should need",
        cure="check the links (nccl-tests on the same hosts), and that the group lies within a host; a "
        "message also lasts while a device waits for a later one: trace every rank",
    ),
    "slow work": Kind(
        words="kernels run slower than their rate",
        cure="check clocks and power (throttling), other processes on the device, and odd sizes",
    ),
    "gaps": Kind(
        words="gaps between kernels: the host launches them slower than the device runs them",
        cure="launch fewer and larger ones: compile the step, CUDA graphs, a larger microbatch",
    ),
    "straggler": Kind(
        words="devices wait for one that is slower",
        cure="look at its host: clocks, temperature, another process, its share of the data; or leave it out",
    ),
}
"""The kinds of causes. A cause of a message or of work names its class in `Cause.name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of a gap.

    Args:
        kind: a key of `KINDS`.
        seconds: of one step, as a mean over steps and devices.
        name: what it is of: a class of work, a message, a function, a device.
        where: a line of the source, "train.py:41"; "" if the trace does not tell.
        evidence: what in the trace says so, with its counts.
        cure: the change that would cure it; `change`: as an option of the command line, "" if there is none.
        saving_seconds: by how much the step would be shorter; None if nothing tells.
        saved_bytes: memory of one device that the change saves, below zero if it needs more; None if unknown.
        fits: whether the step fits with the change; None if unknown.
        saving: how this is known, in words: weighed, or the seconds of the cause at most, or why not.
    """

    kind: str
    seconds: float
    name: str = ""
    where: str = ""
    evidence: str = ""
    cure: str = ""
    change: str = ""
    saving_seconds: float | None = None
    saved_bytes: int | None = None
    fits: bool | None = None
    saving: str = ""

    @property
    def words(self) -> str:
        """Return what it is, in words."""
        return KINDS[self.kind].words


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Hold what was weighed for a gap: the program with its overrides, and its weighing."""

    weighing: Weighing
    program: Program | None = None
    overrides: Overrides = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """Exposed seconds of one class of work in a step; `predicted` is None if no time is predicted."""

    name: str
    predicted: float | None
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Gap(Reconciliation):
    """Why a step takes longer than predicted: causes with seconds, and a rest that nothing explains.

    The seconds of the causes and `unexplained_seconds` sum to `gap_seconds`. A step may be faster than
    predicted; then the rest is negative, and causes still say what slows the step.

    Args:
        program, fleet: of the weighing.
        measured_seconds: the mean step.
        predicted: None if no time is predicted; the causes are then those of the trace alone, and the rest is
            the step without them.
        step_seconds: each step of the trace; empty without one.
        modules: seconds of kernels by module of the program; empty where the trace names no modules.
        busy: how busy a device is from the beginning of a typical step to its end; None without a trace.
        could_be: without a trace, what the prediction says could make a step longer.
        matched: the share of the traced program that the weighed one has too; None without programs.
        notes: what could not be read, or is not known, in words.
        changes: those that `with_cures` weighed; empty before.
        asked: what was weighed.
    """

    program: str
    fleet: str
    measured_seconds: float
    predicted: Interval | None
    causes: tuple[Cause, ...]
    unexplained_seconds: float
    step_seconds: tuple[float, ...] = ()
    num_devices: int = 1
    classes: tuple[ClassRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    could_be: tuple[str, ...] = ()
    matched: float | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    busy: Busy | None = field(default=None, compare=False)
    asked: Asked | None = field(default=None, compare=False)

    def with_cures(
        self, *, most: int = 4, seconds: float = 120.0, on_event: Callable[[Phase], None] = ignore
    ) -> Gap:
        """Weigh changes to the program that would cure causes, and return the gap with what each saves.

        A configuration has a larger microbatch, another layout, more kept results and a narrower precision; a
        function by its name has the arguments that it declares. The largest causes come first.

        Args:
            most: how many changes are weighed.
            seconds: no weighing begins later than this; one that has begun is finished.
            on_event: called with each `Phase` as it begins.

        >>> import meshwright as mw
        >>> gap = mw.reconcile("linear", on="8xH100", measured="1s")
        >>> gap.with_cures().changes  # no cause is known, so nothing is to be cured
        ()
        """
        from ._cures import with_cures

        return with_cures(self, most, seconds, on_event)

    @property
    def gap_seconds(self) -> float:
        """Measured less expected seconds; all of the measured ones if no time is predicted."""
        return self.measured_seconds - (0.0 if self.predicted is None else self.predicted.expected)

    @property
    def line(self) -> str:
        """The answer in one line."""
        takes = f"{self.program} on {self.fleet} takes {format_seconds(self.measured_seconds)}"
        parts = [f"{format_seconds(each.seconds)} {each.kind}" for each in self.causes[:3]]
        rest = f"{format_seconds(self.unexplained_seconds)} unexplained"
        return f"{takes}, {self.should_take}: {', '.join([*parts, rest])}"

    @property
    def should_take(self) -> str:
        """The predicted step with its interval, in words."""
        if self.predicted is None:
            return "no time is predicted"
        low, high = (
            None if end is None else format_seconds(end) for end in (self.predicted.low, self.predicted.high)
        )
        if low is None:
            ends = "no interval" if high is None else f"at most {high}"
        else:
            ends = f"at least {low}" if high is None else f"{low} to {high}"
        return f"should take {format_seconds(self.predicted.expected)} ({ends})"

    def document(self) -> Document:
        """Return the report of one screen."""
        from ._gap_report import gap_document

        return gap_document(self)

    def page_document(self) -> Document:
        """Return the report of a page, with the steps drawn."""
        from ._gap_report import gap_page

        return gap_page(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `reconcile --json` prints (docs/how-to/why-is-it-slow.md)."""
        fields = dataclasses.asdict(dataclasses.replace(self, asked=None, busy=None))
        del fields["asked"], fields["busy"]
        causes = [{**each, "what": KINDS[each["kind"]].words} for each in fields.pop("causes")]
        return {"schema": SCHEMA, "gap_seconds": self.gap_seconds, "causes": causes, **fields}

    def to_json(self) -> str:
        """Return the JSON text that `reconcile --json` prints."""
        return json.dumps(self.to_dict(), indent=1)


def step_row(predicted: Interval | None, measured: float, how: str) -> tuple[Row, ...]:
    """Return the row of the step's seconds; none if no time is predicted."""
    if predicted is None:
        return ()
    ends = {"low": predicted.low, "high": predicted.high}
    expected = predicted.expected
    return (
        Row(quantity=STEP_SECONDS, unit="seconds", predicted=expected, measured=measured, how=how, **ends),
    )
