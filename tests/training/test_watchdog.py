import socket
import subprocess
import sys
import threading

import pytest

from meshwright.config import FaultConfig
from meshwright.launch import Alone
from meshwright.training._events import Phases
from meshwright.training._watchdog import Watchdog


def test_a_run_that_goes_on_is_left_alone(tmp_path):
    ended: list[int] = []
    faults = FaultConfig(startup_deadline_seconds=60.0, step_deadline_seconds=60.0)
    with Watchdog(tmp_path, faults, Phases(), ended.append).watching() as watchdog:
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
    with Watchdog(tmp_path, faults, Phases(), end).watching() as watchdog:
        for step in steps:
            watchdog.step_done(step)
        assert ended.wait(30)
    assert status == [4]
    said = (tmp_path / "hang.txt").read_text()
    assert words in said
    assert "in phase 'start-up'" in said
    assert "test_watchdog.py" in said  # where this thread waits
    assert "deadline_seconds, which is 0.2" in said
    assert capfd.readouterr().err.startswith("error: nothing has gone on for ")


class Second(Alone):
    index, count, is_first = 1, 4, False


def test_of_several_processes_the_one_that_hangs_is_named_and_leaves_its_own_stacks(tmp_path, capfd):
    ended = threading.Event()
    faults = FaultConfig(startup_deadline_seconds=0.2)
    with Watchdog(tmp_path, faults, Phases(), lambda status: ended.set(), Second()).watching():
        assert ended.wait(30)
    assert "test_watchdog.py" in (tmp_path / "hang-1.txt").read_text()
    assert not (tmp_path / "hang.txt").exists()
    assert f"(1 of the run's 4) on {socket.gethostname()} hangs and is ended" in capfd.readouterr().err


def test_without_deadlines_nothing_is_watched(tmp_path):
    faults = FaultConfig(startup_deadline_seconds=None, step_deadline_seconds=None)
    with Watchdog(tmp_path, faults, Phases(), pytest.fail).watching():
        pass


def test_a_thread_that_holds_on_to_a_lock_cannot_keep_the_process(tmp_path):
    script = f"""
import threading
from pathlib import Path
from meshwright.config import FaultConfig
from meshwright.training._events import Phases
from meshwright.training._watchdog import Watchdog
lock = threading.Lock()
lock.acquire()
with Watchdog(Path({str(tmp_path)!r}), FaultConfig(startup_deadline_seconds=0.2), Phases()).watching():
    lock.acquire()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "Current thread" in done.stderr or "Thread 0x" in done.stderr
