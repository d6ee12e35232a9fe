"""Offer an exported module's loss as a function of JAX, and the module's values as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.contrib.torch_eager import require_torch
from meshwright.errors import InputError

from ._graph_runner import GraphRunner
from ._module_program import ModuleProgram

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class JaxModule:
    """The training loss of a PyTorch module as a pure function, and the shapes of what it takes.

    A parameter that several modules share is there once, under its first name. 64-bit numbers are held in 32
    bits unless `jax_enable_x64` is set. Random operations, such as dropout, have PyTorch's distributions and
    JAX's random numbers.
    """

    program: ModuleProgram

    def loss(
        self,
        parameters: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        inputs: Mapping[str, jax.Array],
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss, and the buffers after the step, such as running means.

        Args:
            parameters, buffers, inputs: by the names in `parameters`, `buffers` and `inputs`.
            key: for random operations; needed if `is_random`.

        Raises:
            InputError: a name is missing, or a key is.
        """
        for kind, given in (("parameters", parameters), ("buffers", buffers), ("inputs", inputs)):
            if missing := [name for name in getattr(self.program, kind) if name not in given]:
                raise InputError(f"{kind} lack {', '.join(missing)}", hint=f"give those in `{kind}`")
        return GraphRunner(program=self.program).loss(parameters, buffers, inputs, key)

    @property
    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the parameters, by the names of `named_parameters`."""
        return {name: each.described() for name, each in self.program.parameters.items()}

    @property
    def buffers(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the buffers, by the names of `named_buffers`."""
        return {name: each.described() for name, each in self.program.buffers.items()}

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the inputs: by name, and "args[0]" for the first one without."""
        return {name: each.described() for name, each in self.program.inputs.items()}

    @property
    def is_random(self) -> bool:
        """Return whether the loss draws random numbers."""
        return self.program.is_random

    def arrays_of(self, module: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return copies of a module's parameters and buffers as arrays, in the formats of their use."""
        values = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        return (
            {name: _array(values[name], each) for name, each in self.parameters.items()},
            {name: _array(values[name], each) for name, each in self.buffers.items()},
        )


def _array(tensor: Any, told: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a copy of a tensor's values; numpy has no bfloat16, which float32 holds exactly.

    On a CPU, JAX may lend NumPy's memory, here the module's own, which PyTorch changes in place: an
    optimizer's step, a batch norm's running mean. JAX runs later than it is called, so it might read either.
    """
    values = tensor.detach().cpu()
    plain = values.float() if str(values.dtype) == "torch.bfloat16" else values
    return jnp.asarray(np.array(plain.numpy(), told.dtype, copy=True))


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
    require_torch()
    from ._export import exported  # imports torch

    return JaxModule(program=exported(module, inputs, keyword_inputs, loss=loss, compute=compute))
