"""Count the model FLOPs of a token by hand, for published models of four families.

The sizes are those of the models' own files, written here once more: nothing is read from Meshwright. A
multiply-add is two FLOPs, and every product has two gradients, so a number of a matrix counts six for each
token. A position sees W - W^2 / (2 S) others on average in a window of W, and S / 2 without one; a pair
counts twelve for each number of a head (two products, forward and backward). A state of K x V numbers counts
6 K V forward with the delta rule and 4 K V without. A lookup, a short convolution, norms and activations are
no products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _attention(embed: int, heads: int, kv_heads: int, width: int, pairs: float) -> float:
    """Return the FLOPs of a layer's attention: query, key, value, output and scores."""
    return 6 * (2 * embed * heads * width + 2 * embed * kv_heads * width) + 12 * heads * width * pairs


def _seen(length: int, window: int) -> float:
    """Return the positions that a position sees on average."""
    return length / 2 if window >= length else window - window**2 / (2 * length)


def gpt_oss_20b(length: int) -> float:
    """24 layers, every other with a window of 128; 4 of 32 experts, each of three matrices."""
    embed, heads, kv_heads, width = 2880, 64, 8, 64
    windowed = _attention(embed, heads, kv_heads, width, _seen(length, 128))
    whole = _attention(embed, heads, kv_heads, width, length / 2)
    experts = 6 * (32 * embed + 4 * 3 * embed * 2880)
    return 12 * (windowed + whole) + 24 * experts + 6 * 201_088 * embed


def qwen3_next_80b(length: int) -> float:
    """48 layers: 36 gated delta nets and 12 gated attentions; 10 of 512 experts and one that all share.

    A delta net has 16 key heads and 32 value heads of 128: query, key, value and gate, two numbers for each
    value head, and an output. Queries of attention have a gate of the same width.
    """
    embed, inner = 2048, 32 * 128
    delta = 6 * (embed * (2 * 16 * 128 + 2 * inner + 2 * 32) + inner * embed) + 3 * 6 * 32 * 128 * 128
    gate = 6 * embed * 16 * 256
    attention = gate + _attention(embed, 16, 2, 256, length / 2)
    experts = 6 * (512 * embed + (10 + 1) * 3 * embed * 512 + embed)
    return 36 * delta + 12 * attention + 48 * experts + 6 * 151_936 * embed


def nemotron_h_8b(length: int) -> float:
    """24 Mamba-2, 4 attentions and 24 MLPs of two matrices.

    Mamba-2 has 128 heads of 64 and 8 groups of states of 128: value, gate, input and output of the state, a
    step for each head, and an output.
    """
    embed, inner = 4096, 128 * 64
    mamba = 6 * (embed * (2 * inner + 2 * 8 * 128 + 128) + inner * embed) + 3 * 4 * 128 * 64 * 128
    attention = _attention(embed, 32, 8, 128, length / 2)
    return 24 * mamba + 4 * attention + 24 * 6 * 2 * embed * 21_504 + 6 * 131_072 * embed


def gemma_3_27b(length: int) -> float:
    """62 layers, every sixth without the window of 1,024; an MLP of three matrices."""
    embed, sizes = 5376, (32, 16, 128)
    windowed, whole = (_attention(embed, *sizes, _seen(length, window)) for window in (1024, length))
    return 52 * windowed + 10 * whole + 62 * 6 * 3 * embed * 21_504 + 6 * 262_208 * embed


BY_HAND: Mapping[str, Callable[[int], float]] = {
    "openai/gpt-oss-20b": gpt_oss_20b,
    "Qwen/Qwen3-Next-80B-A3B-Thinking": qwen3_next_80b,
    "nvidia/Nemotron-H-8B-Base-8K": nemotron_h_8b,
    "google/gemma-3-27b-it": gemma_3_27b,
}
"""FLOPs of the model for one token of a sequence of so many, by the model's id."""
