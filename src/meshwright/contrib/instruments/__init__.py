"""Measure a program of your own: bytes of its arrays, its seconds, its devices' memory, a product's rate.

Imports: `measure`, `hardware`, `jax_steps`, `sharding_words`, `formats`, `units`, `errors`. jax and torch
only inside functions. Used by: users, as `mw.footprint`, `mw.live`, `mw.memory`, `mw.clock` and
`mw.matmul_mfu`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._array_storages import ArrayFootprint as ArrayFootprint
    from ._array_storages import Storage as Storage
    from ._device_memory import Live as Live
    from ._device_memory import LiveArray as LiveArray
    from ._device_memory import Memory as Memory
    from ._device_memory import live as live
    from ._device_memory import memory as memory
    from ._footprint import footprint as footprint
    from ._timing import MatmulMFU as MatmulMFU
    from ._timing import Timing as Timing
    from ._timing import clock as clock
    from ._timing import matmul_mfu as matmul_mfu

__getattr__, __dir__ = names_on_first_use(__name__)
