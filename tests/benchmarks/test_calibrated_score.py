"""Scores of published rows after calibrating with a few of their source."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from calibrated_score import best_known, calibrated, exposed_of, scores_of

from meshwright.hardware import Fleet
from meshwright.predict import machine_of
from meshwright.predict._rates import before_of


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
BEFORE = before_of(machine_of(FLEET, None), FLEET, None)


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


def test_a_source_that_is_slower_throughout_is_corrected_by_three_of_its_rows():
    found = calibrated([row(n, 1.3) for n in range(8)], 3)
    assert len(found["rows"]) == 5
    assert all(
        each["before"] < -0.2 and abs(each["after"]) < 0.02 and each["holds"] for each in found["rows"]
    )


def test_the_least_error_is_that_of_one_factor_for_all_rows_of_a_source():
    found = calibrated([row(n, ratio) for n, ratio in enumerate((1.0, 1.2, 1.1, 1.1, 1.1, 1.1, 1.32))], 3)
    least = {each["id"]: round(each["least"], 3) for each in found["rows"]}
    assert set(least.values()) <= {0.1, round(1.1 / 1.2 - 1, 3), 0.0, round(1.1 / 1.32 - 1, 3)}
    assert 0.0 in least.values()


def test_sources_are_scored_apart_and_small_ones_left_out():
    rows = [row(n, 1.3) for n in range(8)] + [row(n, 0.8, source="b") for n in range(7)]
    summary = scores_of([*rows, row(0, 1.0, source="c")], 3)["summary"]
    assert {name: each["rows"] for name, each in summary.items()} == {"a, H100": 5, "b, H100": 4, "all": 9}
    assert summary["all"]["after"] < 0.03 < summary["all"]["before"]
