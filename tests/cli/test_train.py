from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.cli._train import _state_of
from meshwright.training import (
    CheckpointSaved,
    Compiled,
    EpochDone,
    Evaluated,
    Finished,
    Started,
    StepDone,
)


def test_a_run_prints_its_account_and_leaves_its_files(meshwright, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = meshwright("train", "linear", "--on", "8xCPU", "--steps", "4")
    assert (done.status, done.talk) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert done.output.startswith("4 steps on 8 x cpu")
    assert done.output.endswith(f"Report: runs/{folder.name}/report.html\n")
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "report.html"} <= names
    assert {"weighing.json", "measurement.json", "reconciliation.json"} <= names
    weighed = json.loads((folder / "weighing.json").read_text())
    measured = json.loads((folder / "measurement.json").read_text())
    assert weighed["compile"]["fingerprint"] == measured["fingerprint"]


def test_json_is_the_whole_run(meshwright, tmp_path: Path):
    here = str(tmp_path / "here")
    arguments = ("train", "linear", "--on", "8xCPU", "--steps", "3", "--folder", here)
    answer = meshwright(*arguments, "--json").json
    assert answer["folder"] == here
    assert answer["measurement"]["steps"] == 3
    assert {"schema", "weighing", "measurement", "reconciliation"} <= set(answer)
    again = meshwright(*arguments)
    assert again.status == 2
    assert again.talk.startswith(f"error: {here} holds a run already\nhint: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("linaer",), "did you mean 'linear'?"),
        (("theirs:program",), "is a program of its own"),
        (("linear", "--on", "8xCPU", "--layout", "data=3"), "data = 3 is not the fleet's 8"),
    ],
)
def test_bad_input_exits_with_2(
    meshwright, tmp_path: Path, monkeypatch, arguments: tuple[str, ...], words: str
):
    monkeypatch.chdir(tmp_path)
    done = meshwright("train", *arguments)
    assert done.status == 2
    assert words in done.talk
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "status"), [("", 0), ("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_a_signal_ended_says_so_in_its_status(meshwright, monkeypatch, name: str, status: int):
    from meshwright import _train, report

    run = SimpleNamespace(folder=Path("r"), measurement=SimpleNamespace(signal=name), reconciliation=None)
    monkeypatch.setattr(_train, "train", lambda *_, **__: run)
    monkeypatch.setattr(report, "run_text", lambda *_: "the account")
    done = meshwright("train", "linear")
    assert done.status == status
    assert done.output == "the account\nReport: r/report.html\n"


def test_the_first_steps_are_set_beside_the_prediction_while_the_run_goes_on(meshwright, tmp_path: Path):
    done = meshwright("train", "linear", "--on", "1xCPU", "--steps", "8", "--folder", str(tmp_path / "run"))
    assert done.talk.startswith("first steps: argument bytes per device ")
    assert "step seconds" in done.talk
    assert "predicted" in done.talk


def test_the_bar_follows_the_events():
    started = Started(name="linear", num_parameters=16, device_kind="cpu", num_devices=2, steps=9)
    assert _state_of(started)["description"] == "compiling linear for 2 x cpu"
    assert _state_of(Compiled(seconds=1.0, fingerprint="f"))["description"] == "first step"
    rates = {"gradient_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 1234.0, "seconds_left": 90.0}
    step = StepDone(step=3, steps=9, loss=2.3456, **rates)
    assert _state_of(step) == {
        "description": "step 3 of 9, loss 2.346, 1.23K tokens/s, 90.0 s left",
        "completed": 3,
        "total": 9,
    }
    more = StepDone(step=3, steps=9, loss=2.3456, mfu=0.4512, metrics={"accuracy": 0.5}, **rates)
    assert "loss 2.346, accuracy 0.500, 1.23K tokens/s, MFU 45.1 %, 90.0 s" in _state_of(more)["description"]
    epoch = EpochDone(epoch=2, step=8, seconds=3.0, metrics={"accuracy": 0.75})
    assert _state_of(epoch)["description"] == "epoch 2 in 3.00 s, accuracy 0.750"
    saved = CheckpointSaved(step=4, num_bytes=1, blocked_seconds=0.1, write_seconds=0.2)
    assert _state_of(saved)["description"] == "checkpoint of step 4 saved"
    assert "held-out loss 2.500" in _state_of(Evaluated(step=3, held_out_loss=2.5))["description"]
    assert _state_of(Finished(steps=9, interrupted=False)) == {}
