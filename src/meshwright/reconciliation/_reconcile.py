"""Compare each predicted quantity of a step with the same quantity as measured."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import Ledger
from meshwright.predict import Prediction

from ._measurement import Measurement, Spread

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity, predicted and measured in `unit` (FLOP, bytes, seconds, share).

    `how`: the method of measurement. `low`, `high`: the predicted interval; None where the prediction is a
    single number.
    """

    quantity: str
    unit: str
    predicted: float
    measured: float
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
            InputError: the text is no such JSON object.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise InputError(
                    f"a reconciliation of schema {fields['schema']}; this version reads {SCHEMA}",
                    hint="make it again with this version, or read it with the one that wrote it",
                )
            known = {field.name for field in dataclasses.fields(Row)}
            rows = (Row(**{name: row[name] for name in known}) for row in fields["rows"])
            return Reconciliation(
                same_program=fields["same_program"],
                rows=tuple(rows),
                not_compared=dict(fields["not_compared"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as broken:
            raise InputError(
                f"this is no reconciliation: {broken!r}", hint="`train` writes one as reconciliation.json"
            ) from broken


def reconcile(
    fingerprint: str, ledger: Ledger, prediction: Prediction | None, measurement: Measurement
) -> Reconciliation:
    """Compare every quantity that was both predicted and measured, and say why the others were not.

    Args:
        fingerprint: that of the program that was weighed. It sets `same_program` in the result.
    """
    found = (
        _executed_flops(ledger, measurement),
        ("model FLOPs", "counted in the program as written; no counter of the machine sees them alone"),
        _argument_bytes(ledger, measurement),
        _reserved_bytes(ledger, measurement),
        *_times(
            ledger,
            prediction,
            measurement.step_seconds,
            measurement.not_measured.get("step_seconds", ""),
            measurement.platform,
            measurement.num_devices,
        ),
    )
    return Reconciliation(
        same_program=fingerprint == measurement.fingerprint,
        rows=tuple(each for each in found if isinstance(each, Row)),
        not_compared=dict(each for each in found if not isinstance(each, Row)),
    )


def first_steps(
    ledger: Ledger, prediction: Prediction | None, seconds: Spread, argument_bytes: int, fleet: Fleet
) -> tuple[Row, ...]:
    """Compare what is known a few steps after the start: argument bytes, step seconds and MFU.

    Args:
        argument_bytes: the live bytes of state and batch on the first device.
    """
    found = (
        _arguments_row(ledger, argument_bytes),
        *_times(ledger, prediction, seconds, "", fleet.chip.platform, fleet.num_devices),
    )
    return tuple(each for each in found if isinstance(each, Row))


def _executed_flops(ledger: Ledger, measurement: Measurement) -> Row | tuple[str, str]:
    if measurement.xla_flops is None:
        return "executed FLOPs", measurement.not_measured["xla_flops"]
    return Row(
        quantity="executed FLOPs",
        unit="FLOP",
        predicted=ledger.flops.executed,
        measured=measurement.xla_flops,
        how="XLA's cost analysis of the program that ran, which counts elementwise arithmetic too",
    )


def _argument_bytes(ledger: Ledger, measurement: Measurement) -> Row | tuple[str, str]:
    if measurement.argument_bytes_per_device is None:
        return "argument bytes per device", measurement.not_measured["argument_bytes_per_device"]
    return _arguments_row(ledger, measurement.argument_bytes_per_device)


def _arguments_row(ledger: Ledger, measured: int) -> Row:
    return Row(
        quantity="argument bytes per device",
        unit="bytes",
        predicted=ledger.memory.argument_bytes,
        measured=measured,
        how="live arrays of state and batch on the first device, by the runtime",
    )


def _reserved_bytes(ledger: Ledger, measurement: Measurement) -> Row | tuple[str, str]:
    """Compare reserved bytes by the device's allocator, or by the whole process on a CPU, which has none."""
    if measurement.peak_bytes is not None:
        return Row(
            quantity="reserved bytes per device",
            unit="bytes",
            predicted=ledger.memory.reserved_bytes,
            measured=measurement.peak_bytes,
            how="peak of the runtime's allocator, evaluation included",
        )
    if measurement.process_rss_growth_bytes is None:
        return "reserved bytes", measurement.not_measured["process_rss_growth_bytes"]
    return Row(
        quantity="reserved bytes, all devices",
        unit="bytes",
        predicted=ledger.memory.reserved_bytes * measurement.num_devices,
        measured=measurement.process_rss_growth_bytes,
        how="growth of the process's resident memory, all devices, data and evaluation included",
    )


def _times(
    ledger: Ledger,
    prediction: Prediction | None,
    spread: Spread | None,
    not_timed: str,
    platform: str,
    num_devices: int,
) -> tuple[Row | tuple[str, str], ...]:
    """Compare step seconds and MFU, or return the reason against each."""
    if prediction is None or spread is None:
        why = "no prediction was made" if prediction is None else not_timed
        return ("step seconds", why), ("MFU", why)
    expected = prediction.step_seconds
    seconds = Row(
        quantity="step seconds",
        unit="seconds",
        predicted=expected.expected,
        measured=spread.median,
        how=f"median of {spread.num_steps} steps by the clock; nine in ten took "
        f"{spread.low:.4g} to {spread.high:.4g} s",
        low=expected.low,
        high=expected.high,
    )
    if platform == "cpu":
        return seconds, ("MFU", "a CPU's peak is not in the catalog: a share of it would mean nothing")
    peak = prediction.peak_flops_per_second * num_devices
    if peak == 0:
        return seconds, ("MFU", "the program multiplies nothing")
    return seconds, Row(
        quantity="MFU",
        unit="share",
        predicted=prediction.mfu,
        measured=ledger.flops.model / (spread.median * peak),
        how="model FLOPs over the median step and the catalog's dense peak",
    )
