"""Loss and accuracy of a model that tells images apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._base import Batch


def judged(
    logits: Float[Array, "rows classes"], batch: Batch
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Mean cross entropy in nats, and `accuracy`, the share of rows whose largest logit is their label's.

    Both are means over the rows, each times its weight where the batch has `weights` [rows] beside
    `labels` [rows]; float32.
    """
    logits, labels = logits.astype(jnp.float32), batch["labels"]
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=1) - chosen
    right = (jnp.argmax(logits, axis=1) == labels).astype(jnp.float32)
    if "weights" in batch:
        losses, right = losses * batch["weights"], right * batch["weights"]
    return jnp.mean(losses), {"accuracy": jnp.mean(right)}
