"""Seconds of repeated measurements: what the clocks give and the reconciliation reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds: the median, and the 5th and 95th percentile of `num_steps` steps."""

    median: float
    low: float
    high: float
    num_steps: int
