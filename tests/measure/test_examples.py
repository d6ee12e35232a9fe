import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["_footprint", "_memory", "_timing"])
def test_the_examples_of_public_names_run(name):
    results = doctest.testmod(importlib.import_module(f"meshwright.measure.{name}"))
    assert results.attempted
    assert not results.failed
