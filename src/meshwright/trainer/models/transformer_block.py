"""Define a block of the Transformer: attention and MLP, each after a norm, and what they save.

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

from meshwright.config import TransformerModel
from meshwright.sharding import gather, num_repeats, num_shards, ring_size, rows_here, sequence_length

from ._base_model import RESIDUAL, Context, Parameter, Tree
from .activations import LEARNED, hidden_units, xielu_parameters
from .attention import Documents, Shape, causal_attention, ring_positions
from .grad_scheduling import delay_weight_grads
from .loss import Balance
from .norms import normalised
from .products import ADAPTER, product
from .quantised import CODES, SCALES, dequantised
from .rematerialisation import AFTER_ATTENTION, HIDDEN, PRODUCT, SECOND_PRODUCT
from .rotary import rotated, score_factor, turns_of

PRODUCTS = ("query_down", "query", "key_down", "key", "value", "key_rotary", "output", "up", "gate", "down")
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
    ("attention", "output"): "out",
    ("mlp", "up"): "mlp_up",
    ("mlp", "gate"): "mlp_gate",
    ("mlp", "down"): "mlp_out",
}
"""The name of each product's result, by which a list of what a block keeps chooses it (`config.RESULTS`)."""


class Block:
    """One kind of layer of a Transformer: what it declares, and what it computes."""

    def __init__(self, config: TransformerModel, has_experts: bool) -> None:
        self.config = config
        self.declared = self._parameters(has_experts)
        self._dims = {
            (group, name): parameter.dims
            for group, parameters in self.declared.items()
            for name, parameter in parameters.items()
        }
        present = [name for name in PRODUCTS if {("attention", name), ("mlp", name)} & self._dims.keys()]
        self._second = frozenset(present[1::2])

    def _parameters(self, has_experts: bool) -> dict[str, dict[str, Parameter]]:
        c = self.config
        width = c.mlp_dim if c.num_experts is None else c.dense_mlp_dim or 0
        width = c.shared_dim if has_experts else width
        sizes = {
            "embed": c.embed_dim,
            "heads": c.num_heads,
            "kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "mlp": width,
        }
        matrices = {
            ("attention", "query"): ("embed", "heads", "head_dim"),
            ("attention", "key"): ("embed", "kv_heads", "head_dim"),
            ("attention", "value"): ("embed", "kv_heads", "head_dim"),
            ("attention", "output"): ("heads", "head_dim", "embed"),
        }
        if c.latent_rank is not None:
            matrices = {}
        if width:
            matrices |= {("mlp", "up"): ("embed", "mlp"), ("mlp", "down"): ("mlp", "embed")}
            matrices |= {("mlp", "gate"): ("embed", "mlp")} if c.mlp == "gated" else {}
        norm = norm_parameters(c)
        groups = ("attention",) if c.one_norm else ("attention", "mlp")
        names = [f"{group}_{place}" for group in groups for place in _norm_names(c)]
        declared: dict[str, dict[str, Parameter]] = dict.fromkeys(names, norm)
        declared |= _numbers_of_mlp(c, has_experts)
        if has_experts:
            from .experts import expert_parameters

            declared["experts"] = expert_parameters(c)
        if c.latent_rank is not None:
            from .latent_attention import latent_parameters

            declared["attention"] = latent_parameters(c)
        for (group, name), dims in matrices.items():
            shape, num_inputs = tuple(sizes[dim] for dim in dims), 2 if name == "output" else 1
            parameter = Parameter(shape=shape, dims=dims, fan_in=math.prod(shape[:num_inputs]))
            declared.setdefault(group, {})[name] = parameter
            if c.bias or (c.output_bias if name == "output" else c.qkv_bias and group == "attention"):
                bias = Parameter(shape=shape[num_inputs:], dims=dims[num_inputs:], initial="zeros")
                declared[group][f"{name}_bias"] = bias
        for name, heads in (("query", "heads"), ("key", "kv_heads")) if c.qk_norm != "none" else ():
            dims = ("head_dim",) if c.qk_norm == "head" else (heads, "head_dim")
            shape = tuple(sizes[dim] for dim in dims)
            declared["attention"][f"{name}_norm"] = Parameter(
                shape=shape, dims=dims, initial="ones", wide=True
            )
        if c.attention_sinks:
            sinks = Parameter(shape=(c.num_heads,), dims=("heads",), initial="zeros", wide=True)
            declared["attention"]["sinks"] = sinks
        return declared

    def apply(
        self,
        x: Array,
        layer: Tree,
        index: Array,
        context: Context,
        documents: Documents | None,
        window: int | None,
        turns: bool,
    ) -> tuple[Array, Balance | None]:
        """Return the output of layer `index` [batch, sequence, embed], and the `Balance` of its experts.

        Args:
            window: positions that the layer sees; None: all.
            turns: whether positions turn its queries and keys.
        """
        c = self.config
        with jax.named_scope("attention_block"):
            h, layer = self._input_of("attention", x, layer, context)
            query, key, value = self._projections(h, layer, context, documents, window is not None, turns)
            if (factor := score_factor(c)) != 1:
                query = query * jnp.asarray(factor, query.dtype)
            sinks = (
                context.gather(layer["attention"]["sinks"], "heads", wide=True) if c.attention_sinks else None
            )
            out = causal_attention(query, key, value, context, documents, Shape(window, c.score_cap), sinks)
            y = self._multiplied(out, layer, "attention", "output", context)
            y, layer = delay_weight_grads(y, layer, "mlp", ("down",), context)
            out = self._placed(y, out, layer, "attention", "output", context)
            out = self._normed_after(out, layer, "attention_out_norm", context)
            out = scaled(dropped_out(out, c, context, 2 * index), c.residual_scale)
            entered, x = x, context.pin(x + out, *RESIDUAL)
            x = checkpoint_name(x, AFTER_ATTENTION)
        with jax.named_scope("mlp_block"):
            h, layer = self._input_of("mlp", entered if c.parallel else x, layer, context)
            if "experts" not in layer:
                out, balance = self._mlp(h, layer, context), None
            else:
                from .experts import expert_mlp

                split = context.pin(h, *RESIDUAL)
                out, balance = expert_mlp(split, layer["experts"], c, context)
                if c.shared_dim:
                    out = out + self._shared(h, split, layer, context)
            out = self._normed_after(out, layer, "mlp_out_norm", context)
            out = scaled(dropped_out(out, c, context, 2 * index + 1), c.residual_scale)
            return context.pin(x + out, *RESIDUAL), balance

    def _input_of(self, group: str, x: Array, layer: Tree, context: Context) -> tuple[Array, Tree]:
        """Return the input of a group's products, normed if a norm comes first, and the layer to use."""
        name = "attention_norm" if self.config.one_norm else f"{group}_norm"
        if name not in layer:
            return x, layer
        split = normed(x, layer[name], self.config, context, splits=True)
        split, layer = delay_weight_grads(split, layer, group, FROM_INPUT, context)
        return context.pin(split, "batch", "sequence", "embed"), layer

    def _projections(
        self,
        h: Array,
        layer: Tree,
        context: Context,
        documents: Documents | None,
        is_local: bool,
        turns: bool,
    ) -> tuple[Array, Array, Array]:
        """Return query, key and value of one layer, with norms and positions applied to the first two."""
        c = self.config
        places = None if c.rope_theta is None else places_of(h.shape[1], context, documents)

        def project(x: Array, name: str) -> Array:
            return self._project(x, layer, "attention", name, context)

        if c.latent_rank is not None:
            from .latent_attention import latent_projections

            return latent_projections(h, layer["attention"], project, places, c, context)
        query, key, value = (project(h, name) for name in ("query", "key", "value"))

        def head_normed(query: Array, key: Array) -> tuple[Array, Array]:
            named = (query, "query"), (key, "key")
            query, key = (self._head_norm(t, layer, name, context) for t, name in named)
            return query, key

        if c.qk_norm != "none" and not c.qk_norm_turned:
            query, key = head_normed(query, key)
        if turns:
            angles = turns_of(c, sequence_length(h.shape[1], context.mesh), is_local)
            query, key = (rotated(t, angles, places) for t in (query, key))
        if c.qk_norm_turned:
            query, key = head_normed(query, key)
        return query, key, value

    def _shared(self, h: Array, split: Array, layer: Tree, context: Context) -> Array:
        """Apply the shared experts to `h`; `split` is the same, sharded as a residual, for their gate."""
        out = self._mlp(h, layer, context)
        if "shared_gate" not in layer["mlp"]:
            return out
        with jax.named_scope("shared_gate"):
            gate = context.gather(layer["mlp"]["shared_gate"], *self._dims["mlp", "shared_gate"])
            return out * jax.nn.sigmoid(product(split, gate, 1))

    def _mlp(self, h: Array, layer: Tree, context: Context) -> Array:
        """Apply the MLP that every token passes through: the block's only MLP, or the shared experts."""
        up = self._project(h, layer, "mlp", "up", context)
        is_gated = self.config.mlp == "gated"
        gate = self._project(h, layer, "mlp", "gate", context) if is_gated else None
        learned = [context.gather(layer["mlp"][n], "one", wide=True) for n in LEARNED if n in layer["mlp"]]
        up = hidden_units(up, gate, self.config, tuple(for_each_token(each, up) for each in learned))
        up = checkpoint_name(up if is_gated else checkpoint_name(up, SECOND_PRODUCT), HIDDEN)
        return self._project(up, layer, "mlp", "down", context)

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
                return _projected(x, context.gather(layer[group][name], *dims), context)
            # The matrix is computed from its four bits, and again in the backward pass.
            held = tuple(layer[group][f"{name}{part}"] for part in (CODES, SCALES))
            return jax.checkpoint(partial(_projected_by_codes, dims=dims, context=context))(x, *held)

    def _placed(self, y: Array, x: Array, layer: Tree, group: str, name: str, context: Context) -> Array:
        """Return the product `y` of `x`, sharded by its dims, with its adapter and its bias added."""
        outputs = self._dims[group, name][x.ndim - 2 :]
        with self._scope_of(group, name, context):
            # A sum over `tensor` is scattered by position at once, which is the residual's layout.
            whole = ("batch", "sequence", *outputs)
            y = _scattered(y, context) if outputs == ("embed",) else context.pin(y, *whole)
            if f"{name}{ADAPTER}" in layer[group]:
                from .adapters import apply_adapter

                y = y + apply_adapter(
                    x, layer[group][f"{name}{ADAPTER}"], self.declared[group][name], context
                )
            if f"{name}_bias" in layer[group]:
                y = y + for_each_token(context.gather(layer[group][f"{name}_bias"], *outputs, wide=True), y)
            # The residual after a product of this width is saved in its place, unless a norm lies between.
            is_read = outputs != ("embed",) or f"{group}_out_norm" in layer
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
        dims = self.declared["attention"][f"{name}_norm"].dims
        scale = context.gather(layer["attention"][f"{name}_norm"], *dims, wide=True).reshape(-1)
        rows = x.reshape(*x.shape[:2], -1, scale.size)
        return normalised(rows, scale, None, False, self.config.norm_epsilon, x.dtype).reshape(x.shape)


def _numbers_of_mlp(config: TransformerModel, has_experts: bool) -> dict[str, dict[str, Parameter]]:
    """Declare what an MLP has in addition to its matrices: an xIELU's numbers, the shared experts' gate."""
    declared = xielu_parameters() if config.activation == "xielu" else {}
    if has_experts and config.shared_gate:
        width = config.embed_dim
        declared["shared_gate"] = Parameter(shape=(width, 1), dims=("embed", "one"), fan_in=width)
    return {"mlp": declared} if declared else {}


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


def _projected(x: Array, weight: Array, context: Context) -> Array:
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


def _projected_by_codes(
    x: Array, codes: Array, scales: Array, *, dims: tuple[str, ...], context: Context
) -> Array:
    """Return x . W for a matrix that is held in four bits."""
    codes, scales = (gather(part, context.mesh, part.dtype, *dims) for part in (codes, scales))
    return _projected(x, dequantised(codes, scales, context.dtype), context)
