"""Say when the gradients of a layer's weights are computed, and where they are summed over microbatches.

Where they are summed: the backward pass of a loop over layers would write each layer's gradient to a stack,
and a later kernel would add the stack to the sum. Here the sum goes through the loop as a value that no layer
changes. On the way back its gradient begins as the sum so far, and each layer adds its own gradient to its
place. So the gradient with respect to the sum is the sum with this microbatch's gradients added, and no stack
is made. Where the loop over layers is unrolled, `slice_layer` keeps layers from being copied out of their
stack.

When they are computed: nothing in the backward pass needs the gradients of the weights; only the optimizer
does. XLA's scheduler works from the last operation to the first, and therefore puts them late. That costs

* time over `tensor`: the gradient of a product's input crosses that axis, and the rest of the backward pass
  waits for it. The gradients of the weights could run while the message is under way;
* memory in eight bits: until a weight's gradient is computed, copies of its operands in eight bits are alive.

So the gradient of a block's input waits for them (`delay_weight_grads`), but only if no other axis splits the
tokens. Otherwise a weight's gradient is itself reduced by a message, and the backward pass would wait for
that one.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from meshwright.sharding import axis_size, token_axes

from ._base_model import Context

Tree = Any


@jax.custom_vjp
def taken(layers: Tree, sums: Tree, starts: Tree) -> tuple[Tree, Tree]:
    """Return `layers` and `sums`; the gradient of `layers` is added to `sums`' gradient, from `starts`.

    Args:
        layers: parameters [layers of a group, ...], or of one layer, by the block's part; they get no
            gradient of their own.
        sums: of the same structure [all layers, ...], in float32.
        starts: the place of the first one, by the block's part.
    """
    return layers, sums


def _taken_backward(starts: Tree, gradients: tuple[Tree, Tree]) -> tuple[None, Tree, None]:
    def added(start: Array, total: Array, gradient: Array) -> Array:
        more = gradient.reshape(-1, *total.shape[1:]).astype(total.dtype)
        at = (start, *(0,) * (total.ndim - 1))
        so_far = jax.lax.dynamic_slice(total, at, more.shape)
        return jax.lax.dynamic_update_slice(total, so_far + more, at)

    of_layers, of_sums = gradients
    return None, {part: jax.tree.map(partial(added, starts[part]), of_sums[part], of_layers[part])
                  for part in of_sums}, None  # fmt: skip


taken.defvjp(lambda layers, sums, starts: ((layers, sums), starts), _taken_backward)


@jax.custom_vjp
def summed(x: Array, sums: Tree, totals: Tree) -> Array:
    """Return `x`, the last layer's output; the gradient of `sums` begins as `totals`."""
    return x


summed.defvjp(lambda x, sums, totals: (x, totals), lambda totals, d_x: (d_x, totals, None))


def places(num_layers: int, size: int) -> Int[Array, " groups"]:
    """Return the index of the first layer of each complete group."""
    return jnp.arange(num_layers // size) * size


@jax.custom_vjp
def slice_layer(layer: Tree, stack: Tree, place: Int[Array, ""]) -> Tree:
    """Return one layer of a stack; its gradient goes to `layer`, which is the same layer.

    A layer that goes into a rematerialised block is held back by a barrier, and so it is copied out of the
    stack. One that is read inside the block is not.
    """
    return jax.tree.map(lambda whole: jax.lax.dynamic_index_in_dim(whole, place, keepdims=False), stack)


def _read_forward(layer: Tree, stack: Tree, place: Array) -> tuple[Tree, None]:
    return slice_layer(layer, stack, place), None


slice_layer.defvjp(_read_forward, lambda _, gradient: (gradient, None, None))


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
