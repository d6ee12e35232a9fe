import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli import main

pytestmark = pytest.mark.once

CHILD = """
import os, sys, time, signal
count = {folder!r} + "/count"
with open(count, "a") as file:
    print(*sys.argv[1:], file=file)
ends = {ends!r}
end = ends[min(sum(1 for _ in open(count)), len(ends)) - 1]
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "sleep":
    time.sleep(100)
sys.exit(end)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch):
    """The status of a command whose child ends as told, and the children's arguments."""

    def make(*ends: int | str, arguments: tuple[str, ...] = ("train", "linear", "--folder", "here")):
        started = subprocess.Popen
        script = CHILD.format(folder=str(tmp_path), ends=ends)

        def child(command: list[str], **options: object) -> subprocess.Popen[bytes]:
            assert command[:4] == [sys.executable, "-P", "-m", "meshwright"]
            return started([sys.executable, "-c", script, *command[4:]])

        monkeypatch.setattr(sys, "argv", ["meshwright", *arguments, "--restarts", "2"])
        monkeypatch.setattr(subprocess, "Popen", child)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, (tmp_path / "count").read_text().splitlines()

    return make


def test_a_run_that_was_killed_is_resumed_where_it_stopped(run, capfd):
    status, children = run("kill", 4, 0)
    assert status == 0
    assert children == ["train linear --folder here", *["train linear --folder here --resume"] * 2]
    said = capfd.readouterr().err
    assert "restart 1 of 2: the run was killed by SIGKILL; it is resumed" in said
    assert "restart 2 of 2: the run ended with status 4; it is resumed" in said


def test_a_run_that_begins_with_weights_alone_is_restarted_in_one_folder_of_their_name(run):
    status, children = run("kill", 0, arguments=("train", "--from", "models/small", "--steps", "3"))
    assert status == 0
    words, _, folder = children[0].rpartition(" ")
    assert words == "train --from models/small --steps 3 --folder"
    assert folder.startswith("runs/small-")
    assert children[1] == f"{children[0]} --resume"


def test_after_the_last_restart_its_status_is_the_commands(run):
    assert run("kill") == (137, ["train linear --folder here"] + ["train linear --folder here --resume"] * 2)


@pytest.mark.parametrize("status", [0, 1, 2, 130, 143])
def test_a_run_that_ended_with_words_is_not_begun_again(run, status):
    assert run(status) == (status, ["train linear --folder here"])


def test_a_folder_that_is_not_named_is_chosen_once(run):
    _, children = run("kill", 0, arguments=("train", "linear"))
    first, second = (line.split() for line in children)
    assert first[:3] == ["train", "linear", "--folder"]
    assert first[3].startswith("runs/linear-")
    assert second == [*first, "--resume"]


def test_sigterm_is_passed_on_and_ends_both(tmp_path):
    said = [sys.executable, "-m", "meshwright", "train", "linear", "--on", "1xCPU", "--steps", "1000000"]
    said += ["--folder", str(tmp_path / "run"), "--restarts", "5"]
    process = subprocess.Popen(said, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics = tmp_path / "run/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 1000):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    measured = json.loads((tmp_path / "run/measurement.json").read_text())
    assert measured["signal"] == "SIGTERM"
    assert os.listdir(tmp_path / "run/checkpoints")
