"""The time of one kernel or collective by its size: the formulas whose coefficients `rates.toml` holds.

They take numbers or arrays of numbers, so that `benchmarks/fit_rates.py` fits the very functions that
predict. Rates are parameters: nothing here knows a chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._constants import runs

Number = float | NDArray[Any]

TILES: tuple[tuple[int, int], ...] = tuple((rows, columns) for rows, columns in runs()["products"]["tiles"])
"""What the libraries' heuristics choose from; a model's minimum does as they do."""
_LARGEST_INTENSITY = max(rows * columns / (rows + columns) for rows, columns in TILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """Coefficients of `gemm_seconds` for one chip and format; efficiencies are shares of catalog peaks."""

    efficiency: float
    k_half: float  # the depth at which half of a tile's time is its prologue
    start_seconds: float
    memory_efficiency: float
    wave_share: float  # how much of a part wave's idle time is paid: 1 all, 0 none
    small_tile_exponent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """Coefficients of `attention_seconds` for one chip and head size."""

    efficiency: float
    half_length: float  # the sequence length that reaches half of the rate
    start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRate:
    """Coefficients of `collective_seconds` for one kind and group size; efficiency is the link's share."""

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
    """Time of a batch of [m, k] x [k, n] products: the dearer of arithmetic and memory, plus a start.

    Arithmetic: tiles are rounded up to whole ones, then to waves of one tile per SM; the best of `TILES`.
    Tile and wave quantisation: NVIDIA, "Matrix Multiplication Background User's Guide"
    (docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication); the share of a part
    wave that is paid, the loss by small tiles and by short k are fitted. Not modelled: clocks under load.
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
    """Time of a fused attention forward kernel over `length` positions: a rate that saturates with length.

    `flops`: of the part of the scores that the mask leaves. Form: R(s) = R_inf s / (s + s_half).
    """
    per_second = flops_per_second * rate.efficiency * length / (length + rate.half_length)
    return flops / per_second + rate.start_seconds


def collective_seconds(rate: CollectiveRate, *, wire_bytes: Number, bytes_per_second: float) -> Number:
    """Time of a collective of which one device sends `wire_bytes` over its link.

    alpha + x/B + sqrt(ramp x/B): the last term is what a pipelined transfer pays for filling its pipeline
    when the chunk size is chosen best. Without it the measured tables fit three to eight times worse.
    """
    transfer = wire_bytes / (bytes_per_second * rate.efficiency)
    return rate.alpha_seconds + transfer + np.sqrt(rate.ramp_seconds * transfer)
