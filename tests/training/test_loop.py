import json
import os
import signal
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from meshwright.config import Layout, RunConfig, load_config, overridden
from meshwright.errors import InputError, MeshwrightError
from meshwright.sharding import mesh_of
from meshwright.trainer.data import ALL, RegressionRows, open_data
from meshwright.trainer.loop import (
    CheckpointSaved,
    Noticed,
    PhaseClock,
    Saving,
    StepDone,
    Watchdog,
    compile_programs,
    metrics_of,
)
from meshwright.trainer.loop._loop import BatchLoader, Loop
from meshwright.trainer.loop._recording import Recorder, RunWriter
from meshwright.trainer.loop._run_folder import about_of

pytestmark = pytest.mark.quick

DATA = Layout.parse("data=1")
LINEAR = load_config(
    "linear", ["evaluation.every_steps=4", "evaluation.batches=3", "checkpoint.every_steps=3"]
)


@pytest.fixture(scope="module")
def programs():
    return compile_programs(LINEAR, mesh_of(DATA.axes, jax.devices()[:1]), "cpu")


class Poisoned(RegressionRows):
    """A row of some batches is no number."""

    poisoned = (7,)

    def batch(self, step: int, split: str, rows=ALL) -> dict[str, np.ndarray]:
        batch = super().batch(step, split, rows)
        if split == "train" and step in self.poisoned:
            batch["inputs"][3, 2] = np.nan
        return batch


class Broken(RegressionRows):
    """Data that ends in the middle of a run."""

    def batch(self, step: int, split: str, rows=ALL) -> dict[str, np.ndarray]:
        if step == 5 and split == "train":
            raise InputError("row 5 cannot be read", hint="mend it")
        return super().batch(step, split, rows)


@pytest.fixture(scope="module")
def run(programs, request_for):
    """Ten steps of `linear`, from the folder's newest checkpoint if it has one."""

    def make(
        folder: Path, *, config=LINEAR, data=None, steps=10, waits=True, tell=lambda event: None
    ) -> Loop:
        phases = PhaseClock()
        request = request_for(config, folder, steps=steps, resume=True, on_event=tell)
        saving = Saving(request.folder, config.checkpoint, about_of(config, DATA), phases)
        try:
            newest = saving.newest()
            with closing(RunWriter(request.folder, keep_to=-1 if newest is None else newest.step)) as files:
                recorder = Recorder(request, files)
                recorder.remember(metrics_of(folder))
                watchdog = Watchdog(request.folder, config.faults, phases)
                data = open_data(config) if data is None else data
                loop = Loop(request, programs, data, recorder, saving, phases, watchdog, waits=waits)
                loop.begin() if newest is None else loop.go_to(newest)
                loop.run()
        finally:
            saving.close()
        return loop

    return make


