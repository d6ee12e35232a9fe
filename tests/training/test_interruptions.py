"""What ends a run early: a signal, which all processes obey after the same step, and the watchdog."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from meshwright.config import FaultConfig
from meshwright.trainer.launch import SingleProcess, noting_signals
from meshwright.trainer.loop import Agreement, PhaseClock, RunFolder, Watchdog, stop_at_once

pytestmark = pytest.mark.quick


def test_a_run_that_goes_on_is_left_alone(tmp_path):
    ended: list[int] = []
    faults = FaultConfig(startup_deadline_seconds=60.0, step_deadline_seconds=60.0)
    with Watchdog(RunFolder(tmp_path), faults, PhaseClock(), ended.append).watching() as watchdog:
        watchdog.step_done(1)
    assert (ended, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(("steps", "words"), [((), "before the first step"), ((1, 2), "after step 2")])
def test_a_run_that_hangs_is_ended_with_every_threads_stack(tmp_path, steps, words, capfd):
    ended = threading.Event()
    status: list[int] = []

    def end(number: int) -> None:
        status.append(number)
        ended.set()

    faults = FaultConfig(startup_deadline_seconds=0.2, step_deadline_seconds=0.2)
    with Watchdog(RunFolder(tmp_path), faults, PhaseClock(), end).watching() as watchdog:
        for step in steps:
            watchdog.step_done(step)
        assert ended.wait(30)
    assert status == [4]
    said = (tmp_path / "hang.txt").read_text()
    assert words in said
    assert "in phase 'start-up'" in said
    assert "test_interruptions.py" in said  # where this thread waits
    assert "deadline_seconds, which is 0.2" in said
    assert capfd.readouterr().err.startswith("error: no progress for ")


class Second(SingleProcess):
    index, count, is_first = 1, 4, False


def test_of_several_processes_the_one_that_hangs_is_named_and_leaves_its_own_stacks(tmp_path, capfd):
    ended = threading.Event()
    faults = FaultConfig(startup_deadline_seconds=0.2)
    with Watchdog(
        RunFolder(tmp_path, peers=Second()), faults, PhaseClock(), lambda status: ended.set()
    ).watching():
        assert ended.wait(30)
    assert "test_interruptions.py" in (tmp_path / "hang-1.txt").read_text()
    assert not (tmp_path / "hang.txt").exists()
    assert f"(1 of the run's 4) on {socket.gethostname()} hangs and is ended" in capfd.readouterr().err


def test_without_deadlines_nothing_is_watched(tmp_path):
    faults = FaultConfig(startup_deadline_seconds=None, step_deadline_seconds=None)
    with Watchdog(RunFolder(tmp_path), faults, PhaseClock(), pytest.fail).watching():
        pass


def test_a_thread_that_holds_on_to_a_lock_cannot_keep_the_process(tmp_path):
    script = f"""
import threading
from pathlib import Path
from meshwright.config import FaultConfig
from meshwright.trainer.loop import RunFolder
from meshwright.trainer.loop._interface import PhaseClock
from meshwright.trainer.loop._interruptions import Watchdog
lock = threading.Lock()
lock.acquire()
folder = RunFolder(Path({str(tmp_path)!r}))
with Watchdog(folder, FaultConfig(startup_deadline_seconds=0.2), PhaseClock()).watching():
    lock.acquire()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "Current thread" in done.stderr or "Thread 0x" in done.stderr


class Two(SingleProcess):
    count = 2


def test_alone_a_signal_is_what_it_is(mesh):
    agreement = Agreement(mesh(data=2), SingleProcess(), waits=False)
    assert [agreement.on(signal) for signal in (None, 15)] == [None, 15]


def test_on_a_cpu_the_answer_is_that_of_the_step(mesh):
    agreement = Agreement(mesh(data=2, tensor=2), Two(), waits=True)
    assert [agreement.on(signal) for signal in (None, 15, None)] == [None, 15, None]


def test_on_an_accelerator_it_is_that_of_the_step_before(mesh):
    agreement = Agreement(mesh(data=2, tensor=2), Two(), waits=False)
    assert [agreement.on(signal) for signal in (None, 15, None)] == [None, None, 15]


def test_one_ctrl_c_is_noted_and_the_second_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with noting_signals(stop_at_once) as noted:
        assert noted == []
        os.kill(os.getpid(), signal.SIGINT)
        assert noted == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_is_noted_however_often_it_comes():
    before = signal.getsignal(signal.SIGTERM)
    with noting_signals(stop_at_once) as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_nothing_is_noted_and_nothing_breaks():
    answers: list[list[int]] = []

    def work() -> None:
        with noting_signals(stop_at_once) as noted:
            answers.append(noted)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [[]]
