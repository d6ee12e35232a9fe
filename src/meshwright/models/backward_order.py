"""Order a block's backward pass so that its messages over `tensor` have products to run beside.

The gradient of a product's input crosses `tensor`, and the rest of the backward pass waits for it. The
gradients of the weights wait for nothing and nothing waits for them. XLA's scheduler goes from the last
operation to the first, so it puts them all at the end of a block, where few messages are left. Here the
gradient of a block's input waits for the weights' gradients too, so they run beside the message.

Only where no other axis splits the tokens of a program's part: there a weight's gradient is itself a message.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax
from jaxtyping import Array

from ..sharding import axis_size, token_axes
from ._base import Context

Tree = Any


@jax.custom_vjp
def _together(x: Array, weights: Tree) -> tuple[Array, Tree]:
    """Return `x` and `weights`; the gradients of either are used when those of both exist."""
    return x, weights


_together.defvjp(lambda x, w: ((x, w), None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def ordered(x: Array, layer: Tree, group: str, names: Container[str], context: Context) -> tuple[Array, Tree]:
    """Return `x` and `layer`; in the backward pass the gradient of `x` waits for those of some matrices.

    Args:
        x: what the gradient that waits belongs to.
        layer: the parameters of one layer; the products with these matrices use the result.
        group: the matrices' group in `layer`.
        names: of the matrices.
    """
    is_split = axis_size(context.mesh, "tensor") > 1 and not token_axes(context.mesh)
    chosen = {name: w for name, w in layer.get(group, {}).items() if name in names}
    if not is_split or not chosen or context.adapter_scale is not None:
        return x, layer
    x, chosen = _together(x, chosen)
    return x, {**layer, group: {**layer[group], **chosen}}
