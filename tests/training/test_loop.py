import json
import os
import signal

import jax
import numpy as np
import pytest

from meshwright.config import Layout, load_config
from meshwright.data import RegressionRows, open_data
from meshwright.errors import InputError, MeshwrightError
from meshwright.hardware import Fleet
from meshwright.sharding import mesh_of
from meshwright.training import StepDone, run_training
from meshwright.training._files import RunFiles
from meshwright.training._loop import Loop
from meshwright.training._programs import compile_programs

ONE, DATA = Fleet.parse("1xCPU"), Layout.parse("data=1")


@pytest.fixture(scope="module")
def linear_programs():
    config = load_config("linear", ["evaluation.every_steps=4", "evaluation.batches=3"])
    return config, compile_programs(config, mesh_of(DATA.axes, jax.devices()[:1]), "cpu")


def run_of_ten_steps(config, programs, folder, *, waits: bool) -> Loop:
    with RunFiles(folder) as files:
        loop = Loop(config, programs, open_data(config), files, lambda event: None, 10)
        loop.run(waits=waits)
    return loop


def test_running_ahead_gives_the_losses_of_waiting_for_each_step(tmp_path, linear_programs):
    first, second = (run_of_ten_steps(*linear_programs, tmp_path / str(w), waits=w) for w in (True, False))
    assert list(first.losses) == list(range(1, 11))
    assert list(first.held_out_losses) == [0, 4, 8, 10]
    assert len(first.clock.seconds) == len(second.clock.seconds) == 10
    assert first.losses == second.losses
    assert first.held_out_losses == second.held_out_losses


def test_the_held_out_loss_is_the_mean_over_the_held_out_batches(tmp_path, linear_programs):
    config, programs = linear_programs
    loop = run_of_ten_steps(config, programs, tmp_path, waits=True)
    start = jax.tree.leaves(programs.init(np.uint32(config.seed))["parameters"])
    weights = next(np.asarray(leaf).ravel() for leaf in start if leaf.size == 16)
    expected = []
    for index in range(3):  # targets are inputs . [0 ... 15]; the loss is the mean squared error
        inputs = open_data(config).batch(index, "held-out")["inputs"]
        expected.append(np.mean((inputs @ (weights - np.arange(16))) ** 2))
    assert loop.held_out_losses[0] == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_what_was_written(tmp_path):
    config = load_config("linear", ["optimizer.learning_rate=1e12"])
    with pytest.raises(MeshwrightError, match=r"step \d+: the (loss|gradient norm) is (inf|nan)") as error:
        run_training(config, ONE, DATA, tmp_path)
    assert "1e+12, to 1e+11" in error.value.hint
    assert "clip_norm" in error.value.hint
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all(np.isfinite(line["loss"]) for line in lines[1:])


def test_ctrl_c_ends_the_run_after_the_step_that_runs(tmp_path):
    def interrupt(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    measurement = run_training(load_config("linear"), ONE, DATA, tmp_path, on_event=interrupt)
    assert measurement.interrupted
    assert measurement.steps == 4
    assert list(measurement.held_out_losses) == [0]


class Broken(RegressionRows):
    """Data that ends in the middle of a run."""

    def batch(self, step: int, split: str) -> dict[str, np.ndarray]:
        if step == 5:
            raise InputError("row 5 cannot be read", hint="mend it")
        return super().batch(step, split)


def test_an_error_in_the_data_reaches_the_user(tmp_path, linear_programs):
    config, programs = linear_programs
    data = Broken(seed=0, rows=64, dim=16, has_answer=True)
    with RunFiles(tmp_path) as files, pytest.raises(InputError, match="row 5 cannot be read"):
        Loop(config, programs, data, files, lambda event: None, 10).run(waits=True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5 + 2  # steps, evaluations
