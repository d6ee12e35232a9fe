import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _published_interval import interval_of, quantiles, weights


def rows(source, ratios):
    return [{"source": source, "error": 1 / ratio - 1} for ratio in ratios]


def test_a_source_with_many_rows_counts_for_no_more_than_the_most():
    assert weights(["a"] * 60 + ["b"], 30).tolist() == [0.5] * 60 + [1.0]


def test_quantiles_of_one_source_are_its_own():
    ratios = np.exp(np.linspace(-0.1, 0.1, 21))
    low, high = quantiles(ratios, ["a"] * 21)
    assert np.log([low, high]) == pytest.approx([-0.0945, 0.0945], abs=2e-3)


def test_sources_alike_are_held_nine_in_ten_also_when_left_out():
    made = np.random.default_rng(0)
    found = interval_of([row for name in "abcdef" for row in rows(name, np.exp(made.normal(0, 0.1, 200)))])
    assert found["low"] == pytest.approx(np.exp(-1.645 * 0.1), rel=0.03)
    assert found["holds"] == pytest.approx(0.9, abs=0.02)
    assert found["left_out_holds"] == pytest.approx(0.9, abs=0.03)


def test_a_source_unlike_all_others_is_not_held_when_left_out():
    found = interval_of([*rows("a", np.linspace(0.95, 1.05, 20)), *rows("b", np.linspace(1.9, 2.1, 20))])
    assert found["left_out_holds"] == 0.0
    assert found["holds"] > 0.8


def test_one_source_alone_says_nothing_of_others():
    assert "left_out_holds" not in interval_of(rows("a", [0.9, 1.0, 1.1]))
