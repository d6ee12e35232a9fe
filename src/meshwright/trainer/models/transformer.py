"""Define the decoder-only Transformer: GPT-2 to Llama 3 by configuration.

Layers are those of one or several stretches (`layer_stacks`), each of which runs in a loop.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from meshwright.config import FIRST_LAYERS, TransformerModel
from meshwright.registry import room
from meshwright.sharding import look_up, num_shards, token_axes

from ._base_model import RESIDUAL, Batch, Context, Model, Outcome, Parameter, Tree
from .attention import Documents, documents_of, in_ring_order
from .layer_stacks import LayerStack, joined, one_by_one
from .loss import LEFT_OUT, Balance, Targets, balance_metrics, mean_cross_entropy, soft_cap
from .products import product
from .transformer_block import dropped_out, for_each_token, norm_parameters, normed, places_of, scaled


class Transformer(Model):
    """The decoder-only Transformer that a `TransformerModel` config describes."""

    def __init__(self, config: TransformerModel) -> None:
        super().__init__(config)
        self.stacks = {stretch.name: LayerStack(config, stretch) for stretch in config.stretches}
        self._further = room("further_tokens").FurtherTokens(self) if config.mtp_layers else None

    def parameters(self) -> Tree:
        """Declare `embedding`, `positions` (if learned), `layers`, `final_norm` and `head` (if not tied).

        Each stretch of layers has its name (`TransformerModel.stretches`). Tables that are the head too
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
        declared |= {name: stack.parameters() for name, stack in self.stacks.items()}
        declared |= {} if self._further is None else self._further.parameters()
        if not c.tied_embeddings:
            declared["head"] = table(c.vocab_size, "vocab")
        return declared

    def layers_with(self, stretch: str, part: str) -> list[int]:
        """Return the layers, from 0, that the rows of one part of a stretch's blocks belong to."""
        return self.stacks[stretch].layers_with(part)

    @property
    def _rows_of_embedding(self) -> str:
        """The name of the embedding's first dim."""
        return "vocab" if self.config.tied_embeddings else "token"

    def summed(self, context: Context) -> tuple[str, ...]:
        """Return the groups of stacked layers in a loop, unless `fsdp` or `expert` splits the tokens.

        Such an axis reduces each layer's gradient in the loop. XLA hides that message behind the next layer,
        which it does not if a sum waits for it (llama3-8b with `fsdp=8`: 62.2 s a step in place of 61.2).
        """
        if self.config.unroll or {"fsdp", "expert"} & set(token_axes(context.mesh)):
            return ()
        return tuple(name for name, stack in self.stacks.items() if not stack.unrolls(context))

    def hidden(
        self, parameters: Tree, tokens: Array, context: Context, segments: Array | None = None
    ) -> tuple[Float[Array, "batch sequence embed"], Balance | None]:
        """Return the final hidden states of `tokens` [batch, sequence], and the layers' `Balance`.

        The head is not applied. If `context` shards the sequence, the states are in ring order.

        Args:
            segments: the number of each token's document in its window, same shape. None: one document.
        """
        documents = self._documents(segments, context)
        x = self.embedded(parameters, tokens, context, documents)
        balances: list[Balance | None] = []
        for name, stack in self.stacks.items():
            x, balance = stack.apply(parameters[name], x, context, documents)
            balances.append(balance)
        return self._normed(parameters, x, context), joined(balances)

    def _normed(self, parameters: Tree, x: Array, context: Context) -> Array:
        """Return the head's input: its products with the head are the logits, `logit_scale` included."""
        factor = self.config.logit_scale
        return normed(x, parameters["final_norm"], self.config, context, factor=factor)

    def _documents(self, segments: Array | None, context: Context) -> Documents | None:
        c = self.config
        return None if segments is None else documents_of(segments, context, c.head_dim, c.value_dim)

    def embedded(
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
                    x = x + _by_rows(for_each_token(table[: x.shape[1]], x), context)
                else:
                    x = x + table[places].astype(x.dtype)
            return context.pin(dropped_out(x, self.config, context, 0), *RESIDUAL)

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
        `balancing_loss` times the mean load-balancing loss of the layers. With modules that predict further
        tokens it includes `mtp_loss` times their mean loss, which is a metric of that name.

        Args:
            batch: `tokens` [rows, sequence + 1]. If windows hold several documents, also `segments` of the
                same shape: a document's first token is not predicted and does not count in the mean. With
                `answers` of the same shape, only tokens marked by 1 are.
        """
        tokens, segments = inputs_of(batch)
        hidden, balance = self.hidden(parameters, tokens, context, segments)
        loss = self.loss_of(parameters, hidden, self.targets(batch, context), context)
        further = None
        if self._further is not None and context.training:
            further, more = self._further.loss(parameters, batch, hidden, context)
            loss, balance = loss + self.config.mtp_loss * further, joined([balance, more])
        metrics = {} if balance is None else balance_metrics(balance)
        if metrics and context.training:
            loss = loss + self.config.balancing_loss * metrics["balancing_loss"]
        return loss, Outcome({}, metrics if further is None else {**metrics, "mtp_loss": further})

    # The parts of `loss` of a pipeline: `step` calls `embed`, then `apply_group`, then `head_loss`.

    def embed(self, parameters: Tree, batch: Batch, context: Context) -> Array:
        """Return the first block's input."""
        tokens, segments = inputs_of(batch)
        return self.embedded(parameters, tokens, context, self._documents(segments, context))

    def group_size(self, context: Context) -> int:
        """Return the number of layers after which their kinds and their policies repeat."""
        return self._shared.group_size(context)

    def layers_of_group(self, layers: Tree, context: Context) -> list[Tree]:
        """Return the parameters of each layer of a group, which are stacked by the layers' parts."""
        return [self._shared.layer_of(layers, place) for place in range(self.group_size(context))]

    @property
    def _shared(self) -> LayerStack:
        """The layers that stages share."""
        return self.stacks["layers"]

    def for_layers(self, batch: Batch, context: Context) -> Documents | None:
        """Return the documents of a batch's windows; None if each is one."""
        return self._documents(inputs_of(batch)[1], context)

    def first_layers(self, parameters: Tree, x: Array, used: Documents | None, context: Context) -> Array:
        """Apply the layers that have no experts, before those that have."""
        return self.stacks[FIRST_LAYERS].apply(parameters[FIRST_LAYERS], x, context, used)[0]

    def apply_group(
        self, layers: list[Tree], x: Array, documents: Documents | None, context: Context, first: Array
    ) -> tuple[tuple[Array, Array], Balance | None]:
        """Apply `group_size` layers, numbered from `first` among those that stages share.

        Returns:
            The layers' output and their contribution to the loss; and each layer's `Balance`.
        """
        blocks = self._shared.blocks(context, documents, scanned=True)
        first = first + self.config.num_first_layers
        numbered = [(layer, first + place) for place, layer in enumerate(layers, 1)]
        with jax.named_scope("layers"):
            x, balance = one_by_one(blocks, x, numbered)
        added = jnp.float32(0)
        if balance is not None and context.training:
            added = self.config.balancing_loss * jnp.sum(balance.loss) / self.config.num_expert_layers
        return (x, added), balance

    def targets(self, batch: Batch, context: Context, further: int = 0) -> Targets:
        """Return the targets, in ring order over `context`; `LEFT_OUT` where none is to be predicted.

        That is a document's first token and, if the batch marks answers, whatever is outside of them.

        Args:
            further: how many tokens lie between a position's next one and its target.
        """
        targets, segments = batch["tokens"][:, 1:], batch.get("segments")
        if "answers" in batch:
            targets = jnp.where(batch["answers"][:, 1:] == 1, targets, LEFT_OUT)
        targets = shifted(targets, further, LEFT_OUT)
        if segments is not None:
            own = shifted(segments[:, 1:], further, LEFT_OUT) == segments[:, :-1]
            targets = jnp.where(own, targets, LEFT_OUT)
        return Targets(in_ring_order(targets, context.mesh), gaps=segments is not None or further > 0)

    def head_loss(self, parameters: Tree, x: Array, targets: Targets, context: Context) -> Float[Array, ""]:
        """Return some positions' contribution to the loss, from the last block's output `x`."""
        return self.loss_of(parameters, self._normed(parameters, x, context), targets, context)

    def summarize(self, balance: Balance | None) -> dict[str, Array]:
        """Return a batch's metrics from the `Balance` of microbatches and layers [microbatches, layers]."""
        return {} if balance is None else jax.tree.map(jnp.mean, jax.vmap(balance_metrics)(balance))

    def loss_of(
        self, parameters: Tree, hidden: Array, targets: Targets, context: Context
    ) -> Float[Array, ""]:
        """Return the mean cross entropy of positions, from the head's input."""
        head = self.head(parameters, context)
        c = self.config
        return mean_cross_entropy(
            hidden, head, targets, context, c.loss_chunk, c.logit_cap, num_ids=c.vocab_size
        )


def _by_rows(x: Array, context: Context) -> Array:
    """Keep the last dimension of `x` and of its gradient innermost in a GPU's memory, in code of one device.

    The gradient of learned positions is a sum over the batch. For its sake XLA of jax 0.12 makes the batch
    the innermost dimension of all residuals, and transposes them for each norm and product: as predicted,
    GPT-2 of 124M takes 10.6 % longer on 8 H100. Where XLA divides arrays itself it does not, and gathers
    arrays whose layout is asked for (jax 0.10).
    """
    if context.platform != "cuda" or num_shards(context.mesh) > 1:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def shifted(rows: Array, places: int, last: int) -> Array:
    """Return rows [batch, sequence] that begin `places` later, and end with as many times `last`."""
    return rows if not places else jnp.pad(rows[:, places:], ((0, 0), (0, places)), constant_values=last)


def inputs_of(batch: Batch) -> tuple[Array, Array | None]:
    """Return all tokens but each row's last, and their segments if windows hold several documents."""
    segments = batch.get("segments")
    return batch["tokens"][:, :-1], None if segments is None else segments[:, :-1]
