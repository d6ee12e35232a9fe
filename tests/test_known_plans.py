"""The file of the cache in which a plan's winner is kept, when it is damaged or another program's."""

from __future__ import annotations

import json

import pytest

from meshwright.api._known_plans import _file, remembered
from meshwright.config import load_config
from meshwright.hardware import Fleet

RUN, FLEET = load_config("bytes-nano"), Fleet.parse("8xH100")
WHOLE = {"overrides": {"layout": "fsdp=8", "remat": "full"}, "seconds": 0.5, "program": "0" * 32}


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    path = _file(RUN, FLEET)
    path.parent.mkdir(parents=True)
    return path


def test_a_whole_file_is_read(kept):
    kept.write_text(json.dumps(WHOLE))
    assert remembered(RUN, FLEET) == WHOLE["overrides"]


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": []},
        {"overrides": {"model.num_layers": 1}},
        {"overrides": {"layout": ["fsdp=8"]}},
        {"overrides": {"layout": {"a": {}}}},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": -1.0},
        {"seconds": None},
        {"program": "../../etc"},
        {"program": 5},
    ],
    ids=str,
)
def test_a_changed_file_is_no_answer(kept, change):
    kept.write_text(json.dumps({**WHOLE, **change}))
    assert remembered(RUN, FLEET) is None


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[" * 100_000, '{"a":' * 100_000, '{"seconds": ' + "9" * 5000 + "}", "\0"]
)
def test_a_damaged_file_is_no_answer(kept, text):
    kept.write_text(text)
    assert remembered(RUN, FLEET) is None
    kept.write_bytes(b"\xff\xfe" + text.encode())
    assert remembered(RUN, FLEET) is None


def test_a_folder_in_its_place_is_no_answer(kept):
    kept.mkdir()
    assert remembered(RUN, FLEET) is None
