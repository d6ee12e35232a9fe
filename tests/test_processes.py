"""Real runs in several real processes: the same training, and what happens when one of them dies."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from meshwright.trainer.checkpoint import newest_checkpoint
from tests import commands

# Small enough that four processes on two cores compile it in seconds.
TINY = ("model.num_layers=1", "model.embed_dim=32", "model.mlp_dim=64", "batch.sequence_length=32")
EVALUATION = ("evaluation.every_steps=1000", "evaluation.batches=1")


def command(
    config: str, folder: Path, on: str, steps: int, *more: str, sets: tuple[str, ...] = ()
) -> list[str]:
    said = [sys.executable, "-m", "meshwright", "train", config, "--on", on, "--steps", str(steps)]
    said += [word for each in (*EVALUATION, *sets) for word in ("--set", each)]
    return [*said, "--folder", str(folder), *more]


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder) if "loss" in line]


def ran(said: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(said, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def ran_here(said: list[str]) -> None:
    """Run a command of one process in the tests' own."""
    done = commands.run(*said[3:])
    assert done.status == 0, done.talk


def begun(said: list[str], until: Callable[[], bool]) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """The parent, and its children once the run is so far."""
    parent = subprocess.Popen(said, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while parent.poll() is None and not until():
        time.sleep(0.02)
    if parent.poll() is not None:
        pytest.fail(f"over too early: {parent.communicate()}")
    return parent, sorted(psutil.Process(parent.pid).children(), key=lambda child: child.pid)


# The number of processes, the configuration, the number of devices, the layout, and what else is set.
SEVERAL = [
    pytest.param((2, "linear", 2, "fsdp=2", ("model.input_dim=4096",)), id="two"),
    # The processes of the second data replica hold copies.
    pytest.param((4, "bytes-nano", 8, "data=2,fsdp=2,tensor=2", TINY), id="four", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=SEVERAL)
def several(request, tmp_path_factory: pytest.TempPathFactory):
    """What is run, the folder of several processes that ran it, and their answer."""
    processes, config, devices, layout, sets = request.param
    folder = tmp_path_factory.mktemp("several") / "run"
    more = ("--layout", layout, "--processes", str(processes), "--json")
    done = ran(command(config, folder, f"{devices}xCPU", 4, *more, sets=sets))
    return (config, devices, layout, sets), folder, json.loads(done.stdout)


def test_several_processes_train_as_one_with_all_devices(several, tmp_path):
    (config, devices, layout, sets), folder, answer = several  # stdout has it alone, whatever gloo says
    ran_here(command(config, tmp_path / "one", f"{devices}xCPU", 4, "--layout", layout, sets=sets))
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5, abs=1e-5)
    assert answer["measurement"]["num_devices"] == devices
    assert answer["measurement"]["fingerprint"] == answer["weighing"]["compile"]["fingerprint"]


@pytest.mark.wide
def test_processes_whose_rows_lie_apart_train_as_one(tmp_path):
    """`fsdp` is outermost, and `data` is the outer part of the rows: each process has every other pair."""
    for processes, name in (("2", "two"), ("1", "one")):
        layout = ("--layout", "fsdp=2,data=2", "--processes", processes)
        sets = ("batch.sequences=16", "batch.microbatch_sequences=2")
        ran(command("linear", tmp_path / name, "4xCPU", 4, *layout, sets=sets))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_what_one_process_looked_at_is_not_told_of_all(several):
    measured = json.loads((several[1] / "measurement.json").read_text())
    assert measured["process_rss_growth_bytes"] is None
    assert "several processes" in measured["not_measured"]["process_rss_growth_bytes"]


def test_every_process_writes_its_part_of_a_checkpoint_and_each_number_is_there_once(several):
    folder = several[1]
    found = newest_checkpoint(folder / "checkpoints")
    assert found is not None
    assert found.step == 4
    databases = {file.name.split("/")[1] for file in found.manifest.files if file.name.count("/") > 1}
    assert databases == {"d", "ocdbt.process_1"}
    files = [found.folder / file.name for file in found.manifest.files if "/d/" in file.name]
    num_bytes = sum(
        math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in found.manifest.arrays
    )
    assert sum(path.stat().st_size for path in files) < 1.5 * num_bytes  # with what describes the arrays


@pytest.mark.once
@pytest.mark.parametrize(
    ("processes", "killed", "fewer"), [(2, 1, 1), pytest.param(4, 2, 2, marks=pytest.mark.long)]
)
def test_a_process_that_is_killed_ends_the_run_and_fewer_go_on_with_it(processes, killed, fewer, tmp_path):
    folder = tmp_path / "run"
    every = ("checkpoint.every_steps=5",)
    said = command("linear", folder, "4xCPU", 100_000, "--processes", str(processes), sets=every)
    parent, children = begun(said, lambda: (folder / "checkpoints/10").exists())
    children[killed].kill()
    at = time.monotonic()
    talk = parent.communicate(timeout=60)[1]
    assert time.monotonic() - at < 30  # jax alone would wait for longer before it gives a process up
    assert parent.returncode == 4
    who = f"process {killed} of {processes} ({children[killed].pid} on {os.uname().nodename})"
    assert f"error: {who} was killed by SIGKILL" in talk
    assert not any(child.is_running() for child in children)

    found = newest_checkpoint(folder / "checkpoints")
    assert found is not None
    assert not found.rejected
    more = ("--processes", str(fewer), "--resume")
    (ran if fewer > 1 else ran_here)(command("linear", folder, "4xCPU", found.step + 3, *more, sets=every))
    resumed = [line for line in lines(folder, "notices.jsonl") if line["kind"] == "resumed"]
    assert resumed[-1]["step"] == found.step
    whole = tmp_path / "whole"
    ran_here(command("linear", whole, "4xCPU", found.step + 3, sets=every))
    # The loss falls from 1700 towards 0, and the rounding of parameters does not fall with it.
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5, abs=1e-5)


