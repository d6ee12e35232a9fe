"""How workers end: by their limits, by signals, with their parents. None of these compiles anything."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from meshwright.compiler import cache_root, compile_program
from meshwright.errors import CompileError

PATIENCE_SECONDS = 60  # until a test that hangs is given up


@pytest.fixture
def worker_runs(request_for, tmp_path, monkeypatch):
    """Compiles a program whose function does what the text says, with a cache that no other test uses."""
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))

    def run(text, **limits):
        (tmp_path / "somebodys.py").write_text(f"def train_step(mesh):\n{textwrap.indent(text, '    ')}\n")
        request = request_for("somebodys:train_step", "1xCPU", "data=1", search_path=(str(tmp_path),))
        return compile_program(request, **limits)

    return run


def workers():
    """Compile workers among this process's descendants; other tests may have left helpers of their own."""
    return [p for p in psutil.Process().children(recursive=True) if "meshwright.worker._main" in p.cmdline()]


def unfinished():
    return list((cache_root() / "compiled").glob(".making-*"))


def test_a_worker_that_is_killed_leaves_its_last_words(worker_runs):
    with pytest.raises(CompileError) as error:
        worker_runs(
            "import os, sys; print('Check failed: it', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
        )
    message = error.value.message
    assert message.startswith(
        "the compile worker for somebodys:train_step on 1xCPU ended (killed by SIGKILL) while tracing."
    )
    assert message.endswith("Its last words:\n    Check failed: it")
    assert "too much memory" in error.value.hint
    assert unfinished() == []


def test_a_worker_that_exits_says_its_status(worker_runs):
    with pytest.raises(CompileError, match=r"ended \(exit status 7\)"):
        worker_runs("import os; os._exit(7)")


def test_a_worker_that_takes_too_long_is_ended_and_says_where_it_was(worker_runs):
    seen = []
    with pytest.raises(CompileError) as error:
        worker_runs("import time; time.sleep(1000)", time_limit_seconds=3.0, on_phase=seen.append)
    message = "compiling somebodys:train_step for 1xCPU: not done after 3 s ("
    assert error.value.message == f"{message}{seen[-1]})"
    assert error.value.hint == "raise the limit, or weigh a smaller program"
    assert workers() == []


def test_a_worker_that_takes_too_much_memory_is_ended(worker_runs):
    with pytest.raises(CompileError) as error:
        worker_runs("x = bytearray(2**30); import time; time.sleep(1000)", memory_limit_bytes=2**29)
    assert "GiB of this machine's memory, the limit is 0.5 GiB" in error.value.message
    assert "close other programs" in error.value.hint
    assert workers() == []


def test_a_child_that_a_users_function_forks_does_not_outlive_the_command(worker_runs, tmp_path):
    forked = tmp_path / "forked"
    with pytest.raises(CompileError, match=r"ended \(exit status 7\)"):
        worker_runs(
            "import os, time\n"
            f"forked = {str(forked)!r}\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    open(forked, 'w').write(str(os.getpid()))\n"
            "    time.sleep(1000)\n"
            "while not os.path.exists(forked) or not os.path.getsize(forked): time.sleep(0.01)\n"
            "os._exit(7)"
        )
    assert not psutil.pid_exists(int(forked.read_text()))


PARENT = """
import os, sys
from meshwright.compiler import Request, compile_program
request = Request.from_json(sys.stdin.read())
compile_program(request, on_phase=lambda phase: print(phase, flush=True))
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_a_parent_that_is_stopped_leaves_no_worker(request_for, tmp_path, sent):
    (tmp_path / "sleeper.py").write_text("import time\ndef train_step(mesh): time.sleep(1000)\n")
    request = request_for("sleeper:train_step", "1xCPU", "data=1", search_path=(str(tmp_path),))
    environment = {**os.environ, "MESHWRIGHT_CACHE_DIR": str(tmp_path / "cache")}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    parent.stdin.write(request.to_json())
    parent.stdin.close()
    while "tracing" not in parent.stdout.readline():  # the worker is in the function now
        assert parent.poll() is None, parent.stderr.read()
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) == 2  # the worker, and the process that guards it
    parent.send_signal(sent)
    parent.wait(PATIENCE_SECONDS)
    _, alive = psutil.wait_procs(workers, PATIENCE_SECONDS)
    words = parent.stderr.read()
    parent.stdout.close()
    parent.stderr.close()
    assert alive == []
    if sent is signal.SIGINT:  # it also tidied up
        assert "KeyboardInterrupt" in words
        assert list((tmp_path / "cache/compiled").iterdir()) == []


def test_phases_are_told_a_program_is_cached_and_a_corrupt_one_is_compiled_again(
    request_for, tmp_path, monkeypatch
):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    request, seen = request_for("linear", "1xCPU", "data=-1"), []
    first, folder, cached = compile_program(request, on_phase=seen.append)
    assert not cached
    order = ["starting", "tracing", "counting", "compiling", "saving"]
    assert seen == [phase for phase in order if phase in seen]
    assert {"starting", "tracing"} <= set(seen)
    assert folder == tmp_path / "compiled" / request.key()
    assert compile_program(request, on_phase=seen.append) == (first, folder, True)
    (folder / "live-range.txt.gz").write_bytes(b"")
    again, place, cached = compile_program(request)
    assert not cached
    assert place == folder
    assert again.fingerprint == first.fingerprint
