"""Hold suggestions that make a step's memory smaller, and its rule of thumb.

Rooms outside the core make them. Imports: `hardware`. No jax. Used by: `results`, `report`, and those rooms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from meshwright.hardware import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change to what was weighed, and its effect; a field that is None or empty changes nothing.

    `is_enough`: the saving is exact, and as large as what is too much.
    """

    effect: str
    fleet: str | None = None
    layout: str | None = None
    overrides: tuple[str, ...] = ()
    is_enough: bool = False

    @property
    def arguments(self) -> str:
        """Command-line arguments of the change."""
        parts = [Fleet.parse(self.fleet).options] if self.fleet else []
        parts += [f"--layout {self.layout}"] if self.layout else []
        return " ".join([*parts, *(f"--set {override}" for override in self.overrides)])


BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HandRow:
    """One quantity: hand-computed bytes on the fleet and on one device, and compiled bytes on one device."""

    quantity: str
    whole_bytes: int
    device_bytes: float
    compiled_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """The rule's counts of numbers over the whole fleet; `rule` says how activations were counted."""

    parameters: int
    activations: int
    gradients: int
    optimizer_state: int
    rule: str
    rows: tuple[HandRow, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes by the rule: 4 x (parameters + activations + gradients + optimizer state)."""
        return BYTES * (self.parameters + self.activations + self.gradients + self.optimizer_state)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the total."""
        return {**dataclasses.asdict(self), "total_bytes": self.total_bytes}
