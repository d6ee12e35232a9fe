"""Define the mixture of experts: a router sends each token to a few of many MLPs, as Mixtral's does.

A token goes to the experts of its largest logits. Their outputs are summed, weighted by the softmax over
those logits alone (Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.1), or by the rules of
DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3 (https://arxiv.org/abs/2412.19437). Each expert has a
buffer of fixed size on each device, filled in the order of the tokens. A choice that finds it full is dropped
and adds nothing (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, section 2.2).

The code runs per device (`shard_map`) on that device's tokens, which `tensor` shards by position. Buffers
travel to the experts' devices and back by all-to-all over `expert`. Over `tensor` they are all-gathered
before the experts and reduce-scattered after them. Rows move by gathers, forward and backward: there is no
sort, and no scatter-add, whose order of summation a GPU would choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from meshwright.config import ACTIVATION_RULES, TransformerModel
from meshwright.sharding import activation_spec, axis_size, on_each_device, parameter_spec, whole_size

from ._base_model import RESIDUAL, Context, Parameter
from .eight_bits import FORWARD, NarrowMatrix, fp8_product, quantised
from .loss import Balance
from .products import product as matrix_product
from .rematerialisation import EXPERTS, SECOND_EXPERTS

ROUTER = ("router", "router_bias")  # parameters in float32


class Places(NamedTuple):
    """The mapping between choices and buffer slots, in both directions.

    `slots` [tokens, choices]: the slot of each choice; beyond the last slot if the choice is dropped.
    `sources` [experts x capacity]: the choice in each slot, as token x choices + choice; beyond the last
    choice if the slot is empty.
    """

    slots: Int[Array, "tokens choices"]
    sources: Int[Array, " slots"]


def _sizes(config: TransformerModel) -> tuple[int, int]:
    """Return the number of experts and the number of choices per token."""
    assert config.num_experts is not None, "the model has no experts"
    assert config.experts_per_token is not None, "nothing says how many experts a token is sent to"
    return config.num_experts, config.experts_per_token


def expert_parameters(config: TransformerModel) -> dict[str, Parameter]:
    """Declare `router`, `up`, `down`, (if gated) `gate` for all experts, and `router_bias` if it has one."""
    (experts, _), embed, mlp = _sizes(config), config.embed_dim, config.mlp_dim
    up = Parameter(shape=(experts, embed, mlp), dims=("experts", "embed", "mlp"), fan_in=embed)
    declared = {
        "router": Parameter(shape=(embed, experts), dims=("embed", "routes"), fan_in=embed, wide=True),
        "up": up,
        "down": Parameter(shape=(experts, mlp, embed), dims=("experts", "mlp", "embed"), fan_in=mlp),
    }
    if config.router_bias:
        declared["router_bias"] = Parameter(shape=(experts,), dims=("routes",), initial="zeros", wide=True)
    return {**declared, "gate": up} if config.mlp == "gated" else declared


def capacity_of(config: TransformerModel, num_tokens: int) -> int:
    """Return how many of a device's `num_tokens` tokens one expert takes.

    Without a capacity factor it takes all of them. That suffices, because a token chooses an expert at most
    once.
    """
    num_experts, num_choices = _sizes(config)
    if config.capacity_factor is None:
        return num_tokens
    fair = num_tokens * num_choices / num_experts
    return min(num_tokens, math.ceil(config.capacity_factor * fair))


def expert_mlp(
    x: Float[Array, "batch sequence embed"],
    layer: dict[str, Array],
    config: TransformerModel,
    context: Context,
    activation: Callable[[Array], Array],
) -> tuple[Float[Array, "batch sequence embed"], Balance]:
    """Return the weighted sum of the chosen experts' outputs. Result and `x` are sharded as residuals."""
    dims = {name: parameter.dims for name, parameter in expert_parameters(config).items()}
    # Cast outside the shard_map: gradients then cross the network in that format.
    of_gradients = jnp.float32 if context.widens else context.dtype
    router = {n: context.gather(w, *dims[n], wide=True) for n, w in layer.items() if n in ROUTER}
    layer = {**{n: w.astype(of_gradients) for n, w in layer.items() if n not in ROUTER}, **router}
    local = partial(_on_one_device, config=config, context=context, activation=activation, dims=dims)
    with jax.named_scope("experts"):
        rows = activation_spec(RESIDUAL, context.mesh)
        weights = {
            name: PartitionSpec() if name in ROUTER else parameter_spec(names, context.mesh)
            for name, names in dims.items()
        }
        return on_each_device(local, context.mesh, (rows, weights), (rows, PartitionSpec()))(x, layer)


