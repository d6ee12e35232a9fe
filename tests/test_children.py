"""What our processes run, what ends with them, and what becomes of what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meshwright.subprocesses import (
    ABANDONED_SECONDS,
    OWNER,
    own_python,
    working_folder,
)

PATIENCE_SECONDS = 60
SHADOWS = ("secrets", "numpy", "jax", "psutil", "token", "ast", "inspect")


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that say when they are executed."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "weigh",
            "linear",
            "--on",
            "1xCPU",
            "--set",
            "batch.sequences=24",
            "--json",
        ],  # compiled by no other test
        ["data", "tokenize", "a.txt", "b.txt", "--to", "tokens.bin", "--workers", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_process_executes_modules_of_the_working_directory(shadowed: Path, arguments: list[str]):
    for name in ("a.txt", "b.txt"):
        (shadowed / name).write_text("It was a dark and stormy night.")
    done = subprocess.run([sys.executable, "-m", "meshwright", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (shadowed / "executed").exists(), (shadowed / "executed").read_text()


def test_a_folder_named_by_the_user_is_still_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "somebodys.py").write_text("print('found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(own_python("-c", "import somebodys"), capture_output=True, text=True, check=True)
    assert done.stdout == "found\n"


def test_a_working_folder_is_there_for_the_block_alone(tmp_path: Path):
    with working_folder("some-", tmp_path) as folder:
        (folder / "file").write_text("")
        assert folder.parent == tmp_path
        assert folder.name.startswith("some-")
    assert list(tmp_path.iterdir()) == []


HOLDS = """
import sys, time
from pathlib import Path
from meshwright.subprocesses import working_folder
with working_folder("some-", Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(100)
"""


def test_what_killed_processes_left_goes_after_a_day_and_what_belongs_to_a_living_one_stays(tmp_path: Path):
    living, killed = (
        subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    held, left = (Path(process.stdout.readline().strip()) for process in (living, killed))
    killed.kill()
    killed.communicate()
    strange, empty, fresh = (tmp_path / f"some-{name}" for name in ("thing", "empty", "fresh"))
    for folder in (strange, empty, fresh):
        folder.mkdir()
    (strange / "notes").write_text("not made by us")
    (fresh / OWNER).write_text("")
    long_ago = time.time() - 2 * ABANDONED_SECONDS
    for folder in (held, left, strange, empty):
        os.utime(folder, (long_ago, long_ago))
    with working_folder("some-", tmp_path):
        assert {path.name for path in (held, strange, fresh)} <= {path.name for path in tmp_path.iterdir()}
        assert not left.exists()
        assert not empty.exists()
    living.kill()
    living.communicate()


FORKS = """
import os, sys, time
from pathlib import Path
{begin}
    for number, leaves in enumerate((False, True)):
        if os.fork() == 0:
            if leaves:  # a daemon: a session of its own, and its parent gone
                os.setsid()
                if os.fork():
                    os._exit(0)
            Path(sys.argv[1], "new").with_suffix(f".{{number}}").write_text(str(os.getpid()))
            Path(sys.argv[1], "new").with_suffix(f".{{number}}").rename(Path(sys.argv[1], str(number)))
            time.sleep(100)
    while not all(Path(sys.argv[1], name).exists() for name in "01"):
        time.sleep(0.01)
    {end}
"""
GUARDED = "from meshwright.subprocesses import guard\nguard(os.getppid())\nif True:"


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux gives orphans to another than the first process"
)
@pytest.mark.parametrize(
    ("begin", "end", "sent", "status"),
    [
        (GUARDED, "sys.exit(7)", None, 7),
        (GUARDED, "os.kill(os.getpid(), 11)", None, -signal.SIGSEGV),
        (GUARDED, "time.sleep(100)", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_nothing_that_a_process_has_forked_outlives_it(
    tmp_path: Path, begin: str, end: str, sent: signal.Signals | None, status: int
):
    code = FORKS.format(begin=begin, end=end)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    while not all((tmp_path / name).exists() for name in "01"):
        assert process.poll() is None or end != "time.sleep(100)"
        time.sleep(0.01)
    if sent is not None:
        process.send_signal(sent)
    assert process.wait(PATIENCE_SECONDS) == status
    assert not any(psutil.pid_exists(int((tmp_path / name).read_text())) for name in "01")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_the_end_of_the_command_itself_ends_what_was_forked(tmp_path: Path):
    inner = FORKS.format(begin=GUARDED, end="time.sleep(100)")
    outer = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", outer, str(tmp_path), inner])
    while not all((tmp_path / name).exists() for name in "01"):
        time.sleep(0.01)
    forked = [psutil.Process(int((tmp_path / name).read_text())) for name in "01"]
    process.kill()
    process.wait()
    assert psutil.wait_procs(forked, PATIENCE_SECONDS)[1] == []


def test_a_process_ends_with_its_work_whatever_threads_are_left():
    """Python would wait for the thread, and the command for Python."""
    program = """
import sys, threading, time
from meshwright.subprocesses import end_after
threading.Thread(target=lambda: time.sleep(10**6)).start()
def work():
    print("done")
    {how}
end_after(work)
"""
    hows = {"pass": 0, "sys.exit(3)": 3, "sys.exit('words')": 1, "raise ValueError('wrong')": 1}
    for how, status in hows.items():
        command = [sys.executable, "-c", program.format(how=how)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (status, "done\n"), done.stderr
        assert ("words" in done.stderr, "ValueError: wrong" in done.stderr) == (
            "words" in how,
            "wrong" in how,
        )
