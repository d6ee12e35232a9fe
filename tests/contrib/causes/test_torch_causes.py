"""Plant causes in PyTorch steps, trace them with torch.profiler, and find them; find none in others."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import _planted

import meshwright as mw

MOST_BLAMED = 0.1  # of an unplanted step
PLANTED = {plant.name: plant for plant in _planted.TORCH}
QUICK = ("a sleep", "recomputation", "an evaluation", "nothing")  # in each run of the tests


def _traced(folder: Path, names: Iterable[str]) -> Path:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    _planted.trace_processes("torch", folder, names)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    return _traced(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    return _traced(tmp_path_factory.mktemp("others"), {*PLANTED, *_planted.UNPLANTED_TORCH} - {*QUICK})


@pytest.fixture
def trace(what, request) -> Path:
    return request.getfixturevalue("quick" if what in QUICK else "others") / f"{what}.json"


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    marked = [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in names]
    return pytest.mark.parametrize("what", marked)


def shown(gap: mw.Gap) -> str:
    rows = [f"{c.seconds / gap.measured_seconds:.0%} {c.kind} {c.name} {c.where}" for c in gap.causes]
    return f"{gap.measured_seconds:.3f} s: {'; '.join(rows)}; {gap.notes}"


@each(PLANTED)
def test_a_planted_cause_is_named_first_or_second_and_the_parts_sum_to_the_step(what, trace):
    gap = _planted.torch_gap(trace)
    assert _planted.rank_of(PLANTED[what], gap) in (1, 2), shown(gap)
    assert gap.predicted is None  # no rate of PyTorch's kernels on a CPU is known
    assert _planted.parts_sum_to_the_gap(gap)


@each(_planted.UNPLANTED_TORCH)
def test_nothing_above_a_tenth_is_blamed_on_an_unplanted_step(what, trace, tmp_path):
    """A busy machine may pause a step, which is blamed rightly: not in each of three traces."""
    for _ in range(3):
        gap = _planted.torch_gap(trace)
        assert gap.matched == pytest.approx(1)
        if all(cause.seconds < MOST_BLAMED * gap.measured_seconds for cause in gap.causes):
            return
        trace = _traced(tmp_path, [what]) / f"{what}.json"
    pytest.fail(shown(gap))
