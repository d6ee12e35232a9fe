"""Hold the measurement of one run, and the percentiles of its step seconds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from meshwright.records import EXACT, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds of `num_steps` repetitions: the median, and the 5th and 95th percentiles."""

    median: float
    low: float
    high: float
    num_steps: int


SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one run. A field that could not be measured is None.

    `not_measured`: the reason for each such field, by its name.
    `step_seconds`: by the clock, from step to step, without the first two steps and without evaluation; None
    for a run of at most two steps.
    `compile_seconds`: those of the train step, from trace to executable.
    `losses`, `held_out_losses`: nats by step, where step n is the n-th update. Held-out losses are those of
    the parameters after it.
    `argument_bytes_per_device`: live arrays of state and batch on the first device, by the runtime.
    `peak_bytes`: the largest peak of the runtime's allocator on any device of this process.
    `process_rss_growth_bytes`: the growth of resident memory from before the state is made to the peak.
    `xla_flops`: by XLA's cost analysis of the program that ran, on all devices, with elementwise arithmetic.
    `unigram_entropy_nats`: that of the held-out tokens; None for data without tokens.
    `signal`: the name of the signal that ended the run early, else empty.
    `resumed_from`: the step of the checkpoint from which the run resumed. Losses include the steps before it;
    all seconds are those of this process alone.
    `seconds_by_phase`: they sum to the process's time since the beginning of the run. "input wait" is time in
    which the devices had nothing else to do, "checkpoint" the time for which the steps waited.
    `num_bad_steps`: steps that were not applied, because the loss or the gradient was not finite.
    """

    __pydantic_config__ = EXACT
    steps: int
    signal: str
    resumed_from: int | None
    tokens_per_step: int
    step_seconds: Percentiles | None
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
    sample: str  # the text that the model generated after the prompt; "" if none

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices at the median step; None if no step was timed."""
        return None if self.step_seconds is None else self.tokens_per_step / self.step_seconds.median

    @property
    def interrupted(self) -> bool:
        """True if a signal ended the run early."""
        return bool(self.signal)

    @property
    def goodput(self) -> float:
        """The share of the process's time spent in training steps: "step" among all phases."""
        return self.seconds_by_phase.get("step", 0.0) / sum(self.seconds_by_phase.values())

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads, with `tokens_per_second` and `goodput` added."""
        derived = {"tokens_per_second": self.tokens_per_second, "goodput": self.goodput}
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self), **derived}, indent=1)

    @staticmethod
    def from_json(text: str) -> Measurement:
        """Read the text that `to_json` writes.

        Raises:
            InputError: the text is not such a JSON object, or has another schema.
        """
        return read_record(
            Measurement,
            text,
            name="a measurement",
            schema=SCHEMA,
            derived=("tokens_per_second", "goodput"),
            hint="`train` writes one as measurement.json",
        )
