"""docs/reference/json.md names every field that `weigh --json` prints, and no other."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.config import Ticks
from meshwright.contrib.calibration import Calibrated, CalibratedClass, CalibratedStep
from meshwright.contrib.causes import History
from meshwright.ledger import Collective, Finding, Ledger
from meshwright.measure import PastRow
from tests import commands

PAGE = Path(__file__).parents[1] / "docs/reference/json.md"


def documented():
    """By object ("ledger.memory", "ledger.traffic[]"): its fields, and those that are maps."""
    fields, maps = {}, set()
    for path, meaning in re.findall(r"^\| `([\w.\[\]]+)` \| (.*) \|$", PAGE.read_text(), re.M):
        parts = path.split(".")
        for depth in range(len(parts)):
            fields.setdefault(".".join(parts[:depth]), set()).add(parts[depth].removesuffix("[]"))
        if meaning.startswith("map: "):
            maps.add(path)
    return fields, maps


def objects(value, path=""):
    """Every object of the output with its path; maps, and the configuration's own fields, left out."""
    _, maps = documented()
    yield path, value
    for name, inner in value.items():
        here = f"{path}.{name}" if path else name
        if here in maps or here == "run_config":
            continue
        if isinstance(inner, dict):
            yield from objects(inner, here)
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield from objects(inner[0], f"{here}[]")


@pytest.fixture(scope="module")
def printed():
    """What the command that every reader types first prints; compiled once with the library."""
    weighing = mw.weigh("bytes-nano", on="8xH100", run=mw.RunLength(price_per_device_hour=1.8))
    return json.loads(json.dumps(weighing.to_dict()))


def test_every_field_is_documented_and_every_documented_field_is_there(printed):
    fields, _ = documented()
    found = dict(objects(printed))
    assert {
        "",
        "ledger",
        "ledger.memory",
        "ledger.flops",
        "ledger.traffic[]",
        "prediction",
        "run_total.cost",
    } <= set(found)
    for path, value in found.items():
        assert set(value) == fields[path], path
    # A sound step has no findings, and one stage no pipeline.
    assert set(fields) - set(found) <= {"ledger.findings[]", "pipeline"}


def test_a_pipelines_fields_are_documented():
    ticks = Ticks(schedule="1f1b", num_stages=2, num_microbatches=4)
    assert set(ticks.to_dict()) == documented()[0]["pipeline"]


@pytest.mark.parametrize(
    ("record", "path"), [(Collective, "ledger.traffic[]"), (Finding, "ledger.findings[]")]
)
def test_records_that_a_step_may_lack_are_documented_too(record, path):
    assert {field.name for field in dataclasses.fields(record)} == documented()[0][path]


def fields_of(path, section):
    """By object ("steps[]"): the fields that a table below a heading names."""
    text = (PAGE.parent / path).read_text().partition(section)[2]
    fields = {}
    for name in re.findall(r"^\| `([\w.\[\]]+)` \|", text, re.M):
        home, _, field = name.rpartition(".")
        fields.setdefault(home, set()).add(field.removesuffix("[]"))
    return fields


def names(record):
    return {field.name for field in dataclasses.fields(record)}


def test_what_calibrate_prints_is_documented_with_the_command():
    fields = fields_of("../how-to/calibration.md", "`calibrate --json`:")
    assert fields["steps[]"] == names(CalibratedStep)
    assert fields["classes[]"] == names(CalibratedClass)
    assert fields["rows[]"] == names(PastRow) | {"relative_error"}
    assert {"schema", *names(Calibrated), *names(History)} - {"steps", "classes", "rows"} == fields[""]


@pytest.mark.wide
def test_gpt2_on_one_h200_has_every_field_and_comes_back_as_a_ledger():
    found = commands.run("weigh", "gpt2-124m", "--on", "1xH200", "--json").json
    fields, _ = documented()
    assert set(found) == fields[""]
    for part in ("memory", "flops"):
        assert set(found["ledger"][part]) == fields[f"ledger.{part}"]
    ledger = Ledger.from_json(json.dumps(found["ledger"]))
    assert json.loads(json.dumps(ledger.to_dict())) == found["ledger"]
    assert ledger.flops.elementwise_by_class["transcendental"] > 0
    assert ledger.memory.host_needs
