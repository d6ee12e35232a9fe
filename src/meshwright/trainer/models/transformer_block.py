"""Define a block of the Transformer: a mixer and an MLP, or one of them, and what they save.

Between blocks, `tensor` shards the residual by position; inside a block, it shards heads and hidden units.
What a block saves for the backward pass is named here and chosen in `rematerialisation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from meshwright.config import GLOBAL_ATTENTION, LayerKind, TransformerModel
from meshwright.registry import load_registered, room
from meshwright.sharding import num_repeats, num_shards, ring_size, rows_here, sequence_length

from ._base_model import RESIDUAL, Context, Parameter, Tree
from .activations import LEARNED, hidden_units, xielu_parameters
from .attention import Documents, Shape, causal_attention, ring_positions
from .layer_gradients import delay_weight_grads
from .loss import Balance
from .norms import normalised
from .products import ADAPTER, num_inputs_of, product
from .rematerialisation import AFTER_ATTENTION, HIDDEN, PRODUCT, SECOND_PRODUCT
from .rotary import grown, rotated, score_factor, turns_of

PRODUCTS = (
    *("query_down", "query", "key_down", "key", "value", "key_rotary", "beta", "step", "decay_down", "decay"),
    *("output_gate_down", "output_gate", "output", "up", "gate", "down"),
)
"""A block's matrix products, in the order in which they run; no model has all of them."""
FROM_INPUT = tuple(name for name in PRODUCTS if name not in ("output", "down"))
"""All but the last product of attention and of the MLP."""
NAMES = {
    ("attention", "query_down"): "latents",
    ("attention", "key_down"): "latents",
    ("attention", "key_rotary"): "latents",
    ("attention", "query"): "query",
    ("attention", "key"): "key",
    ("attention", "value"): "value",
    ("attention", "output_gate"): "query",
    ("attention", "output"): "out",
    ("mlp", "up"): "mlp_up",
    ("mlp", "gate"): "mlp_gate",
    ("mlp", "down"): "mlp_out",
}
STATE_MIXERS = ("delta", "mamba")
MIXERS = "meshwright.mixers"  # the entry points of rooms outside the core that have them
NAMES |= {
    (mixer, name): NAMES.get(("attention", name), "value") for mixer in STATE_MIXERS for name in PRODUCTS
}
NAMES |= {(mixer, f"{name}_down"): "latents" for mixer in STATE_MIXERS for name in ("decay", "output_gate")}
NAMES |= {("shared", name): NAMES["mlp", name] for name in ("up", "gate", "down")}
NAMES |= {(GLOBAL_ATTENTION, name): of for (group, name), of in NAMES.items() if group == "attention"}
"""The name of each product's result, by which a list of what a block keeps chooses it (`config.RESULTS`)."""


