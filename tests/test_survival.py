"""Real runs in real processes, killed at any moment: what is resumed is what would have been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshwright.trainer.checkpoint import newest_checkpoint, whole_array


def command(folder: Path, config: str, on: str, steps: int, *more: str) -> list[str]:
    settings = ("--set", "evaluation.every_steps=1000", "--set", "evaluation.batches=1")
    train = (sys.executable, "-m", "meshwright", "train", config, "--on", on, "--steps", str(steps))
    return [*train, "--folder", str(folder), "--resume", *settings, *more]


def finished(said: list[str]) -> None:
    done = subprocess.run(said, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def outcome(folder: Path) -> tuple[dict[int, float], dict[str, bytes]]:
    """Every loss, and the bytes of the last checkpoint's arrays."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = newest_checkpoint(folder / "checkpoints")
    assert found is not None
    assert not found.rejected
    arrays = {array.path: whole_array(found, array).tobytes() for array in found.manifest.arrays}
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, arrays


def saving(folder: Path) -> bool:
    """Return whether a save is being written now."""
    return any(name.endswith(".partial") for name in os.listdir(folder / "checkpoints"))


def killed(said: list[str], folder: Path, moments: random.Random, *, in_a_save: bool) -> bool:
    """Start the run and kill it: inside a save, or after a random time from its first new checkpoint on.
    Whether it was killed before it was done."""
    before = newest_step(folder)
    process = subprocess.Popen(said, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait(process, lambda: newest_step(folder) > before)
    if in_a_save:
        wait(process, lambda: saving(folder))
    else:
        time.sleep(moments.uniform(0, 0.8))
    process.kill()
    talk = process.communicate()[1]
    assert process.returncode in (0, -signal.SIGKILL), talk
    assert "Traceback" not in talk
    return process.returncode != 0


def newest_step(folder: Path) -> int:
    there = folder / "checkpoints"
    return (
        max((int(name) for name in os.listdir(there) if name.isdecimal()), default=0) if there.is_dir() else 0
    )


def wait(process: subprocess.Popen[str], until: Callable[[], bool]) -> None:
    while process.poll() is None and not until():
        time.sleep(0.0005)


def survives(
    tmp_path: Path, kills: int, in_saves: int, seed: int, config: str, on: str, steps: int, *more: str
):
    """A run that is killed again and again, and resumed each time, ends as one that is left alone."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finished(command(whole, config, on, steps, *more))
    moments, said = random.Random(seed), command(parts, config, on, steps, *more)
    inside = set(moments.sample(range(kills), in_saves))
    done = [killed(said, parts, moments, in_a_save=number in inside) for number in range(kills)]
    assert all(done), f"the run was over before kill {done.index(False) + 1}: give it more steps"
    finished(said)
    assert outcome(parts) == outcome(whole)
    notices = [json.loads(line) for line in (parts / "notices.jsonl").read_text().splitlines()]
    assert notices[-1]["kind"] == "resumed"


NANO = ("bytes-nano", "1xCPU")


@pytest.mark.wide
def test_a_run_that_is_killed_ends_as_one_that_is_left_alone(tmp_path):
    survives(tmp_path, 2, 1, 1, *NANO, 300, "--set", "checkpoint.every_steps=5")


@pytest.mark.long
def test_twenty_kills_and_three_of_them_inside_a_save(tmp_path):
    survives(tmp_path, 20, 3, 2, *NANO, 6000, "--set", "checkpoint.every_steps=5")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["data=8", "data=2,fsdp=2,tensor=2"])
def test_ten_kills_of_ten_million_parameters_on_eight_devices(tmp_path, layout):
    more = ("--layout", layout, "--set", "checkpoint.every_steps=2", "--set", "batch.sequences=8")
    survives(tmp_path, 10, 2, 3, "bytes-10m", "8xCPU", 36, *more, "--set", "batch.sequence_length=64")


@pytest.mark.wide
@pytest.mark.once
def test_restarts_bring_back_a_run_that_was_killed(tmp_path):
    said = command(tmp_path / "run", *NANO, 100, "--set", "checkpoint.every_steps=5", "--restarts", "2")
    process = subprocess.Popen(said, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait(process, lambda: newest_step(tmp_path / "run") > 0)
    (child,) = (each for each in psutil.Process(process.pid).children() if "train" in each.cmdline())
    child.kill()
    talk = process.communicate(timeout=120)[1]
    assert process.returncode == 0
    assert "restart 1 of 2: the run was killed by SIGKILL; it is resumed" in talk
    losses, _ = outcome(tmp_path / "run")
    assert list(losses) == list(range(1, 101))
