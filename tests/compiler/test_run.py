"""How workers end: by their limits, by signals, with their parents. None of these compiles anything."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from meshwright.compiler import Compiled, cache_root, compile_program, warm_workers
from meshwright.errors import CompileError

PATIENCE_SECONDS = 60  # until a test that hangs is given up


@pytest.fixture(params=["new process", "fork"])
def worker_runs(request, request_for, tmp_path, monkeypatch):
    """Compiles a program whose function does what the text says, with a cache that no other test uses."""
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ANOTHER_ENVIRONMENT", "than the session's")  # whose forks are not used then
    forks = warm_workers() if request.param == "fork" else contextlib.nullcontext()

    def run(text, **limits):
        (tmp_path / "somebodys.py").write_text(f"def train_step(mesh):\n{textwrap.indent(text, '    ')}\n")
        program = request_for("somebodys:train_step", "1xCPU", "data=1", search_path=(str(tmp_path),))
        return compile_program(program, **limits)

    before = templates()
    with forks:
        yield run
    assert templates() == before


def templates():
    """The processes that workers are forked from; they are told no folders, only whose children they are."""
    own = str(os.getpid())
    return [p for p in psutil.Process().children() if p.cmdline()[-2:] == ["meshwright.worker._main", own]]


def workers():
    """Compile workers among this process's descendants; other tests may have left helpers of their own."""
    all_of_them = psutil.Process().children(recursive=True)
    return [p for p in all_of_them if "meshwright.worker._main" in p.cmdline() and p not in templates()]


def unfinished():
    return list((cache_root() / "compiled").glob(".making-*"))


@pytest.mark.once
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


@pytest.mark.once
def test_a_worker_that_exits_says_its_status(worker_runs):
    with pytest.raises(CompileError, match=r"ended \(exit status 7\)"):
        worker_runs("import os; os._exit(7)")


@pytest.mark.once
def test_a_worker_that_takes_too_long_is_ended_and_says_where_it_was(worker_runs):
    seen = []
    with pytest.raises(CompileError) as error:
        worker_runs("import time; time.sleep(1000)", time_limit_seconds=3.0, on_phase=seen.append)
    message = "compiling somebodys:train_step for 1xCPU: not done after 3 s ("
    assert error.value.message == f"{message}{seen[-1]})"
    assert error.value.hint == "raise the limit, or weigh a smaller program"
    assert workers() == []


@pytest.mark.once
def test_a_worker_that_takes_too_much_memory_is_ended(worker_runs):
    with pytest.raises(CompileError) as error:
        worker_runs("x = bytearray(2**30); import time; time.sleep(1000)", memory_limit_bytes=2**29)
    assert "GiB of this machine's memory, the limit is 0.5 GiB" in error.value.message
    assert "close other programs" in error.value.hint
    assert workers() == []


@pytest.mark.once
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
import contextlib, sys
from meshwright.compiler import Request, compile_program, warm_workers
request = Request.from_json(sys.stdin.read())
with warm_workers() if "fork" in sys.argv else contextlib.nullcontext():
    compile_program(request, on_phase=lambda phase: print(phase, flush=True))
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("sent", "how", "count"),
    [
        pytest.param(signal.SIGKILL, "new process", 2, id="killed, a new process"),
        pytest.param(signal.SIGINT, "fork", 3, id="interrupted, a fork"),
        pytest.param(
            signal.SIGINT, "new process", 2, id="interrupted, a new process", marks=pytest.mark.wide
        ),
        pytest.param(signal.SIGKILL, "fork", 3, id="killed, a fork", marks=pytest.mark.wide),
    ],
)
def test_a_parent_that_is_stopped_leaves_no_worker(request_for, tmp_path, sent, how, count):
    (tmp_path / "sleeper.py").write_text("import time\ndef train_step(mesh): time.sleep(1000)\n")
    request = request_for("sleeper:train_step", "1xCPU", "data=1", search_path=(str(tmp_path),))
    environment = {**os.environ, "MESHWRIGHT_CACHE_DIR": str(tmp_path / "cache")}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
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
    assert len(workers) == count  # the worker, the process that guards it, and a template
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
    assert seen == ["starting", "tracing", "counting", "compiling", "saving"]
    assert folder == tmp_path / "compiled" / request.key()
    assert compile_program(request, on_phase=seen.append) == (first, folder, True)
    (folder / "live-range.txt.gz").write_bytes(b"")
    again, place, cached = compile_program(request)
    assert not cached
    assert place == folder
    assert again.fingerprint == first.fingerprint


