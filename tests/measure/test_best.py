import time

import jax.numpy as jnp
import pytest

from meshwright.measure import _probe_kernels as _best


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


@pytest.mark.parametrize(
    ("rounds", "better", "expected"),
    [
        ([10.0, 10.2], max, (10.2, 0.02)),  # the two best agree at once
        ([5.0, 10.0, 7.0, 9.8, 1.0], max, (10.0, 10 / 9.8 - 1)),  # a busy moment passes
        ([4.0, 2.0, 3.0, 2.05], min, (2.0, 0.025)),
        (
            [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
            max,
            (32.0, 1.0),
        ),  # never steady: six rounds, and its spread
    ],
)
def test_a_rate_is_measured_until_its_two_best_rounds_agree(rounds, better, expected):
    left = iter(rounds)
    assert _best.steady(lambda: next(left), better) == pytest.approx(expected)
