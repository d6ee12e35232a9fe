"""Compare each predicted quantity of a step with the same quantity as measured."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from meshwright.hardware import Fleet
from meshwright.ledger import Ledger
from meshwright.predict import Prediction
from meshwright.records import read_record

from ._measurement import Measurement, Percentiles

SCHEMA = 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """All rows of the comparison. `not_compared`: the reason for each quantity without a row.

    `same_program`: True if the program that ran has the fingerprint of the program that was weighed.
    """

    same_program: bool
    rows: tuple[Row, ...]
    not_compared: dict[str, str]

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
        same_program=fingerprint == measurement.fingerprint,
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
    """Compare reserved bytes by the device's allocator, or by the whole process on a CPU, which has none."""
    reserved, growth = ledger.memory.reserved_bytes, measurement.process_rss_growth_bytes
    if measurement.peak_bytes is not None:
        how = "peak of the runtime's allocator, evaluation included"
        return _row("reserved bytes per device", "bytes", reserved, measurement.peak_bytes, how, "")
    if growth is None:
        return "reserved bytes", measurement.not_measured.get("process_rss_growth_bytes", "")
    how = "growth of the process's resident memory, all devices, data and evaluation included"
    total = reserved * measurement.num_devices
    return _row("reserved bytes, all devices", "bytes", total, growth, how, "")


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
        return ("step seconds", why), ("MFU", why)
    expected = prediction.step_seconds
    seconds = Row(
        quantity="step seconds",
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
    if peak == 0:
        return seconds, ("MFU", "the program multiplies nothing")
    return seconds, Row(
        quantity="MFU",
        unit="share",
        predicted=prediction.mfu,
        measured=ledger.flops.model / (timed.median * peak),
        how="model FLOPs over the median step and the catalog's dense peak",
    )
