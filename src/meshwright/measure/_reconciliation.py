"""Hold the measurement of a run, and compare each predicted quantity with the measured one.

Also hold the history of errors.

Pure: records in, a record out. Imports: `json_records`, `units`, `hardware`, `ledger`, `predict`. No jax, no
clock. Used by: `_own_run` (for `Percentiles`), `trainer.loop`, `results`, `report`, `api`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.json_records import EXACT, read_record
from meshwright.ledger import Ledger
from meshwright.predict import Prediction
from meshwright.reportable import Reportable
from meshwright.units import format_bytes

SCHEMA = 1
STEP_SECONDS = "step seconds"  # the quantity of which every run has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity, predicted and measured in `unit` (FLOP, bytes, seconds, share).

    `how`: the method of measurement. `low`, `high`: the predicted interval; None where the prediction is a
    single number.

    >>> Row(quantity="step seconds", unit="seconds", predicted=3.0, measured=2.0, how="clock").relative_error
    0.5
    """

    quantity: str
    unit: str
    predicted: int | float  # read back exactly as written
    measured: int | float
    how: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        _check_in_range(self.quantity, self.predicted, self.measured, self.low, self.high)

    @property
    def relative_error(self) -> float | None:
        """Predicted / measured - 1: 0.1 is a tenth too high. None if the measured value is zero."""
        return None if self.measured == 0 else self.predicted / self.measured - 1

    @property
    def inside(self) -> bool | None:
        """True if the measured value is in the predicted interval; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


LEAST, LARGEST = 1e-100, 1e100  # of a quantity that is not zero; the ratio of two is then a number too


def _check_in_range(quantity: str, *values: float | None) -> None:
    """Raise if a value is no quantity of a run, as in a damaged file: infinite, no number, out of range."""
    for value in values:
        if value is not None and value != 0 and not LEAST <= abs(value) <= LARGEST:
            hint = "the file was damaged or edited: make it again"
            raise InputError(f"{quantity} is {value!r:.40}, which no run measures", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reconciliation(Reportable):
    """All rows of the comparison. `not_compared`: the reason for each quantity without a row.

    `same_program`: True if the program that ran has the fingerprint of the program that was weighed; None on
    a TPU, for which a weighing reads the program before the compiler changes its text once more.
    """

    same_program: bool | None
    rows: tuple[Row, ...]
    not_compared: dict[str, str]

    @property
    def line(self) -> str:
        """The error of each quantity."""
        errors = (row for row in self.rows if row.relative_error is not None)
        return ", ".join(f"{row.quantity} {100 * (row.relative_error or 0.0):+.1f} %" for row in errors)

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads, with error and `inside` added to each row."""
        rows = [
            {**dataclasses.asdict(row), "relative_error": row.relative_error, "inside": row.inside}
            for row in self.rows
        ]
        fields = {"schema": SCHEMA, "same_program": self.same_program, "rows": rows}
        return json.dumps({**fields, "not_compared": self.not_compared}, indent=1)

    @staticmethod
    def from_json(text: str) -> Reconciliation:
        """Read the text that `to_json` writes.

        Raises:
            InputError: the text is not such a JSON object, or has another schema.
        """
        hint = "`train` writes one as reconciliation.json"
        return read_record(Reconciliation, text, name="a reconciliation", schema=SCHEMA, hint=hint)


def reconcile(
    fingerprint: str, ledger: Ledger, prediction: Prediction | None, measurement: Measurement
) -> Reconciliation:
    """Compare every quantity that was both predicted and measured, and give the reason for each other one.

    Args:
        fingerprint: that of the program that was weighed. It sets `same_program` in the result.
    """
    reasons, executed = measurement.not_measured, ledger.flops.executed
    how = "XLA's cost analysis of the program that ran, which counts elementwise arithmetic too"
    not_timed = reasons.get("step_seconds", "")
    machine = measurement.platform, measurement.num_devices
    compared = (
        _row("executed FLOPs", "FLOP", executed, measurement.xla_flops, how, reasons.get("xla_flops", "")),
        ("model FLOPs", "counted in the program as written; no counter of the machine sees them alone"),
        _arguments(ledger, measurement.argument_bytes_per_device, reasons),
        _reserved_bytes(ledger, measurement),
        *_times(ledger, prediction, measurement.step_seconds, not_timed, *machine),
    )
    return Reconciliation(
        same_program=None if measurement.platform == "tpu" else fingerprint == measurement.fingerprint,
        rows=tuple(row for row in compared if isinstance(row, Row)),
        not_compared=dict(row for row in compared if not isinstance(row, Row)),
    )


def first_steps(
    ledger: Ledger, prediction: Prediction | None, seconds: Percentiles, argument_bytes: int, fleet: Fleet
) -> tuple[Row, ...]:
    """Compare what is known a few steps after the start: argument bytes, step seconds and MFU.

    Args:
        argument_bytes: the live bytes of state and batch on the first device.
    """
    times = _times(ledger, prediction, seconds, "", fleet.chip.platform, fleet.num_devices)
    compared = (_arguments(ledger, argument_bytes, {}), *times)
    return tuple(row for row in compared if isinstance(row, Row))


