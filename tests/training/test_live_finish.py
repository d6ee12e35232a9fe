"""A run's log says when it will be finished, by its own steps."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.api._live_finish import LiveFinish
from meshwright.trainer.loop import CheckpointSaved, Noticed, StepDone


@pytest.fixture(scope="module")
def weighing():
    return mw.weigh("bytes-nano", on="8xH100")


def step_of(number: int, steps: int, seconds: float, tokens: int) -> StepDone:
    figures = {"loss": 1.0, "gradient_norm": 1.0, "learning_rate": 1e-3}
    left = (steps - number) * seconds
    return StepDone(
        step=number, steps=steps, tokens_per_second=tokens / seconds, seconds_left=left, **figures
    )


def said(weighing, steps: int, seconds: float) -> list[Noticed]:
    events = []
    listen = LiveFinish(weighing, events.append)
    listen(CheckpointSaved(step=0, num_bytes=1, blocked_seconds=30.0, write_seconds=1.0))
    for number in range(1, 12):
        listen(step_of(number, steps, seconds, weighing.tokens_per_step))
    assert len([event for event in events if isinstance(event, StepDone)]) == 11
    return [event for event in events if isinstance(event, Noticed)]


def test_a_long_run_says_it_once_in_half_an_hour_by_its_own_steps(weighing):
    (line,) = said(weighing, 100_000, 60.0)  # 69 days, whatever was predicted
    (sooner,) = said(weighing, 100_000, 6.0)
    assert line.kind == "finish"
    assert line.step == 7  # two steps warm up, five are timed
    assert "(80 %: " in line.message
    assert "checkpoint every" in line.message
    assert line.message.partition(" (")[0] != sooner.message.partition(" (")[0]


def test_a_short_run_says_nothing(weighing):
    assert said(weighing, 100, 1.0) == []
