import dataclasses
import json

import pytest

from meshwright.errors import InputError
from meshwright.measure import Measurement, Reconciliation, Row, reconcile


def rows_of(*given):
    reconciliation = reconcile("weighed", *given)
    return {row.quantity: row for row in reconciliation.rows}, reconciliation.not_compared


def test_on_an_accelerator_every_quantity_stands_beside_its_measurement(ledger, prediction, measurement):
    rows, missing = rows_of(ledger, prediction, measurement)
    figures = {name: (row.predicted, row.measured, row.unit) for name, row in rows.items()}
    assert figures == {
        "executed FLOPs": (1800, 2000, "FLOP"),
        "argument bytes per device": (1100, 1000, "bytes"),
        "reserved bytes per device": (3000, 4000, "bytes"),
        "step seconds": (0.4, 0.5, "seconds"),
        "MFU": (0.5, 1600 / (0.5 * 2 * 4000), "share"),
    }
    assert rows["executed FLOPs"].relative_error == pytest.approx(-0.1)
    assert rows["step seconds"].inside is True
    assert "median of 5 steps" in rows["step seconds"].how
    assert missing.keys() == {"model FLOPs"}


def test_a_step_outside_its_interval_is_said_to_be(ledger, prediction, measurement):
    slow = dataclasses.replace(measurement.step_seconds, median=0.61)
    rows, _ = rows_of(ledger, prediction, dataclasses.replace(measurement, step_seconds=slow))
    assert rows["step seconds"].inside is False


def test_on_a_cpu_the_growth_of_the_process_is_not_compared_and_there_is_no_mfu(
    ledger, prediction, measurement
):
    cpu = dataclasses.replace(measurement, platform="cpu", peak_bytes=None, process_rss_growth_bytes=5000)
    rows, missing = rows_of(ledger, prediction, cpu)
    assert not any("reserved" in name for name in rows), "like is compared with like"
    assert "reserve 5.86 KiB in the program; the process grew by 4.88 KiB" in missing["reserved bytes"]
    assert "a CPU's peak" in missing["MFU"]


def test_what_was_not_measured_is_listed_with_its_reason(ledger, prediction, measurement):
    reasons = {"xla_flops": "it has loops", "process_rss_growth_bytes": "no Linux", "step_seconds": "too few"}
    blind = dataclasses.replace(
        measurement, xla_flops=None, peak_bytes=None, step_seconds=None, not_measured=reasons
    )
    rows, missing = rows_of(ledger, prediction, blind)
    assert rows.keys() == {"argument bytes per device"}
    del missing["model FLOPs"]
    assert missing == {
        "executed FLOPs": "it has loops",
        "reserved bytes": "no Linux",
        "step seconds": "too few",
        "MFU": "too few",
    }


def test_without_a_prediction_there_is_no_time_to_compare(ledger, measurement):
    rows, missing = rows_of(ledger, None, measurement)
    assert "step seconds" not in rows
    assert missing["step seconds"] == missing["MFU"] == "no prediction was made"


def test_a_prediction_without_an_mfu_has_none_to_compare(ledger, prediction, measurement):
    idle = dataclasses.replace(prediction, mfu=None, hfu=None, peak_flops_per_second=0.0)
    missing = rows_of(ledger, idle, measurement)[1]
    assert missing["MFU"] == "the prediction has none: no format has a peak, or work is unpriced"


@pytest.mark.parametrize(("ran", "same"), [("weighed", True), ("another", False)])
def test_it_says_whether_the_program_that_ran_is_the_one_weighed(ledger, prediction, measurement, ran, same):
    measured = dataclasses.replace(measurement, fingerprint=ran)
    assert reconcile("weighed", ledger, prediction, measured).same_program is same
    on_tpu = dataclasses.replace(measured, platform="tpu")
    assert reconcile("weighed", ledger, prediction, on_tpu).same_program is None


def row(predicted: float, measured: float, **interval: float) -> Row:
    return Row(
        quantity="steps", unit="seconds", predicted=predicted, measured=measured, how="by hand", **interval
    )


def test_an_error_is_how_far_the_prediction_lies_above_what_was_measured():
    assert row(3, 2).relative_error == 0.5
    assert row(1, 2).relative_error == -0.5
    assert row(1, 0).relative_error is None


def test_inside_is_asked_of_an_interval_only():
    assert row(3, 2).inside is None
    assert row(3, 2, low=2, high=4).inside is True
    assert row(3, 1.9, low=2, high=4).inside is False


def test_a_reconciliation_reads_back_as_it_was_written():
    written = Reconciliation(
        same_program=True,
        rows=(row(2**60 + 1, 2), row(3, 1.5, low=1.0, high=4.0)),
        not_compared={"MFU": "no peak is known"},
    )
    assert Reconciliation.from_json(written.to_json()) == written
    assert Reconciliation.from_json(written.to_json()).to_json() == written.to_json()  # integers stay exact
    fields = json.loads(written.to_json())
    assert [each["relative_error"] for each in fields["rows"]] == [2.0**59, 1.0]
    assert [each["inside"] for each in fields["rows"]] == [None, True]


def test_a_measurement_reads_back_as_it_was_written(measurement):
    assert Measurement.from_json(measurement.to_json()) == measurement
    untimed = dataclasses.replace(measurement, step_seconds=None, peak_bytes=None)
    assert Measurement.from_json(untimed.to_json()) == untimed


def test_tokens_per_second_are_those_of_the_median_step(measurement):
    assert measurement.tokens_per_second == 200.0
    assert json.loads(measurement.to_json())["tokens_per_second"] == 200.0
    assert dataclasses.replace(measurement, step_seconds=None).tokens_per_second is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": %d}', '{"schema": %d, "rows": [{}], "steps": 1}']
)
@pytest.mark.parametrize(
    ("record", "schema", "name"), [(Measurement, 2, "measurement"), (Reconciliation, 1, "reconciliation")]
)
def test_another_text_or_schema_is_refused_with_the_file_that_was_expected(text, record, schema, name):
    with pytest.raises(InputError, match=f"this is not a {name}") as refused:
        record.from_json(text.replace("%d", str(schema)))
    assert refused.value.hint == f"`train` writes one as {name}.json"
    with pytest.raises(
        InputError, match=f"a {name} of schema 7; this version of Meshwright reads schema {schema}"
    ):
        record.from_json('{"schema": 7}')


def test_a_field_that_this_version_does_not_know_is_refused(measurement):
    text = measurement.to_json().replace('"signal"', '"signals"')
    with pytest.raises(InputError, match="this is not a measurement: signal"):
        Measurement.from_json(text)
