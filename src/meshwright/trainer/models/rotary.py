"""Turn queries and keys by angles that grow with their position (Su et al. 2021, arXiv 2104.09864).

Wavelengths may be stretched for sequences longer than those of pretraining: Llama 3.1's rule, YaRN (Peng et
al. 2023, arXiv 2309.00071), LongRoPE (Ding et al. 2024, arXiv 2402.13753), or all alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from meshwright.config import TransformerModel


def score_factor(config: TransformerModel) -> float:
    """Return the factor of attention's scores, in addition to 1 / sqrt(head_dim)."""
    growth = 1 + 0.1 * config.rope_magnitude * math.log(config.rope_factor or 1)
    if config.score_scale is not None:
        return config.score_scale * math.sqrt(config.head_dim) * growth**2
    return math.sqrt(config.head_dim / (config.score_dim or config.head_dim)) * growth**2


def rotated_dim(config: TransformerModel) -> int:
    """Return how many numbers of each head rotary positions turn: an even number."""
    if config.rotary_dim is not None:
        return config.rotary_dim
    return 2 * int(config.head_dim * config.rotary_share / 2)


class Turns(NamedTuple):
    """The angles per position by which rotary embedding turns each pair, and how.

    `gain` multiplies sines and cosines. `interleaved`: the pairs are neighbours, not in two halves.
    """

    frequency: Float[Array, " half"]
    gain: float = 1.0
    interleaved: bool = False


def turns_of(config: TransformerModel, length: int, is_local: bool = False) -> Turns:
    """Return how rotary positions turn the queries and keys of a layer.

    Args:
        length: positions of a sequence.
        is_local: of a layer with a window, which may have a base of its own and is then not stretched.
    """
    is_plain = is_local and config.rope_local_theta is not None
    frequency = _frequencies(config, length, is_plain)
    return Turns(frequency, 1.0 if is_plain else config.rope_gain, config.rope_interleaved)


def _frequencies(config: TransformerModel, length: int, is_plain: bool) -> Float[Array, " half"]:
    """Return the angles per position by which rotary embedding turns each pair of numbers.

    With `rope_factor` F, original length L and factors l < h, a wavelength w stays below L / h and is
    stretched by F above L / l. Between, the two frequencies are mixed, with the share (L / w - l) / (h - l)
    of the one that stays (Llama 3.1, `apply_scaling` in https://github.com/meta-llama/llama-models).
    """
    assert config.rope_theta is not None, "positions are rotary"
    is_proportional = config.rope_stretching == "proportional"
    half = (config.head_dim if is_proportional else rotated_dim(config)) // 2
    exponents = -jnp.arange(half, dtype=jnp.float32) / half
    if is_plain and config.rope_local_theta is not None:
        return config.rope_local_theta**exponents
    frequency = config.rope_theta**exponents
    if is_proportional:
        return jnp.where(jnp.arange(half) < int(config.rotary_share * config.head_dim // 2), frequency, 0.0)
    if config.rope_short_factors:
        is_long = length > (config.rope_original_positions or 0)
        return frequency / jnp.asarray(config.rope_long_factors if is_long else config.rope_short_factors)
    if config.rope_factor is None:
        return frequency
    if config.rope_stretching == "linear":
        return frequency / config.rope_factor
    low, high = config.rope_low_factor, config.rope_high_factor
    assert config.rope_original_positions is not None, "the configuration is checked"
    if config.rope_stretching == "yarn":
        return _yarn(frequency, config, (low, high), config.rope_original_positions)
    turns = config.rope_original_positions * frequency / (2 * math.pi)  # in the original length
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (share + (1 - share) / config.rope_factor)


def _yarn(
    frequency: Float[Array, " half"], config: TransformerModel, turns: tuple[float, float], length: int
) -> Float[Array, " half"]:
    """Return YaRN's frequencies, mixed by a pair's place between those with the given numbers of `turns`.

    The places are rounded outwards, as in the authors' code (https://github.com/jquesnelle/yarn), unless the
    model leaves them as they are.
    """
    half, base, factor = frequency.shape[0], config.rope_theta, config.rope_factor
    assert base is not None, "positions are rotary"
    assert factor is not None, "wavelengths are stretched"

    def place(num_turns: float) -> float:
        return half * math.log(length / (num_turns * 2 * math.pi)) / math.log(base)

    fast, slow = place(turns[1]), place(turns[0])
    if config.rope_rounded:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, 2 * half - 1)
    stretched = jnp.clip((jnp.arange(half, dtype=jnp.float32) - fast) / max(slow - fast, 1e-3), 0.0, 1.0)
    return frequency * (1 - stretched + stretched / factor)


def rotated(
    x: Float[Array, "batch sequence heads head_dim"], turns: Turns, positions: Array | None = None
) -> Array:
    """Apply rotary position embedding; the numbers of a head that are not turned come last.

    The result has the pairs in the two halves, as Llama does. If they are neighbours in `x`, that is another
    order, which is the same for the product of a query and a key.

    Args:
        positions: [batch, sequence], each token's position; None counts from the first token of the window.
    """
    num_turned = 2 * turns.frequency.shape[0]
    if num_turned < x.shape[-1]:
        turned, rest = jnp.split(x, [num_turned], axis=-1)
        return jnp.concatenate([rotated(turned, turns, positions), rest], axis=-1)
    places = jnp.arange(x.shape[1], dtype=jnp.float32)[None] if positions is None else positions
    angle = places.astype(jnp.float32)[:, :, None] * turns.frequency[None, None]
    cos, sin = (rearrange(turns.gain * f(angle), "b s d -> b s 1 d") for f in (jnp.cos, jnp.sin))
    wide = x.astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if turns.interleaved else jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def grown(
    query: Float[Array, "batch sequence heads head_dim"], config: TransformerModel, positions: Array | None
) -> Array:
    """Multiply queries by a factor that grows with the logarithm of their position, in steps.

    Source: `get_llama_4_attn_scale` of Ministral 3 in https://github.com/huggingface/transformers.

    Args:
        positions: as for `rotated`.
    """
    places = jnp.arange(query.shape[1], dtype=jnp.float32)[None] if positions is None else positions
    step = jnp.floor(places.astype(jnp.float32) / (config.rope_original_positions or 1))
    factor = rearrange(1 + config.position_growth * jnp.log1p(step), "b s -> b s 1 1")
    return (query.astype(jnp.float32) * factor).astype(query.dtype)
