"""A weighing loads what it needs: few modules in the command, and the model's own in its worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import size  # the limits stand there, once

pytestmark = pytest.mark.once
PRESET, FLEET = "bytes-nano", "8xH100"


def test_a_weighing_from_the_cache_loads_few_modules():
    size.loaded(PRESET, FLEET)  # a process of the same environment puts it there
    found = size.loaded(PRESET, FLEET)
    assert len(found) <= size.MOST_LOADED, found
    for room in ("hlo", "planned", "trainer", "contrib", "sharding", "worker", "eager"):
        assert not [name for name in found if name.startswith(f"meshwright.{room}")]


def test_a_worker_loads_the_modules_of_its_model_alone():
    found = size.loaded_by_worker(PRESET, FLEET)
    assert len(found) <= size.MOST_LOADED, found
    others = ("eight_bits", "splash_attention")
    assert not {f"meshwright.trainer.models.{name}" for name in others} & set(found)
    others = tuple(f"meshwright.{room}" for room in ("report", "results", "contrib"))
    assert not [name for name in found if name.startswith(others)]


def test_a_circle_of_imports_is_found_and_a_line_of_them_is_none():
    assert size.circles_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert size.circles_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_module_and_no_package_imports_what_imports_it():
    assert size.circles_in(size.imports()) == []
    assert size.circles_in(size.imports_of_packages(size.imports())) == []


def test_each_verb_has_few_parameters_and_the_core_does_not_know_contrib():
    found = size.parameters_by_verb()
    assert {"weigh", "plan", "train", "sweep", "calibrate", "reconcile"} <= set(found)
    assert max(found.values()) <= size.MOST_PARAMETERS, found
    assert size.imports_into_contrib() == []
