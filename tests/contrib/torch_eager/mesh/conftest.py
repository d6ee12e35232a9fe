from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def cases(monkeypatch):
    """The modules and plans that real ranks run too."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import mesh_cases

    yield mesh_cases
    sys.modules.pop("mesh_cases", None)
