"""Generate text from a Transformer: at the end of a run whose tokens are bytes, on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from meshwright.config import RunConfig
from meshwright.contrib.offload import with_stand_ins
from meshwright.trainer.data import TokenReader
from meshwright.trainer.loop import Sampled
from meshwright.trainer.models import Context, model_of
from meshwright.trainer.models.transformer import Transformer
from meshwright.trainer.step import FORMATS

NUM_TOKENS = 160
TEMPERATURE = 0.8
PROMPT_TOKENS = 64
_STREAM = 2  # folded into the run's key; the state uses 0 and 1


def sample_tokens(
    config: RunConfig,
    mesh: Mesh,
    parameters: dict[str, Any],
    prompt: np.ndarray,
    key: Key[Array, ""],
    num_tokens: int = NUM_TOKENS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Return the tokens that a model on one device generates after a prompt.

    Args:
        prompt: tokens; only the last ones that fit into the run's sequence are read.
    """
    sample = jax.jit(_sampler(config, mesh, num_tokens, temperature))
    with jax.default_device(mesh.devices.flat[0]):
        return np.asarray(sample(parameters, *_window(config, prompt), key))


def _window(config: RunConfig, prompt: np.ndarray) -> tuple[np.ndarray, np.int32]:
    """Return a window of the run's sequence length that begins with the prompt's end, and what it fills."""
    window = np.zeros(config.batch.sequence_length, np.int32)
    prompt = prompt[-len(window) :]
    window[: len(prompt)] = prompt
    return window, np.int32(len(prompt))


def _sampler(config: RunConfig, mesh: Mesh, num_tokens: int, temperature: float) -> Callable[..., Array]:
    """Return the function, not jitted, of parameters, window, filled positions and key, that draws tokens.

    Each token is drawn from the model's output for the whole window. The unfilled positions come last, and no
    filled position attends to them. A full window slides. Nothing is cached from token to token: one shape,
    one program. At temperature 0 the most likely token is taken.
    """
    model = model_of(config.model)
    assert isinstance(model, Transformer), f"a {config.model.kind} model generates no text"
    device = mesh.devices.flat[0]
    platform = "cuda" if device.platform == "gpu" else device.platform
    scale = None if config.lora.rank is None else config.lora.scale
    dtype = FORMATS[config.precision]
    context = Context(mesh=mesh, dtype=dtype, platform=platform, remat="none", adapter_scale=scale)

    def next_token(
        parameters: dict[str, Any], context: Context, window: Array, filled: Array, key: Array
    ) -> Array:
        hidden = model.hidden(parameters, window[None], context)[0][0]
        last = jax.lax.dynamic_index_in_dim(hidden, filled - 1, keepdims=False)
        logits = model.logits(parameters, last, context)
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / temperature)

    def sample(parameters: dict[str, Any], window: Array, filled: Array, key: Array) -> Array:
        if config.waits("parameters"):
            parameters, held = with_stand_ins(parameters)
            used = replace(context, held=held)
        else:
            used = context

        def one(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
            window, filled = carry
            token = next_token(parameters, used, window, filled, key).astype(window.dtype)
            is_full = filled == window.shape[0]
            moved = jnp.where(is_full, jnp.roll(window, -1), window)
            filled = jnp.where(is_full, filled, filled + 1)
            return (moved.at[filled - 1].set(token), filled), token

        return jax.lax.scan(one, (window, filled), jax.random.split(key, num_tokens))[1]

    return sample


def lowered_sample(config: RunConfig, mesh: Mesh, parameters: dict[str, Any]) -> jax.stages.Lowered:
    """Lower the program that `sample_of` runs, for parameters as `parameters` describes them.

    It makes its random key from the run's seed, so that nothing else is compiled when the run ends.
    """
    draw = _sampler(config, mesh, NUM_TOKENS, TEMPERATURE)

    def sample(parameters: dict[str, Any], window: Array, filled: Array, seed: Array) -> Array:
        return draw(parameters, window, filled, jax.random.fold_in(jax.random.key(seed), _STREAM))

    window = jax.ShapeDtypeStruct((config.batch.sequence_length,), np.int32)
    filled, seed = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.uint32)
    return jax.jit(sample).lower(parameters, window, filled, seed)


def sample_of(
    config: RunConfig, sample: Callable[..., Array], parameters: dict[str, Any], data: TokenReader
) -> Sampled:
    """Return the 160 tokens that a trained model generates after the beginning of the held-out text.

    Only the run's seed decides the draw. `sample`: the compiled program of `lowered_sample`.
    """
    length = min(PROMPT_TOKENS, max(config.batch.sequence_length // 2, 1))
    prompt = data.batch(0, "held-out")["tokens"][0][:length]
    tokens = np.asarray(sample(parameters, *_window(config, prompt), np.uint32(config.seed)))
    return Sampled(prompt=data.decode(prompt), text=data.decode(tokens))