def equal(first: Loop, second: Loop) -> None:
    for a, b in zip(jax.tree.leaves(first.state), jax.tree.leaves(second.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def poisoned(*steps: int) -> Poisoned:
    made = Poisoned(seed=0, rows=64, dim=16, has_answer=True)
    made.__class__.poisoned = steps
    return made


def faults(**fields) -> RunConfig:
    return overridden(LINEAR, [f"faults.{name}={value}" for name, value in fields.items()])


@pytest.mark.parametrize("waits", [True, False])
def test_running_ahead_gives_the_losses_of_waiting_for_each_step(tmp_path, run, waits):
    loop, reference = (run(tmp_path / str(each), waits=each) for each in (waits, True and not waits))
    assert list(loop.recorder.losses) == list(range(1, 11))
    assert list(loop.recorder.held_out_losses) == [0, 4, 8, 10]
    assert len(loop.recorder.clock.seconds) == 10
    assert loop.recorder.losses == reference.recorder.losses
    assert loop.recorder.held_out_losses == reference.recorder.held_out_losses
    equal(loop, reference)


def test_the_held_out_loss_is_the_mean_over_the_held_out_batches(tmp_path, programs, run):
    loop = run(tmp_path, steps=1)
    start = jax.tree.leaves(programs.init(np.uint32(LINEAR.seed))["parameters"])
    weights = next(np.asarray(leaf).ravel() for leaf in start if leaf.size == 16)
    expected = []
    for index in range(3):  # targets are inputs . [0 ... 15]; the loss is the mean squared error
        inputs = open_data(LINEAR).batch(index, "held-out")["inputs"]
        expected.append(np.mean((inputs @ (weights - np.arange(16))) ** 2))
    assert loop.recorder.held_out_losses[0] == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize("waits", [True, False])
def test_a_resumed_run_ends_bitwise_as_the_uninterrupted_one(tmp_path, run, waits):
    whole = run(tmp_path / "whole", waits=waits)
    run(tmp_path / "parts", steps=5, waits=waits)  # saved at 3 and, the last, at 5
    parts = run(tmp_path / "parts", waits=waits)
    assert parts.recorder.losses == whole.recorder.losses
    equal(whole, parts)
    # The first part was over after 5 steps, and judged its parameters then.
    assert {**whole.recorder.held_out_losses, 5: 0} == {**parts.recorder.held_out_losses, 5: 0}


def test_checkpoints_are_saved_every_so_often_and_after_the_last_step(tmp_path, run):
    events: list[object] = []
    run(tmp_path, tell=events.append)
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [3, 6, 9, 10]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == ["10", "6", "9"]


@pytest.mark.parametrize(("number", "waits"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_ends_the_run_after_the_step_that_runs_with_a_checkpoint(tmp_path, run, number, waits):
    def interrupt(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 4:
            os.kill(os.getpid(), number)

    loop = run(tmp_path, tell=interrupt, waits=waits)
    assert loop.signal == number
    assert loop.step in (5, 6)  # one ahead where steps are not waited for
    assert (tmp_path / f"checkpoints/{loop.step}/manifest.json").exists()
    assert list(loop.recorder.losses) == list(range(1, loop.step + 1))
    whole, rest = run(tmp_path / "whole"), run(tmp_path)
    equal(whole, rest)


def test_stop_keeps_the_state_and_names_the_first_bad_tensor(tmp_path, run):
    with pytest.raises(MeshwrightError, match=r"^step 8: the loss is nan; training stopped; ") as error:
        run(tmp_path, data=poisoned(7))
    assert "first not finite: batch/inputs" in error.value.message
    assert "--resume" in error.value.hint
    assert "optimizer.clip_norm" in error.value.hint
    assert (tmp_path / "checkpoints/8/manifest.json").exists()
    (notice,) = (json.loads(line) for line in (tmp_path / "notices.jsonl").read_text().splitlines())
    assert (notice["step"], notice["kind"]) == (8, "bad step")
    lines = {line["step"]: line["loss"] for line in metrics_of(tmp_path) if "loss" in line}
    assert lines[8] is None
    assert all(np.isfinite(lines[step]) for step in range(1, 8))
    loop = run(tmp_path, data=poisoned(7))  # the next batch, and so on to the end
    assert list(loop.recorder.losses) == [*range(1, 8), 9, 10]


@pytest.mark.parametrize("waits", [True, False])
def test_skip_leaves_the_bad_batch_out_and_goes_on(tmp_path, run, waits):
    events: list[object] = []
    loop = run(tmp_path, config=faults(bad_step="skip"), data=poisoned(4, 7), tell=events.append, waits=waits)
    assert (loop.step, loop.recorder.num_bad_steps) == (10, 2)
    assert list(loop.recorder.losses) == [1, 2, 3, 4, 6, 7, 9, 10]
    said = [event.message for event in events if isinstance(event, Noticed)]
    assert len(said) == 2
    assert said[0].startswith("step 5: the loss is nan; its batch is skipped; first not finite: batch/inputs")


@pytest.mark.parametrize("waits", [True, False])
def test_rollback_goes_back_to_the_checkpoint_and_reads_other_batches(tmp_path, programs, run, waits):
    events: list[object] = []
    data = poisoned(7)
    loop = run(tmp_path, config=faults(bad_step="rollback"), data=data, tell=events.append, waits=waits)
    # Step 8 met batch 7; the checkpoint of step 6 is gone back to, and batches 6 and 7 are left out.
    assert (loop.step, loop.data_offset) == (10, 2)
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps == [*range(1, 9), 7, 8, 9, 10]
    (said,) = [event.message for event in events if isinstance(event, Noticed)]
    assert "back to step 6; the batches since then are left out" in said
    state, feed = programs.init(np.uint32(LINEAR.seed)), BatchLoader(open_data(LINEAR), programs.built.batch)
    for index in [*range(6), 8, 9, 10, 11]:  # by hand: these batches and no others
        state, _ = programs.step(state, feed.batch(index))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(loop.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_rollback_without_a_checkpoint_begins_anew(tmp_path, run):
    config = overridden(faults(bad_step="rollback"), ["checkpoint.every_steps=none"])
    loop = run(tmp_path, config=config, data=poisoned(1))
    assert (loop.step, loop.data_offset) == (10, 2)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("kind", ["skip", "rollback"])
def test_too_many_bad_steps_stop_the_run_in_the_end(tmp_path, run, kind):
    config = faults(bad_step=kind, most_bad_steps=3)
    with pytest.raises(MeshwrightError, match="training stopped") as error:
        run(tmp_path, config=config, data=poisoned(*range(4, 100)))
    assert error.value.hint.startswith("3 steps in a row were bad; ")


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path, run):
    run(tmp_path, steps=7)
    for path in (tmp_path / "checkpoints/7/state").glob("*.ocdbt"):
        path.write_bytes(path.read_bytes()[:-1])
    events: list[object] = []
    loop = run(tmp_path, tell=events.append)
    (said,) = [event.message for event in events if isinstance(event, Noticed)]
    assert said.startswith("the checkpoint of step 7 is damaged and skipped: ")
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps == [7, 8, 9, 10]
    equal(loop, run(tmp_path / "whole"))


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tmp_path, run, monkeypatch):
    from meshwright.trainer.checkpoint import _checkpoints

    monkeypatch.setattr(_checkpoints.Checkpoints, "_free_bytes", lambda self: 0)
    events: list[object] = []
    loop = run(tmp_path, tell=events.append)
    assert loop.step == 10
    said = [event for event in events if isinstance(event, Noticed)]
    assert [event.step for event in said] == [3, 6, 9, 10]
    assert "was not saved: No space left on device" in said[0].message
    assert said[0].hint.startswith("make room")


def test_an_error_in_the_data_reaches_the_user(tmp_path, run):
    data = Broken(seed=0, rows=64, dim=16, has_answer=True)
    with pytest.raises(InputError, match="row 5 cannot be read"):
        run(tmp_path, data=data)
    assert [line["step"] for line in metrics_of(tmp_path) if "loss" in line] == [1, 2, 3, 4, 5]


def test_time_is_accounted_for_by_phase(tmp_path, run):
    loop = run(tmp_path)
    seconds = loop._phases.seconds()
    assert {"step", "input wait", "evaluation", "checkpoint"} <= set(seconds)
    assert all(value > 0 for value in seconds.values())
    timed = sum(loop.recorder.clock.seconds)
    assert timed < seconds["step"] + seconds["checkpoint"] + seconds["evaluation"]
