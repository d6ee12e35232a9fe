"""Measure the arrays, memory and speed of a Python process, for jax, numpy and PyTorch where possible.

`footprint(tree)` counts the bytes of arrays, shared storage once. `live_arrays()` lists the live jax arrays
and their holders. `device_memory()` reads the memory that each device has allocated. `clock(function)` times
a function until its call returns and until its results are ready. `matmul_mfu()` times one large product.
`module_as_jax(module, *inputs)` returns a PyTorch module's training loss as a function of JAX.

Imports: `measure`, `torch_program`. Used by: users, as `mw.tools`.

>>> import numpy as np
>>> from meshwright import tools
>>> tools.footprint({"weights": np.zeros((2, 3), "float32")}).total_bytes
24
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .measure import clock as clock
from .measure import footprint as footprint
from .measure import live as live_arrays
from .measure import matmul_mfu as matmul_mfu
from .measure import memory as device_memory

if TYPE_CHECKING:
    import torch

    from .torch_program import JaxModule


def module_as_jax(
    module: torch.nn.Module,
    /,
    *inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    compute: torch.dtype | None = None,
    **keyword_inputs: Any,
) -> JaxModule:
    """Return the training loss of a PyTorch module as a pure function of JAX, for these shapes of inputs.

    The module is exported by `torch.export` on fake tensors, as it is: in training mode unless it was put in
    another. It may be on the meta device, and does not change.

    Args:
        module: the module.
        inputs, keyword_inputs: the arguments of its `forward`; only shapes, formats and plain values matter.
        loss: a function from the module's output to one number. By default the output if it is one number, or
            else its `loss`, or else the sum of its tensors.
        compute: the format of parameters and of floating-point inputs in use; their own if None.

    Raises:
        InputError: PyTorch is not installed, the module cannot be exported, its loss is not one number or
            needs no gradient, or it uses operations without a rule; the error names all of them.
    """
    from .torch_account import require_torch

    require_torch()
    from .torch_program import JaxModule, exported

    return JaxModule(program=exported(module, inputs, keyword_inputs, loss=loss, compute=compute))


__all__ = ["clock", "device_memory", "footprint", "live_arrays", "matmul_mfu", "module_as_jax"]
