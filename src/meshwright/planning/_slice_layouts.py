"""Choose which layouts a plan tries on several TPU slices: those that send little between them.

The network between slices carries a hundredth of what the links inside carry. The messages of `stage`, `data`
and `fsdp` run beside products; those over `tensor`, `context` and `expert` come in every block, which waits
for them. So the first three join slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.config import AXES, RunConfig
from meshwright.hardware import Fleet
from meshwright.predict import machine_of

from ._estimates import estimate
from ._space import CONTEXT, EXPERT, INNER, TENSOR, Candidates, Space, room_of

IN_EVERY_BLOCK = (CONTEXT, EXPERT, TENSOR)
_STRADDLES = "an axis straddles the slices"
_BETWEEN = "context, expert or tensor lie between slices"


def inside_slices(config: RunConfig, fleet: Fleet, space: Space, fix: Mapping[str, Sequence[str]]) -> Space:
    """Return a space without the layouts that straddle slices or send messages of every block between them.

    The latter stay if `fix` names one of their axes, or if by the estimates no other layout fits. A fleet of
    one slice, or of GPUs, has the space as it is.

    >>> from meshwright.config import load_config
    >>> from meshwright.planning import space_of
    >>> run, fleet = load_config("llama3-8b"), Fleet.parse("2xv5e-16")
    >>> space = inside_slices(run, fleet, space_of(run, fleet), {})
    >>> int(space.candidates.size(TENSOR).max())
    16
    """
    if fleet.domain != "slice" or fleet.num_domains == 1:
        return space
    candidates, illegal = space.candidates, dict(space.illegal)
    even = _lie_evenly(candidates, fleet.chips_per_domain)
    if removed := int((~even).sum()):
        illegal[_STRADDLES] = removed
    candidates = candidates[even]
    inside = _stay_inside(candidates, fleet.chips_per_domain)
    chosen = any(name in fix for name in (*(AXES[axis] for axis in IN_EVERY_BLOCK), INNER))
    if not chosen and _some_fit(config, fleet, candidates[inside]):
        illegal[_BETWEEN] = int((~inside).sum())
        candidates = candidates[inside]
    return dataclasses.replace(space, candidates=candidates, illegal=illegal)


def _lie_evenly(candidates: Candidates, slice_size: int) -> NDArray[np.bool_]:
    """Return which layouts XLA can compile, by the rule of `check_slices`."""
    strides = candidates.strides()
    reach = strides * candidates.sizes
    even = (strides >= slice_size) | (slice_size % reach == 0) | (reach % slice_size == 0)
    return (even | (candidates.sizes == 1)).all(axis=1)


def _stay_inside(candidates: Candidates, slice_size: int) -> NDArray[np.bool_]:
    """Return which layouts have the groups of the axes of every block inside one slice."""
    reach = candidates.strides() * candidates.sizes
    inside = (reach <= slice_size) | (candidates.sizes == 1)
    return inside[:, IN_EVERY_BLOCK].all(axis=1)


def _some_fit(config: RunConfig, fleet: Fleet, candidates: Candidates) -> bool:
    """Return whether by the estimates one of some candidates fits at least; False without candidates."""
    if not len(candidates):
        return False
    memory = estimate(config, machine_of(fleet, None), candidates).memory
    return bool((memory <= room_of(fleet, candidates)).any())
