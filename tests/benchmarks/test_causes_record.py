"""The table of planted causes on its page is that of the newest record, and enough of them are found."""

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import planted_causes
from _planted import GLOO, JAX, TORCH
from _record import RECORDS

NAMES = {"jax": JAX, "torch": TORCH, "gloo": GLOO}


def rows() -> list[dict]:
    newest = max(RECORDS.glob("*_planted_causes.toml"))
    return tomllib.loads(newest.read_text())["step"]


def test_four_in_five_planted_causes_are_found_and_the_page_shows_each():
    recorded = rows()
    assert planted_causes.failures(recorded) == []
    page = planted_causes.PAGE.read_text()
    assert planted_causes.table(recorded) in page
    assert planted_causes.summary(recorded) in page


def test_the_record_has_every_cause_that_is_planted():
    recorded = {(row["program"], row["name"], row["kind"]) for row in rows() if row["is_planted"]}
    assert recorded == {(name, plant.name, plant.kind) for name, plants in NAMES.items() for plant in plants}
    assert len(recorded) >= 20


def test_what_does_not_hold_is_said():
    recorded = [row for row in rows() if row["program"] == "jax"]
    assert planted_causes.failures(recorded) == []
    first = {**recorded[0], "sums": False, "blamed_share": 0.2, "kind": "host"}
    assert planted_causes.failures([first, *recorded[1:]]) == [
        "JAX (nothing): its parts do not sum to the gap",
        "JAX (nothing): 20.0 % blamed on host",
    ]
    unnamed = [{**row, "place": 3} for row in recorded]
    assert planted_causes.failures(unnamed) == ["0 of 12 are named"]
