"""Number the policies of rematerialisation for a column of candidates, and estimate what each keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from meshwright.config import NAMED_REMAT, POLICIES, RESULTS, SAVE, block_policies, in_order, saved_results

NUM_NAMED = len(NAMED_REMAT)
_NAMES = tuple(RESULTS)
Places = NDArray[np.int64]
BLOCKS_UNDER = np.array(
    [
        [blocks.count(name) / max(len(blocks), 1) for name in POLICIES]
        for blocks in (*map(block_policies, NAMED_REMAT), ())
    ]
)
"""Share of the blocks under each of these, by the run's policy; none where it is a list, which comes last."""


class RematValues(Sequence[str]):
    """All policies by index: named ones, then every list of results.

    A list's place is the number of policies with a name, and a bit for each result that it keeps. Iterating
    yields the policies with a name alone.

    >>> values = RematValues()
    >>> values[3], values[values.index("save:query,key")], len(list(values))
    ('full', 'save:query,key', 8)
    """

    def __len__(self) -> int:
        return NUM_NAMED + 2 ** len(_NAMES)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMED_REMAT)

    def __contains__(self, value: object) -> bool:
        results = saved_results(value) if isinstance(value, str) else None
        if results is None:
            return value in NAMED_REMAT
        return set(results) <= set(_NAMES) and len(set(results)) == len(results)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return NAMED_REMAT[index]
        if index < NUM_NAMED:
            return NAMED_REMAT[index]
        return in_order(tuple(name for name in _NAMES if (index - NUM_NAMED) >> _NAMES.index(name) & 1))

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the index of a policy."""
        results = saved_results(value)
        if results is None:
            return NAMED_REMAT.index(value)
        return NUM_NAMED + sum(1 << _NAMES.index(name) for name in results)


def kinds(places: Places) -> Places:
    """Return the indices of named policies, and one more for all lists."""
    return np.minimum(places, NUM_NAMED)


def is_list(places: Places) -> NDArray[np.bool_]:
    """Return which policies are lists of results."""
    return places >= NUM_NAMED


def keeps(places: Places, *results: str) -> NDArray[np.bool_]:
    """Return which policies are lists that name one of `results`."""
    bits = sum(1 << _NAMES.index(name) for name in results)
    return is_list(places) & ((places - NUM_NAMED) & bits != 0)


def kept_of(places: Places) -> list[tuple[NDArray[np.float64], tuple[float, ...]]]:
    """Return shares of the blocks of each candidate, and the bytes of each token that those keep."""
    under = BLOCKS_UNDER[kinds(places)]
    found = [(under[:, place], each.kept_bytes) for place, each in enumerate(POLICIES.values())]
    listed = {name: each.kept_bytes for name, each in RESULTS.items() if any(each.kept_bytes)}
    return found + [(keeps(places, name).astype(float), each) for name, each in listed.items()]


def share_repeating(places: Places, work: str) -> NDArray[np.float64]:
    """Return the share of the blocks whose named policy repeats some forward work; 0 for lists."""
    repeating = [place for place, each in enumerate(POLICIES.values()) if work in each.repeats]
    return BLOCKS_UNDER[kinds(places)][:, repeating].sum(1)


def unlisted_products(
    places: Places, heads: float, keys: NDArray[np.float64], hidden: Any, gated: bool
) -> NDArray[np.float64]:
    """Return the share of a block's products that a list repeats: all but `down` that it does not name.

    The residual after attention stands for the output's product.

    Args:
        places: the policies of candidates.
        heads, keys, hidden: the widths of heads, of keys, and of the MLP's hidden units.
        gated: whether a second product multiplies those.
    """
    parts: dict[tuple[str, ...], Any] = {
        ("query",): heads,
        ("key",): keys,
        ("value",): keys,
        ("out", "residual"): heads,
        ("mlp_gate", "expert_gate"): hidden * gated,
        ("mlp_up", "expert_up"): hidden,
    }
    again, whole = np.zeros(len(places)), np.zeros(len(places)) + hidden
    for names, size in parts.items():
        again, whole = again + size * ~keeps(places, *names), whole + size
    return is_list(places) * again / np.maximum(whole, 1)


def joined(values: Sequence[str]) -> list[str]:
    """Return policies that commas divided, with lists of results whole again.

    >>> joined(["full", "save:query", "key", "dots"])
    ['full', 'save:query,key', 'dots']
    """
    found: list[str] = []
    for value in values:
        is_policy = value in NAMED_REMAT or value.startswith(SAVE)
        if not is_policy and found and found[-1].startswith(SAVE):
            found[-1] = f"{found[-1]},{value}"
        else:
            found.append(value)
    return found
