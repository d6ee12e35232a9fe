"""Define the decoder-only Transformer: GPT-2 to Llama 3 by configuration.

Blocks are stacked along `layers` and scanned, so compile time does not grow with depth; on one GPU few blocks
are unrolled, and `unroll` keeps their parameters separate too, which is faster on a CPU. Between blocks,
`tensor` shards the residual by position; inside a block, it shards heads and hidden units. What a block saves
for the backward pass is named here and chosen in `rematerialisation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshwright.config import LoraConfig, TransformerModel, block_policies
from meshwright.sharding import (
    axis_size,
    gather,
    look_up,
    num_repeats,
    num_shards,
    ring_size,
    rows_here,
    sequence_length,
    token_axes,
)

from ._base_model import RESIDUAL, Batch, Context, Model, Outcome, Parameter, Tree, is_parameter
from .attention import Documents, Shape, causal_attention, documents_of, in_ring_order, ring_positions
from .grad_accumulation import places, slice_layer, summed, taken
from .grad_scheduling import delay_weight_grads
from .loss import LEFT_OUT, Balance, Targets, balance_metrics, mean_cross_entropy, soft_cap
from .norms import normalised
from .products import ADAPTER, product
from .quantised import CODES, SCALES, dequantised
from .rematerialisation import AFTER_ATTENTION, BLOCK_INPUT, HIDDEN, PRODUCT, SECOND_PRODUCT, rematerialised
from .rotary import rotated, score_factor, turns_of

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu-erf": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
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


class Transformer(Model):
    """The decoder-only Transformer that a `TransformerModel` config describes."""

    def __init__(self, config: TransformerModel) -> None:
        super().__init__(config)
        self.block = self._block_parameters(has_experts=config.num_experts is not None)
        self.dense_block = self._block_parameters(has_experts=False) if config.num_dense_layers else {}
        self._dims = {
            (group, name): parameter.dims
            for block in (self.dense_block, self.block)
            for group, parameters in block.items()
            for name, parameter in parameters.items()
        }
        present = [name for name in PRODUCTS if {("attention", name), ("mlp", name)} & self._dims.keys()]
        self._second = frozenset(present[1::2])

    def parameters(self) -> Tree:
        """Declare `embedding`, `positions` (if learned), `layers`, `final_norm` and `head` (if not tied).

        `dense_layers` are those before `layers`, where some have no experts. Tables that are the head too
        start with a deviation of 1/sqrt(3 embed_dim): 0.0208 at GPT-2's width (its own is 0.02), 0.0040 at
        that of Smith et al. 2022, https://arxiv.org/abs/2201.11990 (theirs). Logits then have a variance of
        1/3, and the first loss is a sixth of a nat above that of equal odds instead of half a nat.
        """
        c = self.config
        gain = 3**-0.5 if c.tied_embeddings else 1.0

        def table(num_rows: int, dim: str) -> Parameter:
            shape = (num_rows, c.embed_dim)
            return Parameter(shape=shape, dims=(dim, "embed"), fan_in=c.embed_dim, gain=gain)

        embedding = table(c.vocab_size, self._rows_of_embedding)
        declared: Tree = {"embedding": embedding, "final_norm": self._norm_parameters()}
        if c.max_positions is not None:
            declared["positions"] = table(c.max_positions, "positions")
        declared["layers"] = self._of_layers(self.block, c.num_layers - c.num_dense_layers)
        if c.num_dense_layers:
            declared["dense_layers"] = self._of_layers(self.dense_block, c.num_dense_layers)
        if not c.tied_embeddings:
            declared["head"] = table(c.vocab_size, "vocab")
        return declared

    @property
    def _rows_of_embedding(self) -> str:
        """The name of the embedding's first dim."""
        return "vocab" if self.config.tied_embeddings else "token"

    def summed(self, context: Context) -> tuple[str, ...]:
        """Return the groups of stacked layers in a loop, unless `fsdp` or `expert` splits the tokens.

        Such an axis reduces each layer's gradient in the loop. XLA hides that message behind the next layer,
        which it does not if a sum waits for it (llama3-8b with `fsdp=8`: 62.2 s a step in place of 61.2).
        """
        c = self.config
        if c.unroll or {"fsdp", "expert"} & set(token_axes(context.mesh)):
            return ()
        groups = {"layers": c.num_layers - c.num_dense_layers, "dense_layers": c.num_dense_layers}
        return tuple(name for name, count in groups.items() if count and not self._unrolls(context, count))

    def _unrolls(self, context: Context, num_layers: int) -> bool:
        """Return whether the layers have no loop. Manual or not, `context` has messages in every layer."""
        of_rows = num_shards(context.mesh) // axis_size(context.mesh, "context")
        return self.config.unrolls(
            context.layer_loop,
            remat=context.remat,
            platform=context.platform,
            num_devices=of_rows * ring_size(context.mesh),
            num_layers=num_layers,
        )

    def adapters(self, lora: LoraConfig) -> Tree:
        """Declare the adapters of `layers`."""
        from .adapters import adapter_parameters

        block = adapter_parameters(self.block, self.config, lora)
        return {"layers": self._of_layers(block, self.config.num_layers)}

    def _of_layers(self, block: Tree, count: int) -> Tree:
        """Return the declarations of `count` layers like one block: stacked, or a list if unrolled."""

        def stacked(p: Parameter) -> Parameter:
            return replace(p, shape=(count, *p.shape), dims=("layers", *p.dims))

        if self.config.unroll:
            return [block] * count
        return jax.tree.map(stacked, block, is_leaf=is_parameter)

    def _norm_parameters(self) -> dict[str, Parameter]:
        scale = Parameter(shape=(self.config.embed_dim,), dims=("embed",), initial="ones", wide=True)
        has_bias = self.config.norm == "layer" and self.config.bias
        return {"scale": scale, "bias": replace(scale, initial="zeros")} if has_bias else {"scale": scale}

    def _block_parameters(self, has_experts: bool) -> dict[str, dict[str, Parameter]]:
        c = self.config
        width = c.mlp_dim if c.num_experts is None else c.dense_mlp_dim or 0
        width = c.num_shared_experts * c.mlp_dim if has_experts else width
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
        norm = self._norm_parameters()
        names = [f"{group}_{place}" for group in ("attention", "mlp") for place in _norm_names(c)]
        declared: dict[str, dict[str, Parameter]] = dict.fromkeys(names, norm)
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
            if c.bias or (c.qkv_bias and name in ("query", "key", "value")):
                bias = Parameter(shape=shape[num_inputs:], dims=dims[num_inputs:], initial="zeros")
                declared[group][f"{name}_bias"] = bias
        for name, heads in (("query", "heads"), ("key", "kv_heads")) if c.qk_norm != "none" else ():
            dims = ("head_dim",) if c.qk_norm == "head" else (heads, "head_dim")
            shape = tuple(sizes[dim] for dim in dims)
            declared["attention"][f"{name}_norm"] = Parameter(
                shape=shape, dims=dims, initial="ones", wide=True
            )
        return declared

    def hidden(
        self, parameters: Tree, tokens: Array, context: Context, segments: Array | None = None
    ) -> tuple[Float[Array, "batch sequence embed"], Balance | None]:
        """Return the final hidden states of `tokens` [batch, sequence], and the layers' `Balance`.

        The head is not applied. If `context` shards the sequence, the states are in ring order.

        Args:
            segments: the number of each token's document in its window, same shape. None: one document.
        """
        documents = self._documents(segments, context)
        x = self._embedded(parameters, tokens, context, documents)
        if dense := self.config.num_dense_layers:
            x, _ = self._through_group(parameters, "dense_layers", x, context, documents)
        x, balance = self._through_group(parameters, "layers", x, context, documents, dense)
        return self._norm(x, parameters["final_norm"], context), balance

    def _documents(self, segments: Array | None, context: Context) -> Documents | None:
        c = self.config
        return None if segments is None else documents_of(segments, context, c.head_dim, c.value_dim)

    def _embedded(
        self, parameters: Tree, tokens: Array, context: Context, documents: Documents | None
    ) -> Float[Array, "batch sequence embed"]:
        """Return the first block's input for `tokens`, in ring order over `context`, sharded as residuals."""
        tokens = in_ring_order(tokens, context.mesh)
        with jax.named_scope("embed"):
            tokens = context.pin(tokens, "batch", "sequence")
            rows = self._rows_of_embedding
            table = context.gather(parameters["embedding"], rows, "embed")
            sums = None if context.sums is None else context.sums.get("embedding")
            how = (context.mesh, context.zero1, context.dtype, rows)
            x = look_up(table, tokens, *how, sums, in_loop=context.in_loop)
            if self.config.scaled_embedding:
                x = x * jnp.asarray(math.sqrt(self.config.embed_dim), x.dtype)
            if self.config.position == "learned":
                table = context.gather(parameters["positions"], "positions", "embed")
                places = _places(tokens.shape[1], context, documents)
                if places is None:
                    x = x + _for_each_token(table[: x.shape[1]], x)
                else:
                    x = x + table[places].astype(x.dtype)
            return context.pin(self._dropout(x, context, 0), *RESIDUAL)

    def _blocks(
        self, context: Context, documents: Documents | None, scanned: bool, grouped: bool = False
    ) -> list[Any]:
        """Return the blocks of a group of layers, each a function of its input and (parameters, number).

        Each block of a group has its window, and its policy of rematerialisation. If `grouped`, each takes
        the parameters and numbers of the whole group: a layer's, taken out before, would be saved as a copy.
        """

        def block(
            place: int, x: Array, layer: tuple[Tree, Array], stacked: tuple[Tree, Array] | None = None
        ) -> tuple[Array, Balance | None]:
            x, (parameters, number) = checkpoint_name(x, BLOCK_INPUT), _at(layer, place) if grouped else layer
            if context.held is not None:
                parameters = context.fetched(parameters, number)
            elif stacked is not None:
                parameters = slice_layer(parameters, *stacked)
            return self._block(x, parameters, number, context, documents, windows[place % len(windows)])

        policies, windows = block_policies(context.remat), self.config.windows
        return [
            rematerialised(
                partial(block, place),
                replace(context, remat=policies[place % len(policies)]),
                scanned=scanned,
            )
            for place in range(self.config.group_size(context.remat))
        ]

    def _through_group(
        self,
        parameters: Tree,
        name: str,
        x: Array,
        context: Context,
        documents: Documents | None,
        first: Array | int = 0,
    ) -> tuple[Float[Array, "batch sequence embed"], Balance | None]:
        """Apply the layers of a name, numbered from `first` in the model; return output and `Balance`."""
        layers = parameters[name]
        with jax.named_scope("layers"):
            if self.config.unroll:
                blocks = self._blocks(context, documents, scanned=False)
                return _one_by_one(
                    blocks, x, list(zip(layers, first + jnp.arange(1, len(layers) + 1), strict=True))
                )
            totals = {} if context.sums is None else context.sums.get(name, {})
            held = None if context.held is None else (context.held[name], first)
            (x, sums), balance = self._through_stack(
                layers, (x, totals), replace(context, sums=None, held=held), documents, first
            )
            return summed(x, sums, totals), balance

    def _through_stack(
        self,
        layers: Tree,
        carry: tuple[Array, Tree],
        context: Context,
        documents: Documents | None,
        first: Array | int,
    ) -> tuple[tuple[Array, Tree], Balance | None]:
        """Apply stacked layers; `carry` is their input, and the sums of their gradients or {}."""
        num_layers, size = jax.tree.leaves(layers)[0].shape[0], self.config.group_size(context.remat)
        indices = first + jnp.arange(1, num_layers + 1)
        is_unrolled = self._unrolls(context, num_layers)
        whole = num_layers // size * size
        # XLA takes a loop of one round apart, and would then keep what is computed again.
        scanned = not is_unrolled and (size == 1 or whole > size)
        blocks = self._blocks(context, documents, scanned=scanned, grouped=size > 1)

        def group(carry: tuple[Array, Tree], item: tuple[Tree, Array]) -> Any:
            (x, sums), ((layers, indices), place) = carry, item
            if sums:
                layers, sums = taken(layers, sums, place)
            if size == 1:
                x, balance = blocks[0](x, (layers, indices), (stack, place) if is_unrolled else None)
            else:
                x, balance = _one_by_one(blocks, x, [(layers, indices)] * size)
            return (x, sums), balance

        grouped, stack = (layers, indices), jax.lax.stop_gradient(layers)
        if size > 1:
            grouped = jax.tree.map(lambda a: a[:whole].reshape(whole // size, size, *a.shape[1:]), grouped)
        rounds = (grouped, places(num_layers, size))
        carry, balance = jax.lax.scan(group, carry, rounds, unroll=whole // size if is_unrolled else 1)
        if size > 1:
            balance = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), balance)
        if whole < num_layers:  # the last group is not whole
            x, sums = carry
            rest = jax.tree.map(lambda a: a[whole:], layers)
            if sums:
                rest, sums = taken(rest, sums, jnp.int32(whole))
            each = [(_at(rest, place), indices[whole + place]) for place in range(num_layers - whole)]
            x, more = _one_by_one(self._blocks(context, documents, scanned=False), x, each)
            carry, balance = (x, sums), jax.tree.map(lambda a, b: jnp.concatenate([a, b]), balance, more)
        return carry, balance

    def head(self, parameters: Tree, context: Context) -> Float[Array, "vocab embed"]:
        """Return the output matrix, gathered for use; the embedding if they are tied."""
        return context.gather(
            parameters["embedding" if self.config.tied_embeddings else "head"], "vocab", "embed"
        )

    def logits(
        self, parameters: Tree, hidden: Float[Array, "*batch embed"], context: Context
    ) -> Float[Array, "*batch vocab"]:
        """Return the logits of final hidden states, in float32."""
        logits = product(hidden, self.head(parameters, context).T, 1)
        return soft_cap(logits.astype(jnp.float32), self.config.logit_cap)

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean cross entropy in nats of each token, given the tokens before it.

        With experts, the outcome has the metrics of `balance_metrics`. In training the loss then includes
        `balancing_loss` times the mean load-balancing loss of the layers.

        Args:
            batch: `tokens` [rows, sequence + 1]. If windows hold several documents, also `segments` of the
                same shape: a document's first token is not predicted and does not count in the mean. With
                `answers` of the same shape, only tokens marked by 1 are.
        """
        tokens, segments = _inputs(batch)
        hidden, balance = self.hidden(parameters, tokens, context, segments)
        loss = self._loss_of(parameters, hidden, self.targets(batch, context), context)
        metrics = {} if balance is None else balance_metrics(balance)
        if metrics and context.training:
            loss = loss + self.config.balancing_loss * metrics["balancing_loss"]
        return loss, Outcome({}, metrics)

    # The parts of `loss` of a pipeline: `step` calls `embed`, then `apply_group`, then `head_loss`.

    def embed(self, parameters: Tree, batch: Batch, context: Context) -> Array:
        """Return the first block's input."""
        tokens, segments = _inputs(batch)
        return self._embedded(parameters, tokens, context, self._documents(segments, context))

    def group_size(self, context: Context) -> int:
        """Return the number of layers after which their windows and their policies repeat."""
        return self.config.group_size(context.remat)

    def for_layers(self, batch: Batch, context: Context) -> Documents | None:
        """Return the documents of a batch's windows; None if each is one."""
        return self._documents(_inputs(batch)[1], context)

    def first_layers(self, parameters: Tree, x: Array, used: Documents | None, context: Context) -> Array:
        """Apply the layers that have no experts, before those that have."""
        return self._through_group(parameters, "dense_layers", x, context, used)[0]

    def apply_group(
        self, layers: list[Tree], x: Array, documents: Documents | None, context: Context, first: Array
    ) -> tuple[tuple[Array, Array], Balance | None]:
        """Apply `group_size` layers, numbered from `first` among those that stages share.

        Returns:
            The layers' output and their contribution to the loss; and each layer's `Balance`.
        """
        blocks = self._blocks(context, documents, scanned=True)
        first = first + self.config.num_dense_layers
        numbered = [(layer, first + place) for place, layer in enumerate(layers, 1)]
        with jax.named_scope("layers"):
            x, balance = _one_by_one(blocks, x, numbered)
        added = jnp.float32(0)
        if balance is not None and context.training:
            added = self.config.balancing_loss * jnp.sum(balance.loss) / self.config.num_expert_layers
        return (x, added), balance

    def targets(self, batch: Batch, context: Context) -> Targets:
        """Return the targets, in ring order over `context`; `LEFT_OUT` where none is to be predicted.

        That is a document's first token and, if the batch marks answers, whatever is outside of them.
        """
        targets, segments = batch["tokens"][:, 1:], batch.get("segments")
        if segments is not None:
            targets = jnp.where(segments[:, 1:] == segments[:, :-1], targets, LEFT_OUT)
        if "answers" in batch:
            targets = jnp.where(batch["answers"][:, 1:] == 1, targets, LEFT_OUT)
        return Targets(in_ring_order(targets, context.mesh), gaps=segments is not None)

    def head_loss(self, parameters: Tree, x: Array, targets: Targets, context: Context) -> Float[Array, ""]:
        """Return some positions' contribution to the loss, from the last block's output `x`."""
        return self._loss_of(parameters, self._norm(x, parameters["final_norm"], context), targets, context)

    def summarize(self, balance: Balance | None) -> dict[str, Array]:
        """Return a batch's metrics from the `Balance` of microbatches and layers [microbatches, layers]."""
        return {} if balance is None else jax.tree.map(jnp.mean, jax.vmap(balance_metrics)(balance))

    def _loss_of(
        self, parameters: Tree, hidden: Array, targets: Targets, context: Context
    ) -> Float[Array, ""]:
        head = self.head(parameters, context)
        c = self.config
        return mean_cross_entropy(
            hidden, head, targets, context, c.loss_chunk, c.logit_cap, num_ids=c.vocab_size
        )

    def _block(
        self,
        x: Array,
        layer: Tree,
        index: Array,
        context: Context,
        documents: Documents | None,
        window: int | None,
    ) -> tuple[Array, Balance | None]:
        c = self.config
        with jax.named_scope("attention_block"):
            h, layer = self._input_of("attention", x, layer, context)
            query, key, value = self._projections(h, layer, context, documents, window is not None)
            if (factor := score_factor(c)) != 1:
                query = query * jnp.asarray(factor, query.dtype)
            out = causal_attention(query, key, value, context, documents, Shape(window, c.score_cap))
            y = self._multiplied(out, layer, "attention", "output", context)
            y, layer = delay_weight_grads(y, layer, "mlp", ("down",), context)
            out = self._placed(y, out, layer, "attention", "output", context)
            out = self._normed(out, layer, "attention_out_norm", context)
            entered, x = x, context.pin(x + self._dropout(out, context, 2 * index), *RESIDUAL)
            x = checkpoint_name(x, AFTER_ATTENTION)
        with jax.named_scope("mlp_block"):
            h, layer = self._input_of("mlp", entered if c.parallel else x, layer, context)
            if "experts" not in layer:
                out, balance = self._mlp(h, layer, context), None
            else:
                from .experts import expert_mlp

                split = context.pin(h, *RESIDUAL)
                out, balance = expert_mlp(split, layer["experts"], c, context, ACTIVATIONS[c.activation])
                if c.num_shared_experts:
                    out = out + self._mlp(h, layer, context)
            out = self._normed(out, layer, "mlp_out_norm", context)
            return context.pin(x + self._dropout(out, context, 2 * index + 1), *RESIDUAL), balance

    def _input_of(self, group: str, x: Array, layer: Tree, context: Context) -> tuple[Array, Tree]:
        """Return the input of a group's products, normed if a norm comes first, and the layer to use."""
        if f"{group}_norm" not in layer:
            return x, layer
        split = self._norm(x, layer[f"{group}_norm"], context, splits=True)
        split, layer = delay_weight_grads(split, layer, group, FROM_INPUT, context)
        return context.pin(split, "batch", "sequence", "embed"), layer

    def _projections(
        self, h: Array, layer: Tree, context: Context, documents: Documents | None, is_local: bool
    ) -> tuple[Array, Array, Array]:
        """Return query, key and value of one layer, with norms and positions applied to the first two."""
        c = self.config
        places = None if c.rope_theta is None else _places(h.shape[1], context, documents)

        def project(x: Array, name: str) -> Array:
            return self._project(x, layer, "attention", name, context)

        if c.latent_rank is not None:
            from .latent_attention import latent_projections

            return latent_projections(h, layer["attention"], project, places, c, context)
        query, key, value = (project(h, name) for name in ("query", "key", "value"))
        if c.qk_norm != "none":
            query, key = (self._head_norm(t, layer, n, context) for t, n in ((query, "query"), (key, "key")))
        if c.rope_theta is not None:
            turns = turns_of(c, sequence_length(h.shape[1], context.mesh), is_local)
            query, key = (rotated(t, turns, places) for t in (query, key))
        return query, key, value

    def _mlp(self, h: Array, layer: Tree, context: Context) -> Array:
        """Apply the MLP that every token passes through: the block's only MLP, or the shared experts."""
        activation = ACTIVATIONS[self.config.activation]
        up = self._project(h, layer, "mlp", "up", context)
        if self.config.mlp == "gated":
            up = activation(self._project(h, layer, "mlp", "gate", context)) * up
        else:
            up = checkpoint_name(activation(up), SECOND_PRODUCT)
        up = checkpoint_name(up, HIDDEN)
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

                y = y + apply_adapter(x, layer[group][f"{name}{ADAPTER}"], self.block[group][name], context)
            if f"{name}_bias" in layer[group]:
                y = y + _for_each_token(context.gather(layer[group][f"{name}_bias"], *outputs, wide=True), y)
            # The residual after a product of this width is saved in its place, unless a norm lies between.
            is_read = outputs != ("embed",) or f"{group}_out_norm" in layer
            named = SECOND_PRODUCT if name in self._second else PRODUCT
            y = checkpoint_name(y, NAMES[group, name])
            return checkpoint_name(y, named) if is_read else y

    @contextmanager
    def _scope_of(self, group: str, name: str, context: Context) -> Iterator[None]:
        """Name a product's operations; if several devices repeat it, one of them counts as model FLOPs."""
        shape = (self.block if group in self.block else self.dense_block)[group][name].shape
        repeats = num_repeats(self._dims[group, name], shape, context.mesh)
        with (
            jax.named_scope(name),
            jax.named_scope(f"needed_1_of_{repeats}") if repeats > 1 else nullcontext(),
        ):
            yield

    def _norm(self, x: Array, group: Tree, context: Context, splits: bool = False) -> Array:
        """Apply RMSNorm or LayerNorm in float32, sharded by position.

        The result is gathered for the matmuls; with `splits` it stays sharded as a residual.
        """
        c = self.config
        scale = context.gather(group["scale"], "embed", wide=True)
        bias = context.gather(group["bias"], "embed", wide=True) if "bias" in group else None
        y = normalised(x, scale, bias, c.norm == "layer", c.norm_epsilon, context.dtype)
        normed = context.pin(y, *RESIDUAL)  # in the compute format: float32 would cross `tensor`
        return normed if splits else context.pin(normed, "batch", "sequence", "embed")

    def _normed(self, x: Array, layer: Tree, name: str, context: Context) -> Array:
        """Apply a norm of the block after a product, if it has one of that name; the result stays split."""
        return self._norm(x, layer[name], context, splits=True) if name in layer else x

    def _head_norm(self, x: Array, layer: Tree, name: str, context: Context) -> Array:
        """Apply RMSNorm in float32 to queries or keys [batch, sequence, heads, head_dim].

        Over the numbers of each head, or of all heads together.
        """
        dims = self.block["attention"][f"{name}_norm"].dims
        scale = context.gather(layer["attention"][f"{name}_norm"], *dims, wide=True).reshape(-1)
        rows = x.reshape(*x.shape[:2], -1, scale.size)
        return normalised(rows, scale, None, False, self.config.norm_epsilon, x.dtype).reshape(x.shape)

    def _dropout(self, x: Array, context: Context, place: Array | int) -> Array:
        """Zero a share of `x` and scale up the rest; each use and layer has its own random key (`place`)."""
        if context.dropout_key is None or self.config.dropout == 0:
            return x
        kept = 1.0 - self.config.dropout
        key = jax.random.fold_in(context.dropout_key, place)
        # Each row and position also has its own key, so the mask does not depend on the sharding.
        rows = jax.vmap(partial(jax.random.fold_in, key))(rows_here(x.shape[0], context.mesh))
        positions = ring_positions(x.shape[1], context.mesh)
        keys = jax.vmap(lambda row: jax.vmap(partial(jax.random.fold_in, row))(positions))(rows)
        mask = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, kept, x.shape[2:])))(keys)
        return jnp.where(context.pin(mask, *RESIDUAL), x / kept, 0).astype(x.dtype)


