"""Define the mixture of experts: a router sends each token to a few of many MLPs, as Mixtral's does.

A token goes to the experts of its largest logits. Their outputs are summed, weighted by the softmax over
those logits alone (Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.1), or by the rules of
DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3 (https://arxiv.org/abs/2412.19437).

Every choice is computed (`dropless`), unless the model has a capacity factor. Then each expert has a buffer
of fixed size on each device, filled in the order of the tokens. A choice that finds it full is dropped and
adds nothing (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, section 2.2).

The code runs per device (`shard_map`) on that device's tokens, which `tensor` shards by position.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meshwright.config import ACTIVATION_RULES, TransformerModel
from meshwright.sharding import activation_spec, on_each_device, parameter_spec
from meshwright.trainer.models import RESIDUAL, Context, Parameter, with_experts_over
from meshwright.trainer.models.activations import hidden_units
from meshwright.trainer.models.eight_bits import FORWARD, NarrowMatrix, fp8_product, narrowed, quantised
from meshwright.trainer.models.loss import Balance
from meshwright.trainer.models.norms import normalised
from meshwright.trainer.models.products import product as matrix_product
from meshwright.trainer.models.rematerialisation import EXPERTS, SECOND_EXPERTS

from .dropless import Rows, Run, dropless
from .expert_rows import exchange, exchange_back, is_split, matched, order_of, places_of, receive, send
from .grouped_products import Axes

ROUTER = ("router", "router_bias", "logit_bias", "output_scale")  # in float32, whole on each device
BIASES = ("up_bias", "gate_bias", "down_bias")  # of the products, in float32


def _sizes(config: TransformerModel) -> tuple[int, int]:
    """Return the number of experts and the number of choices per token."""
    assert config.num_experts is not None, "the model has no experts"
    assert config.experts_per_token is not None, "nothing says how many experts a token is sent to"
    return config.num_experts, config.experts_per_token


def expert_parameters(config: TransformerModel) -> dict[str, Parameter]:
    """Declare `router`, `up`, `down` and (if gated) `gate` for all experts, and the biases that there are.

    `router_bias` is of the choice of experts alone, and `logit_bias` of the router's logits. With norms of
    their own, `input_scale` is of the router's input, and `output_scale` multiplies each expert's weight.
    """
    (experts, _), embed, mlp = _sizes(config), config.embed_dim, config.mlp_dim
    up = Parameter(shape=(experts, embed, mlp), dims=("experts", "embed", "mlp"), fan_in=embed)
    declared = {
        "router": Parameter(shape=(embed, experts), dims=("embed", "routes"), fan_in=embed, wide=True),
        "up": up,
        "down": Parameter(shape=(experts, mlp, embed), dims=("experts", "mlp", "embed"), fan_in=mlp),
    }
    if config.router_bias:
        declared["router_bias"] = Parameter(shape=(experts,), dims=("routes",), initial="zeros", wide=True)
    declared |= {"gate": up} if config.mlp == "gated" else {}
    if config.expert_norms:
        scales = {"input_scale": (embed, "embed"), "output_scale": (experts, "routes")}
        for name, (size, dim) in scales.items():
            declared[name] = Parameter(shape=(size,), dims=(dim,), initial="ones", wide=True)
    if config.expert_bias:
        widths = {"up": (mlp, "mlp"), "gate": (mlp, "mlp"), "down": (embed, "embed")}
        for name, (width, dim) in widths.items():
            if name in declared:
                declared[f"{name}_bias"] = Parameter(
                    shape=(experts, width), dims=("experts", dim), initial="zeros", wide=True
                )
        declared["logit_bias"] = Parameter(shape=(experts,), dims=("routes",), initial="zeros", wide=True)
    return declared


def capacity_of(config: TransformerModel, factor: float, num_tokens: int) -> int:
    """Return how many of a device's `num_tokens` tokens one expert takes by a capacity factor.

    All of them at most, for a token chooses an expert at most once.
    """
    num_experts, num_choices = _sizes(config)
    return min(num_tokens, math.ceil(factor * num_tokens * num_choices / num_experts))


def expert_mlp(
    x: Float[Array, "batch sequence embed"],
    layer: dict[str, Array],
    config: TransformerModel,
    context: Context,
    routed: Float[Array, "batch sequence embed"] | None = None,
) -> tuple[Float[Array, "batch sequence embed"], Balance]:
    """Return the weighted sum of the chosen experts' outputs. Result and inputs are sharded as residuals.

    `routed` is the router's input; None for `x`.
    """
    layer = {name: weight for name, weight in layer.items() if name != "input_scale"}
    declared = with_experts_over(expert_parameters(config), context.fold_experts)
    declared = {name: parameter for name, parameter in declared.items() if name in layer}
    dims = {name: parameter.dims for name, parameter in declared.items()}
    # Cast outside the shard_map: gradients then cross the network in that format.
    of_gradients = jnp.float32 if context.widens else context.dtype
    wide = {n: context.gather(w, *dims[n], wide=True) for n, w in layer.items() if declared[n].wide}
    layer = {**{n: w.astype(of_gradients) for n, w in layer.items() if n not in wide}, **wide}
    local = partial(_on_one_device, config=config, context=context, dims=dims)
    with jax.named_scope("experts"):
        rows = activation_spec(RESIDUAL, context.mesh)
        weights = {
            name: PartitionSpec() if name in ROUTER else parameter_spec(names, context.mesh)
            for name, names in dims.items()
        }
        if "down_bias" in weights:  # gathered over the width's axes
            weights["down_bias"] = PartitionSpec(weights["down_bias"][0])
        each = on_each_device(local, context.mesh, (rows, rows, weights), (rows, PartitionSpec()))
        return each(x, routed, layer)


def router_input(x: Array, layer: dict[str, Array], config: TransformerModel, context: Context) -> Array:
    """Return the input of a router that has a norm of its own: RMSNorm, a learned scale, and 1 / sqrt(embed).

    So it is in Gemma 4. `x` is the residual.
    """
    scale = context.gather(layer["input_scale"], "embed", wide=True) * config.embed_dim**-0.5
    return normalised(x, scale, None, False, config.norm_epsilon, context.dtype)


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
    if bias is not None:
        liking = (liking if by_sigmoid else jax.nn.softmax(logits, axis=-1)) + bias[None]
    liking = jax.lax.stop_gradient(liking)
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


@jax.custom_vjp
def counted_for_bias(weights: Array, bias: Array, excess: Array) -> Array:
    """Return the weights; the gradient of `bias` is `excess`, the tokens of each expert beyond the mean.

    The step moves the bias against the sign of the sum (`_balance.py`), so its scale does not matter.
    """
    del bias, excess
    return weights


counted_for_bias.defvjp(
    lambda w, b, excess: (w, excess), lambda excess, g: (g, excess, jnp.zeros_like(excess))
)


def _largest(x: Float[Array, "tokens places"], num: int) -> Bool[Array, "tokens num places"]:
    """Return the indices of each row's largest numbers, the largest first, the lower index first if equal.

    Each is found among the numbers after the one before it in this order. So a kernel reads a row and two
    numbers, where masks of all before would make later kernels larger, and slow to compile.
    """
    places = jnp.arange(x.shape[1])[None]
    left, chosen = x, list[Array]()
    for _ in range(num):
        largest, best = left.max(axis=-1)[:, None], jnp.argmax(left, axis=-1)[:, None]
        chosen.append(best)
        left = jnp.where((x < largest) | ((x == largest) & (places > best)), x, -jnp.inf)
    return jnp.stack(chosen, axis=1) == places[None]


def _within_groups(liking: Array, num_groups: int, num_chosen: int, by_two: bool) -> Array:
    """Return `liking` with -inf outside the best groups, whose value is that of their best expert or two."""
    grouped = liking.reshape(liking.shape[0], num_groups, -1)
    best = grouped.max(axis=-1)
    if by_two:
        first = jnp.argmax(grouped, axis=-1)[:, :, None] == jnp.arange(grouped.shape[2])[None, None]
        best = best + jnp.where(first, -jnp.inf, grouped).max(axis=-1)
    is_chosen = _largest(best, num_chosen).any(axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(liking.shape)


def _on_one_device(
    x: Array,
    routed: Array | None,
    layer: dict[str, Array],
    *,
    config: TransformerModel,
    context: Context,
    dims: dict[str, tuple[str, ...]],
) -> tuple[Array, Balance]:
    """Run the experts on one device's tokens, given its shards of the parameters as stored."""
    num_experts, _ = _sizes(config)
    tokens, factor = x.reshape(-1, x.shape[-1]), config.capacity_factor
    with jax.named_scope("router"):
        wide = (tokens if routed is None else routed.reshape(tokens.shape)).astype(jnp.float32)
        logits = jnp.matmul(wide, layer["router"], precision=jax.lax.Precision.HIGHEST)
        if "logit_bias" in layer:
            logits = logits + layer["logit_bias"][None]
        logits = checkpoint_name(checkpoint_name(logits, "router"), EXPERTS)
        chosen, weights = route(logits, config, layer.get("router_bias"))
        if "output_scale" in layer:
            weights = weights * jnp.where(chosen, layer["output_scale"][None, None], 0.0).sum(axis=-1)
        order = order_of(chosen)
        capacity = None if factor is None else capacity_of(config, factor, tokens.shape[0])
        kept = order.rank < (tokens.shape[0] if capacity is None else capacity)
        if config.router_bias_rate and "router_bias" in layer:
            excess = order.counts.astype(jnp.float32) - weights.size / num_experts
            weights = counted_for_bias(weights, layer["router_bias"], excess)
        balance = _balance(_probabilities(logits, config), chosen, kept, context)
    narrow = context.fp8 and is_split("fsdp", context)
    matrices: dict[str, Any] = {
        name: whole_in_eight_bits(w, dims[name].index("embed"), context.dtype)
        if narrow
        else _whole(w, dims[name], context.dtype, context)
        for name, w in layer.items()
        if name not in (*ROUTER, *BIASES)
    }
    biases = {name: _once(layer[name], name, context) for name in BIASES if name in layer}
    mlp = partial(_mlp, config=config)
    if capacity is None:
        axes = {name: Axes(0, 1) for name in matrices}
        if is_split("fsdp", context):
            matrices, axes = _gathered_first(matrices, dims)
        elif context.fp8:
            matrices = {name: narrowed(w, context.dtype) for name, w in matrices.items()}
        run = Run(axes, mlp, config, context)
        return dropless(tokens, weights, {**matrices, **biases}, order, run).reshape(x.shape), balance
    num_slots = num_experts * capacity
    places = places_of(order.expert * capacity + order.rank, kept, num_slots)
    arrived = exchange(send(tokens, places).reshape(num_experts, capacity, -1), context)
    factors = exchange(matched(weights, places).reshape(num_experts, capacity, 1), context)
    # All slots of the buffers are multiplied, filled or not.
    with jax.named_scope(f"needed_{min(weights.size, num_slots)}_of_{num_slots}"):
        each = Rows(
            lambda x, name: _batched(x, matrices[name], context),
            lambda name: biases[name][:, None] if name in biases else None,
        )
        out = mlp(arrived, factors, each)
    out = exchange_back(out, context).reshape(num_slots, -1)
    return receive(out, places).reshape(x.shape), balance


