"""Collect the examples in docstrings (`--doctest-modules`), with the settings of all other tests.

A module without examples is not imported, nor one that needs PyTorch where that is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import forked_workers as forked_workers
from tests.conftest import pytest_runtest_protocol as pytest_runtest_protocol

HERE = Path(__file__).parent
HAS_TORCH = importlib.util.find_spec("torch") is not None


def has_examples(module: Path) -> bool:
    """Return whether a module has examples that can be run here."""
    needs_torch = any("torch" in part for part in module.relative_to(HERE).parts)
    return ">>> " in module.read_text() and (HAS_TORCH or not needs_torch)


collect_ignore = [str(module.relative_to(HERE)) for module in HERE.rglob("*.py") if not has_examples(module)]

REGISTRIES = ("meshwright.ledger._work_rules", "meshwright.compiler._kernel_calls")


@pytest.fixture(autouse=True)
def no_rule_of_an_example_is_left() -> Iterator[None]:
    """Take back the rules that an example registers, which would hold for the tests after it."""
    yield
    for name in REGISTRIES:
        if (module := sys.modules.get(name)) is not None:
            module._REGISTERED.clear()
