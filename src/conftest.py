"""Collect the examples in docstrings (`--doctest-modules`), with the settings of all other tests.

A module without examples is not imported, nor one that needs PyTorch where that is not installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.conftest import forked_workers as forked_workers
from tests.conftest import pytest_runtest_protocol as pytest_runtest_protocol

HERE = Path(__file__).parent
HAS_TORCH = importlib.util.find_spec("torch") is not None


def has_examples(module: Path) -> bool:
    """Return whether a module has examples that can be run here."""
    needs_torch = any("torch" in part for part in module.relative_to(HERE).parts)
    return ">>> " in module.read_text() and (HAS_TORCH or not needs_torch)


collect_ignore = [str(module.relative_to(HERE)) for module in HERE.rglob("*.py") if not has_examples(module)]
