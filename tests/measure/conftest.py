"""Threads that all do the same at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest


@pytest.fixture
def at_once() -> Callable[[Callable[[], Any]], list[Any]]:
    """What a function returns in each of eight threads."""

    def run(fn: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return [future.result() for future in [pool.submit(fn) for _ in range(8)]]

    return run
