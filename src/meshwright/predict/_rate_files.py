"""Read the files of rates: rates.toml, fitted to tables of kernels, and runs.toml, from runs and reports.

Published runs on eight and more devices sustain less than one card does. Nothing measured says why: messages
run beside products on the same SMs, all devices share a host's power, and a step waits for the slowest.
`runs.toml` holds the figures of fleets under [sustained], and those of one card under [alone].
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.hardware import Chip, MeasuredAttention


@cache
def runs() -> Mapping[str, Any]:
    """Return runs.toml: figures from published runs and others' reports, shared by all predictions."""
    return tomllib.loads(files("meshwright.predict").joinpath("runs.toml").read_text(encoding="utf-8"))


@cache
def fitted() -> Mapping[str, Any]:
    """Return rates.toml: coefficients fitted to public tables of kernels."""
    return tomllib.loads(files("meshwright.predict").joinpath("rates.toml").read_text(encoding="utf-8"))


def provenance() -> str:
    """Return the source of the coefficients and the date of their fit."""
    return f"{fitted()['source']}, fitted {fitted()['date']}"


def share_of_peak(figure: Mapping[str, Any], chip: Chip) -> float:
    """Return the share of its peak that a chip reaches, by a figure of a chip of the same silicon.

    A chip may have another power limit. The share is then multiplied by the cube root of the ratio of the
    limits, because dynamic power grows as the cube of the clock.
    """
    limit = figure.get("watts")
    power = 1.0 if limit is None else (chip.watts or limit) / limit
    exponent = runs()["shared"]["power_exponent"]
    return float(figure["flops_per_second"] / figure["peak_flops_per_second"] * power**exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceRates:
    """Rates that one card reached without neighbours.

    `share`: of the peak, in products of 16 bits. `attention`: rates of one library's kernel by head size and
    length; empty where that kernel was not measured. `measured`: which cards, in words.
    """

    share: float
    attention: tuple[MeasuredAttention, ...]
    measured: str


def single_device_rates(system: str | None, chip: Chip, attention_kernel: str) -> SingleDeviceRates | None:
    """Return the rates of a single chip, or None if no card of its silicon was measured.

    `system`: the chip's name among the measured systems of rates.toml.
    """
    for entry in runs()["alone"].values():
        if system not in entry["systems"]:
            continue
        points = tuple(
            MeasuredAttention(
                head_size=int(head),
                length=length,
                forward_flops_per_second=forward,
                backward_flops_per_second=backward,
            )
            for head, rates in entry["attention"].get(attention_kernel, {}).items()
            for length, forward, backward in zip(
                entry["lengths"], rates["forward"], rates["backward"], strict=True
            )
        )
        return SingleDeviceRates(
            share=share_of_peak(entry, chip), attention=points, measured=entry["measured"]
        )
    return None
