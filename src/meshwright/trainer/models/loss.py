"""Compute the cross entropy from the last hidden states, without holding the logits of the whole batch.

Logits are computed for one chunk of the sequence at a time. If the loss is differentiated, the forward pass
also computes each chunk's gradients, so that no matmul runs twice. It saves these gradients in the formats of
hidden states and head, and the backward pass only scales them. Each device sums the gradient of the head over
its chunks in float32. The sum crosses the network once.

The code runs per device (`shard_map`): the automatic partitioner would reduce the gradient of the head in
every chunk, or gather the vocabulary.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshwright.sharding import (
    activation_spec,
    axis_size,
    mean_over_manual,
    on_each_device,
    token_axes,
    width_axes,
    zeros_here,
)

from ._base_model import Context

LEFT_OUT = -1  # marks a position that the loss leaves out
NEVER = -1e18  # the logit of padding: its exponential is 0, and its square is finite
BACKWARD = "transpose(loss)"  # JAX's name for backward work; here it runs in the forward pass


class Balance(NamedTuple):
    """Measures of how evenly one layer's tokens were spread over the experts; scalars, float32.

    `loss`: num_experts x the sum over experts of (share of tokens that chose it x mean probability). With one
    choice this is Switch's equation 4. Each of k choices counts, so `loss` is k if all experts are equal.
    `load`: the largest share of choices that one expert received, x num_experts.
    `dropped`: the share of choices beyond capacity.
    """

    loss: Float[Array, ""]
    load: Float[Array, ""]
    dropped: Float[Array, ""]


def balance_metrics(balance: Balance) -> dict[str, Float[Array, ""]]:
    """Return the metrics of `balance`, which is stacked over layers.

    `balancing_loss` is the mean over layers, without its factor. `expert_load` is the largest of all layers.
    `dropped` is the mean over layers.
    """
    return {
        "balancing_loss": jnp.mean(balance.loss),
        "expert_load": jnp.max(balance.load),
        "dropped": jnp.mean(balance.dropped),
    }


class Targets(NamedTuple):
    """The targets of a batch, or of some of its positions.

    `gaps`: some may be `LEFT_OUT`; such positions do not count. `whole`: all targets of the batch, over which
    the loss is a mean, if `ids` are only some of them.
    """

    ids: Int[Array, "batch sequence"]
    gaps: bool
    whole: Int[Array, "batch all_of_sequence"] | None = None


def mean_cross_entropy(
    hidden: Float[Array, "batch sequence embed"],
    head: Float[Array, "vocab embed"],
    targets: Targets,
    context: Context,
    most_positions: int,
    cap: float | None = None,
    num_ids: int | None = None,
) -> Float[Array, ""]:
    """Return the sum of -log softmax(hidden . head)[target] over the batch's count, in nats, float32.

    Args:
        head: with all columns; its vocabulary may be sharded over `tensor`. It is in the format of
            `hidden`, or in float32: then it is rounded, and its gradient is float32.
        targets: of the positions of `hidden`. The sum is divided by the number of the whole batch's positions
            that count. If none counts, the loss is 0.
        most_positions: the most positions whose logits may exist at once on a device. The device's part of
            the sequence is computed in the fewest chunks of that size or less, all of one length; positions
            that fill the last chunk are left out of the loss.
        cap: logits become cap x tanh(logits / cap); None leaves them as they are.
        num_ids: of the vocabulary; rows of `head` beyond it are padding, and belong to no softmax. None: all.
    """
    held = hidden.shape[1] // axis_size(context.mesh, "context")
    chunk = math.ceil(held / math.ceil(held / most_positions))
    gaps = targets.gaps or held % chunk > 0
    ids = context.pin(targets.ids, "batch", "sequence")
    whole = ids if targets.whole is None else targets.whole
    how = How(chunk, gaps, cap, head.shape[0] if num_ids is None else num_ids, head.dtype)
    total: Array = _summed(context, how, hidden, head, ids)  # type: ignore[assignment]
    if not targets.gaps:
        return total / whole.size
    # If this runs per replica, a mean over replicas follows, so all must divide by the same count.
    counted = mean_over_manual(jnp.sum(whole != LEFT_OUT).astype(jnp.float32), context.mesh)
    return total / jnp.where(counted > 0, counted, 1.0)


class How(NamedTuple):
    """Hold the settings of a loss.

    `chunk`: positions at once. `num_ids`: rows of the head without padding. `of_head`: its gradient's format.
    """

    chunk: int
    gaps: bool
    cap: float | None
    num_ids: int
    of_head: Any


def soft_cap(logits: Array, cap: float | None) -> Array:
    """Return cap x tanh(logits / cap), or `logits` unchanged without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _chunk_loss(
    x: Array, head: Array, targets: Array, vocab: str | None, how: How, num_rows: int
) -> tuple[Array, Array, Array, Array]:
    """Return the summed loss of one chunk, its logits, their log-sum-exp, and a mask of the targets."""
    rounded = jnp.einsum("bse,ve->bsv", x, head)
    first = jax.lax.axis_index(vocab) * rounded.shape[-1] if vocab else 0
    chosen = _chosen(rounded, targets - first, how.cap)
    # Nothing of the backward pass waits for the loss: without a barrier the logits might be kept for it.
    rounded, chosen = jax.lax.optimization_barrier((rounded, chosen))
    logits = soft_cap(rounded.astype(jnp.float32), how.cap)
    ids = (first + jnp.arange(logits.shape[-1]))[None, None, :]
    if num_rows > how.num_ids:
        logits = jnp.where(ids < how.num_ids, logits, NEVER)
    is_target = ids == targets[:, :, None]
    peak = logits.max(axis=-1)
    peak = jax.lax.pmax(peak, vocab) if vocab else peak
    mass = jnp.exp(logits - peak[:, :, None]).sum(axis=-1)
    mass, chosen = jax.lax.psum((mass, chosen), vocab) if vocab else (mass, chosen)
    log_sum_exp = peak + jnp.log(mass)
    losses = log_sum_exp - chosen
    if how.gaps:
        losses = jnp.where(targets != LEFT_OUT, losses, 0.0)
    return jnp.sum(losses), logits, log_sum_exp, is_target