@pytest.mark.wide
def test_sigterm_at_one_process_stops_all_after_the_same_step_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    said = command("linear", folder, "4xCPU", 100_000, "--processes", "2")
    parent, children = begun(said, lambda: len(lines(folder)) > 5)
    children[1].terminate()  # as a scheduler that takes one host away
    parent.communicate(timeout=60)
    assert parent.returncode == 143
    measured = json.loads((folder / "measurement.json").read_text())
    assert measured["signal"] == "SIGTERM"
    found = newest_checkpoint(folder / "checkpoints")
    assert found is not None
    assert found.step == measured["steps"] == len(losses(folder))


@pytest.mark.once
def test_a_mistake_of_the_user_is_said_once(tmp_path):
    said = command("linear", tmp_path / "run", "4xCPU", 3, "--processes", "2", "--layout", "data=3")
    done = subprocess.run(said, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("data=3") == 1
    assert "the others were ended" not in done.stderr


@pytest.mark.wide
def test_all_processes_go_back_from_a_bad_step_and_stop_together(tmp_path):
    wild = ("optimizer.learning_rate=1e12", "faults.bad_step=rollback", "faults.most_bad_steps=2")
    said = command("linear", tmp_path / "run", "2xCPU", 30, "--processes", "2", sets=wild)
    done = subprocess.run(said, capture_output=True, text=True)
    assert done.returncode == 1
    assert [line["message"].partition(";")[0] for line in lines(tmp_path / "run", "notices.jsonl")] == [
        "step 3: the loss is inf"
    ] * 2
    assert done.stderr.count("error: step 3: the loss is inf; training stopped") == 1
    assert "process 1" not in done.stderr
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.long
@pytest.mark.wide
def test_restarts_bring_back_all_processes(tmp_path):
    folder = tmp_path / "run"
    more = ("--processes", "2", "--restarts", "1")
    said = command("linear", folder, "2xCPU", 400, *more, sets=("checkpoint.every_steps=5",))
    parent, inner = begun(said, lambda: (folder / "checkpoints/5").exists())
    psutil.Process(inner[0].pid).children()[1].send_signal(signal.SIGKILL)
    talk = parent.communicate(timeout=120)[1]
    assert parent.returncode == 0, talk
    assert "restart 1 of 1: the run ended with status 4; it is resumed" in talk
    assert len(losses(folder)) == 400


@pytest.mark.once
def test_processes_of_a_cluster_that_differ_end_in_words_in_each_of_them(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        told = {
            "MESHWRIGHT_COORDINATOR": f"127.0.0.1:{probe.getsockname()[1]}",
            "MESHWRIGHT_NUM_PROCESSES": "2",
        }
    started = [
        subprocess.Popen(
            command("linear", tmp_path / "run", "2xCPU", 10_000, sets=(f"optimizer.learning_rate={rate}",)),
            env={**os.environ, **told, "MESHWRIGHT_PROCESS": str(index)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, rate in enumerate((0.1, 0.2))
    ]
    said = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    here = socket.gethostname()
    words = f"optimizer.learning_rate is 0.1 in process 0 on {here}, and 0.2 in process 1 on {here}"
    assert all(f"error: the processes of this run differ: {words}\n" in each for each in said)
    assert not (tmp_path / "run").exists()
