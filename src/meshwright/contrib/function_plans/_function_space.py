"""Enumerate the meshes and knobs that a function of the user's own could have on a fleet.

A function declares its *knobs* as parameters whose annotation lists their values, and may name the axes of
its mesh:

    def program(mesh, *, remat: bool = True, block: Literal[128, 256] = 128): ...
    program.axes = ("data", "model")

There is no closed form for a program that Meshwright has not seen. The estimates are constants, and the
search learns from compiled candidates alone. So the first candidate is the one that the function has without
the planner: the whole fleet along the first axis, every knob at its default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.config import Layout
from meshwright.errors import InputError, nearest_name
from meshwright.hardware import Fleet
from meshwright.planning import Estimates, Priors

MOST_OF_A_FUNCTION = 20_000  # candidates: each is compiled or left, none is estimated
UNKNOWN = 20.0  # standard deviation of ln(seconds) before anything is compiled
FUNCTION_PRIORS = Priors(time_effect=0.5, time_noise=0.1, memory_effect=0.5, memory_noise=0.1)
"""An axis or a knob of an unknown program may well change its time or memory by a factor of 1.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpace:
    """The candidates of a function on a fleet.

    `sizes` [candidates, axes]: the mesh, outermost axis first. `places` [candidates, knobs]: the place of
    each knob's value in `knobs`, whose default comes first.
    """

    axes: tuple[str, ...]
    knobs: Mapping[str, tuple[str, ...]]
    sizes: NDArray[np.int64]
    places: NDArray[np.int64]
    num_layouts: int

    def __len__(self) -> int:
        return len(self.sizes)

    def layout(self, row: int) -> Layout:
        """Return the mesh of one candidate, with its axes of size 1: the function may name them."""
        sizes = (int(size) for size in self.sizes[row])
        return Layout(axes=tuple(zip(self.axes, sizes, strict=True)))

    def chosen(self, row: int) -> dict[str, str]:
        """Return the value of each knob of one candidate, as text."""
        values = self.places[row]
        return {name: self.knobs[name][int(place)] for name, place in zip(self.knobs, values, strict=True)}

    def overrides(self, row: int) -> dict[str, str]:
        """Return mesh and knobs of one candidate, as `weigh` takes them."""
        return {"layout": str(self.layout(row)), **self.chosen(row)}

    def words(self, row: int) -> str:
        """Return the knobs of one candidate in words: "remat True, block 128"."""
        return ", ".join(f"{name} {value}" for name, value in self.chosen(row).items())

    def properties(self) -> NDArray[np.float64]:
        """Return the features of the search's effects: a constant, each axis, each value of a knob."""
        sizes = self.sizes.astype(float)
        columns = [np.full(len(self), UNKNOWN / FUNCTION_PRIORS.time_effect)]
        for axis in range(len(self.axes)):
            columns += [(sizes[:, axis] > 1).astype(float), np.log2(sizes[:, axis])]
        for knob, values in enumerate(self.knobs.values()):
            columns += [(self.places[:, knob] == place).astype(float) for place in range(1, len(values))]
        return np.stack(columns, axis=1)

    def families(self) -> NDArray[np.int64]:
        """Return a number for each candidate: the same for those with the same axes in use and knobs."""
        family = np.zeros(len(self), np.int64)
        for axis in range(len(self.axes)):
            family = 2 * family + (self.sizes[:, axis] > 1)
        for knob, values in enumerate(self.knobs.values()):
            family = family * len(values) + self.places[:, knob]
        return family

    def estimates(self) -> Estimates:
        """Return constants: one second and one gigabyte for all, with bounds of 0."""
        ones, none = np.ones(len(self)), np.zeros(len(self))
        return Estimates(
            memory_bound=none,
            memory=ones * 1e9,
            seconds_bound=none,
            seconds=ones,
            seconds_fitting=ones,
        )


def function_space(
    fleet: Fleet,
    axes: Sequence[str],
    declared: Mapping[str, Sequence[str]],
    restricted: Mapping[str, Sequence[str]],
) -> FunctionSpace:
    """Return all meshes of a fleet over the function's axes, with all values of its knobs.

    Args:
        axes: that the function names; ("data",) if it names none.
        declared: the values of its knobs as text, the default first.
        restricted: the values that an axis or a knob may have. A name that is neither is a further axis.

    Raises:
        InputError: a value that a knob does not have, a size that is no number, or too many candidates.

    >>> knobs = {"remat": ["True", "False"]}
    >>> space = function_space(Fleet.parse("8xH100"), ["data"], knobs, {"model": ["1", "2"]})
    >>> len(space), str(space.layout(0)), space.words(0)
    (4, 'data=8,model=1', 'remat True')
    """
    named = [*axes, *(name for name in restricted if name not in declared and name not in axes)]
    knobs = {name: _allowed(name, values, restricted.get(name)) for name, values in declared.items()}
    for name in named:
        for size in restricted.get(name, ()):
            if not size.isascii() or not size.isdigit() or not int(size[:15]) > 0:
                raise InputError(
                    f"{name} = {size!r} is no size of a mesh axis",
                    hint=f"{nearest_name(name, list(declared))}; knobs are parameters annotated with Literal",
                )
    meshes = _meshes(fleet.num_devices, [restricted.get(name) for name in named])
    choices = list(itertools.product(*(range(len(values)) for values in knobs.values())))
    if len(meshes) * len(choices) > MOST_OF_A_FUNCTION:
        raise InputError(
            f"{len(meshes):,} meshes with {len(choices):,} values of knobs are too many to search",
            hint=f"restrict them to {MOST_OF_A_FUNCTION:,}: --fix {named[0]}=1",
        )
    return FunctionSpace(
        axes=tuple(named),
        knobs=knobs,
        sizes=np.repeat(np.array(meshes, np.int64).reshape(-1, len(named)), len(choices), axis=0),
        places=np.tile(np.array(choices, np.int64).reshape(len(choices), len(knobs)), (len(meshes), 1)),
        num_layouts=len(meshes),
    )


def _allowed(knob: str, values: Sequence[str], wanted: Sequence[str] | None) -> tuple[str, ...]:
    for value in wanted or ():
        if value not in values:
            raise InputError(f"{knob} = {value!r} is none of its values", hint=nearest_name(value, values))
    return tuple(value for value in values if wanted is None or value in wanted)


def _meshes(num_devices: int, allowed: Sequence[Sequence[str] | None]) -> list[tuple[int, ...]]:
    """Return all ways to divide the devices over the axes, those with most along the first axis first."""
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    sizes = [
        [size for size in reversed(divisors) if wanted is None or str(size) in wanted] for wanted in allowed
    ]
    rows: list[tuple[int, ...]] = [()]
    for place, choices in enumerate(sizes):
        last = place == len(sizes) - 1
        rows = [
            (*row, size)
            for row in rows
            for size in choices
            if (rest := num_devices // math.prod(row)) % size == 0 and (not last or size == rest)
        ]
    return rows
