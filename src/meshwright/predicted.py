"""Give the figures that all weighings have: whether it fits, the rate, the run's cost, FLOPs and traffic.

Imports: `config`, `hardware`, `ledger`, `predict`, `shown`, `units`. Used by: `results`.
"""

from __future__ import annotations

from typing import Protocol

from .config import Layout
from .hardware import Fleet
from .ledger import Ledger
from .predict import AxisTraffic, Prediction, RunFlops, RunTotal, run_flops, traffic_by_axes
from .shown import Shown
from .units import format_bytes, format_seconds


class Weighed(Protocol):
    """What a weighing has, as a field or as a property."""

    @property
    def name(self) -> str:
        """The name of what was weighed."""
        ...

    @property
    def fleet(self) -> Fleet:
        """The devices that it was weighed for."""
        ...

    @property
    def layout(self) -> Layout:
        """The mesh on them."""
        ...

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None if unknown."""
        ...

    @property
    def ledger(self) -> Ledger:
        """Memory, FLOPs and traffic of one step."""
        ...

    @property
    def prediction(self) -> Prediction | None:
        """The time of one step; None if none is predicted."""
        ...

    @property
    def run_total(self) -> RunTotal | None:
        """Hours, device-hours and cost of the whole run; None if unknown."""
        ...


class Predicted(Shown):
    """The figures that weighings of JAX programs and of PyTorch modules have in common.

    If no time is predicted, the figures of time are None.
    """

    @property
    def fits(self: Weighed) -> bool | None:
        """True if reserved + allowance bytes are at most the usable bytes; None if those are unknown."""
        return self.ledger.memory.fits

    @property
    def step_seconds(self: Weighed) -> float | None:
        """Expected seconds of one step; None if no time is predicted."""
        return None if self.prediction is None else self.prediction.step_seconds.expected

    @property
    def mfu(self: Weighed) -> float | None:
        """Model FLOPs of a step as a share of the fleet's dense peak in the step's time; None if unknown."""
        return None if self.prediction is None else self.prediction.mfu

    @property
    def tokens_per_second(self: Weighed) -> float | None:
        """Expected tokens per second of the whole fleet, or images or rows; None if unknown."""
        rate = None if self.prediction is None else self.prediction.tokens_per_second_per_device
        return None if rate is None else rate * self.fleet.num_devices

    @property
    def cost(self: Weighed) -> float | None:
        """Expected cost of the whole run in the currency of the price; None without steps or a price."""
        total = self.run_total
        return None if total is None or total.cost is None else total.cost.expected

    @property
    def run_flops(self: Weighed) -> RunFlops | None:
        """FLOPs of the whole run, and their share of the reporting threshold; None without its steps."""
        return run_flops(self.ledger.flops, self.num_steps)

    @property
    def traffic_by_axes(self: Weighed) -> tuple[AxisTraffic, ...]:
        """What one device sends in a step by mesh axes: what leaves its host, what stays, what is hidden."""
        return traffic_by_axes(self.ledger.traffic, self.prediction)

    @property
    def line(self: Weighed) -> str:
        """The name, the fleet and the layout; whether it fits, and the expected time of a step."""
        memory, prediction = self.ledger.memory, self.prediction
        verdict = {True: "fits", False: "does not fit", None: "no verdict"}[memory.fits]
        needed = format_bytes(memory.reserved_bytes + memory.allowance_bytes)
        usable = "" if memory.usable_bytes is None else f" of {format_bytes(memory.usable_bytes)}"
        step = "" if prediction is None else f", step {format_seconds(prediction.step_seconds.expected)}"
        where = f"{self.name} on {self.fleet.name}, layout {self.layout}"
        return f"{where}: {verdict}, {needed}{usable} per device{step}"