def _gathered_first(
    matrices: dict[str, Any], dims: dict[str, tuple[str, ...]]
) -> tuple[dict[str, Any], dict[str, Axes]]:
    """Return matrices with the dimension along which they were gathered first, as the gather leaves them.

    A kernel takes an array as it is given, so another order would be a copy.
    """
    places = {name: dims[name].index("embed") for name in matrices}

    def first(name: str, matrix: Any) -> Any:
        if isinstance(matrix, NarrowMatrix):
            return NarrowMatrix(first(name, matrix.values), matrix.scale, first(name, matrix.stand_in))
        return jnp.moveaxis(matrix, places[name], 0)

    moved = {name: first(name, matrix) for name, matrix in matrices.items()}
    return moved, {name: Axes(1, 0 if place == 1 else 2) for name, place in places.items()}


def _batched(x: Array, matrix: Any, context: Context) -> Array:
    """Multiply the rows of each expert's buffer [experts, slots, ...] with its matrix."""
    if context.fp8:
        return fp8_product(x, matrix, 1, context.platform == "cpu", 1)
    return matrix_product(x, matrix, 1, 1)


def _once(bias: Array, name: str, context: Context) -> Array:
    """Return a bias for this device; one of the devices whose partial sums are added has that of `down`."""
    if name != "down_bias" or not is_split("tensor", context):
        return bias
    return jnp.where(jax.lax.axis_index("tensor") == 0, bias, 0.0)


