"""Scores of published rows after calibrating with a few of their source."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from calibrated_score import (
    best_known,
    calibrated,
    exposed_of,
    noise_of,
    recomputed_of,
    rows_in,
    scores_of,
)

from meshwright.hardware import Fleet
from meshwright.predict import machine_of, prior_of

RECORDS = Path(__file__).parents[2] / "benchmarks/records"


def row(number, ratio, *, standard=True, notes=(), devices=8, source="a"):
    """A row of 10 s, predicted with an error; its mix differs a little from row to row."""
    products = 9 - 0.1 * number
    return {
        "id": f"{source}-{number:02}",
        "source": source,
        "chip": "H100",
        "num_devices": devices,
        "standard": standard,
        "notes": list(notes),
        "measured_seconds": 10 * ratio,
        "predicted_seconds": 10.0,
        "error": 1 / ratio - 1,
        "exposed_seconds": {"matmul": products, "all-gather[fsdp]": 10 - products},
        "otherwise_seconds": {},
        "recomputed_seconds": {},
    }


FLEET = Fleet.parse("8xH100")
BEFORE = prior_of(machine_of(FLEET, None), FLEET, None)


def test_of_the_best_known_rows_those_of_unlike_work_calibrate_whatever_their_error():
    rows = [row(n, 1.0) for n in range(1, 8)]
    rows += [row(0, 1.0, standard=False), row(30, 1.0, notes=["assumed"])]
    drawn = [each["id"] for each in best_known(rows, 3, BEFORE)]
    assert len({*drawn}) == 3
    assert {"a-01", "a-07"} < {*drawn}, "the mixes at both ends tell the classes apart"
    wrong = [{**each, "measured_seconds": 77.0, "error": -0.87} for each in rows]
    assert [each["id"] for each in best_known(wrong, 3, BEFORE)] == drawn


def test_what_a_rows_software_does_otherwise_is_of_its_own_class():
    one = {**row(1, 1.0), "exposed_seconds": {"matmul": 6.0, "attention": 1.0, "all-gather[fsdp]": 2.0}}
    one |= {"otherwise_seconds": {"attention in parts": 2.0, "messages beside products": -1.0}}
    assert exposed_of(one) == pytest.approx({"matmul": 6.0, "attention": 3.0, "all-gather": 1.0})
    one["otherwise_seconds"] = {"messages beside products": -2.0, "head in the last stage": 3.0}
    assert exposed_of(one) == pytest.approx({"matmul": 9.0, "attention": 1.0}), "nothing is left of a message"
    one = {
        **row(1, 1.0),
        "exposed_seconds": {"matmul": 5.0, "reduce-scatter[data]": 4.0, "all-gather[data]": 3.0},
    }
    one["otherwise_seconds"] = {"reductions in fp16": -2.0}
    found = exposed_of(one)
    assert found == pytest.approx({"matmul": 5.0, "reduce-scatter": 2.0, "all-gather": 3.0})
    one |= {
        "whole_seconds": {"all-reduce[data]": 4.0},
        "otherwise_seconds": {"reductions after the backward pass": 1.0},
    }
    one["exposed_seconds"] = {"matmul": 6.0, "all-reduce[data]": 3.0}
    assert exposed_of(one) == pytest.approx({"matmul": 6.0, "all-reduce": 4.0})


def test_recomputed_seconds_grow_with_their_class():
    one = {
        **row(1, 1.0),
        "exposed_seconds": {"matmul": 7.0, "attention": 1.0},
        "recomputed_seconds": {"attention": 0.25},
    }
    one["otherwise_seconds"] = {"attention in parts": 2.0}
    assert recomputed_of(one) == pytest.approx({"attention": 0.75})


def test_a_source_whose_repeated_work_is_slow_is_corrected_by_rows_with_and_without():
    def repeated(number, again):
        """A row whose recomputed kernels take 1.2 times as long."""
        return {**row(number, 1 + 0.02 * again), "recomputed_seconds": {"matmul": 1.0 * again}}

    def worst(rows):
        found = calibrated(rows, [rows[3], rows[7], rows[0]])
        return max(abs(each["after"]) for each in found["rows"])

    rows = [repeated(n, n % 4) for n in range(12)]
    assert worst(rows) < 0.02
    assert worst(rows) < 0.7 * worst([{**each, "recomputed_seconds": {}} for each in rows])


def test_what_factors_leave_is_fitted_with_each_source_left_out():
    ratios = (1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.3)
    rows = [row(n, ratio, source=source) for source in "ab" for n, ratio in enumerate(ratios)]
    found = noise_of(rows, 3)
    assert list(found) == ["", "without a", "without b"]
    freedom, scale = found[""]
    assert freedom < 4, "one error of eight is far from the others"
    assert 0.005 < scale < 0.04


def test_a_source_that_is_slower_throughout_is_corrected_by_three_of_its_rows():
    rows = [row(n, 1.3) for n in range(8)]
    found = calibrated(rows, rows[:3])
    assert len(found["rows"]) == 5
    assert all(
        each["before"] < -0.2 and abs(each["after"]) < 0.02 and each["holds"] for each in found["rows"]
    )


def test_the_least_error_is_that_of_one_factor_for_all_rows_of_a_source():
    rows = [row(n, ratio) for n, ratio in enumerate((1.0, 1.2, 1.1, 1.1, 1.1, 1.1, 1.32))]
    found = calibrated(rows, rows[2:5])
    least = {each["id"]: round(each["least"], 3) for each in found["rows"]}
    assert set(least.values()) <= {0.1, round(1.1 / 1.2 - 1, 3), 0.0, round(1.1 / 1.32 - 1, 3)}
    assert 0.0 in least.values()


def test_sources_are_scored_apart_and_small_ones_left_out():
    rows = [row(n, 1.3) for n in range(8)] + [row(n, 0.8, source="b") for n in range(7)]
    summary = scores_of([*rows, row(0, 1.0, source="c")], 3)["summary"]
    assert {name: each["rows"] for name, each in summary.items()} == {"a, H100": 5, "b, H100": 4, "all": 9}
    assert summary["all"]["after"] < 0.03 < summary["all"]["before"]
    at_random = [scores_of(rows, 3, seed)["sources"]["a, H100"]["calibrated_with"] for seed in range(4)]
    assert scores_of(rows, 3, 0)["sources"]["a, H100"]["calibrated_with"] == at_random[0]
    assert len({tuple(drawn) for drawn in at_random}) > 1


def test_every_row_of_the_last_record_has_a_class_for_what_its_software_does_otherwise():
    """Rules were added to the survey's software for a week, and this script could read no newer record."""
    newest = max(RECORDS.glob("*_predict_published.toml"))
    rows = [row for row in rows_in(newest) if row["otherwise_seconds"]]
    for row in rows:
        assert sum(exposed_of(row).values()) == pytest.approx(row["predicted_seconds"])
    assert len(rows) > 100
