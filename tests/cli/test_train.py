from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.errors import InputError
from meshwright.run_lines import LogEvery, RunLog, bar_state
from meshwright.trainer.loop import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Finished,
    Started,
    StepCompiled,
    StepDone,
)


def test_a_run_prints_its_account_and_leaves_its_files(meshwright, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = meshwright("train", "linear", "--on", "8xCPU", "--steps", "4")
    assert done.status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert done.output.startswith("4 steps on 8 x cpu")
    assert done.output.endswith(f"Report: runs/{folder.name}/report.html\n")
    lines = [line[9:] for line in done.talk.splitlines()]  # without the time of day
    assert lines[0].startswith("training linear on 8xCPU (")
    said = ("compiling linear for 8 x cpu: 16 parameters, 4 steps, files in runs/", "step 1 of 4, loss ")
    said += ("step 4 of 4, loss ", "step 4, held-out loss ", "checkpoint of step 4 saved, ")
    for words in said:
        assert sum(line.startswith(words) for line in lines) == 1, words
    assert lines[-1] == "finished after 4 steps"
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
    assert f"error: {here} already holds a run\nhint: " in again.talk


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("linaer",), "did you mean 'linear'?"),
        (("theirs:program",), "is not a configuration"),
        (("linear", "--on", "8xCPU", "--layout", "data=3"), "data = 3 is not the fleet's 8"),
        (("linear", "--on", "8xCPU", "--reserve", "1GiB"), "no memory of its own of which 1GiB"),
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


def started(**fields: object) -> Started:
    known = {"name": "linear", "num_parameters": 16, "device_kind": "cpu", "num_devices": 2, "steps": 9}
    return Started(**{**known, "folder": Path("r"), **fields})


@pytest.mark.parametrize(("name", "status"), [("", 0), ("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_a_signal_ended_says_so_and_how_to_go_on(
    meshwright, monkeypatch, tmp_path, name: str, status: int
):
    from meshwright import report

    folder = tmp_path / "r"
    (folder / "checkpoints/7").mkdir(parents=True)
    measured = SimpleNamespace(signal=name)
    run = SimpleNamespace(folder=folder, measurement=measured, reconciliation=None, not_written={})

    def train(*_: object, on_event, **__: object):
        on_event(started(folder=folder))
        on_event(Finished(steps=7, interrupted=bool(name)))
        return run

    monkeypatch.setattr("meshwright.train", train)
    monkeypatch.setattr(report, "renderable", lambda _: "the account")
    done = meshwright("train", "linear", "--steps", "9")
    assert done.status == status
    assert done.output == f"the account\nReport: {folder}/report.html\n"
    if name:
        words, command = done.talk.splitlines()[-2:]
        assert words == "stopped after step 7; resume from the checkpoint of step 7:"
        assert command == f"    meshwright train linear --steps 9 --folder {folder} --resume"
        typed = ("--set", "steps=9", "--discard-steps", f"--folder={folder}", "--resume")
        again = f"    meshwright train linear --set steps=9 --folder={folder} --resume"
        assert meshwright("train", "linear", *typed).talk.splitlines()[-1] == again
        (folder / "checkpoints/7").rmdir()
        assert meshwright("train", "linear", *typed).talk.splitlines()[-1] == f"{again} --discard-steps"


def test_files_that_could_not_be_written_are_named_after_the_account(meshwright, monkeypatch):
    from meshwright import report

    left = {"report.html": "No space left on device"}
    measured = SimpleNamespace(signal="")
    run = SimpleNamespace(folder=Path("r"), measurement=measured, reconciliation=None, not_written=left)
    monkeypatch.setattr("meshwright.train", lambda *_, **__: run)
    monkeypatch.setattr(report, "renderable", lambda _: "the account")
    done = meshwright("train", "linear")
    assert (done.status, done.output) == (1, "the account\nReport: r/report.html\n")
    assert "error: the run is done, but files of r could not be written: report.html: No space" in done.talk


@pytest.mark.parametrize(("every", "printed"), [("4", [1, 4, 8, 9]), ("30s", [1, 4, 7, 9]), ("1h", [1, 9])])
def test_steps_are_printed_as_often_as_asked(capsys, every: str, printed: list[int]):
    clock = iter(range(0, 1000, 10))  # ten seconds a step
    log = RunLog(LogEvery.parse(every), lambda line: sys.stderr.write(f"{line}\n"), now=lambda: next(clock))
    rates = {"gradient_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 1234.0, "seconds_left": 90.0}
    for step in range(1, 10):
        log.event(StepDone(step=step, steps=9, loss=1.0, **rates))
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[2]) for line in lines] == printed


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "5d", "1.5", "9" * 5000])
def test_an_interval_of_the_log_that_is_none_is_refused(text: str):
    with pytest.raises(InputError, match="neither steps nor a time"):
        LogEvery.parse(text)


def test_the_first_steps_are_set_beside_the_prediction_while_the_run_goes_on(meshwright, tmp_path: Path):
    done = meshwright("train", "linear", "--on", "1xCPU", "--steps", "8", "--folder", str(tmp_path / "run"))
    assert " first steps: argument bytes per device " in done.talk
    assert "step seconds" in done.talk
    assert "predicted" in done.talk


def test_the_bar_follows_the_events():
    assert bar_state(started())["description"] == "compiling linear for 2 x cpu"
    assert bar_state(StepCompiled(seconds=1.0, fingerprint="f"))["description"] == "first step"
    rates = {"gradient_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 1234.0, "seconds_left": 90.0}
    step = StepDone(step=3, steps=9, loss=2.3456, **rates)
    assert bar_state(step) == {
        "description": "step 3 of 9, loss 2.346, 1.23K tokens/s, 90.0 s left",
        "completed": 3,
        "total": 9,
    }
    more = StepDone(step=3, steps=9, loss=2.3456, mfu=0.4512, metrics={"accuracy": 0.5}, **rates)
    assert "loss 2.346, accuracy 0.500, 1.23K tokens/s, MFU 45.1 %, 90.0 s" in bar_state(more)["description"]
    epoch = EpochDone(epoch=2, step=8, seconds=3.0, metrics={"accuracy": 0.75})
    assert bar_state(epoch)["description"] == "epoch 2 in 3.00 s, accuracy 0.750"
    saved = CheckpointSaved(step=4, num_bytes=2048, blocked_seconds=0.1, write_seconds=0.2)
    assert bar_state(saved)["description"] == "checkpoint of step 4 saved, 2.00 KiB in 200 ms"
    assert "held-out loss 2.500" in bar_state(Evaluated(step=3, held_out_loss=2.5))["description"]
    assert bar_state(Finished(steps=9, interrupted=False)) == {}