def _chosen(logits: Array, places: Array, cap: float | None) -> Array:
    """Return the logit of each token's target, or 0 where another device holds it.

    A gather, because a sum over all logits would be one kernel with the gradient, which an H200 then writes
    at half of the memory's rate.
    """
    held = (places >= 0) & (places < logits.shape[-1])
    found = jnp.take_along_axis(logits, jnp.where(held, places, 0)[:, :, None], axis=-1)[:, :, 0]
    return jnp.where(held, soft_cap(found.astype(jnp.float32), cap), 0.0)


def _num_gradients(context: Context, differentiates: bool) -> int:
    """Return how many gradients there are: of the hidden states, and of a head that is not frozen."""
    if not differentiates:
        return 0
    return 2 if context.adapter_scale is None else 1


def _d_logits(logits: Array, log_sum_exp: Array, is_target: Array, labels: Array, how: How) -> Array:
    """Return the gradient of one chunk's summed loss with respect to its logits before the cap."""
    d_logits = jnp.exp(logits - log_sum_exp[:, :, None]) - is_target
    if how.cap is not None:
        d_logits = d_logits * (1 - jnp.square(logits / how.cap))  # the slope of tanh
    return jnp.where((labels != LEFT_OUT)[:, :, None], d_logits, 0) if how.gaps else d_logits


def with_positions(x: Array, multiple: int, value: int) -> Array:
    """Return `x` [batch, positions, ...] with `value` appended until `multiple` divides its positions."""
    lacking = -x.shape[1] % multiple
    return jnp.pad(x, [(0, lacking if dim == 1 else 0) for dim in range(x.ndim)], constant_values=value)


