"""Measure the arrays, memory and speed of a Python process, for jax, numpy and PyTorch where possible.

`footprint(tree)` counts the bytes of arrays, shared storage once. `live_arrays()` lists the live jax arrays
and their holders. `device_memory()` reads the memory that each device has allocated. `clock(function)` times
a function until its call returns and until its results are ready. `matmul_mfu()` times one large product.

Imports: `measure`. Used by: users, as `mw.tools`.

>>> import numpy as np
>>> from meshwright import tools
>>> tools.footprint({"weights": np.zeros((2, 3), "float32")}).total_bytes
24
"""

from __future__ import annotations

from .measure import clock as clock
from .measure import footprint as footprint
from .measure import live as live_arrays
from .measure import matmul_mfu as matmul_mfu
from .measure import memory as device_memory

__all__ = ["clock", "device_memory", "footprint", "live_arrays", "matmul_mfu"]
