"""A layout laid over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh


def mesh_of(axes: Sequence[tuple[str, int]], devices: Sequence[Any]) -> Mesh:
    """The mesh of `axes` (name, size; outermost first) over `devices` in their order.

    Axes are automatic: the compiler places what no rule pins. The product of the sizes must be the
    number of devices; `Layout.resolve` has told the user before this is reached.
    """
    names = tuple(name for name, _ in axes)
    sizes = tuple(size for _, size in axes)
    assert int(np.prod(sizes)) == len(devices), f"axes {dict(axes)} do not cover {len(devices)} devices"
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