class Block:
    """One kind of layer of a Transformer: what it declares, and what it computes."""

    def __init__(self, config: TransformerModel, kind: LayerKind) -> None:
        (self.config, self._mixer), self.kind = config.of_kind(kind), kind
        self.declared = self._parameters()
        self._dims = {
            (group, name): parameter.dims
            for group, parameters in self.declared.items()
            for name, parameter in parameters.items()
        }
        named = {name for group, name in self._dims if group in (self._mixer, "mlp", "shared")}
        self._second = frozenset([name for name in PRODUCTS if name in named][1::2])

    def _parameters(self) -> dict[str, dict[str, Parameter]]:
        c, kind = self.config, self.kind
        groups = [group for group in (kind.mixer, kind.mlp and "mlp") if group is not None]
        normed = groups[:1] if c.one_norm else groups
        names = [f"{group}_{place}" for group in normed for place in _norm_names(c)]
        declared: dict[str, dict[str, Parameter]] = dict.fromkeys(names, norm_parameters(c))
        if kind.mixer == "attention":
            declared[self._part] = self._attention_parameters()
        elif kind.mixer is not None:
            declared[kind.mixer] = load_registered(MIXERS, kind.mixer).parameters(c)
        if c.layer_factor:
            factor = Parameter(shape=(1,), dims=("one",), initial="ones", wide=True)
            declared["layer"] = {"factor": factor}
        if kind.mlp == "mlp":
            declared["mlp"] = self._mlp_parameters(c.plain_mlp_dim)
            declared["mlp"] |= xielu_parameters() if c.activation == "xielu" else {}
        if kind.mlp == "experts":
            declared["experts"] = room("experts").expert_parameters(c)
            named = ("experts_norm", "experts_out_norm", "shared_out_norm")[: 3 if c.shared_dim else 2]
            declared |= dict.fromkeys(named, norm_parameters(c)) if c.expert_norms else {}
            if c.shared_dim:
                declared["shared"] = self._mlp_parameters(c.shared_dim)
            if c.shared_gate:
                gate = Parameter(shape=(c.embed_dim, 1), dims=("embed", "one"), fan_in=c.embed_dim)
                declared["shared"]["shared_gate"] = gate
        return declared

    def _attention_parameters(self) -> dict[str, Parameter]:
        c = self.config
        sizes = {
            "embed": c.embed_dim,
            "heads": c.num_heads,
            "kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
        }
        matrices = {
            "query": ("embed", "heads", "head_dim"),
            "key": ("embed", "kv_heads", "head_dim"),
            "value": ("embed", "kv_heads", "head_dim"),
            "output": ("heads", "head_dim", "embed"),
        }
        if c.global_key_is_value:
            del matrices["value"]
        if c.attention_gate:
            matrices["output_gate"] = matrices["query"]
        declared: dict[str, Parameter] = {}
        if c.latent_rank is not None:
            declared, matrices = room("latent_attention").latent_parameters(c), {}
        with_bias = {"query", "key", "value"} if c.qkv_bias else set[str]()
        with_bias = set(matrices) if c.bias else with_bias | {"output"} if c.output_bias else with_bias
        declared |= _products(matrices, sizes, with_bias)
        for name, heads in (("query", "heads"), ("key", "kv_heads")) if c.qk_norm != "none" else ():
            dims = ("head_dim",) if c.qk_norm == "head" else (heads, "head_dim")
            shape = tuple(sizes[dim] for dim in dims)
            declared[f"{name}_norm"] = Parameter(shape=shape, dims=dims, initial="ones", wide=True)
        if c.attention_sinks:
            sinks = Parameter(shape=(c.num_heads,), dims=("heads",), initial="zeros", wide=True)
            declared["sinks"] = sinks
        return declared

    def _mlp_parameters(self, width: int) -> dict[str, Parameter]:
        c = self.config
        sizes = {"embed": c.embed_dim, "mlp": width}
        matrices = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
        matrices |= {"gate": ("embed", "mlp")} if c.mlp == "gated" else {}
        return _products(matrices, sizes, set(matrices) if c.bias else set())

    def apply(
        self, x: Array, layer: Tree, index: Array, context: Context, documents: Documents | None
    ) -> tuple[Array, Balance | None]:
        """Return the output of layer `index` [batch, sequence, embed], and the `Balance` of its experts."""
        c, entered, balance = self.config, x, None
        if (mixer := self.kind.mixer) is not None:
            with jax.named_scope(f"{mixer}_block"):
                mix = self._attended if mixer == "attention" else self._states
                out, layer = mix(x, layer, context, documents)
                out = scaled(dropped_out(out, c, context, 2 * index), c.residual_scale)
                x = context.pin(x + out, *RESIDUAL)
                x = checkpoint_name(x, AFTER_ATTENTION)
        if self.kind.mlp is not None:
            with jax.named_scope("mlp_block"):
                h, layer = self._input_of("mlp", entered if c.parallel else x, layer, context)
                out, balance = self._mlps(h, x, layer, context)
                out = self._normed_after(out, layer, "mlp_out_norm", context)
                out = scaled(dropped_out(out, c, context, 2 * index + 1), c.residual_scale)
                x = context.pin(x + out, *RESIDUAL)
        return self._scaled(x, layer, context), balance

    @property
    def _part(self) -> str:
        """The name of the mixer's parameters among the layer's parts."""
        assert self._mixer is not None, "the layer has no mixer"
        return self._mixer

    def _scaled(self, x: Array, layer: Tree, context: Context) -> Array:
        """Multiply a layer's output by its own number, which has no gradient; there may be none."""
        if not self.config.layer_factor:
            return x
        factor = context.gather(jax.lax.stop_gradient(layer["layer"]["factor"]), "one", wide=True)
        return (x * factor[None, None]).astype(x.dtype)

    def _attended(
        self, x: Array, layer: Tree, context: Context, documents: Documents | None
    ) -> tuple[Array, Tree]:
        """Return what attention adds to the residual `x`, and the layer to use after it."""
        c, shape = self.config, Shape(self.kind.window, self.config.score_cap)
        h, layer = self._input_of("attention", x, layer, context)
        query, key, value = self._projections(h, layer, context, documents)
        if (factor := score_factor(c)) != 1:
            query = query * jnp.asarray(factor, query.dtype)
        held = layer[self._part]
        sinks = context.gather(held["sinks"], "heads", wide=True) if c.attention_sinks else None
        out = causal_attention(query, key, value, context, documents, shape, sinks)
        if c.attention_gate:
            out = out * jax.nn.sigmoid(self._project(h, layer, self._part, "output_gate", context))
        return self._mixed(out, layer, context)

    def _states(
        self, x: Array, layer: Tree, context: Context, documents: Documents | None
    ) -> tuple[Array, Tree]:
        """Return what a mixer with states adds to the residual `x`, and the layer to use after it."""
        mixer = self._part
        h, layer = self._input_of(mixer, x, layer, context)

        # The bias of steps is the mixer's own, added in float32, and none of the product that makes them.
        matrices = {**layer, mixer: {name: x for name, x in layer[mixer].items() if name != "step_bias"}}

        def project(x: Array, name: str) -> Array:
            return self._project(x, matrices, mixer, name, context)

        mixing = load_registered(MIXERS, mixer)  # a room outside the core
        out = mixing.apply(h, layer[mixer], project, self.config, context, documents)
        return self._mixed(out, layer, context)

    def _mixed(self, out: Array, layer: Tree, context: Context) -> tuple[Array, Tree]:
        """Return the product of a mixer's heads with `output`, and the layer to use after it."""
        y = self._multiplied(out, layer, self._part, "output", context)
        for group in ("mlp", "shared"):
            y, layer = delay_weight_grads(y, layer, group, ("down",), context)
        out = self._placed(y, out, layer, self._part, "output", context)
        return self._normed_after(out, layer, f"{self.kind.mixer}_out_norm", context), layer

    def _mlps(self, h: Array, x: Array, layer: Tree, context: Context) -> tuple[Array, Balance | None]:
        """Return the output of the block's MLP, or of its experts with their `Balance`. `x`: the residual."""
        c = self.config
        if self.kind.mlp == "mlp":
            return self._mlp(h, layer, "mlp", context), None
        experts, split, routed = room("experts"), context.pin(h, *RESIDUAL), None
        entering = split
        if c.expert_norms:
            entering = normed(x, layer["experts_norm"], c, context, splits=True)
            routed = context.pin(experts.router_input(x, layer["experts"], c, context), *RESIDUAL)
        found: tuple[Array, Balance] = experts.expert_mlp(entering, layer["experts"], c, context, routed)
        out, balance = found
        out = self._normed_after(out, layer, "experts_out_norm", context)
        if c.shared_dim:
            shared = self._shared(h, split, layer, context)
            out = out + self._normed_after(shared, layer, "shared_out_norm", context)
        return out, balance

    def _input_of(self, group: str, x: Array, layer: Tree, context: Context) -> tuple[Array, Tree]:
        """Return the input of a group's products, normed if a norm comes first, and the layer to use."""
        name = f"{self.kind.mixer}_norm" if self.config.one_norm else f"{group}_norm"
        if name not in layer:
            return x, layer
        split = normed(x, layer[name], self.config, context, splits=True)
        for each in (group, "shared") if group == "mlp" else (self._part,):
            split, layer = delay_weight_grads(split, layer, each, FROM_INPUT, context)
        return context.pin(split, "batch", "sequence", "embed"), layer

    def _projections(
        self, h: Array, layer: Tree, context: Context, documents: Documents | None
    ) -> tuple[Array, Array, Array]:
        """Return query, key and value of one layer, with norms and positions applied to the first two."""
        c = self.config
        is_turned = c.rope_theta is not None and self.kind.has_positions
        has_places = is_turned or c.position_growth
        places = places_of(h.shape[1], context, documents) if has_places else None

        def project(x: Array, name: str) -> Array:
            return self._project(x, layer, self._part, name, context)

        if c.latent_rank is not None:
            turns = turns_of(c, sequence_length(h.shape[1], context.mesh)) if is_turned else None
            held = layer[self._part]
            return room("latent_attention").latent_projections(h, held, project, turns, places, c, context)
        query, key = (project(h, name) for name in ("query", "key"))
        value = key if c.global_key_is_value else project(h, "value")
        if c.value_norm:
            ones = jnp.ones(value.shape[-1], jnp.float32)
            value = normalised(value, ones, None, False, c.norm_epsilon, value.dtype)

        def head_normed(query: Array, key: Array) -> tuple[Array, Array]:
            named = (query, "query"), (key, "key")
            query, key = (self._head_norm(t, layer, name, context) for t, name in named)
            return query, key

        if c.qk_norm != "none" and not c.qk_norm_turned:
            query, key = head_normed(query, key)
        if is_turned:
            angles = turns_of(c, sequence_length(h.shape[1], context.mesh), self.kind.window is not None)
            query, key = (rotated(t, angles, places) for t in (query, key))
        if c.qk_norm_turned:
            query, key = head_normed(query, key)
        if c.position_growth:
            query = grown(query, c, places)
        return query, key, value

    def _shared(self, h: Array, split: Array, layer: Tree, context: Context) -> Array:
        """Apply the shared experts to `h`; `split` is the same, sharded as a residual, for their gate."""
        out = self._mlp(h, layer, "shared", context)
        if not self.config.shared_gate:
            return out
        with jax.named_scope("shared_gate"):
            gate = context.gather(layer["shared"]["shared_gate"], *self._dims["shared", "shared_gate"])
            return out * jax.nn.sigmoid(product(split, gate, 1))

    def _mlp(self, h: Array, layer: Tree, group: str, context: Context) -> Array:
        """Apply an MLP that every token passes through: the block's only one, or that of shared experts."""
        up = self._project(h, layer, group, "up", context)
        is_gated = self.config.mlp == "gated"
        gate = self._project(h, layer, group, "gate", context) if is_gated else None
        learned = [context.gather(layer[group][n], "one", wide=True) for n in LEARNED if n in layer[group]]
        up = hidden_units(up, gate, self.config, tuple(for_each_token(each, up) for each in learned))
        up = checkpoint_name(up if is_gated else checkpoint_name(up, SECOND_PRODUCT), HIDDEN)
        return self._project(up, layer, group, "down", context)

    def _project(self, x: Array, layer: Tree, group: str, name: str, context: Context) -> Array:
        """Compute x . W (+ b), sharded by its dims."""
        return self._placed(self._multiplied(x, layer, group, name, context), x, layer, group, name, context)

    def _multiplied(self, x: Array, layer: Tree, group: str, name: str, context: Context) -> Array:
        """Compute x . W; if `tensor` splits the inputs, each device has a part of the sum."""
        dims = self._dims[group, name]
        with self._scope_of(group, name, context):
            if name in layer[group]:
                if context.fp8 and num_shards(context.mesh) > 1:
                    from .eight_bits import projected_in_eight_bits

                    return projected_in_eight_bits(x, layer[group][name], dims, context)
                return projected(x, context.gather(layer[group][name], *dims), context)
            return room("lora").projected_by_codes(x, layer[group], name, dims, context)  # in four bits

    def _placed(self, y: Array, x: Array, layer: Tree, group: str, name: str, context: Context) -> Array:
        """Return the product `y` of `x`, sharded by its dims, with its adapter and its bias added."""
        outputs = self._dims[group, name][x.ndim - 2 :]
        with self._scope_of(group, name, context):
            # A sum over `tensor` is scattered by position at once, which is the residual's layout.
            whole = ("batch", "sequence", *outputs)
            y = _scattered(y, context) if outputs == ("embed",) else context.pin(y, *whole)
            if f"{name}{ADAPTER}" in layer[group]:
                adapter, matrix = layer[group][f"{name}{ADAPTER}"], self.declared[group][name]
                y = y + room("lora").apply_adapter(x, adapter, matrix, context)
            if f"{name}_bias" in layer[group]:
                y = y + for_each_token(context.gather(layer[group][f"{name}_bias"], *outputs, wide=True), y)
            # The residual after a product of this width is saved in its place, unless a norm lies between.
            normed_after = f"{'mlp' if group in ('mlp', 'shared') else 'attention'}_out_norm" in layer
            is_read = outputs != ("embed",) or normed_after
            named = SECOND_PRODUCT if name in self._second else PRODUCT
            y = checkpoint_name(y, NAMES[group, name])
            return checkpoint_name(y, named) if is_read else y

    @contextmanager
    def _scope_of(self, group: str, name: str, context: Context) -> Iterator[None]:
        """Name a product's operations; if several devices repeat it, one of them counts as model FLOPs."""
        shape = self.declared[group][name].shape
        repeats = num_repeats(self._dims[group, name], shape, context.mesh)
        with (
            jax.named_scope(name),
            jax.named_scope(f"needed_1_of_{repeats}") if repeats > 1 else nullcontext(),
        ):
            yield

    def _normed_after(self, x: Array, layer: Tree, name: str, context: Context) -> Array:
        """Apply a norm of the block after a product, if it has one of that name; the result stays split."""
        return normed(x, layer[name], self.config, context, splits=True) if name in layer else x

    def _head_norm(self, x: Array, layer: Tree, name: str, context: Context) -> Array:
        """Apply RMSNorm in float32 to queries or keys [batch, sequence, heads, head_dim].

        Over the numbers of each head, or of all heads together.
        """
        dims = self.declared[self._part][f"{name}_norm"].dims
        scale = context.gather(layer[self._part][f"{name}_norm"], *dims, wide=True).reshape(-1)
        rows = x.reshape(*x.shape[:2], -1, scale.size)
        return normalised(rows, scale, None, False, self.config.norm_epsilon, x.dtype).reshape(x.shape)


