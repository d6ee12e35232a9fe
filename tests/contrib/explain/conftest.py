from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import Done, run


@pytest.fixture
def meshwright() -> Callable[..., Done]:
    """Runs the real command line in this process."""
    return run


@pytest.fixture
def log(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Writes a log."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "train.log"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write
