from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.contrib.sweeps import SweepRunStarted, _sweep, _sweep_command
from meshwright.results import Phase
from meshwright.trainer.loop import StepDone

pytestmark = pytest.mark.once


def test_a_sweep_prints_its_table_best_first_and_where_the_page_is(meshwright, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = meshwright(
        "sweep", "linear", "--on", "1xCPU", "--steps", "4", "--set", "optimizer.learning_rate=0.001,0.2"
    )
    assert (done.status, done.talk) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("sweep-linear-")
    lines = [line.split() for line in done.output.splitlines()]
    assert done.output.startswith("2 finished runs of linear on 1xCPU\n")
    assert [line[:2] for line in lines[2:4]] == [["0002", "0.2"], ["0001", "0.001"]]
    assert done.output.endswith(f"Report: runs/{folder.name}/report.html\n")


def test_json_is_the_sweep_and_a_sweep_without_a_finished_run_exits_with_1(meshwright, tmp_path: Path):
    over = ("--set", "optimizer.learning_rate=1e30,2e30", "--on", "1xCPU", "--steps", "9")
    done = meshwright("sweep", "linear", *over, "--folder", str(tmp_path), "--json")
    assert done.status == 1
    assert [run["held_out_loss"] for run in done.json["runs"]] == [None, None]
    assert all(run["failed"] for run in done.json["runs"])


def test_nothing_to_sweep_exits_with_2(meshwright):
    done = meshwright("sweep", "linear")
    assert done.status == 2
    assert "nothing to sweep" in done.talk


def test_on_a_terminal_the_run_and_its_steps_are_shown(monkeypatch, capsys):
    monkeypatch.setattr(_sweep_command.sys.stderr, "isatty", lambda: True, raising=False)
    shown = []

    class Progress:
        def __init__(self, *columns, **told): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def add_task(self, words, total):
            return words

        def update(self, task, **told):
            shown.append(told)

        def reset(self, task, **told):
            shown.append(told)

    monkeypatch.setattr("rich.progress.Progress", Progress)
    with _sweep_command._progress("linear") as on_event:
        on_event(SweepRunStarted(number=2, total=6, values={"seed": "3"}))
        on_event(Phase(name="compile"))
        on_event(
            StepDone(
                step=3,
                steps=9,
                loss=1.5,
                gradient_norm=1.0,
                learning_rate=0.1,
                tokens_per_second=1000.0,
                seconds_left=2.0,
            )
        )
    assert shown[0] == {"description": "run 2 of 6: seed=3", "completed": 1, "total": 6}
    assert shown[2] == {"description": "weighing: compile"}
    assert shown[3]["completed"] == 3


def test_a_stopped_sweep_exits_with_130(meshwright, monkeypatch):

    made = SimpleNamespace(to_dict=lambda: {"runs": []}, stopped=True, best=None)
    monkeypatch.setattr(_sweep, "sweep", lambda *_, **__: made)
    assert meshwright("sweep", "linear", "--set", "seed=1,2", "--json").status == 130


@pytest.mark.parametrize("words", ["--set", "--folder", "KEY=VALUE"])
def test_help_names_the_options(meshwright, words):
    assert words in meshwright("sweep", "--help").output
