"""Compile changes to a step that does not fit or could be faster, and compare each with the step.

`_smaller_memory` suggests those that save memory. Used by: users as `mw.explain` and `meshwright weigh
--explain`; `contrib.causes`, for the cures of causes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.api import weigh_unkept
from meshwright.compiler import TARGET_COMPILER, warm_workers
from meshwright.config import NAMED_REMAT, POLICIES, Layout, block_policies, check_layout
from meshwright.errors import InputError, MeshwrightError
from meshwright.hardware import Fleet
from meshwright.planning import Suggestion
from meshwright.results import Change, Phase, Weighing, ignore

from ._changes import Changes
from ._smaller_memory import suggestions

LEAST_EXPOSED_SHARE = 0.01  # share of the step spent waiting on an axis: below it, the axis is not changed
FIGURES = ("reserved_bytes", "saved_bytes", "fits", "extra_executed_flops", "step_seconds", "extra_seconds")


@warm_workers()
def explain(weighing: Weighing, *, on_event: Callable[[Phase], None] = ignore) -> Changes:
    """Compile every change that this config accepts, and return them with the largest memory saving first.

    Each change is compiled as the step itself was, by the target's compiler or simulated. The changes concern
    the microbatch, rematerialisation, the layout's axes and their order, precision, and a larger fleet. Each
    takes as long as a weighing, unless it is in the cache.

    Raises:
        InputError: the program is foreign, so it has no keys to change.

    >>> import meshwright as mw
    >>> changes = mw.explain(mw.weigh("linear", on="8xH100"))
    >>> all(change.fits or change.failed for change in changes)
    True
    """
    if not isinstance(weighing, Weighing):
        what = f"{type(weighing).__name__} {weighing!r} is no weighing"
        raise InputError(what, hint='weigh it first: mw.explain(mw.weigh("llama3-8b", on="8xH100"))')
    config = weighing.config
    if config is None:
        raise InputError(
            f"{weighing.name} is not a configuration, so its settings cannot be changed from here",
            hint="change the program and weigh it again",
        )
    memory = weighing.refusal or weighing.ledger.memory
    known = suggestions(config, weighing.layout, weighing.fleet, memory)
    changes: list[Change] = []
    others = (*_other_remat(weighing, known), *faster(weighing))
    tried = dict.fromkeys(s.arguments for s in (*known, *others))
    by_arguments = {s.arguments: s for s in (*others, *known)}
    for place, suggestion in enumerate((by_arguments[each] for each in tried), start=1):
        on_event(Phase(name=f"change {place}: {suggestion.arguments}"))
        changes.append(weighed_change(weighing, suggestion))
    return Changes(sorted(changes, key=lambda c: -(c.saved_bytes or 0)))


def _other_remat(weighing: Weighing, known: tuple[Suggestion, ...]) -> list[Suggestion]:
    """Return the levels of rematerialisation that no known suggestion mentions."""
    config = weighing.config
    if config is None or not config.model.has_blocks:
        return []
    mentioned = {override for suggestion in known for override in suggestion.overrides}
    by_bytes = sorted(NAMED_REMAT, key=_kept_bytes, reverse=True)  # groups of blocks: only if a run has them
    now = by_bytes.index(config.remat) if config.remat in by_bytes else None

    def kept(place: int) -> str:
        return "other results" if now is None else "more" if place < now else "less"

    return [
        Suggestion(
            overrides=(f"remat={name}",),
            effect=f"keeps {kept(place)} for the backward pass (now: {config.remat})",
        )
        for place, name in enumerate(by_bytes)
        if place != now and f"remat={name}" not in mentioned and len(block_policies(name)) == 1
    ]


def _kept_bytes(remat: str) -> float:
    """Return what a policy keeps, in bytes of a block that is as wide in all its parts."""
    blocks = [sum(POLICIES[each].kept_bytes) for each in block_policies(remat)]
    return sum(blocks) / len(blocks)


def faster(weighing: Weighing) -> list[Suggestion]:
    """Return changes that may make the step faster: those that the prediction names, and candidates.

    The candidates, for bounds that name no change, are a larger microbatch, bf16 products, more results kept
    for the backward pass, and smaller axes.
    """
    config, prediction = weighing.config, weighing.prediction
    if config is None or prediction is None:
        return []
    found = [
        Suggestion(layout=help_.change.removeprefix("--layout "), effect=help_.what)
        for help_ in prediction.what_helps
        if help_.change
    ]
    per_replica = config.batch.sequences // weighing.layout.num_replicas
    now = config.batch.microbatch_sequences or per_replica
    larger = next((n for n in range(now + 1, per_replica + 1) if per_replica % n == 0), None)
    if larger is not None:
        effect = f"{larger} instead of {now} sequences at a time: fewer gathers, reductions and launches"
        found.append(Suggestion(overrides=(f"batch.microbatch_sequences={larger}",), effect=effect))
    if config.precision == "fp32" and "bf16" in weighing.fleet.chip.peak_flops_per_second:
        found.append(Suggestion(overrides=("precision=bf16",), effect="products in bf16 instead of fp32"))
    more = [each for each in _other_remat(weighing, ()) if each.effect.startswith("keeps more")]
    found += [more[place] for place in sorted({0, len(more) - 1})] if more else []  # all, and the next level
    return [*found, *_smaller_axes(weighing)]


def _smaller_axes(weighing: Weighing) -> Iterator[Suggestion]:
    """Yield layouts with half of an axis that the step waits for, its devices moved to `fsdp` or `data`."""
    config, prediction = weighing.config, weighing.prediction
    assert config is not None, "a foreign program has no axes of ours"
    assert prediction is not None, "no step without a prediction is known to wait"
    for name in ("fsdp", "tensor", "context"):
        exposed = sum(s.exposed_seconds for s in prediction.slices if s.name.endswith(f"[{name}]"))
        size = weighing.layout.size(name)
        if size % 2 or exposed < LEAST_EXPOSED_SHARE * prediction.step_seconds.expected:
            continue
        other = "data" if name == "fsdp" or weighing.layout.size("fsdp") == 1 else "fsdp"
        doubled, sizes = 2 * weighing.layout.size(other), dict(weighing.layout.axes)
        sizes = {**sizes, other: doubled} if other in sizes else {other: doubled, **sizes}
        sizes[name] = size // 2
        layout = Layout(axes=tuple((axis, count) for axis, count in sizes.items() if count > 1))
        try:
            check_layout(config, layout)
        except InputError:
            continue
        yield Suggestion(layout=str(layout), effect=f"{name} of half the size sends to fewer devices")


def weighed_change(weighing: Weighing, suggestion: Suggestion) -> Change:
    """Compile a change to a configuration as its step was compiled, and compare the two."""
    assert weighing.config is not None, "a foreign program is refused before"
    try:
        changed = weigh_unkept(
            weighing.config,
            on=_fleet(weighing, suggestion),
            layout=suggestion.layout or str(weighing.layout),
            overrides=suggestion.overrides,
            simulate=weighing.source != TARGET_COMPILER,
        )
    except MeshwrightError as error:
        return failed_change(suggestion.arguments, suggestion.effect, error.message)
    return change_between(weighing, changed, suggestion.arguments, suggestion.effect)


def failed_change(arguments: str, effect: str, why: str) -> Change:
    """Return a change that could not be compiled."""
    return Change(arguments=arguments, effect=effect, **dict.fromkeys(FIGURES), failed=why)


def change_between(weighing: Weighing, changed: Weighing, arguments: str, effect: str) -> Change:
    """Return how a changed step differs from the weighed one.

    Args:
        arguments: of the change, as `meshwright weigh` takes them; `effect`: in words.
    """
    words = {"arguments": arguments, "effect": effect}
    before, after = weighing.figures, changed.figures
    if after is None:
        unknown: dict[str, Any] = {**words, **dict.fromkeys(FIGURES), "fits": False}
        return Change(**unknown, failed=f"does not fit: {_refusal_line(changed)}")
    now, then = _seconds(weighing), _seconds(changed)
    saved = None if before is None else before.memory.reserved_bytes - after.memory.reserved_bytes
    return Change(
        **words,
        reserved_bytes=after.memory.reserved_bytes,
        saved_bytes=saved,
        fits=changed.fits,
        extra_executed_flops=None if before is None else after.flops.executed - before.flops.executed,
        step_seconds=then,
        extra_seconds=None if now is None or then is None else then - now,
        failed="",
    )


def _refusal_line(weighing: Weighing) -> str:
    return "" if weighing.refusal is None else weighing.refusal.line


def _fleet(weighing: Weighing, suggestion: Suggestion) -> Fleet:
    """Return the suggested fleet, else the weighed one; chips and links are those of the weighing."""
    if suggestion.fleet is None:
        return weighing.fleet
    return dataclasses.replace(Fleet.parse(suggestion.fleet), chip=weighing.fleet.chip)


def _seconds(weighing: Weighing) -> float | None:
    return None if weighing.prediction is None else weighing.prediction.step_seconds.expected
