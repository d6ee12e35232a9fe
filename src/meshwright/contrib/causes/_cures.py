"""Say what the cure of a cause would save: weighed where the program can be changed, else at most its time.

What a traced program does and the weighed one lacks is weighed already: the weighed program is the cured one,
and its memory says whether the cure fits. What the host does has no program: curing it saves at most its own
seconds, and less if something else then waits. Kernels and messages that are slow have changes to the
program, which are compiled only if they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshwright.compiler import declared_by
from meshwright.contrib.changes import change_between, failed_change, faster, weighed_change
from meshwright.contrib.jax_steps import NamedStep
from meshwright.errors import MeshwrightError
from meshwright.programs import Settings, knobs_of, request_of
from meshwright.results import Change, Phase, Weighing
from meshwright.units import format_bytes, format_seconds

from ._cause import Asked, Cause, Gap

OF_THE_PROGRAM = ("callback", "recomputation", "wide product", "extra message", "extra work")
"""Kinds of cause whose work is in the traced program and not in the weighed one."""
MESSAGES = ("exposed message", "slow message")
HELPS = {
    "gaps": ("microbatch_sequences",),
    "slow work": ("precision", "remat", "microbatch_sequences"),
    **dict.fromkeys(MESSAGES, ("--layout", "microbatch_sequences")),
}
"""By kind of cause, the settings of a configuration that may cure it."""
ASK = "add --cures (in Python: gap.with_cures()) to weigh changes to it"
NO_SETTINGS = "the program has no settings that could be changed from here"

_Try = tuple[str, Callable[[], Change]]  # the change as arguments, and what weighs it


def with_saving(cause: Cause, weighing: Weighing) -> Cause:
    """Return a cause with what its cure would save, as far as that is known without another weighing."""
    seconds = format_seconds(cause.seconds)
    if cause.saving_seconds is not None:  # a walk over the program
        words = f"walked: saves up to {format_seconds(cause.saving_seconds)}"
        return replace(cause, saving=words if weighing.config is None else f"{words}; {ASK}")
    known = replace(cause, saving_seconds=cause.seconds)
    if cause.kind in OF_THE_PROGRAM:
        words = f"weighed without it: saves up to {seconds}{_memory_words(weighing)}"
        return replace(known, fits=weighing.fits, saving=words)
    if cause.kind in HELPS and weighing.config is not None:
        return replace(known, saving=f"saves up to {seconds}; {ASK}")
    return replace(known, saving=f"saves up to {seconds}")


def _memory_words(weighing: Weighing) -> str:
    """Return whether a weighed program fits, in words; "" if that is not known."""
    if weighing.figures is None or weighing.fits is None:
        return ""
    memory = weighing.figures.memory
    needed = format_bytes(memory.reserved_bytes + memory.allowance_bytes)
    verdict = "fits" if weighing.fits else "does not fit"
    return f", {verdict}: it needs {needed} of {format_bytes(memory.usable_bytes or 0)} on each device"


def with_cures(gap: Gap, most: int, seconds: float, on_event: Callable[[Phase], None]) -> Gap:
    """Return a gap whose causes have changes that were weighed, as `Gap.with_cures` says."""
    wanted = [each for each in gap.causes if each.kind in HELPS]
    if gap.asked is None or not wanted:
        return gap
    before = time.monotonic()
    tries = dict(_tries(gap.asked, wanted))
    found: dict[str, Change] = {}
    for arguments, weigh_it in tries.items():
        if len(found) == most or time.monotonic() - before > seconds:
            break
        on_event(Phase(name=f"weighing {arguments}"))
        found[arguments] = weigh_it()
    left = len(tries) - len(found)
    over = f"{left} further changes are not weighed: at most {most}, and none after {seconds:g} s"
    return replace(
        gap,
        causes=tuple(_cured(each, gap.asked, found) for each in gap.causes),
        changes=tuple(found.values()),
        notes=(*gap.notes, *((over,) if left else ())),
    )


def _tries(asked: Asked, causes: Sequence[Cause]) -> Iterator[_Try]:
    """Yield the changes that may cure the causes, those of the largest cause first."""
    weighing = asked.weighing
    if weighing.config is None:
        yield from _knob_tries(asked)
        return
    known = faster(weighing)
    for cause in causes:
        for each in known:
            if _helps(cause.kind, each.arguments):
                yield each.arguments, lambda each=each: weighed_change(weighing, each)


def _helps(kind: str, arguments: str) -> bool:
    """Return whether a change to a configuration may cure a cause of a kind."""
    return any(name in arguments for name in HELPS[kind])


def _knob_tries(asked: Asked) -> Iterator[_Try]:
    """Yield each other value of each argument that a function declares."""
    program, weighing = asked.program, asked.weighing
    if not isinstance(program, NamedStep):
        return
    try:
        declared = declared_by(request_of(program.function, weighing.fleet, weighing.layout)).knobs
    except MeshwrightError:  # it takes no mesh, and so no arguments
        return
    own = knobs_of(asked.overrides)
    for name, values in declared.items():
        for value in values:
            if value != own.get(name, values[0]):
                settings = Settings(layout=str(weighing.layout), overrides={**own, name: value})
                yield f"--set {name}={value}", lambda settings=settings: _of_knobs(asked, program, settings)


def _of_knobs(asked: Asked, program: NamedStep, settings: Settings) -> Change:
    own, knobs = knobs_of(asked.overrides), knobs_of(settings.overrides)
    arguments = " ".join(f"--set {name}={knobs[name]}" for name in knobs if knobs[name] != own.get(name))
    try:
        changed = program.weigh(asked.weighing.fleet, settings)
    except MeshwrightError as error:
        return failed_change(arguments, "an argument of the function", error.message)
    return change_between(asked.weighing, changed, arguments, "an argument of the function")


def _cured(cause: Cause, asked: Asked, found: dict[str, Change]) -> Cause:
    """Return a cause with the change that saves most of those that may cure it."""
    if cause.kind not in HELPS:
        return cause
    is_run = asked.weighing.config is not None
    mine = [each for each in found.values() if not is_run or _helps(cause.kind, each.arguments)]
    faster_ones = [each for each in mine if each.extra_seconds and each.extra_seconds < 0 and each.fits]
    least = min(faster_ones, key=lambda each: each.extra_seconds or 0.0, default=None)
    bare = cause.saving.removesuffix(f"; {ASK}")
    if least is None:
        tried = f"{_none_of(len(mine))}" if mine else NO_SETTINGS
        return replace(cause, saving=f"{bare}; {tried}")
    saving = -(least.extra_seconds or 0.0)
    words = f"weighed: saves {format_seconds(saving)}, {_bytes_words(least)}, fits"
    return replace(
        cause,
        change=least.arguments,
        saving_seconds=saving,
        saved_bytes=least.saved_bytes,
        fits=least.fits,
        saving=words,
    )


def _bytes_words(change: Change) -> str:
    saved = change.saved_bytes
    if saved is None:
        return "memory before is not known"
    return f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'} on each device"


def _none_of(number: int) -> str:
    if number == 1:
        return "the change that was weighed is not faster, or does not fit"
    return f"none of {number} weighed changes is faster and fits"
