"""Scores of published rows after calibrating with a few of their source."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from calibrated_score import best_known, calibrated, scores_of


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
    }


def test_rows_of_which_least_is_assumed_calibrate_spread_over_sizes_whatever_their_error():
    rows = [row(n, 1.0, devices=8 * n) for n in range(1, 8)]
    rows += [row(8, 1.0, standard=False), row(9, 1.0, notes=["assumed"])]
    assert [each["num_devices"] for each in best_known(rows, 3)] == [8, 32, 56]
    wrong = [{**each, "measured_seconds": 77.0, "error": -0.87} for each in rows]
    assert [each["id"] for each in best_known(wrong, 3)] == [each["id"] for each in best_known(rows, 3)]


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
