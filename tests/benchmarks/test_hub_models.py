"""The most downloaded models of the Hub: read as the record says, and shown on the page as recorded."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from hub_models import HERE, MODELS, PAGE, REFUSED, config_of, page_of

import meshwright as mw

NEWEST = max((MODELS.parent / "records").glob("*_hub_models.toml"))
RECORD = tomllib.loads(NEWEST.read_text())
ROWS = RECORD["model"]


def test_at_least_ninety_of_a_hundred_are_weighed():
    assert len(ROWS) >= 100
    assert [row["model"] for row in ROWS] == list(tomllib.loads(MODELS.read_text()))
    assert sum(row["how"] == REFUSED for row in ROWS) <= len(ROWS) / 10
    assert all(row["why"] for row in ROWS if row["how"] == REFUSED)


@pytest.mark.parametrize("row", [row for row in ROWS if row["how"] == HERE], ids=lambda row: row["model"])
def test_a_model_that_is_read_here_has_the_parameters_that_transformers_counted(row, tmp_path):
    config = config_of(tomllib.loads(MODELS.read_text())[row["model"]])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mw.load(str(tmp_path)).model.num_parameters == row["parameters"]
    assert row["compared"]


def test_the_page_is_that_of_the_newest_record():
    assert PAGE.read_text() == page_of(RECORD)
