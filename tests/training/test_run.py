import json

import jax
import numpy as np
import pytest

from meshwright.config import Layout, load_config
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.measure import bytes_on
from meshwright.training import _run, run_training
from meshwright.training._loop import Loop

ONE, DATA = Fleet.parse("1xCPU"), Layout.parse("data=1")


def test_the_same_seed_twice_is_bitwise_equal(one_device, one_device_again):
    first, second = one_device.measurement, one_device_again.measurement
    assert first.losses == second.losses
    assert first.held_out_losses == second.held_out_losses
    assert first.sample == second.sample
    for a, b in zip(jax.tree.leaves(one_device.state), jax.tree.leaves(one_device_again.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_eight_devices_and_one_agree_in_their_losses(one_device, eight_devices):
    for name in ("losses", "held_out_losses"):
        one, eight = (getattr(run.measurement, name) for run in (one_device, eight_devices))
        assert one.keys() == eight.keys()
        np.testing.assert_allclose(list(one.values()), list(eight.values()), rtol=1e-5)


def test_training_lowers_the_held_out_loss(one_device):
    held_out = one_device.measurement.held_out_losses
    assert held_out[7] < held_out[0] - 1


def test_every_step_is_a_line_of_metrics(one_device):
    lines = [json.loads(line) for line in (one_device.folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses == one_device.measurement.losses
    held_out = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert held_out == one_device.measurement.held_out_losses


def test_live_argument_bytes_are_state_and_batch(one_device, eight_devices):
    # fp32 parameters and two moments; the two counts of AdamW and its schedule, the step, a key of two
    # words, and 8 x 65 tokens, of four bytes each.
    parameters = sum(leaf.size for leaf in jax.tree.leaves(one_device.state["parameters"]))
    others = jax.tree.leaves({**one_device.state, "parameters": {}})
    small = sum(leaf.nbytes for leaf in others if leaf.size <= 2)
    expected = 3 * 4 * parameters + small + 8 * 65 * 4
    assert one_device.measurement.argument_bytes_per_device == expected
    # Of eight devices each holds less: everything large is split.
    shared = eight_devices.measurement.argument_bytes_per_device
    assert expected / 8 < shared < expected / 3
    state = jax.tree.leaves(eight_devices.state)
    tokens = 2 * 65 * 4  # 8 rows over data x fsdp = 4
    assert shared == bytes_on(jax.devices()[0], state) + tokens


def test_what_a_cpu_cannot_tell_has_a_reason(one_device, eight_devices):
    measurement = one_device.measurement
    assert measurement.peak_bytes is None
    assert "keeps no such figure" in measurement.not_measured["peak_bytes"]
    assert measurement.step_seconds is not None
    assert measurement.step_seconds.num_steps == 5
    assert eight_devices.measurement.sample == ""
    assert measurement.sample
    assert measurement.unigram_entropy_nats == pytest.approx(3.2, abs=0.4)  # of English and code, bytes


def test_two_steps_are_too_few_to_time(tmp_path):
    measurement = run_training(load_config("linear"), ONE, DATA, tmp_path, steps=2)
    assert measurement.step_seconds is None
    assert "first two steps" in measurement.not_measured["step_seconds"]
    assert measurement.unigram_entropy_nats is None


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(_run, "compile_programs", None)
    with pytest.raises(InputError, match="cannot write a run"):
        run_training(load_config("linear"), ONE, DATA, tmp_path / "file" / "run")


def test_a_run_of_no_steps_is_refused(tmp_path):
    with pytest.raises(InputError, match="a run of 0 steps"):
        run_training(load_config("linear"), ONE, DATA, tmp_path, steps=0)


def test_python_and_numpy_draw_from_the_runs_seed(tmp_path, monkeypatch):
    drawn = []
    run = Loop.run

    def draw(self: Loop, *, waits: bool) -> None:
        drawn.append((np.random.random(), _run.random.random()))
        run(self, waits=waits)

    monkeypatch.setattr(Loop, "run", draw)
    for name in ("a", "b"):
        run_training(load_config("linear"), ONE, DATA, tmp_path / name, steps=1)
    assert drawn[0] == drawn[1]
