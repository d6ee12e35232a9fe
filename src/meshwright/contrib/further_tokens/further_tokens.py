"""Predict tokens beyond the next one, in modules after the last layer (multi-token prediction).

Module k has a block, and shares the embedding and the head. With h the final hidden states before it, its
input at position i is W [norm(embedding of token i + k); norm(h_i)], and it predicts token i + k + 1
(DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 2.2). The order of the two halves is that of the
published weights, `eh_proj`. The modules' mean loss, times `mtp_loss`, is added in training alone.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.config import Stretch
from meshwright.trainer.models import RESIDUAL, Batch, Context, Parameter, Tree
from meshwright.trainer.models.attention import Documents
from meshwright.trainer.models.layer_stacks import LayerStack, joined
from meshwright.trainer.models.loss import Balance
from meshwright.trainer.models.products import product
from meshwright.trainer.models.transformer import Transformer, inputs_of, shifted
from meshwright.trainer.models.transformer_block import norm_parameters, normed

JOINT = "joint"  # the group of the matrix that joins a token with a hidden state


class FurtherTokens:
    """The modules of a model that predict further tokens: what they declare, and what one computes."""

    def __init__(self, model: Transformer) -> None:
        self._model, self.config = model, model.config
        config = self.config
        last = Stretch("mtp", (config.period[-1],), 1, config.num_layers)
        self._stack = LayerStack(config, last)

    @property
    def names(self) -> list[str]:
        """The modules' groups of parameters, the first first."""
        return [f"mtp_{number}" for number in range(1, self.config.mtp_layers + 1)]

    def parameters(self) -> dict[str, Tree]:
        """Declare the modules by name: a block, norms before and after it, and the matrix of its input."""
        width, norm = self.config.embed_dim, norm_parameters(self.config)
        matrix = Parameter(shape=(2 * width, width), dims=("embed", "rank"), fan_in=2 * width)
        (block,) = self._stack.period
        norms = dict.fromkeys(("token_norm", "hidden_norm", "last_norm"), norm)
        return {name: {**block.declared, **norms, JOINT: {"matrix": matrix}} for name in self.names}

    def loss(
        self, parameters: Tree, batch: Batch, hidden: Array, context: Context
    ) -> tuple[Float[Array, ""], Balance | None]:
        """Return the mean loss of the modules, and their `Balance`.

        A token that is `k` places too far is no target; nor is one of another document than the next token.

        Args:
            hidden: final hidden states of the model.
        """
        model, tokens = self._model, inputs_of(batch)[0]
        documents = model.for_layers(batch, context)
        losses, balances = list[Array](), list[Balance | None]()
        for number, name in enumerate(self.names, 1):
            later = shifted(tokens, number, 0)
            embedded = model.embedded(parameters, later, context, documents)
            hidden, balance = self._hidden(parameters[name], number, embedded, hidden, context, documents)
            targets = model.targets(batch, context, number)
            losses.append(model.loss_of(parameters, hidden, targets, context))
            balances.append(None if balance is None else jax.tree.map(lambda a: a[None], balance))
        return jnp.mean(jnp.stack(losses)), joined(balances)

    def _hidden(
        self,
        module: Tree,
        number: int,
        tokens: Float[Array, "batch sequence embed"],
        hidden: Float[Array, "batch sequence embed"],
        context: Context,
        documents: Documents | None,
    ) -> tuple[Float[Array, "batch sequence embed"], Balance | None]:
        """Return a module's final hidden states, and the `Balance` of its experts.

        Args:
            module: its parameters.
            number: its place among the modules, from 1.
            tokens: embeddings of the tokens that come `number` positions later.
            hidden: final hidden states of the model or of the module before.
        """
        c = self.config
        with jax.named_scope("further_tokens"):
            halves = (tokens, "token_norm"), (hidden, "hidden_norm")
            both = [normed(context.pin(x, *RESIDUAL), module[name], c, context, True) for x, name in halves]
            matrix = context.gather(module[JOINT]["matrix"], "embed", "rank")
            x = context.pin(product(jnp.concatenate(both, axis=-1), matrix, 1), *RESIDUAL)
            plain = replace(context, sums=None, held=None)
            block = self._stack.blocks(plain, documents, scanned=False)[0]
            x, balance = block(x, (module, jnp.int32(c.num_layers + number)))
            return normed(x, module["last_norm"], c, context, factor=c.logit_scale), balance
