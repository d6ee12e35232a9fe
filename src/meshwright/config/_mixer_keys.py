"""Define the keys of what mixes a Transformer's positions: layers with a state, and parts of attention.

Layers with a state carry it from token to token. Two mixers take attention's place in them: a gated delta net
(Qwen3-Next; with decays per channel, the KDA of Kimi Linear) and Mamba-2 (Nemotron-H, Granite 4). Both begin
with a short causal convolution. Attention has keys for its rotary positions, and for layers that see all
positions where others have a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from ._model_kind import ModelKind
from ._section import (
    NotNegativeFloat,
    OptionalPositive,
    OptionalPositiveFloat,
    Positive,
    PositiveFloat,
    Problem,
    Share,
    near_divisors,
    or_list,
)

_DELTA = ("delta_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim")
_MAMBA = ("mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state_dim")


class StateKeys(ModelKind):
    """The keys of a Transformer's layers with a state: none of them has an effect without such layers."""

    if TYPE_CHECKING:
        embed_dim: Positive

    delta_heads: OptionalPositive = None
    """Value heads of a gated delta net, each with a state of `delta_key_dim` x `delta_value_dim` numbers.
    Effect: parameters and FLOPs of these layers grow in proportion; `tensor` must divide it. Unit: heads"""
    delta_key_heads: OptionalPositive = None
    """Query and key heads of a gated delta net, each of which serves as many value heads.
    Effect: fewer save parameters. `tensor` must divide it, or be a multiple of it. Unit: heads"""
    delta_key_dim: OptionalPositive = None
    """Width of a gated delta net's queries and keys.
    Effect: states, and the FLOPs with them, grow in proportion. Unit: numbers"""
    delta_value_dim: OptionalPositive = None
    """Width of a gated delta net's values.
    Effect: states, and the FLOPs with them, grow in proportion. Unit: numbers"""
    delta_rank: OptionalPositive = None
    """Width of the two latents from which KDA makes its decays, one for each key dimension, and its gates.
    Without it each head has one decay, and gates come from the residual stream.
    Effect: two pairs of matrices in place of two; `fsdp` must divide it. Unit: numbers per token"""
    delta_gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gate that multiplies a gated delta net's normed output; KDA's is the sigmoid.
    Effect: elementwise arithmetic."""
    mamba_heads: OptionalPositive = None
    """Heads of Mamba-2, each with a state of `mamba_state_dim` x `mamba_head_dim` numbers.
    Effect: parameters and FLOPs of these layers grow in proportion; `tensor` must divide it. Unit: heads"""
    mamba_head_dim: OptionalPositive = None
    """Width of one head of Mamba-2.
    Effect: parameters, states and FLOPs of these layers grow in proportion. Unit: numbers"""
    mamba_groups: OptionalPositive = None
    """Groups of Mamba-2's heads that share what is written to states and what reads them (B and C).
    Outputs are normed over each group.
    Effect: more have more parameters. `tensor` must divide it, or be a multiple of it. Unit: groups"""
    mamba_state_dim: OptionalPositive = None
    """Width of a state of Mamba-2: numbers for each of a head's `mamba_head_dim`.
    Effect: states, and the FLOPs with them, grow in proportion. Unit: numbers"""
    mamba_least_step: NotNegativeFloat = 0.0
    """Least step of time by which a state of Mamba-2 decays and is written to (Nemotron-H: 0.001).
    Effect: nothing that is weighed. Unit: none"""
    conv_width: OptionalPositive = None
    """Tokens over which the short convolution of layers with a state sums, its own included.
    Effect: as many parameters for each channel; over `context` the tokens before a piece are sent.
    Unit: tokens"""
    conv_bias: bool = False
    """Biases on the short convolution, as Mamba-2 has them.
    Effect: a parameter for each channel."""
    scan_chunk: Positive = 128
    """Tokens of a chunk whose states are computed by products at once; a power of two.
    Effect: larger chunks take fewer rounds of a loop and more arithmetic within each. Unit: tokens"""

    @property
    def delta_products(self) -> dict[str, tuple[int, int]]:
        """Numbers of inputs and outputs of each product of a gated delta net; none without one."""
        if self.delta_heads is None:
            return {}
        width, keys, values, heads = self.embed_dim, self._delta_keys, self._delta_values, self.delta_heads
        sizes = {
            "query": (width, keys),
            "key": (width, keys),
            "value": (width, values),
            "beta": (width, heads),
        }
        if (rank := self.delta_rank) is None:
            sizes |= {"decay": (width, heads), "output_gate": (width, values)}
        else:
            sizes |= {"decay_down": (width, rank), "decay": (rank, keys)}
            sizes |= {"output_gate_down": (width, rank), "output_gate": (rank, values)}
        return {**sizes, "output": (values, width)}

    @property
    def mamba_products(self) -> dict[str, tuple[int, int]]:
        """Numbers of inputs and outputs of each product of Mamba-2; none without it."""
        if self.mamba_heads is None:
            return {}
        inner, shared = self.mamba_heads * (self.mamba_head_dim or 0), self._mamba_shared
        sizes = {"output_gate": inner, "value": inner, "key": shared, "query": shared}
        sizes["step"] = self.mamba_heads
        made = {name: (self.embed_dim, size) for name, size in sizes.items()}
        return {**made, "output": (inner, self.embed_dim)}

    @property
    def num_delta_matrix_parameters(self) -> int:
        """Number of weights in the products of one gated delta net; see `num_delta_parameters`."""
        return sum(inputs * outputs for inputs, outputs in self.delta_products.values())

    @property
    def num_delta_parameters(self) -> int:
        """Number of parameters of one gated delta net.

        With E embed, H value heads of width U, G key heads of width K, a convolution of W tokens:
            E (2 G K + H U) + H U E + 2 E H + E H U            query, key, value; output; beta, decay; gate
            + W (2 G K + H U) + 2 H + U                        convolutions; rates and biases; norm
        With a rank R, decay and gate have 2 E R + R (G K + H U) weights in place of E H + E H U, and the
        biases are G K. A bias of the convolution adds 2 G K + H U.
        """
        if self.delta_heads is None:
            return 0
        channels, taps = 2 * self._delta_keys + self._delta_values, (self.conv_width or 0) + self.conv_bias
        biases = self.delta_heads if self.delta_rank is None else self._delta_keys
        vectors = taps * channels + self.delta_heads + biases + (self.delta_value_dim or 0)
        return self.num_delta_matrix_parameters + vectors

    @property
    def num_mamba_matrix_parameters(self) -> int:
        """Number of weights in the products of one Mamba-2 layer; see `num_mamba_parameters`."""
        return sum(inputs * outputs for inputs, outputs in self.mamba_products.values())

    @property
    def num_mamba_parameters(self) -> int:
        """Number of parameters of one Mamba-2 layer.

        With E embed, H heads of width P, G groups of state width N, a convolution of W tokens:
            E (2 H P + 2 G N + H) + H P E                      z, x, B, C and steps; output
            + W (H P + 2 G N) + 3 H + H P                      convolutions; rates, biases, skips; norm
        A bias of the convolution adds H P + 2 G N.
        """
        if self.mamba_heads is None:
            return 0
        inner, taps = self.mamba_heads * (self.mamba_head_dim or 0), (self.conv_width or 0) + self.conv_bias
        vectors = taps * (inner + 2 * self._mamba_shared) + 3 * self.mamba_heads + inner
        return self.num_mamba_matrix_parameters + vectors

    def state_sizes(self, dim: str) -> dict[str, int]:
        """Return the keys of layers with states that have the named dimension, and their sizes.

        >>> from ._load import load_config
        >>> load_config("llama3-8b").model.state_sizes("heads")
        {}
        """
        keys = {
            "heads": ("delta_heads", "mamba_heads"),
            "kv_heads": ("delta_key_heads", "mamba_groups"),
            "latent": ("delta_rank",),
        }[dim]
        found = ((f"model.{key}", getattr(self, key)) for key in keys)
        return {path: size for path, size in found if size is not None}

    @property
    def _delta_keys(self) -> int:
        return (self.delta_key_heads or 0) * (self.delta_key_dim or 0)

    @property
    def _delta_values(self) -> int:
        return (self.delta_heads or 0) * (self.delta_value_dim or 0)

    @property
    def _mamba_shared(self) -> int:
        return (self.mamba_groups or 0) * (self.mamba_state_dim or 0)


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


def state_problems(model: StateKeys) -> Iterator[Problem]:
    """Yield what is wrong with the keys of layers with a state: they need each other, and sizes that fit."""
    yield from _missing(model)
    yield from _unused(model)
    for few, many in (("delta_key_heads", "delta_heads"), ("mamba_groups", "mamba_heads")):
        number, wanted = getattr(model, many), getattr(model, few)
        if number and wanted and number % wanted:
            what = f"= {wanted} does not divide {many} = {number}"
            yield few, what, f"use {few} = {or_list(near_divisors(number, wanted))}"
    if model.delta_rank is not None and model.delta_key_heads != model.delta_heads:
        what = f"= {model.delta_key_heads}, but with delta_rank each of delta_heads has keys of its own"
        yield "delta_key_heads", what, f"use delta_key_heads = {model.delta_heads}"
    if model.scan_chunk & (model.scan_chunk - 1):
        lower = 1 << (model.scan_chunk.bit_length() - 1)
        what = f"= {model.scan_chunk} is no power of two"
        yield "scan_chunk", what, f"use scan_chunk = {lower} or {2 * lower}"


def _missing(model: StateKeys) -> Iterator[Problem]:
    """Yield the sizes that a mixer lacks, if it has one of them."""
    for names in (_DELTA, _MAMBA):
        given = [name for name in names if getattr(model, name) is not None]
        for name in (*names, "conv_width") if given else ():
            if getattr(model, name) is None:
                what = f"is missing; {given[0]} = {getattr(model, given[0])} needs it"
                yield name, what, f"set {name}" + " to 4" * (name == "conv_width")


def _unused(model: StateKeys) -> Iterator[Problem]:
    """Yield the keys that have no effect without a mixer."""
    has = {"delta": model.delta_heads is not None, "mamba": model.mamba_heads is not None}
    for name, field in StateKeys.model_fields.items():
        kinds = [kind for kind in has if name.startswith(kind)] or list(has)
        if name in (*_DELTA, *_MAMBA) or any(has[kind] for kind in kinds):
            continue
        if (value := getattr(model, name)) != field.default:
            heads = " or ".join(f"{kind}_heads" for kind in kinds)
            yield name, f"= {value!r} has no effect without {heads}", f"leave {name} out"
