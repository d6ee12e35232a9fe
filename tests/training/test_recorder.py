import json
import math

import pytest

from meshwright.config import load_config
from meshwright.training import EpochDone, Evaluated, FirstStepsDone, Noticed, StepDone
from meshwright.training._files import RunFiles, metrics_of
from meshwright.training._recorder import Recorder
from meshwright.training._run_folder import Writes

CONFIG = load_config("linear")
VALUES = {"loss": 1.0, "gradient_norm": 2.0, "learning_rate": 0.1, "applied": 1.0}


@pytest.fixture
def recording(tmp_path):
    events: list[object] = []
    with RunFiles(tmp_path, Writes(tmp_path)) as files:
        yield lambda **fields: (Recorder(CONFIG, files, events.append, 20, **fields), events)


def test_a_step_is_told_written_and_kept(recording, tmp_path):
    recorder, events = recording(memory_in_use=lambda: 7)
    recorder.step(1, 0, {**VALUES, "accuracy": 0.5}, 0.25)
    (told,) = events
    assert isinstance(told, StepDone)
    assert (told.loss, told.metrics, told.mfu) == (1.0, {"accuracy": 0.5}, None)
    (line,) = metrics_of(tmp_path)
    assert (line["accuracy"], line["input_wait_seconds"], line["memory_in_use_bytes"]) == (0.5, 0.25, 7.0)
    assert line["tokens_per_second"] == pytest.approx(CONFIG.batch.tokens_per_step / line["seconds"])
    assert recorder.losses == {1: 1.0}


def test_a_bad_step_is_counted_and_has_no_loss(recording, tmp_path):
    recorder, _ = recording()
    recorder.step(1, 0, {**VALUES, "loss": math.nan, "applied": 0.0}, 0.0)
    assert (recorder.losses, recorder.num_bad_steps) == ({}, 1)
    assert metrics_of(tmp_path)[0]["loss"] is None


def test_after_five_timed_steps_the_first_steps_are_told_once(recording):
    recorder, events = recording()
    for step in range(1, 12):
        recorder.step(step, step - 1, VALUES, 0.0)
    places = [place for place, event in enumerate(events) if isinstance(event, FirstStepsDone)]
    assert places == [7]


def test_an_epoch_is_told_when_its_last_batch_is_done(recording, tmp_path):
    recorder, events = recording(steps_per_epoch=3)
    for step in range(1, 8):
        recorder.step(step, step - 1, {**VALUES, "accuracy": step / 10}, 0.5)
    epochs = [event for event in events if isinstance(event, EpochDone)]
    assert [(event.epoch, event.step) for event in epochs] == [(1, 3), (2, 6)]
    assert [event.metrics["accuracy"] for event in epochs] == [pytest.approx(0.2), pytest.approx(0.5)]
    assert all(event.seconds > 1.5 for event in epochs)
    written = [line for line in metrics_of(tmp_path) if "epoch" in line]
    assert [line["epoch"] for line in written] == [1.0, 2.0]


def test_an_epoch_that_was_begun_before_is_not_timed(recording):
    recorder, events = recording(steps_per_epoch=3)
    for step in range(2, 7):
        recorder.step(step, step - 1, VALUES, 0.0)
    assert [event.epoch for event in events if isinstance(event, EpochDone)] == [2]


def test_a_spike_is_flagged(recording, tmp_path):
    recorder, events = recording()
    for step in range(1, 41):
        recorder.step(step, step - 1, {**VALUES, "loss": 1.0 + 0.01 * (step % 3)}, 0.0)
    recorder.step(41, 40, {**VALUES, "loss": 3.0}, 0.0)
    (notice,) = [event for event in events if isinstance(event, Noticed)]
    assert (notice.step, notice.kind) == (41, "spike")
    assert notice.message.startswith("step 41: loss 3 is ")
    assert json.loads((tmp_path / "notices.jsonl").read_text())["kind"] == "spike"


def test_held_out_metrics_are_kept_with_the_loss(recording, tmp_path):
    recorder, events = recording()
    recorder.evaluated(4, {"loss": 2.0, "accuracy": 0.75})
    assert (recorder.held_out_losses, recorder.held_out_metrics) == ({4: 2.0}, {4: {"accuracy": 0.75}})
    assert events == [Evaluated(step=4, held_out_loss=2.0, metrics={"accuracy": 0.75})]
    assert metrics_of(tmp_path) == [{"step": 4, "held_out_loss": 2.0, "held_out_accuracy": 0.75}]


def test_a_held_out_loss_that_is_no_number_is_told_and_not_kept(recording):
    recorder, events = recording()
    recorder.evaluated(4, {"loss": math.inf})
    assert recorder.held_out_losses == {}
    (notice,) = [event for event in events if isinstance(event, Noticed)]
    assert notice.message == "step 4: the held-out loss is inf"


def test_a_resumed_run_remembers_what_was_written(recording):
    recorder, _ = recording()
    recorder.remember(
        [
            {"step": 0, "held_out_loss": 2.0, "held_out_accuracy": 0.5},
            {"step": 1, "loss": 1.5, "seconds": 0.1},
            {"step": 2, "loss": None},
        ]
    )
    assert (recorder.losses, recorder.held_out_losses) == ({1: 1.5}, {0: 2.0})
    assert recorder.held_out_metrics == {0: {"accuracy": 0.5}}


def test_a_full_disk_is_told_once(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    events: list[object] = []
    with RunFiles(tmp_path, Writes(tmp_path)) as files:
        recorder = Recorder(CONFIG, files, events.append, 20)
        for step in (1, 2, 3):
            recorder.step(step, step - 1, VALUES, 0.0)
    (notice,) = [event for event in events if isinstance(event, Noticed)]
    assert notice.kind == "disk"
    assert notice.message == "metrics.jsonl cannot be written: No space left on device"
    assert json.loads((tmp_path / "notices.jsonl").read_text())["kind"] == "disk"