def _products(
    matrices: dict[str, tuple[str, ...]], sizes: dict[str, int], with_bias: set[str]
) -> dict[str, Parameter]:
    """Declare matrices by name, from their dims and the sizes of those, with biases after some of them."""
    declared: dict[str, Parameter] = {}
    for name, dims in matrices.items():
        shape, num_inputs = tuple(sizes[dim] for dim in dims), num_inputs_of(name)
        declared[name] = Parameter(shape=shape, dims=dims, fan_in=math.prod(shape[:num_inputs]))
        if name in with_bias:
            bias = Parameter(shape=shape[num_inputs:], dims=dims[num_inputs:], initial="zeros")
            declared[f"{name}_bias"] = bias
    return declared


def norm_parameters(config: TransformerModel) -> dict[str, Parameter]:
    """Declare a norm of the residual stream: a scale, and a bias if LayerNorms have one."""
    scale = Parameter(shape=(config.embed_dim,), dims=("embed",), initial="ones", wide=True)
    if not config.has_norm_biases:
        return {"scale": scale}
    return {"scale": scale, "bias": replace(scale, initial="zeros")}


def scaled(x: Array, factor: float) -> Array:
    """Multiply `x`; a factor of 1 adds no operation."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def normed(
    x: Array,
    group: Tree,
    config: TransformerModel,
    context: Context,
    splits: bool = False,
    factor: float = 1.0,
) -> Array:
    """Apply RMSNorm or LayerNorm in float32, sharded by position, and multiply the result by `factor`.

    The result is gathered for the matmuls; with `splits` it stays sharded as a residual.
    """
    scale = scaled(context.gather(group["scale"], "embed", wide=True), factor)
    bias = context.gather(group["bias"], "embed", wide=True) if "bias" in group else None
    bias = bias if bias is None else scaled(bias, factor)
    y = normalised(x, scale, bias, config.norm == "layer", config.norm_epsilon, context.dtype)
    normed = context.pin(y, *RESIDUAL)  # in the compute format: float32 would cross `tensor`
    return normed if splits else context.pin(normed, "batch", "sequence", "embed")


def dropped_out(x: Array, config: TransformerModel, context: Context, place: Array | int) -> Array:
    """Zero a share of `x` and scale up the rest; each use and layer has its own random key (`place`)."""
    if context.dropout_key is None or config.dropout == 0:
        return x
    kept = 1.0 - config.dropout
    key = jax.random.fold_in(context.dropout_key, place)
    # Each row and position also has its own key, so the mask does not depend on the sharding.
    rows = jax.vmap(partial(jax.random.fold_in, key))(rows_here(x.shape[0], context.mesh))
    positions = ring_positions(x.shape[1], context.mesh)
    keys = jax.vmap(lambda row: jax.vmap(partial(jax.random.fold_in, row))(positions))(rows)
    mask = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, kept, x.shape[2:])))(keys)
    return jnp.where(context.pin(mask, *RESIDUAL), x / kept, 0).astype(x.dtype)


def places_of(
    length: int, context: Context, documents: Documents | None
) -> Int[Array, "batch_or_1 sequence"] | None:
    """Return each token's position in its document or window; None if positions are 0, 1, 2, ..."""
    if documents is not None:
        return documents.positions
    if ring_size(context.mesh) == 1:
        return None
    return ring_positions(length, context.mesh)[None]


