import dataclasses

import pytest

from meshwright.reconciliation import reconcile


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


def test_on_a_cpu_memory_is_the_process_and_there_is_no_mfu(ledger, prediction, measurement):
    cpu = dataclasses.replace(measurement, platform="cpu", peak_bytes=None, process_rss_growth_bytes=5000)
    rows, missing = rows_of(ledger, prediction, cpu)
    memory = rows["reserved bytes, all devices"]
    assert (memory.predicted, memory.measured) == (2 * 3000, 5000)
    assert "all devices" in memory.how
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


def test_a_program_without_products_has_no_mfu(ledger, prediction, measurement):
    idle = dataclasses.replace(prediction, peak_flops_per_second=0.0)
    assert rows_of(ledger, idle, measurement)[1]["MFU"] == "the program multiplies nothing"


@pytest.mark.parametrize(("ran", "same"), [("weighed", True), ("another", False)])
def test_it_says_whether_the_program_that_ran_is_the_one_weighed(ledger, prediction, measurement, ran, same):
    measured = dataclasses.replace(measurement, fingerprint=ran)
    assert reconcile("weighed", ledger, prediction, measured).same_program is same
