"""Plant causes in PyTorch steps, trace them with torch.profiler, and find them; find none in others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.contrib.causes import Gap, gap_of, kineto_trace

MOST_BLAMED = 0.1  # of an unplanted step
STEPS = "tests.contrib.causes.torch_steps"
PLANTED = {
    "a slow data loader": "input",
    "numbers one by one": "synchronization",
    "a sleep": "host",
    "garbage": "collect",
    "a checkpoint": "differing steps",
    "an evaluation": "extra work",
    "recomputation": "recomputation",
    "norms of gradients": "extra work",
    "fp64": "wide product",
    "other shapes": "compilation",
    "twice": "extra work",
}
UNPLANTED = ("nothing", "nothing, three steps", "nothing, a quick data loader")
QUICK = ("a sleep", "recomputation", "an evaluation", "nothing")  # in each run of the tests


@pytest.fixture(scope="module")
def weighing() -> mw.Weighing:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return mw.weigh(f"{STEPS}:program", on="1xCPU")


def _traced(folder: Path, names: Iterable[str]) -> Path:
    command = [sys.executable, "-m", STEPS, str(folder), *names]
    subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=Path(__file__).parents[3])
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    return _traced(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    return _traced(tmp_path_factory.mktemp("others"), {*PLANTED, *UNPLANTED} - {*QUICK})


@pytest.fixture
def trace(what, request) -> Path:
    return request.getfixturevalue("quick" if what in QUICK else "others") / f"{what}.json"


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    marked = [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in names]
    return pytest.mark.parametrize("what", marked)


def shown(gap: Gap) -> str:
    rows = [f"{c.seconds / gap.measured_seconds:.0%} {c.kind} {c.name} {c.where}" for c in gap.causes]
    return f"{gap.measured_seconds:.3f} s: {'; '.join(rows)}; {gap.notes}"


@each(PLANTED)
def test_a_planted_cause_is_named_first_or_second_and_the_parts_sum_to_the_step(what, weighing, trace):
    gap = gap_of(kineto_trace([trace]), weighing)
    assert PLANTED[what] in {cause.kind for cause in gap.causes[:2]}, shown(gap)
    named = sum(cause.seconds for cause in gap.causes)
    assert named + gap.unexplained_seconds == pytest.approx(gap.measured_seconds)


@each(UNPLANTED)
def test_nothing_above_a_tenth_is_blamed_on_an_unplanted_step(what, weighing, trace, tmp_path):
    """A busy machine may pause a step, which is blamed rightly: not in each of three traces."""
    for _ in range(3):
        gap = gap_of(kineto_trace([trace]), weighing)
        assert gap.matched == pytest.approx(1)
        if all(cause.seconds < MOST_BLAMED * gap.measured_seconds for cause in gap.causes):
            return
        trace = _traced(tmp_path, [what]) / f"{what}.json"
    pytest.fail(shown(gap))