def for_each_token(x: Array, like: Array) -> Array:
    """Broadcast `x` to the shape and the format of `like`, so that its gradient is summed in float32.

    In the compute format each addition would round: over a thousand tokens in bf16 by up to 4 % of the sum.
    """
    return jnp.broadcast_to(x.astype(jnp.float32), like.shape).astype(like.dtype)


def _scattered(y: Array, context: Context) -> Array:
    """Shard `y` as a residual; gather its gradient once, as two products would otherwise each gather it."""
    scatter = jax.custom_vjp(lambda y: context.pin(y, *RESIDUAL))
    scatter.defvjp(lambda y: (scatter(y), None), lambda _, g: (context.pin(g, "batch", "sequence", "embed"),))
    return scatter(y)


def _norm_names(config: TransformerModel) -> tuple[str, ...]:
    """Return the suffixes of a block's norm names: before attention or MLP, after it, or both."""
    return {"before": ("norm",), "after": ("out_norm",), "both": ("norm", "out_norm")}[config.norm_place]


def projected(x: Array, weight: Array, context: Context) -> Array:
    """Return x . W for `x` [batch, sequence, inputs] and `weight` [inputs, outputs], each of several dims.

    On one device the tokens are flattened: on a CPU, gradients of three-dimensional operands take twice as
    long (benchmarks/train_cpu.py).
    """
    num_inputs, multiply = x.ndim - 2, _product_of(context)
    if num_shards(context.mesh) == 1:
        flat = x.reshape(x.shape[0] * x.shape[1], -1)
        matrix = weight.reshape(flat.shape[1], -1)
        return multiply(flat, matrix, 1).reshape(*x.shape[:2], *weight.shape[num_inputs:])
    return multiply(x, weight, num_inputs)


def _product_of(context: Context) -> Callable[[Array, Array, int], Array]:
    """Return the function that multiplies in the run's format."""
    if not context.fp8:
        return product
    from .eight_bits import fp8_product

    on_cpu = context.platform == "cpu"
    return lambda x, weight, num_contracted: fp8_product(x, weight, num_contracted, on_cpu)
