"""Define the decoder-only Transformer: GPT-2 to Llama 3 by configuration.

Products in eight bits: E4M3 forward, E5M2 for gradients, each tensor scaled by what it holds now.

A tensor is divided by (its greatest magnitude / the format's largest number), rounded to the format, and
multiplied; the product is summed in float32 and multiplied by both scales there. This is "current scaling"
(https://docs.nvidia.com/deeplearning/transformer-engine): no history is kept. The formats: Micikevicius et
al. 2022, https://arxiv.org/abs/2209.05433. Kept for the backward pass are the eight-bit tensors.

What a block of layers keeps for the backward pass, and what is computed again there.

A decoder-only Transformer: GPT-2 to Llama 3 by configuration.

Blocks are stacked along `layers` and scanned, so compile time does not grow with depth; `unroll`
keeps them apart, which is faster on a CPU. Between blocks the residual is split by position over
`tensor`; inside a block heads and hidden units are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ..config import TransformerModel
from ..sharding import axis_size, look_up, num_shards, rows_here
from ._base import STATELESS, Batch, Context, Outcome, Parameter, Tree
from .attention import NAME as ATTENTION_NAME
from .attention import Documents, causal_attention, documents_of, in_ring_order, ring_positions
from .experts import NAME as EXPERT_NAME
from .experts import RESIDUAL, Balance, balanced, expert_mlp, expert_parameters, figures_of
from .loss import LEFT_OUT, mean_cross_entropy

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
Quantised = tuple[Array, Array]  # values in eight bits, and their scale: float32, no dimensions


def quantised(x: Array, dtype: jax.typing.DTypeLike) -> Quantised:
    """`x` in eight bits, and what to multiply it by; a tensor of zeros has scale 1.

    A number that is not finite makes the scale so, and with it the whole product.
    """
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(most == 0, 1.0, most / float(jnp.finfo(dtype).max))
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _product(x: Quantised, y: Quantised, contracted: Any, dtype: jax.typing.DTypeLike, on_cpu: bool) -> Array:
    (x8, x_scale), (y8, y_scale) = x, y
    if on_cpu:  # has no such products: the same numbers, multiplied in float32
        x8, y8 = x8.astype(jnp.float32), y8.astype(jnp.float32)
    exact = jax.lax.dot_general(x8, y8, (contracted, ((), ())), preferred_element_type=jnp.float32)
    return (exact * (x_scale * y_scale)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fp8_product(x: Array, weight: Array, num_contracted: int, on_cpu: bool = False) -> Array:
    """The last `num_contracted` dimensions of `x` against the first of `weight`, in eight bits.

    Args:
        x: in the format of the result and of the gradients.
        on_cpu: multiply the rounded numbers in float32.
    """
    return _forward(x, weight, num_contracted, on_cpu)[0]


def _forward(
    x: Array, weight: Array, num_contracted: int, on_cpu: bool
) -> tuple[Array, tuple[Quantised, Quantised]]:
    saved = quantised(x, FORWARD), quantised(weight, FORWARD)
    contracted = (tuple(range(x.ndim - num_contracted, x.ndim)), tuple(range(num_contracted)))
    return _product(*saved, contracted, x.dtype, on_cpu), saved


def _backward(
    num_contracted: int, on_cpu: bool, saved: tuple[Quantised, Quantised], gradient: Array
) -> tuple[Array, Array]:
    x, weight = saved
    narrow = quantised(gradient, BACKWARD)
    num_rows = x[0].ndim - num_contracted
    outputs = tuple(range(num_rows, gradient.ndim)), tuple(range(num_contracted, weight[0].ndim))
    rows = (tuple(range(num_rows)),) * 2
    return (
        _product(narrow, weight, outputs, gradient.dtype, on_cpu),
        _product(x, narrow, rows, gradient.dtype, on_cpu),
    )


fp8_product.defvjp(_forward, _backward)


SCORES_RANK = 5  # batch, kv_heads, group, queries, keys: nothing else of a block has as many dimensions
BLOCK_INPUT = "block_input"  # all that `full` saves; it may wait in host memory


def _saves_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    # cuDNN's forward call: its output and log-sum-exp; a second run would be all of attention again
    return primitive.name == "dot_product_attention_fwd_wrapper"


def _saves_all_but_gathered(primitive: Any, *operands: Any, **params: Any) -> bool:
    # Saved, a gathered weight would stay for the whole backward pass. Redoing casts and gathers is
    # no arithmetic; every matmul is kept.
    if primitive.name == "custom_vjp_call":  # `gather`'s, or cuDNN's attention
        return any(_saves_all_but_gathered(inner.primitive) for inner in params["call_jaxpr"].eqns)
    if any(len(getattr(operand, "shape", ())) > SCORES_RANK - 1 for operand in operands):
        return False  # blocks of attention have a checkpoint of their own, which jax asks this policy about
    return primitive.name not in ("convert_element_type", "sharding_constraint", "all_gather")


def rematerialised(block: Any, context: Context, scanned: bool) -> Any:
    """`block` under the run's rematerialisation policy."""
    if context.remat == "none" and num_shards(context.mesh) == 1:
        return block
    policies = jax.checkpoint_policies
    if context.offloads:
        assert context.remat == "full", f"remat {context.remat!r} saves more than a block's input"
        offloaded = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(block, policy=offloaded, prevent_cse=not scanned)
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(EXPERT_NAME)
    )
    policy = {
        "none": _saves_all_but_gathered,
        "dots": dots,
        "dots-attention": policies.save_from_both_policies(
            dots,
            policies.save_from_both_policies(
                policies.save_only_these_names(ATTENTION_NAME), _saves_attention
            ),
        ),
        "full": policies.nothing_saveable,
    }[context.remat]
    return jax.checkpoint(block, policy=policy, prevent_cse=not scanned)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=True), "relu": jax.nn.relu}


