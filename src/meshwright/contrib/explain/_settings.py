"""Say which changes of a program save how much of the memory that its largest buffers hold.

Each figure is at most what the change saves: other buffers may hold the peak then. It is a half, a sum or a
difference of sizes that the compiler named; what has no such figure is not here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from ._explanation import Held, Setting

LEAST_SHARE = 0.01  # of what is held; a smaller saving is not named
_WIDE = re.compile(r"(?:\d{1,9} x )?(f32|f64)\[")
SAVED = ("saved activations", "forward pass")


def settings_of(
    held: tuple[Held, ...],
    missing: int | None,
    *,
    fragments: int | None = None,
    padding: int = 0,
    undonated: int | None = None,
    stored: Collection[str] = ("argument",),
) -> tuple[Setting, ...]:
    """Return the changes whose saving follows from sizes, the largest first.

    Args:
        held: the largest buffers.
        missing: how much must go, if that is known.
        fragments: bytes of temporaries that no value lives in at the peak.
        padding: bytes that a TPU's tiles add to shapes.
        undonated: bytes of outputs that could take an argument's memory.
        stored: categories of what a step is given and returns, whose number format is the caller's to choose.
    """
    least = LEAST_SHARE * max(sum(each.num_bytes for each in held), missing or 0, 1)
    found = [*_of_held(held, stored), *_of_sizes(fragments, padding, undonated)]
    kept = [each for each in found if each.saved_bytes is not None and each.saved_bytes >= least]
    return tuple(sorted(kept, key=lambda each: -(each.saved_bytes or 0)))


def _of_held(held: tuple[Held, ...], stored: Collection[str]) -> Iterator[Setting]:
    made = (each for each in held if each.category not in stored)
    wide = [(each, match[1]) for each in made if (match := _WIDE.match(each.what))]
    if wide:
        saved = sum(each.num_bytes // 2 if kind == "f32" else 3 * each.num_bytes // 4 for each, kind in wide)
        yield Setting(
            change="compute these in bf16",
            saved_bytes=saved,
            why=f"{_named(each.what for each, _ in wide)} hold four bytes or more for each number, where "
            "their precision allows two",
        )
    by_place: Counter[str] = Counter()
    for each in held:
        if each.category in SAVED:
            by_place[each.place or each.module or "the forward pass"] += each.num_bytes
    for place, size in by_place.most_common(2):
        yield Setting(
            change=f"jax.checkpoint around {place}",
            saved_bytes=size,
            why="made in the forward pass and held at the peak: computed again instead of kept",
        )


def _of_sizes(fragments: int | None, padding: int, undonated: int | None) -> Iterator[Setting]:
    if undonated:
        yield Setting(
            change="jax.jit(step, donate_argnums=...)",
            saved_bytes=undonated,
            why="results of that size are written next to the arguments: donated, they take their place",
        )
    if padding:
        yield Setting(
            change="dimensions in multiples of 128 and 8",
            saved_bytes=padding,
            why="a TPU stores the last two dimensions in tiles of that size, and pads the listed shapes "
            "to them",
        )
    if fragments:
        yield Setting(
            change="no setting: fragmentation",
            saved_bytes=fragments,
            why="gaps between temporaries at the peak; fewer or more equal buffers leave smaller ones",
        )


def _named(names: Iterable[str]) -> str:
    """Return two names, and how many more there are."""
    every = list(dict.fromkeys(names))
    more = len(every) - 2
    return ", ".join(every[:2]) + (f" and {more} more" if more > 0 else "")
