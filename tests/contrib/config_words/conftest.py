from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.commands import Done, run


@pytest.fixture
def meshwright() -> Callable[..., Done]:
    """Runs the real command line in this process."""
    return run
