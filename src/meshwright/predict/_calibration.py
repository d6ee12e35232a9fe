"""`Calibration`: what one machine was measured to do, where no catalog can know it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, cast

from meshwright.errors import InputError
from meshwright.formats import FORMATS

_HINT = "measure again: `meshwright probe`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rates that were measured: of a whole host's CPU, which simulated devices share, or of one accelerator.

    `matmul_flops_per_second`: of a large product, by format name. `memory_bytes_per_second`: read plus
    written. `launch_seconds`: of one instruction that does nothing. `source`: how it was measured.
    `details`: what else was measured, by name with its unit; shown, and not used.

    Raises:
        InputError: a rate is no positive number, or a format is unknown.
    """

    matmul_flops_per_second: dict[str, float] = field(hash=False)
    memory_bytes_per_second: float
    launch_seconds: float
    date: str  # YYYY-MM-DD
    source: str
    chip: str = "CPU"  # as the catalog names it
    details: dict[str, float] = field(default_factory=dict[str, float], hash=False)

    def __post_init__(self) -> None:
        rates = {f"matmul_flops_per_second.{name}": r for name, r in self.matmul_flops_per_second.items()}
        rates["memory_bytes_per_second"] = self.memory_bytes_per_second
        rates["launch_seconds"] = self.launch_seconds
        for name, rate in rates.items():
            if not math.isfinite(rate) or rate <= 0:
                raise InputError(f"calibration: {name} = {rate} is no positive number", hint=_HINT)
        unknown = sorted(set(self.matmul_flops_per_second) - set(FORMATS))
        if unknown or not self.matmul_flops_per_second:
            what = f"unknown formats {unknown}" if unknown else "no format at all"
            raise InputError(f"calibration: matmul_flops_per_second names {what}", hint=_HINT)

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Calibration:
        """The inverse of `to_json`.

        Raises:
            InputError: the text is no JSON object with exactly these fields, numbers where numbers stand.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            matmul = cast("dict[str, Any]", fields.pop("matmul_flops_per_second"))
            details = cast("dict[str, Any]", fields.pop("details", {}))
            return Calibration(
                matmul_flops_per_second={str(name): float(rate) for name, rate in matmul.items()},
                memory_bytes_per_second=float(fields.pop("memory_bytes_per_second")),
                launch_seconds=float(fields.pop("launch_seconds")),
                details={str(name): float(rate) for name, rate in details.items()},
                **{name: str(value) for name, value in fields.items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as broken:
            raise InputError(f"calibration: cannot be read: {broken!r}", hint=_HINT) from broken