def _mlp(x: Array, factors: Array, rows: Rows, config: TransformerModel) -> Array:
    """Run the experts' MLPs on rows [..., embed]; over `tensor` return a partial sum.

    The router's weights, `factors` [..., 1] in float32, multiply the hidden units and not the outputs, and
    the bias of the outputs. Their gradient then needs the hidden units, which the gradient of `down` needs
    anyway, so no output is kept. Megatron-Core does the same (https://github.com/NVIDIA/Megatron-LM,
    megatron/core/transformer/moe/experts.py). Rows that fill nothing have the factor 0.
    """

    def product(x: Array, name: str, factors: Array | float = 1.0) -> Array:
        with jax.named_scope(name):
            y, bias = rows.multiply(x, name), rows.bias_of(f"{name}_bias")
            return y if bias is None else (y + bias * factors).astype(y.dtype)

    up = checkpoint_name(checkpoint_name(product(x, "up"), "expert_up"), EXPERTS)
    gate = None
    if config.mlp == "gated":
        gate = checkpoint_name(checkpoint_name(product(x, "gate"), "expert_gate"), SECOND_EXPERTS)
    hidden = hidden_units(up, gate, config)
    return product((hidden * factors).astype(x.dtype), "down", factors)


def _whole(weight: Array, dims: tuple[str, ...], dtype: jax.typing.DTypeLike, context: Context) -> Array:
    """All-gather a parameter over `fsdp` in `dtype`; its gradient is reduce-scattered in its own format."""
    if not is_split("fsdp", context):
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