def _one_by_one(
    blocks: list[Any], x: Array, layers: list[tuple[Tree, Array]]
) -> tuple[Array, Balance | None]:
    """Apply `layers` in turn, each with the block for its index in the group; return output and `Balance`."""
    each: list[Balance | None] = []
    for place, layer in enumerate(layers):
        x, one = blocks[place % len(blocks)](x, layer)
        each.append(one)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *each)


def _at(stacked: Tree, place: int) -> Tree:
    return jax.tree.map(lambda a: a[place], stacked)


def _places(
    length: int, context: Context, documents: Documents | None
) -> Int[Array, "batch_or_1 sequence"] | None:
    """Return each token's position in its document or window; None if positions are 0, 1, 2, ..."""
    if documents is not None:
        return documents.positions
    if ring_size(context.mesh) == 1:
        return None
    return ring_positions(length, context.mesh)[None]


def _for_each_token(x: Array, like: Array) -> Array:
    """Broadcast `x` to the shape and the format of `like`, so that its gradient is summed in float32.

    In the compute format each addition would round: over a thousand tokens in bf16 by up to 4 % of the sum.
    """
    return jnp.broadcast_to(x.astype(jnp.float32), like.shape).astype(like.dtype)


def _scattered(y: Array, context: Context) -> Array:
    """Shard `y` as a residual; gather its gradient once, as two products would otherwise each gather it."""
    scatter = jax.custom_vjp(lambda y: context.pin(y, *RESIDUAL))
    scatter.defvjp(lambda y: (scatter(y), None), lambda _, g: (context.pin(g, "batch", "sequence", "embed"),))
    return scatter(y)


def _inputs(batch: Batch) -> tuple[Array, Array | None]:
    """Return all tokens but each row's last, and their segments if windows hold several documents."""
    segments = batch.get("segments")
    return batch["tokens"][:, :-1], None if segments is None else segments[:, :-1]


def _norm_names(config: TransformerModel) -> tuple[str, ...]:
    """Return the suffixes of a block's norm names: before attention or MLP, after it, or both."""
    return {"before": ("norm",), "after": ("out_norm",), "both": ("norm", "out_norm")}[config.norm_place]
