"""Start a compile worker, watch it, and read its answer.

A worker is a separate process for three reasons: compiler flags and device counts are per process, an XLA
CHECK failure kills its process, and a planner must survive that.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ..children import working_folder
from ..errors import CompileError, InputError, MeshwrightError
from . import _cache
from ._record import Compiled, Request
from ._workers import STDERR_FILE, Worker, start_worker

TIME_LIMIT_SECONDS = 1200.0
POLL_SECONDS = 0.05
STDERR_LINES = 12
CRASHED = "Fatal Python error"  # the first words of Python's faulthandler
BUILDING = ("starting", "tracing", "counting")  # phases in which the user's code runs
KINDS: dict[str, type[MeshwrightError]] = {"InputError": InputError, "CompileError": CompileError}


def compile_program(
    request: Request,
    *,
    on_phase: Callable[[str], None] = lambda phase: None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    memory_limit_bytes: int | None = None,
) -> tuple[Compiled, Path, bool]:
    """Return the compiled program of `request`, its folder, and whether it came from the cache.

    Args:
        on_phase: called with the worker's phase (starting, tracing, compiling, ...).
        memory_limit_bytes: the limit for the worker; nine tenths of the free memory by default.

    Raises:
        InputError: the worker found an error in the user's input.
        CompileError: the compiler failed, crashed, or passed a limit. The message has the compiler's words.
    """
    key = request.key()
    if request.config is not None:
        cached = _cache.lookup(key)
        if cached is not None:
            return cached, _cache.entry(key), True
    if memory_limit_bytes is None:
        memory_limit_bytes = psutil.virtual_memory().available * 9 // 10
    with _cache.aside() as made:
        answer = _work(request, made, on_phase, time_limit_seconds, memory_limit_bytes)
        if "cached" in answer:  # a foreign step is found by its lowered text
            key = answer["cached"]
        else:
            key = answer.get("key", key)
            _cache.publish(made, key)
    compiled = _cache.lookup(key)
    assert compiled is not None, f"the worker left no readable program under {key}"
    return compiled, _cache.entry(key), "cached" in answer


def _work(
    request: Request, made: Path, on_phase: Callable[[str], None], seconds: float, num_bytes: int
) -> dict[str, str]:
    """Run a worker to its end. Return its answer, or raise its error."""
    with working_folder("meshwright-worker-") as work:
        (work / "request.json").write_text(request.to_json())
        worker = start_worker(work, made)
        try:
            passed = _watch(worker, work, on_phase, seconds, num_bytes)
        finally:
            worker.end()
        if passed:
            raise CompileError(f"compiling {request.name} for {request.fleet}: {passed[0]}", hint=passed[1])
        return _answer(request, worker.poll() or 0, work)


def _watch(
    worker: Worker,
    work: Path,
    on_phase: Callable[[str], None],
    seconds: float,
    num_bytes: int,
) -> tuple[str, str] | None:
    """Wait for the worker. Return the limit that it passed with a hint, or None."""
    started, last = time.monotonic(), ""
    while worker.poll() is None:
        phase = _told(work / "phase") or last or "starting"
        if phase != last:
            on_phase(phase)
            last = phase
        if time.monotonic() - started > seconds:
            return f"not done after {seconds:.0f} s ({last})", "raise the limit, or weigh a smaller program"
        resident = _resident_bytes(_told(work / "pid"))
        if resident > num_bytes:
            return (
                f"the compiler took {resident / 2**30:.1f} GiB of this machine's memory, the limit is "
                f"{num_bytes / 2**30:.1f} GiB",
                "close other programs, or weigh on a machine with more memory",
            )
        time.sleep(POLL_SECONDS)
    return None


def _told(file: Path) -> str:
    """Return a text that the worker writes; empty if it has not written it yet."""
    return file.read_text() if file.exists() else ""


def _resident_bytes(pid: str) -> int:
    """Return the host memory of the worker's process; 0 before its pid is known and after its end."""
    try:
        return psutil.Process(int(pid)).memory_info().rss if pid else 0
    except psutil.NoSuchProcess:
        return 0


def _answer(request: Request, status: int, work: Path) -> dict[str, str]:
    """Return the worker's answer, or raise an error with its words."""
    answer_file = work / "answer.json"
    if status == 0 and answer_file.exists():
        answer: dict[str, str] = json.loads(answer_file.read_text())
        if "error" in answer:
            raise KINDS[answer["error"]](answer["message"], hint=answer["hint"])
        return answer
    raise _died(request, status, work)


def _died(request: Request, status: int, work: Path) -> CompileError:
    """Return the error for a worker that ended without an answer: its exit status, phase and last output."""
    said = (work / STDERR_FILE).read_text(errors="replace").splitlines()
    lines = [line for line in said if line.strip() and not line.startswith("Extension modules: ")]
    crash = next((place for place, line in enumerate(lines) if line.startswith(CRASHED)), None)
    # The innermost Python line comes first after a crash, but last in an exception's traceback.
    words = lines[-STDERR_LINES:] if crash is None else lines[crash : crash + STDERR_LINES]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    phase = (work / "phase").read_text() if (work / "phase").exists() else "starting"
    hint = "`meshwright doctor` shows which compile targets this machine has"
    if status == -signal.SIGKILL:
        hint = "the system kills a process that takes too much memory: weigh a smaller program, or elsewhere"
    elif request.function is not None and phase in BUILDING and not any(map(_is_traceback, words)):
        who = f"{request.function}, or what it calls,"
        hint = f"{who} ends or crashes its process: run it by itself to see where"
    return CompileError(
        f"the compile worker for {request.name} on {request.fleet} ended ({how}) while {phase}."
        + (" Its last words:\n    " + "\n    ".join(words) if words else ""),
        hint=hint,
    )


def _is_traceback(line: str) -> bool:
    return line.startswith("Traceback")
