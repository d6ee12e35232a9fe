"""The roll over a dictionary in place of jax's service, and of two real processes one of which dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshwright.contrib.clusters import LEFT_LOOKS, SILENT_SECONDS, Heartbeat


class Board:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


@pytest.fixture
def three(monkeypatch):
    """Three processes' rolls, the statuses they ended with, and a clock that is set by hand."""
    monkeypatch.setattr("meshwright.contrib.clusters._coordination.BEAT_SECONDS", 0.0)
    board, ended, clock = Board(), [], [0.0]
    rolls = [
        Heartbeat(
            board,
            n,
            f"process {n} of 3 on host{n}",
            lambda status, n=n: ended.append((n, status)),
            lambda: clock[0],
        )
        for n in range(3)
    ]
    return rolls, ended, clock


def test_while_all_answer_nothing_is_ended(three):
    rolls, ended, clock = three
    for _ in range(30):
        clock[0] += 1
        for roll in rolls:
            roll.beat()
    assert ended == []


def test_a_silent_process_is_named_and_all_are_ended(three, capfd):
    rolls, ended, clock = three
    for roll in rolls:
        roll.beat()
    for _ in range(int(SILENT_SECONDS) + 2):
        clock[0] += 1
        for roll in rolls[:2]:
            if not ended:
                roll.beat()
    assert ended == [(0, 4)]
    rolls[1].beat()
    assert ended == [(0, 4), (1, 4)]
    said = capfd.readouterr().err
    assert "error: process 2 of 3 on host2 has given no sign of life for 9 s" in said
    assert "hint: resume the run with --resume" in said


def test_a_first_process_that_was_stopped_itself_blames_nobody_when_it_goes_on(three):
    rolls, ended, clock = three
    for roll in rolls:
        roll.beat()
    clock[0] += 10 * SILENT_SECONDS  # nobody's answer came through meanwhile
    rolls[0].beat()
    for roll in rolls:
        roll.beat()
    assert ended == []


def test_a_first_process_that_takes_no_answers_is_named_by_another(three, capfd, monkeypatch):
    rolls, ended, _ = three
    monkeypatch.setattr("meshwright.contrib.clusters._coordination.LOOK_SECONDS", 0.01)
    go_on = threading.Event()
    rolls[1].start()
    rolls[1]._client.key_value_set = lambda *told, **more: go_on.wait()
    rolls[1]._threads[1].join(30)
    go_on.set()
    assert (1, 4) in ended
    assert "the first process has accepted no answer from process 1 of 3 on host1" in capfd.readouterr().err


def test_what_a_process_says_when_it_leaves_is_told_if_the_first_does_not_end_by_itself(three, capfd):
    rolls, ended, _clock = three
    rolls[1].start()
    rolls[1].leave("MemoryError: no room for the batch", 1)
    rolls[0].beat()
    assert ended == [(1, 1)]
    for _ in range(LEFT_LOOKS + 1):
        assert ended == [(1, 1)]
        for roll in (rolls[2], rolls[0]):
            roll.beat()
    assert ended == [(1, 1), (0, 4)]
    assert (
        "error: process 1 of 3 on host1 ended: MemoryError: no room for the batch" in capfd.readouterr().err
    )


def test_when_the_first_leaves_the_others_end_too(three):
    rolls, ended, _ = three
    rolls[0].start()
    rolls[0].leave("the loss is nan", 1)
    rolls[2].beat()
    assert ended == [(0, 1), (2, 4)]


def test_a_process_that_broke_off_leaves_it_to_the_roll_to_name_the_one_that_died(three, capfd):
    rolls, ended, clock = three
    for roll in rolls:
        roll.beat()
    rolls[0].start()
    clock[0] += SILENT_SECONDS + 1
    rolls[0].await_verdict()
    assert ended[0] == (0, 4)
    assert "process 1 of 3 on host1 has given no sign of life" in capfd.readouterr().err


def test_a_process_that_broke_off_since_the_first_is_gone_says_so_at_once(three, capfd):
    rolls, ended, _ = three

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("UNAVAILABLE: the coordinator is gone")

    rolls[2]._client.key_value_set = gone
    rolls[2].await_verdict()
    assert ended == [(2, 4)]
    assert "error: process 2 of 3 on host2 has lost the first process" in capfd.readouterr().err


def test_an_error_of_the_service_is_not_taken_for_an_answer(three):
    rolls, ended, _ = three

    def gone(key: str) -> str:
        raise RuntimeError("UNAVAILABLE: the coordinator is gone")

    rolls[1]._client.key_value_try_get = gone
    with pytest.raises(RuntimeError, match="coordinator is gone"):
        rolls[1].beat()
    rolls[1]._answer_regularly()  # the thread ends, and leaves the rest to jax
    assert ended == []


WAITS = """
import os, sys, time
from meshwright.contrib.clusters import _coordination
from meshwright.trainer.launch import join, place_in
_coordination.BEAT_SECONDS = _coordination.LOOK_SECONDS = 0.25  # eight of them are waited for
peers = join(place_in(os.environ))
peers.gathered("there", None)
sys.stdout.write("ready\\n"); sys.stdout.flush()
time.sleep(120)
"""


def test_a_process_that_is_killed_where_nobody_watches_it_is_named_in_seconds(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = {"MESHWRIGHT_COORDINATOR": f"127.0.0.1:{port}", "MESHWRIGHT_NUM_PROCESSES": "2"}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", WAITS],
            env={**os.environ, **told, "MESHWRIGHT_PROCESS": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    )
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    second.send_signal(signal.SIGKILL)
    second.communicate()
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 4
    assert f"error: process 1 of 2 on {socket.gethostname()} has given no sign of life" in said