def _probabilities(logits: Array, config: TransformerModel) -> Array:
    """Return each expert's share of a token's scores."""
    if config.router == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    scores = jax.nn.sigmoid(logits)
    return scores / scores.sum(axis=-1, keepdims=True)


def _balance(probabilities: Array, chosen: Array, is_kept: Array, context: Context) -> Balance:
    """Compute the balance over the tokens of all devices, including axes already manual outside the model."""
    num_tokens, num_choices, num_experts = chosen.shape
    choices = chosen.astype(jnp.float32).sum(axis=(0, 1))
    probability = probabilities.sum(axis=0)
    kept = jnp.sum(is_kept, dtype=jnp.int32).astype(jnp.float32)
    splitting = (axis for dim in RESIDUAL for axis in ACTIVATION_RULES[dim])
    axes = tuple(axis for axis in splitting if context.mesh.shape.get(axis, 1) > 1)
    if axes:
        choices, probability, kept = jax.lax.psum((choices, probability, kept), axes)
        num_tokens *= math.prod(context.mesh.shape[axis] for axis in axes)
    return Balance(
        loss=num_experts * jnp.sum(choices / num_tokens * (probability / num_tokens)),
        load=num_experts * jnp.max(choices) / (num_tokens * num_choices),
        dropped=(num_tokens * num_choices - kept) / (num_tokens * num_choices),
    )
