"""Plant a cause in a step, trace it with jax's profiler, and find it; in unplanted steps find none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import _planted
import _planted_jax

pytestmark = pytest.mark.program  # names inside of programs are compared
MOST_BLAMED = 0.1  # of an unplanted step
SLOW = ("other shapes", "a sort in each layer", "a pause of some steps")  # to compile, or to wait for


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, marks=pytest.mark.wide if plant.name in SLOW else (), id=plant.name)
        for plant in _planted.JAX
    ],
)
def test_a_planted_cause_is_named_first_or_second(plant, tmp_path):
    gap = _planted_jax.jax_gap(_planted_jax.TRACED[plant.name](tmp_path / "trace"), plant.num_devices)
    place = _planted.rank_of(plant, gap)
    assert place in (1, 2), [(cause.kind, cause.where, cause.seconds) for cause in gap.causes]
    named = gap.causes[place - 1]
    assert named.cure
    if plant.seconds == _planted.NAP or plant.kind == "compilation":  # most of the step by far
        assert named.seconds > gap.measured_seconds / 3
    assert _planted.parts_sum_to_the_gap(gap)


@pytest.mark.parametrize("name", _planted.UNPLANTED_JAX)
def test_nothing_is_blamed_in_an_unplanted_run(name, tmp_path):
    """A busy machine may pause a step, which is blamed rightly: not in each of three traces."""
    blamed: list[object] = []
    for place in range(3):
        trace = _planted_jax.TRACED[name](tmp_path / str(place))
        gap = _planted_jax.jax_gap(trace, _planted.UNPLANTED_JAX[name])
        assert gap.same_program is True
        assert gap.matched == 1.0
        if all(cause.seconds < MOST_BLAMED * gap.measured_seconds for cause in gap.causes):
            return
        blamed.append(gap.causes)
    pytest.fail(f"{blamed}")
