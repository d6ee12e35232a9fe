"""Order a block's backward pass: the gradient of its input waits for the gradients of its weights.

Nothing in the backward pass needs the gradients of the weights; only the optimizer does. XLA's scheduler
works from the last operation to the first, and therefore puts them late. That costs

* time over `tensor`: the gradient of a product's input crosses that axis, and the rest of the backward pass
  waits for it. The gradients of the weights could run while the message is under way;
* memory in eight bits: until a weight's gradient is computed, copies of its operands in eight bits are alive.

This is done only if no other axis splits the tokens. Otherwise a weight's gradient is itself reduced by a
message, and the backward pass would wait for that one.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax
from jaxtyping import Array

from meshwright.sharding import axis_size, token_axes

from ._base_model import Context

Tree = Any


@jax.custom_vjp
def _together(x: Array, weights: Tree) -> tuple[Array, Tree]:
    """Return `x` and `weights`; the gradients of both become available at the same time."""
    return x, weights


_together.defvjp(lambda x, w: ((x, w), None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def delay_weight_grads(
    x: Array, layer: Tree, group: str, names: Container[str], context: Context
) -> tuple[Array, Tree]:
    """Return `x` and `layer`; in the backward pass the gradient of `x` waits for some weights' gradients.

    Of a frozen matrix no gradient is computed: jax drops what a barrier returns and nothing uses.

    Args:
        x: an array of the forward pass, before it is gathered or scattered over `tensor`.
        layer: the parameters of one layer. The products must use those that are returned.
        group: the group of parameters in `layer` that holds the matrices.
        names: the matrices' names.
    """
    gains = axis_size(context.mesh, "tensor") > 1 or context.fp8
    chosen = {name: w for name, w in layer.get(group, {}).items() if name in names}
    if not gains or token_axes(context.mesh) or not chosen:
        return x, layer
    x, chosen = _together(x, chosen)
    return x, {**layer, group: {**layer[group], **chosen}}
