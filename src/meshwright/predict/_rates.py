"""Read the fitted time models of kernels and collectives, by chip.

The tables of constants that come with the package, as their files have them.

The time of one kernel or collective by its size: the formulas whose coefficients `rates.toml` holds.

They take numbers or arrays of numbers, so that `benchmarks/fit_rates.py` fits the very functions that
predict. Rates are parameters: nothing here knows a chip.

The fitted coefficients, by chip: `rates.toml` read, and what stands in for a chip without tables.

`runs.toml` holds what published runs and others' reports say, shared by all predictions.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, nearest_name
from meshwright.hardware import Chip


@cache
def runs() -> Mapping[str, Any]:
    """runs.toml: what published runs and others' reports say, shared by all predictions."""
    return _read_toml("runs.toml")


@cache
def fitted() -> Mapping[str, Any]:
    """rates.toml: coefficients fitted to public tables of kernels."""
    return _read_toml("rates.toml")


def _read_toml(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("meshwright.predict").joinpath(name).read_text(encoding="utf-8"))


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


Rate = TypeVar("Rate", GemmRate, AttentionRate, CollectiveRate)

CUDNN = "cudnn"
"""The attention kernel that our own programs call."""
# The one PCIe system with peer-to-peer transfers among the tables; L40S's goes through the host.
_PCIE_SYSTEM = "rtx_pro_6000_server"
_PCIE_SYSTEMS = (_PCIE_SYSTEM, "l40s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipRates:
    """Coefficients for one chip: GEMMs by format, attention by head size, collectives by kind and group.

    `measured`: whether they come from tables of this very chip.
    """

    gemm: Mapping[str, GemmRate]
    attention: Mapping[int, AttentionRate]
    collectives: Mapping[str, Mapping[int, CollectiveRate]]
    measured: bool

    def gemm_for(self, format_name: str) -> GemmRate:
        """The format's own, fp8-e4m3's for any fp8, else the same share of its peak as bf16."""
        if format_name.startswith("fp8") and "fp8-e4m3" in self.gemm:
            return self.gemm["fp8-e4m3"]
        return self.gemm["bf16"]

    def attention_for(self, head_size: int) -> AttentionRate:
        """Of the head size measured nearest to this one."""
        return self.attention[min(self.attention, key=lambda measured: abs(measured - head_size))]

    def collective_for(self, kind: str, group_size: int) -> CollectiveRate:
        """Of the largest measured group not above this one; beyond it the ring's steps, hence alpha, grow.

        A collective-permute is priced as the all-to-all of two, which sends the same: no table has it.
        """
        if kind == "collective-permute":
            kind, group_size = "all-to-all", 2
        by_size = self.collectives[kind]
        size = max((s for s in by_size if s <= group_size), default=min(by_size))
        rate = by_size[size]
        if group_size <= size:
            return rate
        longer = 1.0 if size < max(by_size) else group_size / size
        return CollectiveRate(
            efficiency=rate.efficiency,
            alpha_seconds=rate.alpha_seconds * longer,
            ramp_seconds=rate.ramp_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Constants of every prediction (sources: runs.toml); efficiencies are shares of catalog rates."""

    factor_without_sustained: float
    backward_attention_share: float
    memory_efficiency: float
    network_efficiency: float
    network_alpha_seconds: float
    launch_seconds: float
    launch_bound_share: float
    unpublished_share: float
    steady_spread: float
    power_exponent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """An interval's ends as shares of what is expected, their source, and why they are not narrower."""

    low: float
    high: float
    words: str
    reason: str = ""


@cache
def widths() -> Mapping[str, Width]:
    """The intervals by how much is known."""
    return {name: Width(**fields) for name, fields in runs()["interval"].items()}


@cache
def shared() -> Shared:
    """The shared constants."""
    return Shared(**runs()["shared"])


def sustained_share(chip: Chip) -> float | None:
    """The share of its peak that a chip sustains in products of 16 bits or more; None where not known.

    Of a chip with another power limit than that of its silicon which was measured: times the cube root of
    the ratio, because dynamic power grows as the cube of the clock.
    """
    for system, (names, _) in _systems().items():
        found = runs()["sustained"].get(system)
        if found and chip.name in names:
            power = (chip.watts or found["watts"]) / found["watts"]
            return (
                found["flops_per_second"] / found["peak_flops_per_second"] * power ** shared().power_exponent
            )
    return None


def attention_of(chip: Chip, kernel: str) -> Mapping[int, AttentionRate]:
    """The rates of a library's attention kernel on a chip: its own, or cuDNN's where runs.toml has none.

    Raises:
        InputError: no such kernel.
    """
    kernels = runs()["attention"]
    if kernel != CUDNN and kernel not in kernels:
        known = (CUDNN, *kernels)
        raise InputError(f"no attention kernel {kernel!r} is known", hint=nearest_name(kernel, known))
    if kernel != CUDNN:
        found, systems = kernels[kernel], _systems()
        for system, share in found["on"].items():
            if chip.name in systems[system][0]:
                rates = systems[found["system"]][1].attention
                return {
                    head: replace(rate, efficiency=rate.efficiency * share) for head, rate in rates.items()
                }
    return rates_of(chip).attention


def rates_of(chip: Chip) -> ChipRates:
    """The chip's own coefficients, or each coefficient's median over the measured chips.

    Collectives of an unmeasured chip: medians over the NVLink systems, but of the PCIe system with
    peer-to-peer transfers where the chip's link is PCIe.
    """
    systems = _systems()
    for names, rates in systems.values():
        if chip.name in names:
            return rates
    measured = [rates for _, rates in systems.values()]
    pcie = chip.inside is not None and chip.inside.name.startswith("PCIe")
    linked = [
        r for name, (_, r) in systems.items() if (name == _PCIE_SYSTEM if pcie else name not in _PCIE_SYSTEMS)
    ]
    return ChipRates(
        gemm=_medians(r.gemm for r in measured),
        attention=_medians(r.attention for r in measured),
        collectives={kind: _medians(r.collectives[kind] for r in linked) for kind in linked[0].collectives},
        measured=False,
    )


def _medians(tables: Iterable[Mapping[Any, Rate]]) -> dict[Any, Rate]:
    by_key: dict[Any, list[Rate]] = {}
    for table in tables:
        for key, rate in table.items():
            by_key.setdefault(key, []).append(rate)
    return {key: _median(rates) for key, rates in sorted(by_key.items())}


def _median(rates: list[Rate]) -> Rate:
    return type(rates[0])(
        **{f.name: statistics.median(getattr(rate, f.name) for rate in rates) for f in fields(rates[0])}
    )


@cache
def _systems() -> Mapping[str, tuple[tuple[str, ...], ChipRates]]:
    chips = fitted()["chips"]
    return {system: (tuple(table["names"]), _read(table)) for system, table in chips.items()}


def provenance() -> str:
    """Where the coefficients come from, and when they were fitted."""
    return f"{fitted()['source']}, fitted {fitted()['date']}"


def _read(table: dict[str, Any]) -> ChipRates:
    return ChipRates(
        gemm={name: GemmRate(**fields) for name, fields in table["gemm"].items()},
        attention={int(head): AttentionRate(**fields) for head, fields in table["attention"].items()},
        collectives={
            kind: {int(size): CollectiveRate(**fields) for size, fields in sizes.items()}
            for kind, sizes in table["collectives"].items()
        },
        measured=True,
    )
