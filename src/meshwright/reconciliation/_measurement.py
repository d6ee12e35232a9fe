"""Seconds of repeated measurements: what the clocks give and the reconciliation reads.

`Measurement`: what one run really did.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds: the median, and the 5th and 95th percentile of `num_steps` steps."""

    median: float
    low: float
    high: float
    num_steps: int


SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run as observed.

    `step_seconds`: by the clock, from step to step, the first two and all evaluation left out; None
    where there were no more than two. `compile_seconds`: of the train step, trace to executable.
    `losses`, `held_out_losses`: nats by step, where step n is the n-th update; held-out losses are of
    the parameters after it. `argument_bytes_per_device`: live arrays of state and batch on the first
    device, by the runtime. `peak_bytes`: the runtime's allocator, most of all devices.
    `process_rss_growth_bytes`: from before the state was made to the peak. `xla_flops`: by XLA's own
    cost analysis of the program that ran, all devices, elementwise arithmetic included. What could not be
    measured is None, and `not_measured` says why, by the field's name.
    `unigram_entropy_nats`: of the held-out tokens; None for data without tokens. `signal`: the name of the
    one that ended the run early, else empty. `resumed_from`: the step of the checkpoint that was gone on
    from; losses are of the steps before it too, all seconds of this process alone. `seconds_by_phase` add up
    to the process's time from the run's beginning; "input wait" is time for which the devices had nothing
    else to do, "checkpoint" what the steps waited for. `num_bad_steps`: not applied, because the loss or the
    gradient was not finite.
    """

    steps: int
    signal: str
    resumed_from: int | None
    tokens_per_step: int
    step_seconds: Spread | None
    compile_seconds: float
    losses: dict[int, float]
    held_out_losses: dict[int, float]
    held_out_metrics: dict[int, dict[str, float]]
    num_bad_steps: int
    seconds_by_phase: dict[str, float]
    unigram_entropy_nats: float | None
    argument_bytes_per_device: int | None
    peak_bytes: int | None
    process_rss_growth_bytes: int | None
    xla_flops: int | None
    not_measured: dict[str, str]
    fingerprint: str
    platform: str  # cpu | cuda | rocm | tpu
    device_kind: str
    num_devices: int
    host: str
    versions: dict[str, str]
    date: str  # UTC, ISO 8601
    sample_prompt: str
    sample: str  # what the model wrote after the prompt; "" where none was made

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices, at the median step; None where no step was timed."""
        return None if self.step_seconds is None else self.tokens_per_step / self.step_seconds.median

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run early."""
        return bool(self.signal)

    @property
    def goodput(self) -> float:
        """The share of the process's time in which it trained: "step" of all phases."""
        return self.seconds_by_phase.get("step", 0.0) / sum(self.seconds_by_phase.values())

    def to_json(self) -> str:
        """As `from_json` reads it; `tokens_per_second` and `goodput` are written beside the fields."""
        beside = {"tokens_per_second": self.tokens_per_second, "goodput": self.goodput}
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self), **beside}, indent=1)

    @staticmethod
    def from_json(text: str) -> Measurement:
        """The inverse of `to_json`.

        Raises:
            InputError: the text is no such JSON object.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            schema = fields.pop("schema")
            if schema != SCHEMA:
                raise InputError(
                    f"a measurement of schema {schema}; this version reads {SCHEMA}",
                    hint="measure again with this version, or read it with the one that wrote it",
                )
            del fields["tokens_per_second"], fields["goodput"]
            for name in ("losses", "held_out_losses"):
                fields[name] = {int(step): float(loss) for step, loss in fields[name].items()}
            more = fields["held_out_metrics"].items()
            fields["held_out_metrics"] = {int(step): dict(values) for step, values in more}
            if fields["step_seconds"] is not None:
                fields["step_seconds"] = Spread(**fields["step_seconds"])
            return Measurement(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as broken:
            raise InputError(
                f"this is no measurement: {broken!r}", hint="`train` writes one as measurement.json"
            ) from broken
