"""`Measurement`: what one run really did."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.spread import Spread

SCHEMA = 1


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
    `unigram_entropy_nats`: of the held-out tokens; None for data without tokens.
    """

    steps: int
    interrupted: bool
    tokens_per_step: int
    step_seconds: Spread | None
    compile_seconds: float
    losses: dict[int, float]
    held_out_losses: dict[int, float]
    unigram_entropy_nats: float | None
    argument_bytes_per_device: int
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

    def to_json(self) -> str:
        """As `from_json` reads it; `tokens_per_second` is written beside the fields."""
        fields = dataclasses.asdict(self)
        return json.dumps({"schema": SCHEMA, **fields, "tokens_per_second": self.tokens_per_second}, indent=1)

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
            del fields["tokens_per_second"]
            for name in ("losses", "held_out_losses"):
                fields[name] = {int(step): float(loss) for step, loss in fields[name].items()}
            if fields["step_seconds"] is not None:
                fields["step_seconds"] = Spread(**fields["step_seconds"])
            return Measurement(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as broken:
            raise InputError(
                f"this is no measurement: {broken!r}", hint="`train` writes one as measurement.json"
            ) from broken
