"""Text from a byte-level Transformer, to look at after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key

from ..config import RunConfig, TransformerModel
from ..models import Context, model_of
from ..models.transformer import Transformer
from ..step import FORMATS

NUM_TOKENS = 160
TEMPERATURE = 0.8
PROMPT_TOKENS = 64
_STREAM = 2  # of the run's key; the state's own keys are 0 and 1


def sampler_of(
    config: RunConfig, mesh: Mesh, num_tokens: int = NUM_TOKENS, temperature: float = TEMPERATURE
) -> Callable[[dict[str, Any], Int[Array, " window"], Int[Array, ""], Key[Array, ""]], Int[Array, " new"]]:
    """A jitted function of parameters, window, how much of the window is filled, and key: new tokens.

    Each token is drawn from the model run on the whole window, whose unfilled end no position before
    it attends to; a full window slides. Nothing is cached from token to token: one shape, one program.
    At temperature 0 the likeliest token is taken.
    """
    model = model_of(config.model)
    assert isinstance(model, Transformer), f"a {config.model.kind} model writes no text"
    dtype = FORMATS[config.precision]
    device = mesh.devices.flat[0]
    platform = "cuda" if device.platform == "gpu" else device.platform
    context = Context(mesh=mesh, dtype=dtype, platform=platform, remat="none")

    def next_token(parameters: dict[str, Any], window: Array, filled: Array, key: Array) -> Array:
        hidden = model.hidden(parameters, window[None], context)[0][0]
        head = model.head(parameters, context)
        logits = (head @ jax.lax.dynamic_index_in_dim(hidden, filled - 1, keepdims=False)).astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / temperature)

    def sample(parameters: dict[str, Any], window: Array, filled: Array, key: Array) -> Array:
        def one(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
            window, filled = carry
            token = next_token(parameters, window, filled, key).astype(window.dtype)
            full = filled == window.shape[0]
            moved = jnp.where(full, jnp.roll(window, -1), window)
            filled = jnp.where(full, filled, filled + 1)
            return (moved.at[filled - 1].set(token), filled), token

        return jax.lax.scan(one, (window, filled), jax.random.split(key, num_tokens))[1]

    return jax.jit(sample)


def sample_tokens(
    config: RunConfig, mesh: Mesh, parameters: dict[str, Any], text: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A prompt, the beginning of `text`, and the 160 tokens that the model writes after it.

    The draw depends on the run's seed alone. `parameters` lie on one device.
    """
    assert isinstance(config.model, TransformerModel), f"a {config.model.kind} model writes no text"
    length = config.batch.sequence_length
    prompt = text[: min(PROMPT_TOKENS, max(length // 2, 1))]
    window = np.zeros(length, np.int32)
    window[: len(prompt)] = prompt
    key = jax.random.fold_in(jax.random.key(config.seed), _STREAM)
    sampler = sampler_of(config, mesh)
    device = mesh.devices.flat[0]
    with jax.default_device(device):
        tokens = sampler(parameters, jnp.asarray(window), jnp.int32(len(prompt)), key)
    return prompt, np.asarray(tokens)
