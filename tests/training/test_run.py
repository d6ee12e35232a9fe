import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.config import load_config
from meshwright.errors import InputError
from meshwright.measure import bytes_on
from meshwright.trainer.loop import Noticed, StepFlops, metrics_of
from meshwright.trainer.loop import _training_run as _run
from meshwright.trainer.loop._loop import Loop
from meshwright.trainer.loop._recording import memory_in_use

pytestmark = pytest.mark.quick

LINEAR = load_config("linear")


def test_the_same_seed_twice_is_bitwise_equal(one_device, one_device_again):
    first, second = one_device.measurement, one_device_again.measurement
    assert first.losses == second.losses
    assert first.held_out_losses == second.held_out_losses
    assert first.sample == second.sample
    for a, b in zip(jax.tree.leaves(one_device.state), jax.tree.leaves(one_device_again.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.once
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


def test_two_steps_are_too_few_to_time(tmp_path, train):
    measurement, _ = train(LINEAR, tmp_path, steps=2)
    assert measurement.step_seconds is None
    assert "first two steps" in measurement.not_measured["step_seconds"]
    assert measurement.unigram_entropy_nats is None


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("meshwright.programs._weighed.compile_program", None)
    with pytest.raises(InputError, match="cannot write a run"):
        mw.train("linear", on="1xCPU", folder=tmp_path / "file" / "run")


def test_a_run_of_no_steps_is_refused(tmp_path):
    with pytest.raises(InputError, match="a run of 0 steps"):
        mw.train("linear", on="1xCPU", folder=tmp_path, steps=0)


def test_python_and_numpy_draw_from_the_runs_seed(tmp_path, monkeypatch, train):
    drawn = []
    run = Loop.run

    def draw(self: Loop) -> None:
        drawn.append((np.random.random(), _run.random.random()))
        run(self)

    monkeypatch.setattr(Loop, "run", draw)
    for name in ("a", "b"):
        train(LINEAR, tmp_path / name, steps=1)
    assert drawn[0] == drawn[1]


def test_a_run_is_resumed_to_what_it_would_have_been_and_told_so(tmp_path, one_device, train):
    train(one_device.config, tmp_path, steps=4)
    events = []
    measurement, state = train(one_device.config, tmp_path, steps=7, resume=True, on_event=events.append)
    assert (measurement.steps, measurement.resumed_from) == (7, 4)
    assert measurement.losses == one_device.measurement.losses
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(one_device.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    (said,) = [event.message for event in events if isinstance(event, Noticed)]
    assert said == "from the checkpoint of step 4, continues to step 7"


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(("precision=bf16", "state.parameters=bf16", "state.moments=bf16"), id="bf16"),
        pytest.param(
            ("state.moments=8bit", "model.embed_dim=64", "model.mlp_dim=128"), id="moments in 8 bits"
        ),
    ],
)
def test_a_run_in_few_bits_is_resumed_bitwise(tmp_path, train, formats):
    config = load_config("bytes-nano", [*formats, "model.num_layers=1"])
    whole, kept = train(config, tmp_path / "whole", steps=4)
    narrow = {str(leaf.dtype) for leaf in jax.tree.leaves(kept["optimizer"]) if leaf.ndim}
    assert narrow & {"bfloat16", "uint8", "int8"}, narrow
    train(config, tmp_path / "parts", steps=2)
    measurement, state = train(config, tmp_path / "parts", steps=4, resume=True)
    assert (measurement.steps, measurement.resumed_from) == (4, 2)
    assert measurement.losses == whole.losses
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_run_that_is_done_is_resumed_to_nothing(tmp_path, one_device, train):
    shutil.copytree(one_device.folder, tmp_path / "run")
    measurement, _ = train(one_device.config, tmp_path / "run", steps=7, resume=True)
    assert measurement.losses == one_device.measurement.losses
    assert measurement.held_out_losses == one_device.measurement.held_out_losses
    assert measurement.argument_bytes_per_device is None
    assert measurement.not_measured["argument_bytes_per_device"] == "no step was run"


def test_a_checkpoint_is_resumed_on_another_layout(tmp_path, one_device, eight_devices, train):
    shutil.copytree(one_device.folder, tmp_path / "run")
    layout, events = "data=2,fsdp=2,tensor=2", []
    resumed = {"steps": 9, "resume": True, "fleet": "8xCPU", "layout": layout}
    measurement, _ = train(one_device.config, tmp_path / "run", **resumed, on_event=events.append)
    (said,) = [event.message for event in events if isinstance(event, Noticed)]
    assert said.endswith(f"with layout: data=1 -> {layout}")
    shutil.copytree(eight_devices.folder, tmp_path / "eight")
    eight, _ = train(one_device.config, tmp_path / "eight", **resumed)
    for step in (8, 9):
        assert measurement.losses[step] == pytest.approx(eight.losses[step], rel=1e-4)


def test_nothing_is_saved_where_nothing_is_asked(tmp_path, train):
    train(load_config("linear", ["checkpoint.every_steps=none"]), tmp_path, steps=2)
    assert not (tmp_path / "checkpoints").exists()


def test_a_fleets_peak_gives_each_step_its_mfu(tmp_path, train):
    flops = StepFlops(model_flops=100, executed_flops=150, peak_flops_per_second=1e6)
    train(LINEAR, tmp_path, steps=3, flops=flops)
    lines = [line for line in metrics_of(tmp_path) if "loss" in line]
    for line in lines:
        assert line["mfu"] == pytest.approx(100 / line["seconds"] / 1e6)
        assert line["hfu"] == pytest.approx(1.5 * line["mfu"])


def device(**stats):
    return SimpleNamespace(memory_stats=lambda: stats or None, process_index=0)


def test_memory_in_use_is_that_of_the_fullest_device():
    assert memory_in_use([device(bytes_in_use=5), device(bytes_in_use=9)]) == 9


def test_a_device_that_does_not_tell_leaves_it_unknown():
    assert memory_in_use([device(), device(bytes_in_use=9)]) is None


def test_a_runs_seconds_are_all_accounted_for(one_device):
    measurement = one_device.measurement
    assert {"compile", "step", "input wait", "evaluation", "checkpoint"} <= set(measurement.seconds_by_phase)
    assert 0 < measurement.goodput < 1
    assert measurement.step_seconds is not None
    assert measurement.step_seconds.median * 5 < measurement.seconds_by_phase["step"] * 2
    assert (measurement.signal, measurement.resumed_from, measurement.num_bad_steps) == ("", None, 0)
