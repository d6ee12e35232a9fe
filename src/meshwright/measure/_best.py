"""The shortest of several runs of a compiled program: what the probe measures by. Imports jax."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

REPEATS = 10


def best_seconds(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, in_place: bool = False
) -> float:
    """The shortest of several runs. `in_place`: results take the places of the first arguments."""
    donated = tuple(range(len(arguments) - 1)) if in_place else ()
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        best = min(best, time.perf_counter() - started)
        if in_place:
            arguments = (*results, arguments[-1])
    return best
