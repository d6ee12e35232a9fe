"""A run is reported to trackers, and none of them stops it, whatever it does."""

from __future__ import annotations

import struct

import pytest
from tensorboardX.proto import event_pb2

import meshwright as mw
from meshwright.contrib.trackers._tensorboard import TensorboardTracker
from meshwright.trainer.loop import Noticed

BAD = ("no-network", "exits", "raises", "hangs", "lost")


def trained(folder, names, steps, events=None, **session):
    return mw.train(
        "linear",
        on="1xCPU",
        steps=steps,
        folder=folder,
        overrides={"checkpoint.every_steps": 2, "evaluation.every_steps": 2},
        session=mw.Session(report_to=names, **session),
        on_event=(lambda event: None) if events is None else events.append,
    )


def test_a_tracker_gets_a_run_and_its_next_session_and_bad_ones_are_said_once(trackers, tmp_path):
    events = []
    run = trained(tmp_path / "run", ("good", *BAD), 4, events)
    assert run.measurement.steps == 4
    (session,) = [each for each in trackers.SESSIONS if type(each) is trackers.Good]
    told = session.run
    assert told.tags == ("linear", "1xCPU", str(run.weighing.layout))
    assert told.config["optimizer"] == run.weighing.config.model_dump(mode="json")["optimizer"]
    assert session.found == ["weighing.json", "config.json"]
    assert session.state == "finished"

    by_step = {step: values for step, values in session.lines if "train/loss" in values}
    assert {step: values["train/loss"] for step, values in by_step.items()} == run.measurement.losses
    predicted = run.weighing.prediction.step_seconds
    for values in by_step.values():
        assert {"train/learning_rate", "train/grad_norm", "train/global_step"} <= set(values)
        assert values["predicted/step_seconds"] == predicted.expected
        assert values["train/step_seconds"] > 0
    held_out = {step: values["eval/loss"] for step, values in session.lines if "eval/loss" in values}
    assert held_out == run.measurement.held_out_losses
    assert any("checkpoint/blocked_seconds" in values for _, values in session.lines)

    said = [event.message for event in events if isinstance(event, Noticed) and event.kind == "tracker"]
    assert sorted(line.partition(" ")[0] for line in said) == sorted(BAD)
    words = " ".join(said)
    for part in ("network is down", "not today", "No space left", "has not ended", "no_such_module"):
        assert part in words

    trained(tmp_path / "run", ("good",), 6, resume=True)
    again = [each for each in trackers.SESSIONS if type(each) is trackers.Good][-1]
    assert (again.run.number, again.run.resumed_at) == (told.number, 4)
    assert [step for step, values in again.lines if "train/loss" in values] == [5, 6]


def test_a_tracker_that_is_behind_loses_figures_and_not_the_run(trackers, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.contrib.trackers._reporting.MOST_WAITING", 2)
    events = []
    assert trained(tmp_path / "run", ("hangs",), 6, events).measurement.steps == 6
    (said,) = [event for event in events if isinstance(event, Noticed) and event.kind == "tracker"]
    assert "behind by 2 steps" in said.message


def test_a_run_that_fails_is_failed_for_its_trackers(trackers, tmp_path):
    def broken(event):
        if getattr(event, "step", 0) == 2:
            raise RuntimeError("a bug of the listener")

    with pytest.raises(RuntimeError):
        mw.train(
            "linear",
            on="1xCPU",
            steps=4,
            folder=tmp_path / "run",
            session=mw.Session(report_to="good"),
            on_event=broken,
        )
    assert trackers.SESSIONS[-1].state == "failed"


def test_a_name_without_a_tracker_is_refused_before_the_run(trackers, tmp_path):
    with pytest.raises(mw.InputError, match="'goood' is not known") as refused:
        trained(tmp_path / "run", ("goood",), 2)
    assert "good" in refused.value.hint
    assert not (tmp_path / "run").exists()


def events_in(path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16


def test_tensorboards_file_has_the_figures_under_their_names(tmp_path):
    from meshwright.contrib.trackers import TrackedRun

    (tmp_path / "weighing.json").write_text('{"fits": true}')
    run = TrackedRun(
        number="r1",
        name="run",
        folder=tmp_path,
        config={"model": {"kind": "linear"}},
        tags=("linear",),
        files=(tmp_path / "weighing.json", tmp_path / "absent.json"),
        resumed_at=7,
    )
    tracker = TensorboardTracker()
    tracker.begin(run)
    tracker.log(8, {"train/loss": 0.5, "predicted/step_seconds": 0.25})
    tracker.end("stopped")
    (path,) = (tmp_path / "tensorboard").glob("events*")
    found, texts, starts = {}, set(), []
    for event in events_in(path):
        if event.HasField("session_log"):
            starts.append(event.step)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found[value.tag, event.step] = value.simple_value
            else:
                texts.add(value.tag.partition("/")[0])
    assert found == {("train/loss", 8): 0.5, ("predicted/step_seconds", 8): 0.25}
    assert {"config", "tags", "weighing.json", "state"} <= texts
    assert starts == [8]  # what a crash left behind the checkpoint is dropped


def test_a_run_that_goes_on_within_a_second_keeps_the_events_of_its_first_session(tmp_path, monkeypatch):
    from meshwright.contrib.trackers import TrackedRun

    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1.8e9)
    for steps, resumed_at in ((range(1, 4), 0), (range(4, 7), 3)):
        run = TrackedRun(
            number="1", name="r", folder=tmp_path, config={}, tags=(), files=(), resumed_at=resumed_at
        )
        tracker = TensorboardTracker()
        tracker.begin(run)
        for step in steps:
            tracker.log(step, {"loss": 1.0})
        tracker.end("done")
    paths = sorted((tmp_path / "tensorboard").iterdir())
    kept = [event.step for path in paths for event in events_in(path) if "loss" in str(event.summary)]
    assert kept == [1, 2, 3, 4, 5, 6]