def route(
    logits: Float[Array, "tokens experts"],
    config: TransformerModel,
    bias: Float[Array, " experts"] | None = None,
) -> tuple[Bool[Array, "tokens choices experts"], Float[Array, "tokens choices"]]:
    """Choose experts by largest score, the lower index first if equal; return choices and their weights.

    Scores are the softmax or the sigmoid of the logits. Weights are the scores, divided by their sum if they
    are normalised, times `router_scale`. `bias` is added to scores for the choice alone, without a gradient.
    """
    _, num_choices = _sizes(config)
    by_sigmoid = config.router == "sigmoid"
    liking = jax.nn.sigmoid(logits) if by_sigmoid else logits  # softmax has the order of the logits
    liking = jax.lax.stop_gradient(liking if bias is None else liking + bias[None])
    if config.router_groups is not None and config.router_groups_chosen is not None:
        liking = _within_groups(liking, config.router_groups, config.router_groups_chosen, by_sigmoid)
    stacked = _largest(liking, num_choices)

    def of_chosen(x: Array) -> Array:
        return jnp.where(stacked, x[:, None], 0.0).sum(axis=-1)

    if config.router_normalised and not by_sigmoid:
        return stacked, jax.nn.softmax(of_chosen(logits), axis=-1) * config.router_scale
    weights = of_chosen(jax.nn.sigmoid(logits) if by_sigmoid else jax.nn.softmax(logits, axis=-1))
    if config.router_normalised:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return stacked, weights * config.router_scale


def _largest(x: Float[Array, "tokens places"], num: int) -> Bool[Array, "tokens num places"]:
    """Return the indices of each row's largest numbers, the largest first."""
    left, chosen = x, list[Array]()
    for _ in range(num):
        best = jnp.argmax(left, axis=-1)[:, None] == jnp.arange(x.shape[1])[None]
        chosen.append(best)
        left = jnp.where(best, -jnp.inf, left)
    return jnp.stack(chosen, axis=1)


