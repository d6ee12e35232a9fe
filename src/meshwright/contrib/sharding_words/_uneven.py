"""Find the dimensions that axes do not divide evenly, and name the sizes that work.

`Surroundings` holds what is known where JAX raises an error of a sharding, which a room outside the core
explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.config import near_divisors, near_multiples, or_list
from meshwright.sharding import axes_of

Axes = Sequence[tuple[str, int]]
Explanation = tuple[str, str]  # the problem, and the hint

MAKE_GLOBAL = (
    "jax.make_array_from_process_local_data(sharding, rows), or "
    "jax.experimental.multihost_utils.host_local_array_to_global_array(rows, mesh, spec)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The context of a JAX error: the layout's axes, the arguments' shapes by path, the number of processes.

    For a fleet that is not present, `num_processes` is the number of its hosts.
    """

    axes: Axes
    shapes: Mapping[str, tuple[int, ...]]
    num_processes: int = 1

    @property
    def layout(self) -> str:
        """Layout in the form that `--layout` takes."""
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def named(self, shape: tuple[int, ...]) -> str:
        """Name an array that JAX identifies by its shape alone.

        Return the only argument of that shape, or else the shape and the arguments that may be meant.
        """
        paths = [path for path, each in self.shapes.items() if each == shape]
        if len(paths) == 1:
            return f"{paths[0]} {shape}"
        among = f" (that of {', '.join(paths[:3])})" if paths else ""
        return f"an array of shape {shape}{among}"


def indivisible(
    shape: Sequence[int], spec: Sequence[Any], sizes: Mapping[str, int]
) -> list[tuple[int, Axes]]:
    """Return the dimensions of `shape` that the axes in `spec` do not divide evenly, with those axes.

    >>> indivisible((10, 6), ("data", "tensor"), {"data": 4, "tensor": 2})
    [(0, [('data', 4)])]
    """
    split = [[(axis, sizes[axis]) for axis in axes_of(entry)] for entry in spec]
    return [
        (dim, axes)
        for dim, (size, axes) in enumerate(zip(shape, split, strict=False))
        if size % math.prod(ways for _, ways in axes)
    ]


def does_not_divide(dim: int, size: int, axes: Axes, num_processes: int = 1) -> Explanation:
    """Return the problem and the hint for dimension `dim` of `size`, which `axes` do not divide evenly.

    The hint names the nearest sizes of the axes and of the dimension that work. If the rows of all processes
    together would divide, these may be the rows of one process. The hint then says how to make them global.
    """
    ways = math.prod(each for _, each in axes)
    names = "*".join(name for name, _ in axes)
    sizes = "*".join(str(each) for _, each in axes) + (f" = {ways}" if len(axes) > 1 else "")
    dims = or_list(near_multiples(ways, size))
    hint = f"use {names} = {or_list(near_divisors(size, ways))}, or a dimension of {dims}"
    if dim == 0 and num_processes > 1 and size * num_processes % ways == 0:
        hint += (
            f"; if these are the rows that one of {num_processes} processes has read, the global array has "
            f"{size * num_processes}: {MAKE_GLOBAL}"
        )
    return f"dimension {dim} = {size} does not divide over {names} = {sizes}", hint