def _per_device(
    context: Context, how: How, differentiates: bool, hidden: Array, head: Array, targets: Array
) -> tuple[Array, ...]:
    """Return the summed loss; if `differentiates`, also its gradients of `hidden` and of a trained `head`."""
    chunk, split, num_rows = how.chunk, token_axes(context.mesh), head.shape[0]
    num_gradients = _num_gradients(context, differentiates)
    vocab = "tensor" if axis_size(context.mesh, "tensor") > 1 else None
    columns, replicas = width_axes(context.mesh, context.zero1)
    scattered = columns + replicas
    others = tuple(axis for axis in split if axis not in scattered)

    def local(hidden: Array, head: Array, targets: Array) -> tuple[Array, ...]:
        held = hidden.shape[1]
        hidden, targets = with_positions(hidden, chunk, 0), with_positions(targets, chunk, LEFT_OUT)

        def one(carry: tuple[Array, ...], index: Array) -> tuple[tuple[Array, ...], None]:
            total, *gradients = carry
            x, labels = (
                jax.lax.dynamic_slice_in_dim(a, index * chunk, chunk, axis=1) for a in (hidden, targets)
            )
            loss, logits, log_sum_exp, is_target = _chunk_loss(x, head, labels, vocab, how, num_rows)
            if not differentiates:
                return (total + loss,), None
            d_hidden, *d_head = gradients
            with jax.named_scope(BACKWARD):
                d_logits = _d_logits(logits, log_sum_exp, is_target, labels, how).astype(hidden.dtype)
                d_x = jnp.einsum("bsv,ve->bse", d_logits, head)
                d_x = jax.lax.psum(d_x, vocab) if vocab else d_x
                if d_head:
                    d_head[0] += jnp.einsum("bsv,bse->ve", d_logits, x, preferred_element_type=jnp.float32)
                d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_x, index * chunk, axis=1)
            return (total + loss, d_hidden, *d_head), None

        of_head = zeros_here(head.shape, hidden[0, 0, 0] if context.in_loop else None)
        zeros = (jnp.zeros_like(hidden), of_head)[:num_gradients]
        first = (jnp.float32(0), *zeros)
        (total, *gradients), _ = jax.lax.scan(one, first, jnp.arange(hidden.shape[1] // chunk))
        gradients[1:] = [over_devices(d_head, how.of_head) for d_head in gradients[1:]]
        gradients[:1] = [jax.lax.slice_in_dim(d_hidden, 0, held, axis=1) for d_hidden in gradients[:1]]
        return jax.lax.psum(total, split) if split else total, *gradients

    def over_devices(d_head: Array, dtype: jax.typing.DTypeLike) -> Array:
        """Sum the head's gradient over all tokens."""
        with jax.named_scope(BACKWARD):
            if dtype != jnp.float16:  # float16 could overflow: this gradient is a sum over the batch
                d_head = d_head.astype(dtype)
            for axes in (columns, replicas):
                if axes:
                    d_head = jax.lax.psum_scatter(d_head, axes, scatter_dimension=1, tiled=True)
            return jax.lax.psum(d_head, others) if others else d_head

    rows = activation_spec(("batch", "sequence"), context.mesh)
    outputs = (PartitionSpec(), rows, PartitionSpec(vocab, scattered or None))[: 1 + num_gradients]
    each = on_each_device(local, context.mesh, (rows, PartitionSpec(vocab), rows), outputs)
    head = head.astype(hidden.dtype)
    needed = f"needed_{how.num_ids}_of_{num_rows}"
    with jax.named_scope("loss"), jax.named_scope(needed) if num_rows > how.num_ids else nullcontext():
        return each(hidden, head, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(context: Context, how: How, hidden: Array, head: Array, targets: Array) -> Array:
    return _per_device(context, how, False, hidden, head, targets)[0]


def _forward(
    context: Context, how: How, hidden: Array, head: Array, targets: Array
) -> tuple[Array, list[Array]]:
    total, *gradients = _per_device(context, how, True, hidden, head, targets)
    return total, gradients


def _backward(_: Context, how: How, saved: list[Array], d_total: Array) -> tuple[Array, Array | None, None]:
    # Scale in float32: 1 / targets.size in bfloat16 would put the same error, up to 0.4 %, on every gradient.
    formats = saved[0].dtype, how.of_head
    d_hidden, *d_head = (
        (x.astype(jnp.float32) * d_total).astype(to) for x, to in zip(saved, formats, strict=False)
    )
    return d_hidden, d_head[0] if d_head else None, None


_summed.defvjp(_forward, _backward)
