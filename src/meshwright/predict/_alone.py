"""Read the rates of a device that works alone, as single cards were measured.

Published runs on eight and more devices sustain less than one card does. Nothing measured says why: messages
run beside products on the same SMs, all devices share a host's power, and a step waits for the slowest.
`runs.toml` holds the figures of fleets under [sustained], and those of one card under [alone].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.hardware import Chip, MeasuredAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What one card reached by itself.

    `share`: of the peak, in products of 16 bits. `attention`: rates of one library's kernel by head size and
    length; empty where that kernel was not measured. `measured`: which cards, in words.
    """

    share: float
    attention: tuple[MeasuredAttention, ...]
    measured: str


def alone_rates(
    table: Mapping[str, Any], system: str | None, chip: Chip, attention_kernel: str, power_exponent: float
) -> Alone | None:
    """Return what a chip reaches alone, or None if no card of its silicon was measured.

    Args:
        table: [alone] of runs.toml, by silicon.
        system: the chip's name among the measured systems of rates.toml.
        power_exponent: how the rate of products follows the power limit.
    """
    for entry in table.values():
        if system not in entry["systems"]:
            continue
        power = ((chip.watts or entry["watts"]) / entry["watts"]) ** power_exponent
        share = entry["flops_per_second"] / entry["peak_flops_per_second"] * power
        kernel = entry["attention"].get(attention_kernel, {})
        points = tuple(
            MeasuredAttention(
                head_size=int(head),
                length=length,
                forward_flops_per_second=forward,
                backward_flops_per_second=backward,
            )
            for head, rates in kernel.items()
            for length, forward, backward in zip(
                entry["lengths"], rates["forward"], rates["backward"], strict=True
            )
        )
        return Alone(share=share, attention=points, measured=entry["measured"])
    return None