def _within_groups(liking: Array, num_groups: int, num_chosen: int, by_two: bool) -> Array:
    """Return `liking` with -inf outside the best groups, whose value is that of their best expert or two."""
    grouped = liking.reshape(liking.shape[0], num_groups, -1)
    best = grouped.max(axis=-1)
    if by_two:
        first = jnp.argmax(grouped, axis=-1)[:, :, None] == jnp.arange(grouped.shape[2])[None, None]
        best = best + jnp.where(first, -jnp.inf, grouped).max(axis=-1)
    is_chosen = _largest(best, num_chosen).any(axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(liking.shape)


def places_of(chosen: Bool[Array, "tokens choices experts"], capacity: int) -> Places:
    """Assign a buffer slot to each choice, in the order of the tokens, until the expert's buffer is full."""
    num_tokens, num_choices, num_experts = chosen.shape
    taken = chosen.any(axis=1).astype(jnp.int32)
    before = jnp.cumsum(taken, axis=0) - taken
    rank = jnp.where(chosen, before[:, None], 0).sum(axis=-1)
    expert = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    choices = jnp.arange(num_tokens * num_choices, dtype=jnp.int32)
    num_slots = num_experts * capacity
    # Each dropped choice gets its own number beyond the end, so that indices stay unique.
    beyond = num_slots + choices.reshape(rank.shape)
    slots = jnp.where(rank < capacity, expert * capacity + rank, beyond)
    empty = jnp.full(num_slots, choices.size, jnp.int32)
    sources = empty.at[slots.reshape(-1)].set(choices, mode="drop", unique_indices=True)
    return Places(slots, sources)


def _rows(x: Array, places: Array) -> Array:
    """Return the rows of `x` at `places`; zeros for indices beyond its end."""
    return jnp.take(x, places, axis=0, mode="fill", fill_value=0)


def _to_slots(x: Array, places: Places) -> Array:
    return _rows(x, places.sources // places.slots.shape[1])


def _to_tokens(y: Array, places: Places) -> Array:
    return _rows(y, places.slots).astype(jnp.float32).sum(axis=1).astype(y.dtype)


@jax.custom_vjp
def send(x: Float[Array, "tokens embed"], places: Places) -> Float[Array, "slots embed"]:
    """Return each slot's token; zeros if the slot is empty."""
    return _to_slots(x, places)


@jax.custom_vjp
def receive(y: Float[Array, "slots embed"], places: Places) -> Float[Array, "tokens embed"]:
    """Sum each token's slots; dropped choices add nothing."""
    return _to_tokens(y, places)


@jax.custom_vjp
def _matched(weights: Float[Array, "tokens choices"], places: Places) -> Float[Array, " slots"]:
    """Return each slot's weight."""
    return _rows(weights.reshape(-1), places.sources)


# `send` and `receive` are each other's transpose; autodiff would use a scatter-add instead.
send.defvjp(lambda x, p: (_to_slots(x, p), p), lambda p, g: (_to_tokens(g, p), None))
receive.defvjp(lambda y, p: (_to_tokens(y, p), p), lambda p, g: (_to_slots(g, p), None))
_matched.defvjp(lambda w, p: (_matched(w, p), p), lambda p, g: (_rows(g, p.slots), None))


def _on_one_device(
    x: Array,
    layer: dict[str, Array],
    *,
    config: TransformerModel,
    context: Context,
    activation: Callable[[Array], Array],
    dims: dict[str, tuple[str, ...]],
) -> tuple[Array, Balance]:
    """Run the experts on one device's tokens, given its shards of the parameters as stored."""
    num_experts, _ = _sizes(config)
    tokens = x.reshape(-1, x.shape[-1])
    capacity = capacity_of(config, tokens.shape[0])
    with jax.named_scope("router"):
        wide = tokens.astype(jnp.float32)
        logits = jnp.matmul(wide, layer["router"], precision=jax.lax.Precision.HIGHEST)
        logits = checkpoint_name(checkpoint_name(logits, "router"), EXPERTS)
        chosen, weights = route(logits, config, layer.get("router_bias"))
        places = places_of(chosen, capacity)
        balance = _balance(_probabilities(logits, config), chosen, places, context)
    narrow = context.fp8 and _split("fsdp", context)
    matrices: dict[str, Any] = {
        name: whole_in_eight_bits(w, dims[name].index("embed"), context.dtype)
        if narrow
        else _whole(w, dims[name], context.dtype, context)
        for name, w in layer.items()
        if name not in ROUTER
    }
    buffers = send(tokens, places).reshape(num_experts, capacity, -1)
    num_needed, num_slots = weights.size, num_experts * capacity
    # All slots of the buffers are multiplied, filled or not.
    scope = f"needed_{min(num_needed, num_slots)}_of_{num_slots}"
    arrived = _exchange(buffers, context)
    factors = _exchange(_matched(weights, places).reshape(num_experts, capacity, 1), context)
    with jax.named_scope(scope):
        out = _mlp(arrived, factors, matrices, activation, context)
    out = _exchange_back(out, context).reshape(num_slots, -1)
    return receive(out, places).reshape(x.shape), balance


def _mlp(
    x: Array,
    factors: Array,
    matrices: dict[str, Any],
    activation: Callable[[Array], Array],
    context: Context,
) -> Array:
    """Run each expert's MLP on its buffer [experts, slots, embed]; over `tensor` return a partial sum.

    The router's weights, `factors` [experts, slots, 1] in float32, multiply the hidden units and not the
    outputs. Their gradient then needs the hidden units, which the gradient of `down` needs anyway, so no
    output is kept. Megatron-Core does the same (https://github.com/NVIDIA/Megatron-LM,
    megatron/core/transformer/moe/experts.py).
    """

    def product(x: Array, name: str) -> Array:
        with jax.named_scope(name):
            if context.fp8:
                return fp8_product(x, matrices[name], 1, context.platform == "cpu", 1)
            return matrix_product(x, matrices[name], 1, 1)

    up = checkpoint_name(checkpoint_name(product(x, "up"), "expert_up"), EXPERTS)
    if "gate" in matrices:
        gate = checkpoint_name(checkpoint_name(product(x, "gate"), "expert_gate"), SECOND_EXPERTS)
        hidden = activation(gate) * up
    else:
        hidden = activation(up)
    return product((hidden * factors).astype(x.dtype), "down")


def _split(axis: str, context: Context) -> bool:
    """Return whether an axis has several devices here; `expert` may be manual outside of the model."""
    return (whole_size if axis == "expert" else axis_size)(context.mesh, axis) > 1


def _whole(weight: Array, dims: tuple[str, ...], dtype: jax.typing.DTypeLike, context: Context) -> Array:
    """All-gather a parameter over `fsdp` in `dtype`; its gradient is reduce-scattered in its own format."""
    if not _split("fsdp", context):
        return weight
    axis = dims.index("embed")

    @jax.custom_vjp
    def use(weight: Array) -> Array:
        return jax.lax.all_gather(weight.astype(dtype), "fsdp", axis=axis, tiled=True).astype(weight.dtype)

    def backward(_: None, gradient: Array) -> tuple[Array]:
        return (jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True),)

    use.defvjp(lambda weight: (use(weight), None), backward)
    return use(weight)


def whole_in_eight_bits(weight: Array, axis: int, dtype: jax.typing.DTypeLike) -> NarrowMatrix:
    """All-gather a parameter over `fsdp` in eight bits, by its dimension `axis`.

    It is rounded to `dtype` first. All parts share a scale. The gradient is reduce-scattered in the format of
    `weight`.
    """

    @jax.custom_vjp
    def use(weight: Array) -> NarrowMatrix:
        values, scale = quantised(weight.astype(dtype), FORWARD, "fsdp")
        values = jax.lax.all_gather(values, "fsdp", axis=axis, tiled=True)
        return NarrowMatrix(values, scale, jnp.zeros(values.shape, weight.dtype))

    def backward(_: None, gradient: NarrowMatrix) -> tuple[Array]:
        return (jax.lax.psum_scatter(gradient.stand_in, "fsdp", scatter_dimension=axis, tiled=True),)

    use.defvjp(lambda weight: (use(weight), None), backward)
    return use(weight)


def _exchange(buffers: Array, context: Context) -> Array:
    """Exchange [experts, capacity, embed] of own tokens for [own experts, slots of all devices, embed].

    Buffers that crossed `expert` may be saved for the backward pass; others are filled again there.
    """
    if _split("expert", context):
        buffers = jax.lax.all_to_all(buffers, "expert", split_axis=0, concat_axis=1, tiled=True)
        buffers = checkpoint_name(buffers, "expert_tokens")
        buffers = checkpoint_name(buffers, EXPERTS)  # as shards; gathered over `tensor` again
    if _split("tensor", context):
        buffers = jax.lax.all_gather(buffers, "tensor", axis=1, tiled=True)
    return buffers


def _exchange_back(out: Array, context: Context) -> Array:
    if _split("tensor", context):
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
    if _split("expert", context):
        out = jax.lax.all_to_all(out, "expert", split_axis=1, concat_axis=0, tiled=True)
    return out


def _probabilities(logits: Array, config: TransformerModel) -> Array:
    """Return each expert's share of a token's scores."""
    if config.router == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    scores = jax.nn.sigmoid(logits)
    return scores / scores.sum(axis=-1, keepdims=True)


def _balance(probabilities: Array, chosen: Array, places: Places, context: Context) -> Balance:
    """Compute the balance over the tokens of all devices, including axes already manual outside the model."""
    num_tokens, num_choices, num_experts = chosen.shape
    choices = chosen.astype(jnp.float32).sum(axis=(0, 1))
    probability = probabilities.sum(axis=0)
    kept = jnp.sum(places.slots < places.sources.size, dtype=jnp.int32).astype(jnp.float32)
    splitting = (axis for dim in RESIDUAL for axis in ACTIVATION_RULES[dim])
    axes = tuple(axis for axis in splitting if context.mesh.shape.get(axis, 1) > 1)
    if axes:
        choices, probability, kept = jax.lax.psum((choices, probability, kept), axes)
        num_tokens *= math.prod(context.mesh.shape[axis] for axis in axes)
    return Balance(
        loss=num_experts * jnp.sum(choices / num_tokens * (probability / num_tokens)),
        load=num_experts * jnp.max(choices) / (num_tokens * num_choices),
        dropped=1.0 - kept / (num_tokens * num_choices),
    )
