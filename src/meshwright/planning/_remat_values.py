"""Number the policies of rematerialisation for a column of candidates, and estimate what each keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from meshwright.config import NAMED_REMAT, RESULTS, SAVE, block_policies, in_order, saved_results

NUM_NAMED = len(NAMED_REMAT)
_NAMES = tuple(RESULTS)
Places = NDArray[np.int64]
NONE, DOTS, DOTS_ATTENTION, FULL, ALTERNATE_DOTS = range(5)
"""Places in `NAMED_REMAT` of the rematerialisation policies that hold for single blocks."""
BLOCKS_UNDER = np.array(
    [
        [blocks.count(name) / max(len(blocks), 1) for name in NAMED_REMAT[: ALTERNATE_DOTS + 1]]
        for blocks in (*map(block_policies, NAMED_REMAT), ())
    ]
)
"""Share of the blocks under each of these, by the run's policy; none where it is a list, which comes last."""
# Bytes that a block keeps for each token until its backward pass, by policy: multiples of the width, of the
# MLP's hidden width and of the heads' width, with that of keys and values last. `none` keeps what XLA
# does not fuse away.
KEPT_BYTES = {
    NONE: (24.0, 14.0, 10.0, 10.0),
    DOTS: (4.0, 4.0, 2.0, 2.0),
    DOTS_ATTENTION: (4.0, 4.0, 4.0, 2.0),
    FULL: (0.0, 0.0, 0.0, 0.0),
    ALTERNATE_DOTS: (2.0, 2.0, 4.0, 1.0),
}
# The same of each result that a list names; of those that are left out a block keeps next to nothing.
LISTED_BYTES = {
    "query": (0.0, 0.0, 2.0, 0.0),
    "key": (0.0, 0.0, 0.0, 1.0),
    "value": (0.0, 0.0, 0.0, 1.0),
    "context": (0.0, 0.0, 2.0, 0.0),
    "out": (2.0, 0.0, 0.0, 0.0),
    "residual": (2.0, 0.0, 0.0, 0.0),
    "mlp_gate": (0.0, 2.0, 0.0, 0.0),
    "mlp_up": (0.0, 2.0, 0.0, 0.0),
    "mlp_hidden": (0.0, 2.0, 0.0, 0.0),
    "expert_gate": (0.0, 2.0, 0.0, 0.0),
    "expert_up": (0.0, 2.0, 0.0, 0.0),
}


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
    found = [(under[:, policy], each) for policy, each in KEPT_BYTES.items()]
    return found + [(keeps(places, name).astype(float), each) for name, each in LISTED_BYTES.items()]


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
