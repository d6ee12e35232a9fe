"""The most downloaded models of the Hub: read as the record says, and shown on the page as recorded."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _hand_counts import BY_HAND
from hub_models import HERE, MODELS, PAGE, REFUSED, config_of, made_of, newest, page_of

import meshwright as mw

RECORD, FAMILIES = newest("hub_models"), newest("families_weighed")
ROWS = RECORD["model"]
LEAST = 90  # to be weighed, of a hundred


def test_at_least_ninety_of_a_hundred_are_weighed():
    assert [row["model"] for row in ROWS] == list(tomllib.loads(MODELS.read_text()))
    assert sum("fits" in row for row in ROWS) >= LEAST
    assert all(row["why"] for row in ROWS if row["how"] == REFUSED)


def test_nothing_above_five_percent_of_memory_has_no_category():
    rows = [row for row in (*ROWS, *FAMILIES["model"]) if "other_percent" in row]
    assert len(rows) >= LEAST
    assert [row["model"] for row in rows if row["other_percent"] > 5] == []


def test_flops_of_four_families_are_those_of_a_count_by_hand():
    rows = FAMILIES["model"]
    assert {(row["model"], row["fleet"]) for row in rows} == {
        (name, fleet) for name in BY_HAND for fleet in ("8xH100", "64xH100")
    }
    for row in rows:
        assert row["model_flops"] == row["tokens_per_step"] * BY_HAND[row["model"]](FAMILIES["length"])
        assert len(row["step_seconds"]) == 3  # the time has an upper end
        assert row["processor_seconds"] < 2 * 60  # of two cores in a minute


@pytest.mark.parametrize("row", [row for row in ROWS if row["how"] == HERE], ids=lambda row: row["model"])
def test_a_model_that_is_read_here_has_the_parameters_that_transformers_counted(row, tmp_path):
    config = config_of(tomllib.loads(MODELS.read_text())[row["model"]])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mw.load(str(tmp_path)).model.num_parameters == row["parameters"]
    assert row["compared"]


def test_the_page_is_that_of_the_newest_records():
    assert PAGE.read_text() == page_of(RECORD, FAMILIES)


@pytest.mark.wide
def test_a_weighing_in_a_process_of_its_own_is_a_verdict_a_refusal_or_a_failure():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", **sizes, "vocab_size": 256, "max_position_embeddings": 64}
    row = {"how": HERE, "parameters": 100_000}
    made = made_of("a/llama", row, config, limit=300)
    assert (made["fits"], made["fleet"]) == (True, "1xH100")
    refused = made_of("a/llama", row, config | {"num_key_value_heads": 3}, limit=300)
    assert "num_key_value_heads = 3" in refused["refused"]
    assert made_of("a/llama", row, config, limit=0)["failed"] == "stopped after 0 s"
