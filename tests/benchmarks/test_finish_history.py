"""Documented runs end as they were estimated from what was known before them, and the page says so."""

import re
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import finish_history

from meshwright.contrib.finishing import Finish


def test_the_interval_holds_in_at_least_five_runs_of_six_and_the_page_has_each():
    rows = list(finish_history.scored())
    inside = sum(row["inside"] for row in rows)
    assert len(rows) >= 6
    assert inside >= 5 / 6 * len(rows)
    assert all(row["high_share"] - row["low_share"] < 0.6 for row in rows)  # it says something
    assert finish_history.table(rows) in finish_history.PAGE.read_text()


def test_the_page_names_each_field_of_json():
    text = finish_history.PAGE.read_text().partition("## In JSON")[2]
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
    assert named == {field.name for field in fields(Finish)} | {"finish_date"}
