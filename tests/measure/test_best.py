import time

import jax.numpy as jnp

from meshwright.measure import _best


def test_the_best_of_several_runs_is_taken(monkeypatch):
    readings = iter([0, 9, 10, 12, 20, 25])
    monkeypatch.setattr(_best, "REPEATS", 3)
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    assert _best.best_seconds(jnp.sin, (jnp.ones(3),)) == 2


def test_in_place_results_become_the_next_arguments():
    first, second = jnp.ones(4), jnp.ones(4)
    assert _best.best_seconds(lambda a, b: (a + b,), (first, second), in_place=True) > 0
    assert first.is_deleted()
    assert not second.is_deleted()