def _row(
    quantity: str, unit: str, predicted: float, measured: float | None, how: str, why_not: str
) -> Row | tuple[str, str]:
    """Return the row of a quantity, or the reason why it was not measured."""
    if measured is None:
        return quantity, why_not
    return Row(quantity=quantity, unit=unit, predicted=predicted, measured=measured, how=how)


def _arguments(ledger: Ledger, measured: int | None, reasons: dict[str, str]) -> Row | tuple[str, str]:
    how = "live arrays of state and batch on the first device, by the runtime"
    why_not = reasons.get("argument_bytes_per_device", "")
    return _row("argument bytes per device", "bytes", ledger.memory.argument_bytes, measured, how, why_not)


def _reserved_bytes(ledger: Ledger, measurement: Measurement) -> Row | tuple[str, str]:
    """Compare reserved bytes by the device's allocator, or say why not: a CPU's runtime has none.

    The growth of the process is no measurement of them: the runtime's threads, data, evaluation and
    checkpoints are in it.
    """
    reserved, growth = ledger.memory.reserved_bytes, measurement.process_rss_growth_bytes
    if measurement.peak_bytes is not None:
        how = "peak of the runtime's allocator, evaluation included"
        return _row("reserved bytes per device", "bytes", reserved, measurement.peak_bytes, how, "")
    if growth is None:
        return "reserved bytes", measurement.not_measured.get("process_rss_growth_bytes", "")
    total = reserved * measurement.num_devices
    words = f"a {measurement.platform} runtime counts none. All devices reserve "
    words += f"{format_bytes(total)} in the program"
    also = "which is also data, evaluation, checkpoints and the runtime's own"
    return "reserved bytes", f"{words}; the process grew by {format_bytes(growth)}, {also}"


def _times(
    ledger: Ledger,
    prediction: Prediction | None,
    timed: Percentiles | None,
    not_timed: str,
    platform: str,
    num_devices: int,
) -> tuple[Row | tuple[str, str], ...]:
    """Compare step seconds and MFU, or return the reason against each."""
    if prediction is None or timed is None:
        why = "no prediction was made" if prediction is None else not_timed
        return (STEP_SECONDS, why), ("MFU", why)
    expected = prediction.step_seconds
    seconds = Row(
        quantity=STEP_SECONDS,
        unit="seconds",
        predicted=expected.expected,
        measured=timed.median,
        how=f"median of {timed.num_steps} steps by the clock; nine in ten took {timed.low:.4g} to "
        f"{timed.high:.4g} s",
        low=expected.low,
        high=expected.high,
    )
    if platform == "cpu":
        return seconds, ("MFU", "a CPU's peak is not in the catalog, so there is nothing to take a share of")
    peak = prediction.peak_flops_per_second * num_devices
    if prediction.mfu is None:
        return seconds, ("MFU", "the prediction has none: no format has a peak, or work is unpriced")
    return seconds, Row(
        quantity="MFU",
        unit="share",
        predicted=prediction.mfu,
        measured=ledger.flops.model / (timed.median * peak),
        how="model FLOPs over the median step and the catalog's dense peak",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds of `num_steps` repetitions: the median, and the 5th and 95th percentiles."""

    median: float
    low: float
    high: float
    num_steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Summarise the seconds of repetitions."""
        import numpy as np

        low, median, high = (float(value) for value in np.quantile(seconds, [0.05, 0.5, 0.95]))
        return cls(median=median, low=low, high=high, num_steps=len(seconds))


MEASUREMENT_SCHEMA = 2


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
    batch_unit: str = "tokens"  # what `tokens_per_step` counts: tokens, images or rows

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
        return json.dumps({"schema": MEASUREMENT_SCHEMA, **dataclasses.asdict(self), **derived}, indent=1)

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
            schema=MEASUREMENT_SCHEMA,
            derived=("tokens_per_second", "goodput"),
            hint="`train` writes one as measurement.json",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRow:
    """One line of the history of errors: a quantity of one run, predicted and measured.

    `run`: the run's folder. `inside`: whether the predicted interval held the measured value; None without
    one. `date`: when the run was measured, UTC, ISO 8601.
    """

    __pydantic_config__ = EXACT
    date: str
    run: str
    steps: int
    config: str
    fleet: str
    quantity: str
    unit: str
    predicted: int | float
    measured: int | float
    inside: bool | None

    def __post_init__(self) -> None:
        _check_in_range(self.quantity, self.predicted, self.measured)

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Return the key of an entry in the history: a quantity of a run after a number of steps."""
        return self.run, self.steps, self.date, self.quantity

    @property
    def relative_error(self) -> float | None:
        """Predicted / measured - 1; None if the measured value is zero."""
        return None if self.measured == 0 else self.predicted / self.measured - 1


def past_rows(
    reconciliation: Reconciliation, measurement: Measurement, *, run: str, config: str, fleet: str
) -> tuple[PastRow, ...]:
    """Return the lines that a run adds to the history of errors."""
    return tuple(
        PastRow(
            date=measurement.date,
            run=run,
            steps=measurement.steps,
            config=config,
            fleet=fleet,
            quantity=row.quantity,
            unit=row.unit,
            predicted=row.predicted,
            measured=row.measured,
            inside=row.inside,
        )
        for row in reconciliation.rows
    )
