"""Starts a compile worker, watches it, and reads what it left.

A worker is a process of its own because compiler flags and device counts are per process, because
an XLA CHECK failure kills a process, and because a planner must survive that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ..errors import CompileError, InputError, MeshwrightError
from . import _cache
from ._record import Compiled
from ._request import Request

TIME_LIMIT_SECONDS = 1200.0
POLL_SECONDS = 0.05
STDERR_LINES = 12
KINDS: dict[str, type[MeshwrightError]] = {"InputError": InputError, "CompileError": CompileError}


def compile_program(
    request: Request,
    *,
    on_phase: Callable[[str], None] = lambda phase: None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    memory_limit_bytes: int | None = None,
) -> tuple[Compiled, Path, bool]:
    """The compiled program of `request`, its folder, and whether it came from the cache.

    Args:
        on_phase: told what the worker is doing (starting, tracing, compiling, ...).
        memory_limit_bytes: of the worker; nine tenths of what is free unless told.

    Raises:
        InputError: the worker found the user's input wrong.
        CompileError: the compiler failed, died, or passed a limit; the message has its own words.
    """
    key = request.key()
    if request.config is not None:
        cached = _cache.lookup(key)
        if cached is not None:
            return cached, _cache.entry(key), True
    if memory_limit_bytes is None:
        memory_limit_bytes = psutil.virtual_memory().available * 9 // 10
    made = _cache.aside()
    try:
        answer = _work(request, made, on_phase, time_limit_seconds, memory_limit_bytes)
        if "cached" in answer:  # a foreign step, known by its lowered text
            shutil.rmtree(made)
            key = answer["cached"]
        else:
            key = answer.get("key", key)
            _cache.publish(made, key)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    compiled = _cache.lookup(key)
    assert compiled is not None, f"the worker left no readable program under {key}"
    return compiled, _cache.entry(key), "cached" in answer


def _work(
    request: Request, made: Path, on_phase: Callable[[str], None], seconds: float, num_bytes: int
) -> dict[str, str]:
    """Run a worker to its end; its answer, or the error it met."""
    with tempfile.TemporaryDirectory(prefix="meshwright-worker-") as folder:
        work = Path(folder)
        (work / "request.json").write_text(request.to_json())
        command = [sys.executable, "-m", "meshwright.compiler._worker", folder, str(made), str(os.getpid())]
        with open(work / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True
            )
        try:
            passed = _watch(process, work, on_phase, seconds, num_bytes)
        finally:
            _end(process)
        if passed:
            raise CompileError(f"compiling {request.name} for {request.fleet}: {passed[0]}", hint=passed[1])
        return _answer(request, process.returncode, work)


def _watch(
    process: subprocess.Popen[bytes],
    work: Path,
    on_phase: Callable[[str], None],
    seconds: float,
    num_bytes: int,
) -> tuple[str, str] | None:
    """Wait for the worker; which limit it passed, with a hint, or None."""
    started, last = time.monotonic(), ""
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        phase_file = work / "phase"
        phase = phase_file.read_text() if phase_file.exists() else "starting"
        if phase and phase != last:  # it is empty while the worker writes it
            on_phase(phase)
            last = phase
        if time.monotonic() - started > seconds:
            return f"not done after {seconds:.0f} s ({last})", "raise the limit, or weigh a smaller program"
        try:
            resident = watched.memory_info().rss
        except psutil.NoSuchProcess:
            break
        if resident > num_bytes:
            return (
                f"the compiler took {resident / 2**30:.1f} GiB of this machine's memory, the limit is "
                f"{num_bytes / 2**30:.1f} GiB",
                "close other programs, or weigh on a machine with more memory",
            )
        time.sleep(POLL_SECONDS)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no worker behind, whatever happened (Ctrl-C included)."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answer(request: Request, status: int, work: Path) -> dict[str, str]:
    """What the worker wrote, or an error made of its own words."""
    answer_file = work / "answer.json"
    if status == 0 and answer_file.exists():
        answer: dict[str, str] = json.loads(answer_file.read_text())
        if "error" in answer:
            raise KINDS[answer["error"]](answer["message"], hint=answer["hint"])
        return answer
    lines = (work / "stderr").read_text(errors="replace").splitlines()
    words = [line for line in lines if line.strip()][-STDERR_LINES:]  # a stack trace may be blank lines
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    raise CompileError(
        f"the compile worker for {request.name} on {request.fleet} ended ({how}). Its last words:\n    "
        + "\n    ".join(words),
        hint="`meshwright doctor` shows which compile targets this machine has",
    )
