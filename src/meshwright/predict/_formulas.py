"""Give the seconds of a product, an attention kernel and a collective by size and coefficients.

The formulas take numbers or arrays of numbers, so that `benchmarks/fit_rates.py` fits the same functions that
predict. No formula depends on a chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._rate_files import runs

Number = float | NDArray[Any]

TILES: tuple[tuple[int, int], ...] = tuple((rows, columns) for rows, columns in runs()["products"]["tiles"])
"""The tile sizes from which a library's heuristics choose. The model takes the fastest, as they do."""
_LARGEST_INTENSITY = max(rows * columns / (rows + columns) for rows, columns in TILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """Coefficients of `gemm_seconds` for one chip and format; efficiencies are shares of catalog peaks."""

    efficiency: float
    k_half: float  # the k at which half of a tile's time is its prologue
    start_seconds: float
    memory_efficiency: float
    wave_share: float  # the share of a partial wave's idle time that is paid: 1 all, 0 none
    small_tile_exponent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """Coefficients of `attention_seconds` for one chip and head size."""

    efficiency: float
    half_length: float  # the sequence length that reaches half of the rate
    start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRate:
    """Coefficients of `collective_seconds` for one kind and group size; efficiency is a share of the link."""

    efficiency: float
    alpha_seconds: float
    ramp_seconds: float


def gemm_seconds(
    rate: GemmRate,
    *,
    m: Number,
    n: Number,
    k: Number,
    num_bytes: Number,
    flops_per_second: float,
    memory_bytes_per_second: float,
    num_sms: int,
    batch: Number = 1,
) -> Number:
    """Return the seconds of a batch of [m, k] x [k, n] products.

    They are the larger of the arithmetic time and the memory time, plus a start. For the arithmetic time,
    tiles are rounded up to whole ones, then to waves of one tile per SM, and the best of `TILES` counts.
    Source of tile and wave quantisation: NVIDIA, "Matrix Multiplication Background User's Guide"
    (docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication). Fitted: the share of a
    partial wave that is paid, and the losses from small tiles and from small k.
    Not modelled: clocks under load.
    """
    arithmetic: Number = np.inf
    for rows, columns in TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
        waves = tiles / num_sms
        paid = rate.wave_share * np.ceil(waves) + (1 - rate.wave_share) * np.maximum(waves, 1)
        intensity = rows * columns / (rows + columns) / _LARGEST_INTENSITY
        per_second = flops_per_second * rate.efficiency * intensity**rate.small_tile_exponent
        seconds = paid * num_sms * rows * columns * 2 * k / per_second * (1 + rate.k_half / k)
        arithmetic = np.minimum(arithmetic, seconds)
    memory = num_bytes / (memory_bytes_per_second * rate.memory_efficiency)
    return np.maximum(arithmetic, memory) + rate.start_seconds


def attention_seconds(
    rate: AttentionRate, *, flops: Number, length: Number, flops_per_second: float
) -> Number:
    """Return the seconds of a fused attention kernel over `length` positions.

    The rate saturates with the length s: R(s) = R_inf s / (s + s_half). `flops`: those of the scores that the
    mask leaves.
    """
    per_second = flops_per_second * rate.efficiency * length / (length + rate.half_length)
    return flops / per_second + rate.start_seconds


def collective_seconds(rate: CollectiveRate, *, wire_bytes: Number, bytes_per_second: float) -> Number:
    """Return the seconds of a collective in which one device sends `wire_bytes` over its link.

    The form is alpha + x/B + sqrt(ramp x/B). The last term is the time in which a pipelined transfer fills
    its pipeline, at the best chunk size. Without it the measured tables fit three to eight times worse.
    """
    transfer = wire_bytes / (bytes_per_second * rate.efficiency)
    return rate.alpha_seconds + transfer + np.sqrt(rate.ramp_seconds * transfer)
