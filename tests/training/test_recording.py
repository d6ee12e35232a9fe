"""What a run writes and reports: metrics, notices, epochs, spikes, bad steps, a full disk."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter  # noqa: F401  the format that is read below

from meshwright.config import FaultConfig, load_config
from meshwright.errors import InputError
from meshwright.trainer.launch import SingleProcess
from meshwright.trainer.loop import (
    EpochDone,
    Evaluated,
    FirstStepsDone,
    Noticed,
    RunFolder,
    StepDone,
    _recording,
    metrics_of,
)
from meshwright.trainer.loop._recording import (
    BadSteps,
    Recorder,
    RunWriter,
    Spikes,
    first_bad_tensor,
    what_is_bad,
)
from meshwright.trainer.loop._run_folder import PendingWrites

pytestmark = pytest.mark.quick


def opened(folder: Path, *, keep_to: int = -1) -> closing[RunWriter]:
    return closing(RunWriter(RunFolder(folder), keep_to=keep_to))


def notice(step: int) -> Noticed:
    return Noticed(step=step, kind="spike", message="high", hint="")


@pytest.fixture
def full_disk(monkeypatch) -> Iterator[Callable[[bool], None]]:
    """Makes the disk full, or gives it room again; what it takes it takes in small parts."""
    written, full = os.write, [False]

    def write(file: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, data[:7])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        yield lambda now: full.__setitem__(0, now)


def tensorboard_scalars(folder: Path) -> dict[tuple[str, int], float]:
    """By tag and step; a TFRecord is length (8 bytes), its checksum (4), the record, its checksum (4)."""
    (path,) = folder.glob("events*")
    return {
        (value.tag, event.step): value.simple_value
        for event in records(path.read_bytes())
        for value in event.summary.value
    }


def records(data: bytes) -> Iterator[Event]:
    while data:
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_metrics_are_on_disk_before_the_file_is_closed(tmp_path):
    (tmp_path / "run").mkdir()
    with opened(tmp_path / "run") as files:
        files.write(1, "train", {"loss": 0.5})
        files.write(2, "train", {"loss": 0.25})
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
        assert tensorboard_scalars(tmp_path / "run") == {("train/loss", 1): 0.5, ("train/loss", 2): 0.25}


def test_files_that_cannot_be_opened_are_an_error_with_the_folder(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"cannot write a run to .*: Is a directory"):
        opened(tmp_path)


def test_a_resumed_run_keeps_the_whole_lines_up_to_its_step(tmp_path):
    with opened(tmp_path) as files:
        for step in (1, 2, 3):
            files.write(step, "train", {"loss": step / 2})
            files.notice(notice(step))
    with (tmp_path / "metrics.jsonl").open("a") as cut_short:
        cut_short.write('{"step": 2, "lo')  # as a process that is killed leaves it
    with opened(tmp_path, keep_to=2) as files:
        assert metrics_of(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}]
        files.write(3, "train", {"loss": 9.0})
    assert [line["loss"] for line in metrics_of(tmp_path)] == [0.5, 1.0, 9.0]
    assert len((tmp_path / "notices.jsonl").read_text().splitlines()) == 2
    with opened(tmp_path, keep_to=-1):
        assert metrics_of(tmp_path) == []


def test_tensorboard_forgets_the_steps_after_the_one_resumed_from(tmp_path):
    with opened(tmp_path) as files:
        files.write(3, "train", {"loss": 0.5})
    for path in tmp_path.glob("events*"):
        path.rename(tmp_path / "old")
    with opened(tmp_path, keep_to=2):
        pass
    (path,) = tmp_path.glob("events*")
    started = [event for event in records(path.read_bytes()) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in started] == [(3, SessionLog.START)]


def test_lines_and_tensorboards_records_wait_until_the_disk_has_room(tmp_path, full_disk):
    with opened(tmp_path) as files:
        writes = files.writes
        files.write(1, "train", {"loss": 0.5})
        full_disk(True)
        files.write(2, "train", {"loss": 0.25})
        assert set(writes.refused.values()) == {"No space left on device"}
        assert len(writes.refused) == 2
        full_disk(False)
        files.write(3, "train", {"loss": 0.125})
        assert writes.refused == {}
    assert [line["loss"] for line in metrics_of(tmp_path)] == [0.5, 0.25, 0.125]
    assert [step for _, step in tensorboard_scalars(tmp_path)] == [1, 2, 3]


def test_a_disk_that_stays_full_ends_nothing_and_the_lost_bytes_are_counted(tmp_path, full_disk):
    with opened(tmp_path) as files:
        writes = files.writes
        full_disk(True)
        files.write(3, "train", {"loss": 0.5})
    assert writes.refused["metrics.jsonl"] == "No space left on device (25 bytes are lost)"
    assert metrics_of(tmp_path) == []


def test_a_reason_is_told_once_with_all_its_files_and_again_after_an_hour(tmp_path):
    clock = [0.0]
    writes = PendingWrites(tmp_path, now=lambda: clock[0])
    for name in ("a.json", "b.json"):
        (tmp_path / name).mkdir()
        writes.documents({name: "text"})
    assert writes.unreported() == {"Is a directory": ["a.json", "b.json"]}
    writes.retry()
    assert writes.unreported() == {}
    clock[0] = 4000.0
    assert list(writes.unreported()) == ["Is a directory"]


def test_a_document_that_waits_is_written_when_there_is_room(tmp_path):
    writes = PendingWrites(tmp_path)
    (tmp_path / "config.json").mkdir()
    writes.documents({"config.json": "{}"})
    (tmp_path / "config.json").rmdir()
    writes.retry()
    assert (tmp_path / "config.json").read_text() == "{}"
    assert writes.refused == {}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_number_that_is_not_finite_is_null_and_not_in_tensorboard(tmp_path):
    with opened(tmp_path) as files:
        files.write(1, "train", {"loss": math.nan, "applied": 0.0})
    assert metrics_of(tmp_path) == [{"step": 1, "loss": None, "applied": 0.0}]
    assert tensorboard_scalars(tmp_path) == {("train/applied", 1): 0.0}


def test_a_process_after_the_first_writes_no_files(tmp_path):
    class Second(SingleProcess):
        index, count, is_first = 1, 2, False

    with closing(RunWriter(RunFolder(tmp_path, peers=Second()))) as files:
        files.write(1, "train", {"loss": 1.0})
        files.notice(notice(1))
    assert list(tmp_path.iterdir()) == []


CONFIG = load_config("linear")
VALUES = {"loss": 1.0, "gradient_norm": 2.0, "learning_rate": 0.1, "applied": 1.0}


@pytest.fixture
def recording(tmp_path, request_for):
    events: list[object] = []
    request = request_for(CONFIG, tmp_path, steps=20, on_event=events.append)
    with closing(RunWriter(request.folder)) as files:
        yield lambda **fields: (Recorder(request, files, **fields), events)


def test_a_step_is_told_written_and_kept(recording, tmp_path, monkeypatch):
    monkeypatch.setattr(_recording, "memory_in_use", lambda devices: 7)
    recorder, events = recording()
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


def test_a_search_for_the_loss_scale_is_told_once_and_is_no_bad_step(recording):
    recorder, events = recording()
    skipped = {**VALUES, "gradient_norm": math.inf, "applied": 0.0}
    steps = [{**skipped, "loss_scale": 2.0**15}, {**skipped, "loss_scale": 2.0**14}]
    steps += [{**VALUES, "loss_scale": 2.0**13}, {**skipped, "loss_scale": 2.0**13}]
    for step, values in enumerate(steps, 1):
        recorder.step(step, step - 1, values, 0.0)
    told = [(event.step, event.kind, event.message) for event in events if isinstance(event, Noticed)]
    assert [(step, kind) for step, kind, _ in told] == [(1, "loss scale"), (4, "loss scale")]
    assert "not finite in fp16 at the loss scale 32768; the step is skipped" in told[0][2]
    assert recorder.num_bad_steps == 0


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


def test_an_epoch_with_a_rollback_is_left_out(recording):
    recorder, events = recording(steps_per_epoch=3)
    # Step 2 was bad: back to step 1, and on with the next batch.
    for step, batch in [(1, 0), (2, 1), (2, 2), (3, 3), (4, 4), (5, 5)]:
        recorder.step(step, batch, VALUES, 0.0)
    assert [(event.epoch, event.step) for event in events if isinstance(event, EpochDone)] == [(2, 5)]


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


def test_a_full_disk_is_told_once(tmp_path, request_for):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    events: list[object] = []
    request = request_for(CONFIG, tmp_path, steps=20, on_event=events.append)
    with closing(RunWriter(request.folder)) as files:
        recorder = Recorder(request, files)
        for step in (1, 2, 3):
            recorder.step(step, step - 1, VALUES, 0.0)
    (notice,) = [event for event in events if isinstance(event, Noticed)]
    assert notice.kind == "disk"
    assert notice.message == "metrics.jsonl cannot be written: No space left on device"
    assert json.loads((tmp_path / "notices.jsonl").read_text())["kind"] == "disk"


GOOD = {"loss": 1.0, "gradient_norm": 1.0, "applied": 1.0}


def test_a_step_is_bad_when_it_was_not_applied_and_no_loss_scale_is_being_found():
    assert what_is_bad(GOOD) == ""
    bad = {**GOOD, "applied": 0.0}
    assert what_is_bad({**bad, "loss": float("nan")}) == "loss is nan"
    assert what_is_bad({**bad, "gradient_norm": float("inf")}) == "gradient norm is inf"
    assert what_is_bad({**bad, "gradient_norm": float("inf"), "loss_scale": 2.0}) == ""
    assert what_is_bad({**bad, "gradient_norm": float("inf"), "loss_scale": 1.0}) != ""


@pytest.mark.parametrize("kind", ["skip", "rollback"])
def test_too_many_bad_steps_in_a_row_stop_the_run(kind):
    steps = BadSteps(FaultConfig(bad_step=kind, most_bad_steps=3))
    assert [steps.bad(5), steps.bad(6)] == [kind, kind]
    steps.good(4)  # gone over once more, before the bad ones
    assert steps.bad(6) == "stop"
    steps.good(7)
    assert steps.bad(8) == kind


def test_a_loss_far_above_those_before_it_is_a_spike():
    spikes, random = Spikes(6.0), np.random.default_rng(0)
    usual = [spikes.add(2.0 + 0.01 * random.standard_normal()) for _ in range(100)]
    assert set(usual) == {""}
    assert "loss 2.2 is " in spikes.add(2.2)
    assert spikes.add(1.0) == ""  # lower is no harm


def test_few_or_equal_losses_tell_no_deviation():
    spikes = Spikes(6.0)
    assert [spikes.add(loss) for loss in [1.0] * 10 + [9.0]] == [""] * 11
    spikes = Spikes(6.0)
    assert [spikes.add(loss) for loss in [1.0] * 40 + [9.0]] == [""] * 41


def counting(**bad):
    def inspect(state, batch):
        counts = {"batch": {"x": 0}, "parameters": {"w": 0, "v": 0}, "loss": 0, "gradients": {"w": 0, "v": 0}}
        assert int(state["step"]) == 7
        return jax.tree.map(jnp.asarray, counts | bad)

    return inspect


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"loss": 1}, "first not finite: loss"),
        ({"loss": 1, "batch": {"x": 3}}, "first not finite: batch/x, 3 of its numbers"),
        (
            {"gradients": {"v": 1, "w": 2}},
            "first not finite: gradients/v; and 1 other arrays of the gradients",
        ),
        ({}, "a repeat of the step gives only finite values: check the machine's memory"),
    ],
)
def test_the_first_bad_tensor_is_the_one_nearest_to_the_cause(bad, words):
    assert first_bad_tensor(counting(**bad), {"step": jnp.int32(9)}, {}, 2) == words


def test_a_look_that_needs_too_much_memory_does_not_end_the_run():
    def inspect(state, batch):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

    words = first_bad_tensor(inspect, {"step": jnp.int32(9)}, {}, 2)
    assert words == "the first bad tensor could not be determined: RESOURCE_EXHAUSTED: out of memory"
