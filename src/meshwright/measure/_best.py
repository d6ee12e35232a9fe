"""Time a program by the best of several runs, in rounds until they agree. Imports jax."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

REPEATS = 10
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6
MOST_SECONDS = 10.0  # of one rate's rounds: a machine that stays busy gets a wide spread, not a long wait
AGREES = 0.05  # as `steady_spread` in predict/runs.toml


def steady(measure: Callable[[], float], better: Callable[[Iterable[float]], float]) -> tuple[float, float]:
    """Measure in rounds until the two best agree within 5 %, at most six times or ten seconds.

    What else the machine does makes a round worse, never better, and comes and goes.

    Args:
        better: `max` of a rate, `min` of a time.

    Returns:
        The best round, and how far the second best lies from it as a share of it.
    """
    rounds: list[float] = []
    started = time.monotonic()
    while True:
        rounds.append(measure())
        if len(rounds) < FEWEST_ROUNDS:
            continue
        best = better(rounds)
        second = better([*rounds[: rounds.index(best)], *rounds[rounds.index(best) + 1 :]])
        spread = max(best, second) / min(best, second) - 1
        late = time.monotonic() - started > MOST_SECONDS
        if spread <= AGREES or len(rounds) == MOST_ROUNDS or late:
            return best, spread


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
