"""Weigh PyTorch modules: as PyTorch runs them, and as JAX programs.

Imports: `torch_eager` (a step on fake tensors), `torch_as_jax` (an exported module), `programs`. Registers
the kinds `pytorch` and `pytorch-script`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

from ._kind import KIND as KIND
from ._kind import SCRIPT_KIND as SCRIPT_KIND

if TYPE_CHECKING:  # imported on first use, by `__getattr__`: most programs are of another kind
    from ._torch_step import torch_step as torch_step

__getattr__, __dir__ = names_on_first_use(__name__)
