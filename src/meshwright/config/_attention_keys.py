"""Define keys of a Transformer's attention: rotary positions, and layers that see all positions."""

from __future__ import annotations

from typing import Literal

from ._section import NotNegativeFloat, OptionalPositive, OptionalPositiveFloat, PositiveFloat, Share
from ._state_keys import StateKeys


class RopeKeys(StateKeys):
    """The keys of rotary positions: their wavelengths, how those are stretched, and what is turned."""

    rope_theta: OptionalPositiveFloat = None
    """Base of the rotary wavelengths.
    Effect: larger bases suit longer sequences; nothing that is weighed. Unit: none"""
    rope_factor: OptionalPositiveFloat = None
    """The factor by which slow rotary wavelengths are stretched, as in Llama 3.1.
    Wavelengths above `rope_original_positions` / `rope_low_factor` are stretched, those below
    `rope_original_positions` / `rope_high_factor` are not, and those between in part.
    Effect: positions beyond the length of pretraining stay apart; nothing that is weighed. Unit: none"""
    rope_stretching: Literal["llama3", "linear", "yarn", "longrope", "proportional"] = "llama3"
    """The rule by which wavelengths between the two limits are stretched.
    `llama3` mixes by the number of turns, `yarn` by the place of the pair (Peng et al. 2023), `linear`
    stretches all wavelengths alike, and `longrope` each by a number of its own (Ding et al. 2024).
    `proportional` stretches none: `rotary_share` of the pairs of a whole head turn, those with the shortest
    wavelengths, in layers that see all positions (Gemma 4).
    Effect: that of `rope_factor`, without which it has none; `longrope` needs lists in its place."""
    rope_short_factors: tuple[PositiveFloat, ...] = ()
    """The numbers by which `longrope` stretches the wavelengths, one for each pair of turned numbers.
    In sequences of at most `rope_original_positions`.
    Effect: nothing that is weighed. Unit: none"""
    rope_long_factors: tuple[PositiveFloat, ...] = ()
    """The numbers by which `longrope` stretches the wavelengths in longer sequences.
    Effect: nothing that is weighed. Unit: none"""
    rope_gain: PositiveFloat = 1.0
    """Multiplies the sines and cosines of stretched wavelengths, as YaRN and LongRoPE do.
    Effect: scores of the turned numbers grow with its square; nothing that is weighed. Unit: none"""
    rope_magnitude: NotNegativeFloat = 0.0
    """Growth of attention's scores with stretched wavelengths, DeepSeek's `mscale_all_dim`.
    They are multiplied by the square of 1 + 0.1 x this x ln(`rope_factor`).
    Effect: nothing that is weighed. Unit: none"""
    rope_rounded: bool = True
    """Round the places of YaRN's two limits outwards to whole pairs, as its authors do; gpt-oss does not.
    Effect: nothing that is weighed."""
    position_growth: NotNegativeFloat = 0.0
    """Growth of queries with their position, as in Ministral 3.
    They are multiplied by 1 + this x ln(1 + the whole part of position / `rope_original_positions`).
    Effect: nothing that is weighed but one product per number. Unit: none"""
    rope_interleaved: bool = False
    """Positions turn neighbouring numbers as a pair (DeepSeek), not those of two halves (Llama).
    Effect: nothing that is weighed."""
    rope_low_factor: PositiveFloat = 1.0
    """Divides `rope_original_positions` to give the wavelength above which all are stretched.
    Effect: that of `rope_factor`, without which it has none. Unit: none"""
    rope_high_factor: PositiveFloat = 4.0
    """Divides `rope_original_positions` to give the wavelength below which none is stretched.
    Effect: that of `rope_factor`, without which it has none. Unit: none"""
    rope_original_positions: OptionalPositive = None
    """Length of the sequences of pretraining, before the wavelengths were stretched.
    Effect: that of `rope_factor`, which needs it. Unit: positions"""
    rope_local_theta: OptionalPositiveFloat = None
    """Base of the rotary wavelengths of layers with a window, which are not stretched (Gemma 3).
    Effect: nothing that is weighed. Unit: none
    Default: as in the other layers"""
    rotary_share: Share = 1.0
    """Share of each head's numbers that rotary positions turn; the first ones. GPT-NeoX turns a quarter.
    Effect: nothing that is weighed. Unit: share"""

    @property
    def is_stretched(self) -> bool:
        """Return whether rotary wavelengths are stretched."""
        return self.rope_factor is not None or bool(self.rope_short_factors)


class GlobalKeys(RopeKeys):
    """The keys of attention in layers that see all positions, where others have a window (Gemma 4)."""

    global_head_dim: OptionalPositive = None
    """Width of a head in layers that see all positions, where others have a `window` (Gemma 4).
    Effect: the parameters and FLOPs of attention in those layers; no fused kernel takes more than 256.
    Unit: numbers"""
    global_kv_heads: OptionalPositive = None
    """Key and value heads of those layers; needs `global_head_dim`.
    Effect: that of `num_kv_heads`, in those layers. Unit: heads
    Default: `num_kv_heads`"""
    global_key_is_value: bool = False
    """In those layers the values are the keys, before norms and positions; needs `global_head_dim`.
    Effect: one matrix fewer in each of them."""
    layer_factor: bool = False
    """Multiply each layer's output by a number of its own, as Gemma 4 does.
    It is read from files and saved, and no gradient changes it.
    Effect: a number per layer, not counted as parameters."""
