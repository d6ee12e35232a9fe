"""Define the decoder-only Transformer: GPT-2 to Llama 3 by configuration.

Blocks are stacked along `layers` and scanned, so compile time does not grow with depth; on one GPU few blocks
are unrolled, and `unroll` keeps their parameters separate too, which is faster on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from meshwright.config import LoraConfig, TransformerModel, block_policies
from meshwright.sharding import axis_size, look_up, num_shards, ring_size, token_axes

from ._base_model import RESIDUAL, Batch, Context, Model, Outcome, Parameter, Tree, is_parameter
from .attention import Documents, documents_of, in_ring_order
from .grad_accumulation import places, slice_layer, summed, taken
from .loss import LEFT_OUT, Balance, Targets, balance_metrics, mean_cross_entropy, soft_cap
from .products import product
from .rematerialisation import BLOCK_INPUT, rematerialised
from .transformer_block import (
    Block,
    dropped_out,
    for_each_token,
    norm_parameters,
    normed,
    places_of,
    scaled,
)


class Transformer(Model):
    """The decoder-only Transformer that a `TransformerModel` config describes."""

    def __init__(self, config: TransformerModel) -> None:
        super().__init__(config)
        self._block_of = {"layers": Block(config, has_experts=config.num_experts is not None)}
        if config.num_dense_layers:
            self._block_of["dense_layers"] = Block(config, has_experts=False)

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
        declared: Tree = {"embedding": embedding, "final_norm": norm_parameters(c)}
        if c.max_positions is not None:
            declared["positions"] = table(c.max_positions, "positions")
        declared["layers"] = self._of_layers(
            self._block_of["layers"].declared, c.num_layers - c.num_dense_layers
        )
        if c.num_dense_layers:
            declared["dense_layers"] = self._of_layers(
                self._block_of["dense_layers"].declared, c.num_dense_layers
            )
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

        block = adapter_parameters(self._block_of["layers"].declared, self.config, lora)
        return {"layers": self._of_layers(block, self.config.num_layers)}

    def _of_layers(self, block: Tree, count: int) -> Tree:
        """Return the declarations of `count` layers like one block: stacked, or a list if unrolled."""

        def stacked(p: Parameter) -> Parameter:
            return replace(p, shape=(count, *p.shape), dims=("layers", *p.dims))

        if self.config.unroll:
            return [block] * count
        return jax.tree.map(stacked, block, is_leaf=is_parameter)

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
        return self._normed(parameters, x, context), balance

    def _normed(self, parameters: Tree, x: Array, context: Context) -> Array:
        """Return the head's input: its products with the head are the logits, `logit_scale` included."""
        factor = self.config.logit_scale
        return normed(x, parameters["final_norm"], self.config, context, factor=factor)

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
            x = scaled(x, self.config.embedding_scale)
            if self.config.position == "learned":
                table = context.gather(parameters["positions"], "positions", "embed")
                places = places_of(tokens.shape[1], context, documents)
                if places is None:
                    x = x + for_each_token(table[: x.shape[1]], x)
                else:
                    x = x + table[places].astype(x.dtype)
            return context.pin(dropped_out(x, self.config, context, 0), *RESIDUAL)

    def _blocks(
        self, name: str, context: Context, documents: Documents | None, scanned: bool, grouped: bool = False
    ) -> list[Any]:
        """Return the blocks of one group of layers.

        A block is a function of its input and (parameters, number). Each has its window, and its policy of
        rematerialisation. If `grouped`, each takes the parameters and numbers of the whole group: a layer's,
        taken out before, would be saved as a copy.
        """

        def block(
            place: int, x: Array, layer: tuple[Tree, Array], stacked: tuple[Tree, Array] | None = None
        ) -> tuple[Array, Balance | None]:
            x, (parameters, number) = checkpoint_name(x, BLOCK_INPUT), _at(layer, place) if grouped else layer
            if context.held is not None:
                parameters = context.fetched(parameters, number)
            elif stacked is not None:
                parameters = slice_layer(parameters, *stacked)
            kind = place % len(windows)
            return apply(x, parameters, number, context, documents, windows[kind], turns[kind])

        policies, windows, turns = block_policies(context.remat), self.config.windows, self.config.turns
        apply = self._block_of[name].apply
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
                blocks = self._blocks(name, context, documents, scanned=False)
                return _one_by_one(
                    blocks, x, list(zip(layers, first + jnp.arange(1, len(layers) + 1), strict=True))
                )
            totals = {} if context.sums is None else context.sums.get(name, {})
            held = None if context.held is None else (context.held[name], first)
            (x, sums), balance = self._through_stack(
                name, layers, (x, totals), replace(context, sums=None, held=held), documents, first
            )
            return summed(x, sums, totals), balance

    def _through_stack(
        self,
        name: str,
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
        blocks = self._blocks(name, context, documents, scanned=scanned, grouped=size > 1)

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
            x, more = _one_by_one(self._blocks(name, context, documents, scanned=False), x, each)
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
        blocks = self._blocks("layers", context, documents, scanned=True)
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
        return self._loss_of(parameters, self._normed(parameters, x, context), targets, context)

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


def _inputs(batch: Batch) -> tuple[Array, Array | None]:
    """Return all tokens but each row's last, and their segments if windows hold several documents."""
    segments = batch.get("segments")
    return batch["tokens"][:, :-1], None if segments is None else segments[:, :-1]