class Transformer:
    """See the module."""

    def __init__(self, config: TransformerModel) -> None:
        self.config = config
        self.block = self._block_parameters()

    def parameters(self) -> Tree:
        """`embedding`, `positions` (learned), `layers`, `final_norm`, `head` (where not tied)."""
        c = self.config
        table = partial(Parameter, fan_in=c.embed_dim)
        declared: dict[str, Any] = {
            "embedding": table(shape=(c.vocab_size, c.embed_dim), dims=("vocab", "embed"))
        }
        if c.max_positions is not None:
            declared["positions"] = table(shape=(c.max_positions, c.embed_dim), dims=("positions", "embed"))
        if c.unroll:
            declared["layers"] = [self.block] * c.num_layers
        else:
            declared["layers"] = jax.tree.map(
                lambda p: Parameter(
                    shape=(c.num_layers, *p.shape),
                    dims=("layers", *p.dims),
                    initial=p.initial,
                    fan_in=p.fan_in,
                    wide=p.wide,
                ),
                self.block,
                is_leaf=lambda p: isinstance(p, Parameter),
            )
        declared["final_norm"] = self._norm_parameters()
        if not c.tied_embeddings:
            declared["head"] = table(shape=(c.vocab_size, c.embed_dim), dims=("vocab", "embed"))
        return declared

    def _norm_parameters(self) -> dict[str, Parameter]:
        shape = (self.config.embed_dim,)
        declared = {"scale": Parameter(shape=shape, dims=("embed",), initial="ones", wide=True)}
        if self.config.norm == "layer" and self.config.bias:
            declared["bias"] = Parameter(shape=shape, dims=("embed",), initial="zeros", wide=True)
        return declared

    def _block_parameters(self) -> dict[str, dict[str, Parameter]]:
        c, embed, head_dim = self.config, self.config.embed_dim, self.config.head_dim
        attention = {
            "query": (("embed", "heads", "head_dim"), (embed, c.num_heads, head_dim), embed),
            "key": (("embed", "kv_heads", "head_dim"), (embed, c.num_kv_heads, head_dim), embed),
            "value": (("embed", "kv_heads", "head_dim"), (embed, c.num_kv_heads, head_dim), embed),
            "output": (
                ("heads", "head_dim", "embed"),
                (c.num_heads, head_dim, embed),
                c.num_heads * head_dim,
            ),
        }
        width = c.mlp_dim if c.num_experts is None else c.num_shared_experts * c.mlp_dim
        mlp = {
            "up": (("embed", "mlp"), (embed, width), embed),
            "down": (("mlp", "embed"), (width, embed), width),
        }
        if c.mlp == "gated":
            mlp["gate"] = mlp["up"]
        declared: dict[str, dict[str, Parameter]] = {
            "attention_norm": self._norm_parameters(),
            "mlp_norm": self._norm_parameters(),
        }
        if c.num_experts is not None:
            declared["experts"] = expert_parameters(c)
        for group, matrices in (("attention", attention), ("mlp", mlp if width else {})):
            for name, (dims, shape, fan_in) in matrices.items():
                declared.setdefault(group, {})[name] = Parameter(shape=shape, dims=dims, fan_in=fan_in)
                if c.bias:
                    keep = 1 if dims[0] in ("embed", "mlp") else 2  # the dims after those contracted
                    declared[group][f"{name}_bias"] = Parameter(
                        shape=shape[keep:], dims=dims[keep:], initial="zeros"
                    )
        return declared

    def hidden(
        self, parameters: Tree, tokens: Array, context: Context, segments: Array | None = None
    ) -> tuple[Float[Array, "batch sequence embed"], Balance | None]:
        """Final hidden states of `tokens` [batch, sequence], before the head; each layer's `Balance`.

        Over `context` they lie in ring order.

        Args:
            segments: the number of each token's document in its window, same shape; None is one document.
        """
        documents = self._documents(segments, context)
        x = self.embedded(parameters, in_ring_order(tokens, context.mesh), context, documents)
        x, balance = self.through_blocks(parameters["layers"], x, context, documents)
        return self._norm(x, parameters["final_norm"], context), balance

    def _documents(self, segments: Array | None, context: Context) -> Documents | None:
        return None if segments is None else documents_of(segments, context, self.config.head_dim)

    def embedded(
        self, parameters: Tree, tokens: Array, context: Context, documents: Documents | None
    ) -> Float[Array, "batch sequence embed"]:
        """What the first block is given, in the layout of residuals. Over `context`: in ring order."""
        with jax.named_scope("embed"):
            tokens = context.pin(tokens, "batch", "sequence")
            table = context.gather(parameters["embedding"], "vocab", "embed")
            x = look_up(table, tokens, context.mesh, context.zero1)
            if self.config.position == "learned":
                table = context.gather(parameters["positions"], "positions", "embed")
                places = _places(tokens.shape[1], context, documents)
                x = x + (table[: tokens.shape[1]][None] if places is None else table[places])
            return context.pin(self._dropout(x, context, 0), *RESIDUAL)

    def through_blocks(
        self, layers: Tree, x: Array, context: Context, documents: Documents | None, first: Array | int = 0
    ) -> tuple[Float[Array, "batch sequence embed"], Balance | None]:
        """`x` after all of `layers`, of which the first is number `first` of the model; each's `Balance`."""

        def block(x: Array, layer: tuple[Tree, Array]) -> tuple[Array, Balance | None]:
            x = checkpoint_name(x, BLOCK_INPUT)
            return self._block(x, layer[0], layer[1], context, documents)

        unrolled = self.config.unroll
        block = rematerialised(block, context, scanned=not unrolled)
        num_layers = len(layers) if unrolled else jax.tree.leaves(layers)[0].shape[0]
        indices = first + jnp.arange(1, num_layers + 1)
        with jax.named_scope("layers"):
            if unrolled:
                each: list[Balance | None] = []
                for index, layer in enumerate(layers):
                    x, one = block(x, (layer, indices[index]))
                    each.append(one)
                balance = jax.tree.map(lambda *layers: jnp.stack(layers), *each)
            else:
                x, balance = jax.lax.scan(block, x, (layers, indices))
        return x, balance

    def head(self, parameters: Tree, context: Context) -> Float[Array, "vocab embed"]:
        """The output matrix, gathered for use; the embedding where they are tied."""
        return context.gather(
            parameters["embedding" if self.config.tied_embeddings else "head"], "vocab", "embed"
        )

    def state(self) -> Tree:
        """Nothing."""
        return {}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Mean cross entropy in nats of each token from those before.

        With experts, in training, `balancing_loss` times the layers' mean load-balancing loss more, and its
        figures (`balanced`).

        Args:
            batch: `tokens` [rows, sequence + 1]; where windows hold several documents also `segments`, same
                shape: a document's first token is not predicted, and left out of the mean.
        """
        tokens, segments = _inputs(batch)
        hidden, balance = self.hidden(parameters, tokens, context, segments)
        targets = self.targets(batch, context)
        loss = self._loss_of(parameters, hidden, targets, context, gaps="segments" in batch)
        return (loss, STATELESS) if balance is None else balanced(loss, balance, self.config, context)

    def entered(self, parameters: Tree, batch: Batch, context: Context) -> Array:
        """The first of three parts of `loss`, for a pipeline: what the first block is given."""
        tokens, segments = _inputs(batch)
        documents = self._documents(segments, context)
        return self.embedded(parameters, in_ring_order(tokens, context.mesh), context, documents)

    def passed(
        self, layers: Tree, x: Array, batch: Batch, context: Context, first: Array
    ) -> tuple[tuple[Array, Array], Balance | None]:
        """The second part: `x` after some of the layers, of which the first is number `first`; what they
        add to the loss, and each one's `Balance`."""
        documents = self._documents(_inputs(batch)[1], context)
        x, balance = self.through_blocks(layers, x, context, documents, first)
        added = jnp.float32(0)
        if balance is not None and context.training:
            added = self.config.balancing_loss * jnp.sum(balance.loss) / self.config.num_layers
        return (x, added), balance

    def targets(self, batch: Batch, context: Context) -> Int[Array, "batch sequence"]:
        """What follows each token, in the order they lie in; a document's first token is not predicted."""
        targets, segments = batch["tokens"][:, 1:], batch.get("segments")
        if segments is not None:
            targets = jnp.where(segments[:, 1:] == segments[:, :-1], targets, LEFT_OUT)
        return in_ring_order(targets, context.mesh)

    def judged(
        self, parameters: Tree, x: Array, targets: Array, batch: Batch, context: Context
    ) -> Float[Array, ""]:
        """The third part: what some positions, which the last block gave as `x`, add to the batch's loss."""
        hidden, gaps = self._norm(x, parameters["final_norm"], context), "segments" in batch
        whole = self.targets(batch, context)
        return self._loss_of(parameters, hidden, targets, context, gaps=gaps, whole=whole)

    def shown(self, balance: Balance | None) -> dict[str, Array]:
        """The figures of a batch, from each microbatch's and layer's `Balance` [microbatches, layers]."""
        return {} if balance is None else jax.tree.map(jnp.mean, jax.vmap(figures_of)(balance))

    def _loss_of(
        self,
        parameters: Tree,
        hidden: Array,
        targets: Array,
        context: Context,
        *,
        gaps: bool,
        whole: Array | None = None,
    ) -> Float[Array, ""]:
        head, chunk = self.head(parameters, context), self.config.loss_chunk
        return mean_cross_entropy(hidden, head, targets, context, chunk, gaps=gaps, whole=whole)

    def _block(
        self, x: Array, layer: Tree, index: Array, context: Context, documents: Documents | None
    ) -> tuple[Array, Balance | None]:
        c = self.config
        with jax.named_scope("attention_block"):
            h = self._norm(x, layer["attention_norm"], context)
            query, key, value = (
                self._project(h, layer, "attention", name, context) for name in ("query", "key", "value")
            )
            if c.rope_theta is not None:
                places = _places(x.shape[1], context, documents)
                query, key = (_rotate(t, c.rope_theta, places) for t in (query, key))
            out = causal_attention(query, key, value, context, documents)
            out = self._project(out, layer, "attention", "output", context)
            x = context.pin(x + self._dropout(out, context, 2 * index), *RESIDUAL)
        with jax.named_scope("mlp_block"):
            h = self._norm(x, layer["mlp_norm"], context)
            if c.num_experts is None:
                out, balance = self._mlp(h, layer, context), None
            else:
                split = context.pin(h, *RESIDUAL)
                out, balance = expert_mlp(split, layer["experts"], c, context, ACTIVATIONS[c.activation])
                if c.num_shared_experts:
                    out = out + self._mlp(h, layer, context)
            return context.pin(x + self._dropout(out, context, 2 * index + 1), *RESIDUAL), balance

    def _mlp(self, h: Array, layer: Tree, context: Context) -> Array:
        """The MLP that every token goes through: a block's only one, or the shared experts."""
        activation = ACTIVATIONS[self.config.activation]
        up = self._project(h, layer, "mlp", "up", context)
        if self.config.mlp == "gated":
            up = activation(self._project(h, layer, "mlp", "gate", context)) * up
        else:
            up = activation(up)
        return self._project(up, layer, "mlp", "down", context)

    def _project(self, x: Array, layer: Tree, group: str, name: str, context: Context) -> Array:
        """x . W (+ b), pinned. On one device the tokens are flattened: gradients of three-dimensional
        operands take a CPU twice as long (benchmarks/train_cpu.py)."""
        with jax.named_scope(name):
            dims = self.block[group][name].dims
            weight = context.gather(layer[group][name], *dims)
            num_inputs = x.ndim - 2
            outputs, on_cpu = dims[num_inputs:], context.platform == "cpu"
            y: Any
            if num_shards(context.mesh) == 1:
                flat = x.reshape(x.shape[0] * x.shape[1], -1)
                matrix = weight.reshape(flat.shape[1], -1)
                y = fp8_product(flat, matrix, 1, on_cpu) if context.fp8 else flat @ matrix
                y = y.reshape(*x.shape[:2], *weight.shape[num_inputs:])
            elif context.fp8:
                y = fp8_product(x, weight, num_inputs, on_cpu)
            else:
                contracted = (tuple(range(2, x.ndim)), tuple(range(num_inputs)))
                y = jax.lax.dot_general(x, weight, (contracted, ((), ())))
            # What sums over `tensor` is scattered by position at once, the residual's layout.
            whole = ("batch", "sequence", *outputs)
            y = _scattered(y, context) if outputs == ("embed",) else context.pin(y, *whole)
            if self.config.bias:
                bias = context.gather(layer[group][f"{name}_bias"], *outputs)
                y = y + bias.reshape(1, 1, *bias.shape)
            return y

    def _norm(self, x: Array, group: Tree, context: Context) -> Array:
        """RMSNorm or LayerNorm in float32, split by position; the result whole, ready for the matmuls."""
        wide = x.astype(jnp.float32)
        if self.config.norm == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(variance + self.config.norm_epsilon)
        wide = wide * context.gather(group["scale"], "embed", wide=True)[None, None]
        if "bias" in group:
            wide = wide + context.gather(group["bias"], "embed", wide=True)[None, None]
        normed = context.pin(wide.astype(context.dtype), *RESIDUAL)  # else float32 would cross `tensor`
        return context.pin(normed, "batch", "sequence", "embed")

    def _dropout(self, x: Array, context: Context, place: Array | int) -> Array:
        """Zero a share of `x` and scale up the rest; each place and layer has a key of its own."""
        if context.dropout_key is None or self.config.dropout == 0:
            return x
        kept = 1.0 - self.config.dropout
        key = jax.random.fold_in(context.dropout_key, place)
        # And each row of the batch and position: it does not matter which of them are seen here.
        rows = jax.vmap(partial(jax.random.fold_in, key))(rows_here(x.shape[0], context.mesh))
        positions = ring_positions(x.shape[1], context.mesh)
        keys = jax.vmap(lambda row: jax.vmap(partial(jax.random.fold_in, row))(positions))(rows)
        mask = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, kept, x.shape[2:])))(keys)
        return jnp.where(context.pin(mask, *RESIDUAL), x / kept, 0).astype(x.dtype)


