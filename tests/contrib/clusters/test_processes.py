"""The parent of several processes, over children that only end as they are told."""

import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright.cli._train_command import train
from meshwright.contrib.clusters import _launch as _processes
from meshwright.contrib.clusters import run_processes
from meshwright.errors import InputError

CHILD = """
import os, sys, time, signal
index = int(os.environ["MESHWRIGHT_PROCESS"])
open({folder!r} + f"/{{index}}", "w").write(" ".join(sys.argv[1:]))
end = {ends!r}[index]
print("child", index, "says", end, file=sys.stderr, flush=True)
print("answer of", index, flush=True)
if end == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if end in ("sleep", "stubborn", "saves"):
    if end == "saves":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    open({folder!r} + f"/ready{{index}}", "w")
    time.sleep(100)
if isinstance(end, str):
    while len([n for n in os.listdir({folder!r}) if n.startswith("ready")]) < {sleepers}:
        time.sleep(0.01)
    os.kill(os.getpid(), getattr(signal, end))
sys.exit(end)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The status of a command whose children end as told."""

    def make(*ends: int | str, on: str = "local") -> int:
        started = subprocess.Popen
        sleepers = sum(end in ("sleep", "stubborn", "saves") for end in ends)
        script = CHILD.format(folder=str(tmp_path), ends=ends, sleepers=sleepers)

        def child(command, **told):
            assert command[:4] == [sys.executable, "-P", "-m", "meshwright"]
            return started([sys.executable, "-c", script, *command[4:]], **told)

        monkeypatch.setattr(sys, "argv", ["meshwright", "train", "linear", "--processes", str(len(ends))])
        monkeypatch.setattr(_processes.subprocess, "Popen", child)
        return run_processes(len(ends), on)

    return make


def test_each_child_gets_the_command_without_the_option_and_the_first_one_speaks(run, tmp_path, capfd):
    assert run(0, 0, 0) == 0
    assert [(tmp_path / str(index)).read_text() for index in range(3)] == ["train linear"] * 3
    said = capfd.readouterr()
    assert said.out == "answer of 0\n"
    assert said.err == "child 0 says 0\n"


def test_a_child_that_is_killed_ends_the_others_and_is_named(run, capfd):
    began = time.monotonic()
    assert run("sleep", "sleep", "SIGKILL") == 4
    assert time.monotonic() - began < 60
    said = capfd.readouterr().err
    assert "error: process 2 of 3 (" in said
    assert f"on {os.uname().nodename}) was killed by SIGKILL; the others were ended" in said
    assert "Its last words:\n    child 2 says SIGKILL" in said


def test_a_child_that_does_not_obey_is_killed(run, monkeypatch):
    monkeypatch.setattr(_processes, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(_processes, "TOGETHER_SECONDS", 0.1)
    assert run("stubborn", "SIGSEGV") == 4


def test_a_peer_that_jax_aborts_is_not_to_blame(run, capfd):
    assert run("SIGABRT", 4, "SIGKILL") == 4
    assert "process 2 of 3" in capfd.readouterr().err


def test_a_child_that_was_stopped_is_blamed_and_not_those_that_broke_off_for_it(run, capfd, monkeypatch):
    monkeypatch.setattr(_processes, "TOGETHER_SECONDS", 0.5)
    monkeypatch.setattr(_processes, "GRACE_SECONDS", 0.1)
    assert run("SIGSTOP", 4, "SIGABRT") == 4
    said = capfd.readouterr().err
    assert "error: process 0 of 3 (" in said
    assert "was stopped by a signal and did not continue; the others were ended" in said
    assert "process 1 of 3" not in said


def test_words_that_only_another_than_the_first_could_say_are_shown(run, capfd, monkeypatch):
    monkeypatch.setattr(_processes, "TOGETHER_SECONDS", 0.5)
    assert run("sleep", 1) == 1
    assert "process 1 of 2" in (said := capfd.readouterr().err)
    assert "ended with status 1; the others were ended. Its last words:\n    child 1 says 1" in said


def test_what_all_say_is_said_once(run, capfd):
    assert run(2, 2, 2) == 2
    assert capfd.readouterr().err == "child 0 says 2\n"


def test_a_signal_goes_to_all_and_is_the_status(tmp_path):
    script = CHILD.format(folder=str(tmp_path), ends=("saves", "saves"), sleepers=2)
    parent = f"""
import subprocess, sys
from meshwright.contrib.clusters import _launch as _processes
started = subprocess.Popen
script = {script!r}
_processes.subprocess.Popen = lambda command, **told: started([sys.executable, "-c", script], **told)
sys.exit(_processes.run_processes(2, "local"))
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not all((tmp_path / f"ready{index}").exists() for index in range(2)):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    talk = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert "error" not in talk


def test_devices_that_cannot_be_shared_are_refused_before_anything_starts():
    with pytest.raises(InputError, match="3 processes cannot share the 8 devices of 8xCPU") as error:
        run_processes(3, "8xCPU")
    assert error.value.hint == "use --processes 2 or 4"


def test_restarts_of_one_process_of_a_cluster_are_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(InputError, match="--restarts in one of the processes that Slurm") as error:
        train("linear", restarts=2)
    assert "deploy/" in error.value.hint


def test_processes_within_processes_are_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(InputError, match="--processes 2 in one of the processes that Slurm has started"):
        run_processes(2, "8xCPU")