@pytest.fixture
def compiled(request_for, tmp_path, monkeypatch):
    """Compiles a program whose function does what the text says, with the workers that the test chooses."""
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ANOTHER_ENVIRONMENT", "than the session's")

    def run(text, name="somebodys"):
        (tmp_path / f"{name}.py").write_text(f"def train_step(mesh):\n{textwrap.indent(text, '    ')}\n")
        return compile_program(
            request_for(f"{name}:train_step", "1xCPU", "data=1", search_path=(str(tmp_path),))
        )

    return run


REAL_ASSEMBLER = """
import sys
from pathlib import Path
from meshwright.worker import _optimised, _main
_optimised.SCRIPT = ""  # cannot be started, so XLA goes on to the real one
_main.may_fail_late = lambda *_: True  # so that machine code is waited for
_main.main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
"""


def test_the_program_is_the_one_that_a_real_assembler_is_given(request_for, tmp_path):
    request, work, made = request_for("linear", "1xH100", "data=-1"), tmp_path / "work", tmp_path / "made"
    work.mkdir()
    made.mkdir()
    (work / "request.json").write_text(request.to_json())
    folders = [str(work), str(made), str(os.getpid())]
    subprocess.run([sys.executable, "-c", REAL_ASSEMBLER, *folders], check=True, capture_output=True)
    assert Compiled.load(made).fingerprint == compile_program(request)[0].fingerprint


def test_a_template_that_cannot_start_leaves_its_last_words(compiled, monkeypatch, tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('a broken jax')")
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with warm_workers(), pytest.raises(CompileError) as error:
        compiled("pass")
    assert "ended (exit status 1) while starting" in error.value.message
    assert error.value.message.endswith("RuntimeError: a broken jax")


def test_a_fork_finds_what_builds_steps_imported(compiled):
    """Else each fork would spend an eighth of its time on importing the same again."""
    needed = ("optax", "meshwright.trainer.step._build", "meshwright.trainer.models.attention")
    text = (
        f"import sys\nprint('without', [each for each in {needed!r} if each not in sys.modules])\n"
        "sys.stdout.flush()\nimport os\nos._exit(7)"
    )
    with warm_workers(), pytest.raises(CompileError, match=r"without \[\]"):
        compiled(text)


def test_forks_are_not_used_where_the_environment_has_changed(compiled, monkeypatch):
    with warm_workers():
        before = templates()
        monkeypatch.setenv("SOMEBODYS_SETTING", "7")
        with pytest.raises(CompileError, match=r"ended \(exit status 7\)"):
            compiled("import os; os._exit(int(os.environ['SOMEBODYS_SETTING']))")
        assert templates() == before


def test_forks_have_the_working_directory_and_the_cache_of_their_caller(compiled, monkeypatch, tmp_path):
    text = "import os\nprint(os.getcwd(), os.environ['MESHWRIGHT_CACHE_DIR'], flush=True)\nos._exit(7)"
    monkeypatch.setenv("COLUMNS", "80")
    with warm_workers():
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            monkeypatch.chdir(tmp_path / name)
            monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / f"cache-{name}"))
            with pytest.raises(CompileError, match=rf"/{name} /.*/cache-{name}\n"):
                compiled(text)
            assert len(templates()) <= 2
        monkeypatch.delenv("COLUMNS")
        with pytest.raises(CompileError, match="COLUMNS is None"):
            compiled("import os\nprint('COLUMNS is', os.environ.get('COLUMNS'), flush=True)\nos._exit(7)")


def test_forks_run_side_by_side(compiled, tmp_path):
    """Each of two waits until it sees the other."""
    text = "import os, time; open({!r}, 'w')\nwhile not os.path.exists({!r}): time.sleep(0.01)\nos._exit(7)"
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    with warm_workers(), concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(compiled, text.format(own, other), name)
            for name, own, other in (("first", one, two), ("second", two, one))
        ]
        assert [str(run.exception(PATIENCE_SECONDS)).count("exit status 7") for run in runs] == [1, 1]