def _places(
    length: int, context: Context, documents: Documents | None
) -> Int[Array, "batch_or_1 sequence"] | None:
    """Where each token stands in its document, or in its window; None if that is the order they lie in."""
    if documents is not None:
        return documents.positions
    if axis_size(context.mesh, "context") == 1:
        return None
    return ring_positions(length, context.mesh)[None]


def _scattered(y: Array, context: Context) -> Array:
    """`y`, laid as a residual; its gradient is gathered at once, for each of two products would gather it."""
    scatter = jax.custom_vjp(lambda y: context.pin(y, *RESIDUAL))
    scatter.defvjp(lambda y: (scatter(y), None), lambda _, g: (context.pin(g, "batch", "sequence", "embed"),))
    return scatter(y)


def _inputs(batch: Batch) -> tuple[Array, Array | None]:
    """Tokens that something follows, and their segments where windows hold several documents."""
    segments = batch.get("segments")
    return batch["tokens"][:, :-1], None if segments is None else segments[:, :-1]


def _rotate(
    x: Float[Array, "batch sequence heads head_dim"], theta: float, positions: Array | None = None
) -> Array:
    """Rotary position embedding, halves rotated against each other (Su et al. 2021, Llama's order).

    `positions` [batch, sequence]: each token's place; None counts from the window's first.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    places = jnp.arange(x.shape[1], dtype=jnp.float32)[None] if positions is None else positions
    angle = places.astype(jnp.float32)[:, :, None] * frequency[None, None]
    cos, sin = (rearrange(f(angle), "b s d -> b s 1 d") for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
