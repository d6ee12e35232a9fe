"""Whether a chip computes in the formats that a run's precision asks for."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.hardware import Chip

from ._run import RunConfig

NEEDS = {"fp16": ("fp16",), "fp8": ("fp8-e4m3", "fp8-e5m2")}
"""Formats by precision; every chip has fp32, and compilers widen bf16 where a chip has none."""


def check_precision(config: RunConfig, chip: Chip) -> None:
    """Refuse a precision for which `chip` has no units: no peak in the catalog. A CPU emulates all of them.

    Raises:
        InputError: names the chip, the formats that it lacks, and those that it has.
    """
    has = chip.peak_flops_per_second
    lacking = [name for name in NEEDS.get(config.precision, ()) if name not in has]
    if chip.platform == "cpu" or not lacking:
        return
    raise InputError(
        f'precision = "{config.precision}" multiplies in {" and ".join(lacking)}, for which {chip.name} has '
        f"no units; it has {', '.join(has)}",
        hint=f'use precision = "{"bf16" if "bf16" in has else "fp32"}", '
        f"or a chip that has them: `meshwright fleets`",
    )
