"""Model the seconds of one kernel or collective by its size, and read the fitted coefficients of each chip.

The formulas take numbers or arrays of numbers, so that `benchmarks/fit_rates.py` fits the same functions that
predict. Their rates are parameters: no formula depends on a chip. `rates.toml` holds the coefficients by
chip, and `rates_of` supplies those of a chip without tables. `runs.toml` holds figures from published runs
and from others' reports, which all predictions share.
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
    """Return runs.toml: figures from published runs and others' reports, shared by all predictions."""
    return _read_toml("runs.toml")


@cache
def fitted() -> Mapping[str, Any]:
    """Return rates.toml: coefficients fitted to public tables of kernels."""
    return _read_toml("rates.toml")


def _read_toml(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("meshwright.predict").joinpath(name).read_text(encoding="utf-8"))


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


Rate = TypeVar("Rate", GemmRate, AttentionRate, CollectiveRate)

CUDNN = "cudnn"
"""The attention kernel that our own programs call."""
# The only PCIe system with peer-to-peer transfers in the tables; the L40S sends through the host.
_PCIE_SYSTEM = "rtx_pro_6000_server"
_PCIE_SYSTEMS = (_PCIE_SYSTEM, "l40s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipRates:
    """Coefficients for one chip: GEMMs by format, attention by head size, collectives by kind and group.

    `measured`: True if they come from tables of this chip itself.
    """

    gemm: Mapping[str, GemmRate]
    attention: Mapping[int, AttentionRate]
    collectives: Mapping[str, Mapping[int, CollectiveRate]]
    measured: bool

    def gemm_for(self, format_name: str) -> GemmRate:
        """Return the coefficients of fp8-e4m3 for any fp8 if the chip has them, else those of bf16.

        Their efficiency is a share of the peak of `format_name`.
        """
        if format_name.startswith("fp8") and "fp8-e4m3" in self.gemm:
            return self.gemm["fp8-e4m3"]
        return self.gemm["bf16"]

    def attention_for(self, head_size: int) -> AttentionRate:
        """Return the rate of the nearest measured head size."""
        return self.attention[min(self.attention, key=lambda measured: abs(measured - head_size))]

    def collective_for(self, kind: str, group_size: int) -> CollectiveRate:
        """Return the rate of the largest measured group that is not above `group_size`.

        Beyond the largest measured group the ring has more steps, so alpha grows in proportion. No table has
        collective-permute: it is priced as an all-to-all of two devices, which sends the same bytes.
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
    """Constants that all predictions share. Efficiencies are shares of catalog rates. Sources: runs.toml."""

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
    """The ends of an interval as shares of the expected value, their source, and why they are no narrower."""

    low: float
    high: float
    words: str
    reason: str = ""


@cache
def widths() -> Mapping[str, Width]:
    """Return the interval widths by their names in runs.toml."""
    return {name: Width(**fields) for name, fields in runs()["interval"].items()}


@cache
def shared() -> Shared:
    """Return the shared constants of runs.toml."""
    return Shared(**runs()["shared"])


def sustained_share(chip: Chip) -> float | None:
    """Return the share of its peak that a chip sustains in products of 16 bits or more; None if not known.

    A chip may have another power limit than the measured chip of the same silicon. The share is then
    multiplied by the cube root of the ratio of the limits, because dynamic power grows as the cube of the
    clock.
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
    """Return the rates of a library's attention kernel on a chip, or cuDNN's where runs.toml has none.

    Raises:
        InputError: the kernel is unknown.
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
    """Return the chip's own coefficients, or the median of each coefficient over the measured chips.

    An unmeasured chip takes the collectives of the PCIe system with peer-to-peer transfers if its own link is
    PCIe, else medians over the NVLink systems.
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
    """Return the source of the coefficients and the date of their fit."""
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
