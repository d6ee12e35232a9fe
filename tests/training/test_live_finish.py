"""A run says when it will be finished, by what has happened to it so far."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

import meshwright as mw
import meshwright.api._train as train_module
from meshwright.contrib.finishing import LiveFinish, OwnHistory
from meshwright.trainer.loop import CheckpointSaved, Evaluated, FinishEstimated, Noticed, StepDone

pytestmark = pytest.mark.once  # days and faults, whatever made the steps

OFTEN = {"checkpoint.every_steps": 2}  # a run on a CPU waits for its first checkpoint
NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def weighing():
    return mw.weigh("bytes-nano", on="8xH100")


class Kept:
    """The record of a run, with its earlier sessions."""

    def __init__(self, *earlier):
        self.earlier, self.finish, self.first_steps = earlier, None, 0

    def sessions(self, rollbacks):
        began = datetime.now(UTC).isoformat()
        return [*self.earlier, {"began": began, "first_step": began, "rollback_seconds": list(rollbacks)}]

    def stepped(self):
        self.first_steps += 1

    def estimated(self, finish, rollbacks):
        self.finish = json.loads(json.dumps(finish))


class Run:
    """A run under way, on a clock of its own."""

    def __init__(self, weighing, *earlier):
        self.at, self.events, self.kept = 0.0, [], Kept(*earlier)
        self.tokens = weighing.tokens_per_step
        self.live = LiveFinish(weighing, self.kept, self.events.append, now=lambda: self.at)

    def step(self, number, steps=100_000, seconds=60.0):
        self.at += seconds
        figures = {"loss": 1.0, "gradient_norm": 1.0, "learning_rate": 1e-3}
        left = (steps - number) * seconds
        self.live(
            StepDone(
                step=number,
                steps=steps,
                tokens_per_second=self.tokens / seconds,
                seconds_left=left,
                **figures,
            )
        )

    def steps(self, first, last, **how):
        for number in range(first, last + 1):
            self.step(number, **how)
        return self

    def estimate(self):
        """The estimate, and the lines of the log."""
        before = len(self.events)
        (estimate,) = self.live.estimate()
        assert isinstance(estimate, FinishEstimated)
        return estimate, [each for each in self.events[before:] if isinstance(each, Noticed)]


def session(hours, state="dead", words="", gap=0.0):
    """A session that ended so many hours after it began, `gap` hours before the next one."""
    begins = datetime.now(UTC) - timedelta(hours=hours + gap)
    ended = begins + timedelta(hours=hours)
    times = {"began": begins, "first_step": begins, "ended": ended}
    return {**{name: at.isoformat() for name, at in times.items()}, "state": state, "words": words}


def test_nothing_is_said_before_steps_are_timed_and_after_the_last(weighing):
    run = Run(weighing).steps(1, 6)
    assert list(run.live.estimate()) == []
    assert run.kept.first_steps == 1
    done = Run(weighing).steps(1, 9, steps=9)
    assert list(done.live.estimate()) == []


def test_the_log_has_it_once_in_half_an_hour_and_the_record_each_time(weighing):
    run = Run(weighing).steps(1, 10)
    estimate, (line,) = run.estimate()
    assert line.kind == "finish"
    assert line.step == estimate.step == run.kept.finish["step"] == 10
    assert line.message == run.kept.finish["text"]
    assert "(80 %: " in line.message
    _, lines = run.steps(11, 12).estimate()
    assert not lines
    assert run.kept.finish["step"] == 12
    _, lines = run.steps(13, 45).estimate()
    assert len(lines) == 1


def test_the_log_of_a_short_run_has_no_day_and_its_record_has(weighing):
    run = Run(weighing).steps(1, 10, steps=100, seconds=1.0)
    estimate, lines = run.estimate()
    assert not lines
    low, expected, high = (estimate.figures[f"finish_seconds_left{end}"] for end in ("_low", "", "_high"))
    assert 89 < low <= expected <= high
    assert run.kept.finish["finish_time"]["expected"] > datetime.now(UTC).isoformat()


def test_its_own_steps_and_evaluations_replace_what_was_predicted(weighing):
    slow, fast = (Run(weighing).steps(1, 10, seconds=seconds).estimate()[0] for seconds in (60.0, 6.0))
    name = "finish_seconds_left"
    assert slow.figures[name] == pytest.approx(10 * fast.figures[name], rel=0.1)

    run = Run(weighing).steps(1, 10)
    run.at += 6000.0
    run.live(Evaluated(step=10, held_out_loss=1.0))
    every = weighing.config.evaluation.every_steps * 60.0
    longer = run.estimate()[0].figures[name] / slow.figures[name]
    assert longer == pytest.approx(1 + 6000 / every, rel=0.1)


def test_a_pace_that_drifts_widens_the_interval(weighing):
    steady = [1.0, 1.4] * 50
    found = []
    for seconds in (steady, sorted(steady)):  # the same steps, alternating and slower in the end
        run = Run(weighing)
        for number, each in enumerate([1.0, 1.0, *seconds], start=1):
            run.step(number, seconds=each)
        figures = run.estimate()[0].figures
        found.append(figures["finish_seconds_left_high"] / figures["finish_seconds_left"])
    assert found[1] > found[0] + 0.1


def test_its_own_checkpoints_and_the_period_that_it_has_count(weighing):
    made = {}
    for blocked in (1.0, 600.0):
        run = Run(weighing).steps(1, 10)
        saved = CheckpointSaved(step=10, num_bytes=1, blocked_seconds=blocked, write_seconds=1.0)
        run.live(saved)
        made[blocked] = run.estimate()[0].figures["finish_seconds_left"]
    every = weighing.config.checkpoint.every_steps * 60.0
    assert made[600.0] / made[1.0] == pytest.approx((1 + 600 / every) / (1 + 1 / every), rel=0.02)


def test_faults_of_its_own_make_it_later_and_its_restarts_say_who_restarts(weighing):
    name = "finish_seconds_left"
    quiet = Run(weighing, session(24 * 30, "finished")).steps(1, 10)
    dying = Run(weighing, *[session(24, gap=0.05) for _ in range(30)]).steps(1, 10)
    slowly = Run(weighing, *[session(24, gap=10.0) for _ in range(30)]).steps(1, 10)
    ends = [run.estimate()[0].figures for run in (quiet, dying, slowly)]
    assert [each["finish_faults"] for each in ends] == [0, 29 + 1, 30]
    assert ends[0][name] < ends[1][name] < ends[2][name]
    assert dying.kept.finish["node_days"] == pytest.approx(30, rel=0.01)


def test_a_rollback_is_a_fault_with_its_own_restart(weighing):
    run = Run(weighing).steps(1, 10)
    run.at += 30.0  # a checkpoint is read
    run.step(6)
    estimate, _ = run.steps(7, 10).estimate()
    assert estimate.figures["finish_faults"] == 1
    assert run.kept.finish["restart_seconds"] == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("state", "words", "faults"),
    [
        ("dead", "", 1),
        ("failed", "step 8: the loss is nan; training stopped", 1),
        ("stopped", "SIGTERM", 1),  # as a scheduler takes a machine away
        ("stopped", "SIGINT", 0),
        ("stopped", "by Ctrl-C", 0),
        ("finished", "", 0),
    ],
)
def test_what_ends_a_session_counts_as_a_fault(state, words, faults):
    def at(hours):
        return (NOON + timedelta(hours=hours)).isoformat()

    ended = {"began": at(0), "first_step": at(1), "ended": at(5), "state": state, "words": words}
    refused = {"began": at(5.5), "ended": at(5.6), "state": "failed", "words": "no such file"}
    now = {"began": at(6), "first_step": at(6.5)}
    found = OwnHistory.of_sessions([ended, refused, now], NOON + timedelta(hours=8))
    assert found.faults == faults
    assert found.restart_seconds == (1.5 * 3600,) * faults  # from the end until steps are made again
    assert found.up_seconds == 7 * 3600


def test_a_record_with_broken_times_is_no_evidence():
    broken = [{"first_step": 3}, {"first_step": "soon", "ended": None}, {}, {"rollback_seconds": ["x"]}]
    assert OwnHistory.of_sessions(broken, NOON) == OwnHistory()


def test_a_run_has_it_in_its_files_and_on_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.api._train.REPORT_SECONDS", 0.0)  # a page after each step
    pages, events, draw = [], [], train_module._draw

    def draw_once(held, *, is_live=False):
        if is_live and not pages and held.path.joinpath("run.json").read_text().count('"finish"'):
            draw(held, is_live=True)
            pages.append((tmp_path / "run/report.html").read_text())
        elif not is_live:
            draw(held)

    monkeypatch.setattr(train_module, "_draw", draw_once)
    how = {"on": "1xCPU", "steps": 12, "folder": tmp_path / "run", "overrides": OFTEN}
    mw.train("linear", on_event=events.append, **how)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["finish"]["step"] == 11
    assert set(record["finish"]) == {
        *("when", "step", "text", "finish_time", "seconds_left", "useful_share"),
        *("save_every_seconds", "faults", "node_days", "restart_seconds"),
    }
    assert record["sessions"][-1]["first_step"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    estimates = [line for line in lines if "finish_seconds_left" in line]
    assert [line["step"] for line in estimates] == [7, 8, 9, 10, 11]
    assert {"finish_unix_seconds", "finish_useful_share", "finish_faults"} <= set(estimates[0])
    assert [event.step for event in events if isinstance(event, FinishEstimated)] == [7, 8, 9, 10, 11]
    assert "FINISH:" in pages[0]
    assert "FINISH:" not in (tmp_path / "run/report.html").read_text()


def test_an_estimate_that_breaks_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.api._train.REPORT_SECONDS", 0.0)
    monkeypatch.setattr(train_module, "_draw", lambda held, **_: None)
    monkeypatch.setattr("meshwright.contrib.finishing._live_finish.finish_of", lambda *_, **__: 1 / 0)
    events = []
    how = {"on": "1xCPU", "steps": 10, "folder": tmp_path / "run", "overrides": OFTEN}
    run = mw.train("linear", on_event=events.append, **how)
    assert run.measurement.steps == 10
    (said,) = [event for event in events if isinstance(event, Noticed) and event.kind == "disk"]
    assert "could not be estimated: ZeroDivisionError" in said.message
