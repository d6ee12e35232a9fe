"""A sweep with real runs: all combinations, failures listed, finished runs kept, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright.contrib.sweeps import _sweep
from meshwright.errors import InputError, MeshwrightError

pytestmark = [pytest.mark.quick, pytest.mark.once]

RATES = "optimizer.learning_rate=0.1,1e30,0.3"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return mw.sweep("linear", [RATES, "seed=1"], on="1xCPU", steps=8, folder=folder)


def test_every_value_is_a_run_of_train_and_the_best_held_out_loss_comes_first(made):
    assert [run.values for run in made.runs] == [
        {"optimizer.learning_rate": value} for value in ("0.1", "1e30", "0.3")
    ]
    finished = [run for run in made.ranked if run.held_out_loss is not None]
    assert len(finished) == 2
    assert made.best is finished[0]
    assert finished[0].held_out_loss < finished[1].held_out_loss
    for run in finished[:1]:
        alone = mw.train(
            "linear",
            on="1xCPU",
            steps=8,
            overrides=["seed=1", *(f"{key}={value}" for key, value in run.values.items())],
            folder=run.folder.parent.parent / "alone" / run.folder.name,
        ).measurement
        assert run.held_out_loss == alone.held_out_losses[8]
        assert run.loss == alone.losses[8]
        assert {"config.json", "metrics.jsonl", "report.html"} <= {path.name for path in run.folder.iterdir()}


def test_a_run_that_diverges_is_listed_with_the_reason_and_the_others_go_on(made):
    run = made.runs[1]
    assert made.ranked[-1] is run
    assert "training stopped" in run.failed
    assert (run.held_out_loss, run.loss, run.steps) == (None, None, 0)
    assert not made.stopped


def test_a_run_whose_last_held_out_loss_is_not_finite_has_none(tmp_path):
    rates = "optimizer.learning_rate=1e38,0.1"
    made = mw.sweep("linear", [rates], on="1xCPU", steps=1, folder=tmp_path)
    lost, best = made.runs
    assert (lost.held_out_loss, lost.failed) == (None, "the held-out loss after the last step is not finite")
    assert made.best is best
    (session,) = json.loads((lost.folder / "run.json").read_text())["sessions"]
    assert session["held_out_loss"] is None
    assert mw.sweep("linear", [rates], on="1xCPU", steps=1, folder=tmp_path).best.values == best.values


def test_folders_of_other_runs_are_left_alone_and_a_broken_measurement_is_made_again(tmp_path):
    (tmp_path / "8b-20261130-120000").mkdir()
    swept = mw.sweep("linear", ["optimizer.learning_rate=0.1,0.2"], on="1xCPU", steps=1, folder=tmp_path)
    assert [run.folder.name for run in swept.runs] == ["0001-learning_rate=0.1", "0002-learning_rate=0.2"]
    (swept.runs[0].folder / "measurement.json").write_text("{")  # as a crash of the machine may leave it
    again = mw.sweep("linear", ["optimizer.learning_rate=0.1,0.2"], on="1xCPU", steps=1, folder=tmp_path)
    assert [run.earlier for run in again.runs] == [False, True]
    assert [run.held_out_loss for run in again.runs] == [run.held_out_loss for run in swept.runs]


def test_folders_are_numbered_and_say_the_values(made):
    assert [run.folder.name for run in made.runs] == [
        "0001-learning_rate=0.1",
        "0002-learning_rate=1e30",
        "0003-learning_rate=0.3",
    ]
    told = json.loads((made.folder / "sweep.json").read_text())
    assert told == made.to_dict()
    assert (made.folder / "report.html").exists()


def test_begun_again_finished_runs_are_read_and_only_what_is_missing_is_run(made, monkeypatch):
    trained = []
    real = _sweep.train

    def train(config, **told):
        trained.append(config.optimizer.learning_rate)
        return real(config, **told)

    monkeypatch.setattr(_sweep, "train", train)
    again = mw.sweep("linear", [RATES + ",0.2", "seed=1"], on="1xCPU", steps=8, folder=made.folder)
    assert trained == [1e30, 0.2]
    assert [run.earlier for run in again.runs] == [True, False, True, False]
    assert [run.folder.name[:4] for run in again.runs] == ["0001", "0002", "0003", "0004"]
    assert again.runs[0].held_out_loss == made.runs[0].held_out_loss


@pytest.mark.parametrize(
    ("over", "steps", "words"),
    [
        ((RATES, "seed=1"), 9, "holds a run of 8 steps"),
        ((RATES, "seed=2"), 8, "a run of another configuration"),
    ],
)
def test_a_folder_of_another_sweep_is_refused_before_the_first_run(made, monkeypatch, over, steps, words):
    monkeypatch.setattr(_sweep, "train", None)
    with pytest.raises(InputError, match=words) as caught:
        mw.sweep("linear", over, on="1xCPU", steps=steps, folder=made.folder)
    assert "another folder" in caught.value.hint


@pytest.mark.parametrize(
    ("over", "words", "hint"),
    [
        ((), "nothing to sweep", "--set optimizer.learning_rate=VALUE,VALUE"),
        (("seed=1",), "nothing to sweep", "--set seed=VALUE,VALUE"),
        (("seed=1,2", "seed=3,4"), "seed is swept twice", "seed=3,4"),
        (("seed=1,2,1",), "has 1 twice", "write seed=1,2"),
        (("seed=1,,2",), "has an empty value", "write seed=1,2"),
        (("sede=1,2",), "sede is not a section or a key", "seed"),
        (("seed=1,two",), 'seed = "two"', "whole number"),
        (("seed",), "nothing to sweep", "seed=VALUE"),
    ],
)
def test_what_makes_no_sweep_is_refused_before_the_first_run(tmp_path, monkeypatch, over, words, hint):
    monkeypatch.setattr(_sweep, "train", None)
    with pytest.raises(InputError) as caught:
        mw.sweep("linear", over, on="1xCPU", folder=tmp_path / "here")
    assert words in caught.value.message
    assert hint in caught.value.hint
    assert not (tmp_path / "here").exists()


def test_a_foreign_program_is_refused():
    with pytest.raises(InputError, match="theirs:step is not a configuration"):
        mw.sweep("theirs:step", ["seed=1,2"])


def test_a_sweep_of_a_fleet_that_is_not_there_ends_at_once(tmp_path):
    with pytest.raises(InputError, match="H10"):
        mw.sweep("linear", ["seed=1,2"], on="8xH10", folder=tmp_path / "here")


def test_commas_in_brackets_and_quotes_part_no_values():
    swept, fixed = _sweep._parsed(['layout="fsdp=4,tensor=2","data=8"', "a=[1,2],[3]", "b=[1,2]", "c='x,y'"])
    assert swept == {"layout": ['"fsdp=4,tensor=2"', '"data=8"'], "a": ["[1,2]", "[3]"]}
    assert fixed == ["b=[1,2]", "c='x,y'"]


def test_layouts_are_swept_where_they_are_quoted(tmp_path):
    over = ['layout="data=4,fsdp=2","data=8"']
    made = mw.sweep("linear", over, on="8xCPU", steps=3, folder=tmp_path)
    assert [bool(run.failed) for run in made.runs] == [False, False]
    layouts = [json.loads((run.folder / "config.json").read_text())["layout"] for run in made.runs]
    assert layouts == ["data=4,fsdp=2", "data=8"]
    names = [run.folder.name for run in made.runs]
    assert len(set(names)) == 2
    assert all(len(name) < 110 and '"' not in name for name in names)


def test_all_combinations_of_several_keys_are_run(tmp_path, monkeypatch):
    def train(config, **told):
        raise MeshwrightError(f"{config.seed} {config.optimizer.learning_rate}", hint="")

    monkeypatch.setattr(_sweep, "train", train)
    made = mw.sweep("linear", ["seed=1,2", "optimizer.learning_rate=0.1,0.2"], folder=tmp_path)
    assert [run.failed for run in made.runs] == ["1 0.1", "1 0.2", "2 0.1", "2 0.2"]
    assert made.best is None


def test_memory_that_is_not_enough_is_a_reason_and_an_input_error_of_a_later_run_too(tmp_path, monkeypatch):
    def train(config, **told):
        if config.seed == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore words")
        raise InputError("data = 3 is not the fleet's 8", hint="")

    monkeypatch.setattr(_sweep, "train", train)
    made = mw.sweep("linear", ["seed=1,2"], folder=tmp_path)
    assert made.runs[0].failed == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert made.runs[1].failed == "data = 3 is not the fleet's 8"


def test_ctrl_c_before_a_first_step_ends_the_sweep_with_what_there_is(tmp_path, monkeypatch):
    real = _sweep.train

    def train(config, **told):
        if config.seed == 2:
            raise KeyboardInterrupt
        return real(config, **told)

    monkeypatch.setattr(_sweep, "train", train)
    made = mw.sweep("linear", ["seed=1,2,3"], on="1xCPU", steps=3, folder=tmp_path)
    assert made.stopped
    assert made.not_run == 1
    assert made.best is made.runs[0]
    assert made.runs[1].failed == "stopped before its first step"


def test_a_batch_by_replica_is_swept_and_its_runs_are_found_again(tmp_path):
    over = ["seed=1,2", "batch.sequences_per_replica=16"]
    for earlier in (False, True):
        made = mw.sweep("linear", over, on="4xCPU", steps=2, folder=tmp_path)
        assert [run.earlier for run in made.runs] == [earlier] * 2


def test_a_run_whose_files_could_not_be_written_is_listed_with_the_reason(tmp_path, monkeypatch):
    measured = SimpleNamespace(measurement=SimpleNamespace(interrupted=False))
    monkeypatch.setattr(_sweep, "train", lambda config, **told: measured)
    made = mw.sweep("linear", ["seed=1,2"], on="1xCPU", steps=2, folder=tmp_path)
    assert [run.failed for run in made.runs] == ["it finished, and its files could not be written"] * 2


def test_an_unfinished_run_goes_on_only_with_the_settings_of_its_first_steps(tmp_path, monkeypatch):
    mw.sweep("linear", ["optimizer.learning_rate=0.1,0.2"], on="1xCPU", steps=3, folder=tmp_path)
    for folder in tmp_path.glob("000*"):
        (folder / "measurement.json").unlink()
    monkeypatch.setattr(_sweep, "train", None)
    over = ["optimizer.learning_rate=0.1,0.2", "optimizer.clip_norm=0.5"]
    with pytest.raises(InputError, match=r"0001-.* holds a run of another configuration") as refused:
        mw.sweep("linear", over, on="1xCPU", steps=3, folder=tmp_path)
    assert "name another folder" in refused.value.hint


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    def train(config, **told):
        raise MeshwrightError("no", hint="")

    monkeypatch.setattr(_sweep, "train", train)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write a sweep to"):
        mw.sweep("linear", ["seed=1,2"], folder=tmp_path / "file" / "here")


@pytest.mark.wide
@pytest.mark.once
def test_a_real_ctrl_c_between_steps_leaves_a_table_a_page_and_130_and_the_sweep_goes_on_later(
    tmp_path: Path,
):
    """The second of two runs is far too long; the signal comes while it steps."""
    command = [sys.executable, "-m", "meshwright", "sweep", "linear", "--on", "1xCPU", "--folder", "here"]
    command += ["--set", "steps=3,10000000", "--set", "evaluation.every_steps=10000000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    metrics, deadline = tmp_path / "here/0002-steps=10000000/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        assert time.monotonic() < deadline, process.communicate()
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, talk = process.communicate(timeout=60)
    assert process.returncode == 130, talk
    assert output.startswith("1 finished run of linear on 1xCPU, 1 not finished")
    assert "steps=10000000: stopped after" in output
    assert (tmp_path / "here/report.html").exists()
    over = ["steps=3,4", "evaluation.every_steps=10000000"]
    again = mw.sweep("linear", over, on="1xCPU", folder=tmp_path / "here")
    assert [run.earlier for run in again.runs] == [True, False]
