"""Start a compile worker, watch it, and read its answer.

A worker is a separate process for three reasons: compiler flags and device counts are per process, an XLA
CHECK failure kills its process, and a planner must survive that.

Starting Python and importing jax takes about two seconds of a worker's time. Where several programs are
compiled one after another (a sweep, `explain`), `warm_workers` pays it once: it starts a *template* process
that imports what every worker needs, and forks it for each request. A caller that has changed its environment
since then gets a new process instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

import psutil

from meshwright.errors import CompileError, InputError, MeshwrightError
from meshwright.files import last_lines, parsed_json
from meshwright.json_records import read_record
from meshwright.subprocesses import (
    GRACE_SECONDS,
    IS_LINUX,
    POLL_SECONDS,
    end_session,
    from_child,
    own_python,
    report_phases,
    spoiled,
    working_folder,
)

from . import _cache
from ._record import (
    ANSWER,
    PID_FILE,
    QUESTION,
    STATUS_FILE,
    STDERR_FILE,
    Compiled,
    Declared,
    Refusal,
    Request,
    TakesNoMesh,
)

NO_FILES: Mapping[str, str] = {}
TIME_LIMIT_SECONDS = 1200.0
STDERR_LINES = 12
MOST_LINES = 1000  # of a worker's output that are looked at
CRASHED = "Fatal Python error"  # the first words of Python's faulthandler
STARTING = "starting"  # until the worker says otherwise
BUILDING = (STARTING, "tracing", "counting")  # phases in which the user's code runs
KINDS: dict[str, type[MeshwrightError]] = {
    each.__name__: each for each in (InputError, TakesNoMesh, CompileError)
}


_is_over: contextvars.ContextVar[Callable[[], bool]] = contextvars.ContextVar(
    "is_over", default=lambda: False
)


@contextlib.contextmanager
def compiling_until(is_over: Callable[[], bool]) -> Iterator[None]:
    """Cut off the block's compilations, and those of threads that run in its context, once `is_over()`.

    Each then ends its worker and raises a `CompileError`.
    """
    before = _is_over.set(is_over)
    try:
        yield
    finally:
        _is_over.reset(before)


def compile_program(
    request: Request,
    *,
    files: Mapping[str, str] = NO_FILES,
    on_phase: Callable[[str], None] = lambda phase: None,
    answers: Callable[[str], str] | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    memory_limit_bytes: int | None = None,
) -> tuple[Compiled, Path, bool]:
    """Return the compiled program of `request`, its folder, and whether it came from the cache.

    Args:
        files: texts that the worker finds in its folder, by name.
        on_phase: called with the worker's phase (starting, tracing, compiling, ...).
        answers: the function that answers what the worker asks while it compiles, if it may ask anything.
        memory_limit_bytes: the limit for the worker; nine tenths of the free memory by default.

    Raises:
        InputError: the worker found an error in the user's input.
        RefusedForMemory: a device has too little memory for the program, as the compiler says.
        CompileError: the compiler failed, crashed, or passed a limit. The message has the compiler's words.
    """
    key = request.key()
    if request.config is not None or request.digest:
        cached = _cache.cached_program(key)
        if cached is not None:
            return cached, _cache.program_folder(key), True
    if memory_limit_bytes is None:
        memory_limit_bytes = psutil.virtual_memory().available * 9 // 10
    with _cache.making_program() as made:
        answer = _work(request, made, on_phase, time_limit_seconds, memory_limit_bytes, files, answers)
        if "refused" in answer:
            from ._refusal import RefusedForMemory

            refusal = read_record(Refusal, answer["refused"], name="a refusal", hint="weigh again")
            raise RefusedForMemory(request.name, request.fleet, refusal)
        if "cached" in answer:  # a foreign step is found by its lowered text
            key = answer["cached"]
        else:
            key = answer.get("key", key)
            _cache.keep_program(made, key)
    compiled = _cache.cached_program(key)
    if compiled is None:
        hint = "weigh again; if it happens again, look at the disk of the cache"
        raise CompileError(f"the program of {request.name} cannot be read back from the cache", hint=hint)
    return compiled, _cache.program_folder(key), "cached" in answer


def declared_by(request: Request) -> Declared:
    """Return the mesh axes and knobs that the function of `request` declares. Its module is imported apart.

    Raises:
        InputError: the module or function does not exist, or fails, or declares something that is no list.
    """
    asked = dataclasses.replace(request, describes=True)
    with working_folder("meshwright-declared-") as made:
        memory = psutil.virtual_memory().available * 9 // 10
        answer = _work(asked, made, lambda phase: None, TIME_LIMIT_SECONDS, memory)
    knobs = {name: tuple(values) for name, values in json.loads(answer["knobs"]).items()}
    return Declared(axes=tuple(json.loads(answer["axes"])), knobs=knobs)


def _work(
    request: Request,
    made: Path,
    on_phase: Callable[[str], None],
    seconds: float,
    num_bytes: int,
    files: Mapping[str, str] = NO_FILES,
    answers: Callable[[str], str] | None = None,
) -> dict[str, str]:
    """Run a worker to its end. Return its answer, or raise its error."""
    with working_folder("meshwright-worker-") as work:
        (work / "request.json").write_text(request.to_json())
        for name, text in files.items():
            (work / name).write_text(text)
        worker = start_worker(work, made)
        try:
            passed = _watch(worker, work, on_phase, seconds, num_bytes, answers)
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
    answers: Callable[[str], str] | None = None,
) -> tuple[str, str] | None:
    """Wait for the worker. Return the limit that it passed with a hint, or None."""
    started, phases = time.monotonic(), list[str]()
    on_phase(STARTING)
    while worker.poll() is None:
        phases = report_phases(work, on_phase, len(phases))
        if answers is not None:
            _answer_questions(work, answers)
        if _is_over.get()():
            spent = time.monotonic() - started
            return f"cut off after {spent:.0f} s ({phases[-1] if phases else STARTING})", "allow more time"
        if time.monotonic() - started > seconds:
            last = phases[-1] if phases else STARTING
            return f"not done after {seconds:.0f} s ({last})", "raise the limit, or weigh a smaller program"
        resident = _resident_bytes(from_child(work / "pid", errors="replace") or "")
        if resident > num_bytes:
            return (
                f"the compiler took {resident / 2**30:.1f} GiB of this machine's memory, the limit is "
                f"{num_bytes / 2**30:.1f} GiB",
                "close other programs, or weigh on a machine with more memory",
            )
        time.sleep(POLL_SECONDS)
    report_phases(work, on_phase, len(phases))  # what a fast worker began after the last look
    return None


def _answer_questions(work: Path, answers: Callable[[str], str]) -> None:
    """Answer each question in a worker's folder, and remove it."""
    for question in work.glob(f"{QUESTION}*"):
        if not question.name.endswith(ANSWER):
            part = work / "answer.part"
            part.write_text(answers(question.read_text()))
            part.rename(work / (question.name + ANSWER))
            question.unlink()


def _resident_bytes(pid: str) -> int:
    """Return the host memory of the worker's process; 0 before its pid is known and after its end."""
    try:
        return psutil.Process(int(pid)).memory_info().rss if pid else 0
    except (psutil.Error, ValueError, OverflowError):  # it has ended; the user's code wrote the file
        return 0


def _answer(request: Request, status: int, work: Path) -> dict[str, str]:
    """Return the worker's answer, or raise an error with its words."""
    file = work / "answer.json"
    said = from_child(file)
    if status or said is None:
        raise _died(request, status, work)
    try:
        answer: dict[str, str] = dict(parsed_json(said))
        error = KINDS[answer["error"]](answer["message"], hint=answer["hint"]) if "error" in answer else None
    except (ValueError, TypeError, KeyError) as wrong:
        raise spoiled(file, "it is no answer") from wrong
    if error is not None:
        raise error
    return answer


def _died(request: Request, status: int, work: Path) -> CompileError:
    """Return the error for a worker that ended without an answer: its exit status, phase and last output."""
    said = last_lines(work / STDERR_FILE, MOST_LINES)
    lines = [line for line in said if not line.startswith("Extension modules: ")]
    crash = next((place for place, line in enumerate(lines) if line.startswith(CRASHED)), None)
    # The innermost Python line comes first after a crash, but last in an exception's traceback.
    words = lines[-STDERR_LINES:] if crash is None else lines[crash : crash + STDERR_LINES]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    phase = [STARTING, *report_phases(work, lambda phase: None)][-1]
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


MODULE = "meshwright.worker._main"
# Variables that a fork takes over from its caller, because nothing reads them while jax is imported.
LATE = ("MESHWRIGHT_CACHE_DIR", "PYTEST_CURRENT_TEST", "COLUMNS")


class Worker(Protocol):
    """A process that serves one request. Its folder holds what it prints, in the file `STDERR_FILE`."""

    def poll(self) -> int | None:
        """Return the exit status (a negative signal number where one ended it), or None while it runs."""
        ...

    def end(self) -> None:
        """End the worker and all processes that it started, if any are left."""
        ...


def start_worker(work: Path, made: Path) -> Worker:
    """Start a worker for the request in `work`, as a fork of the template process where there is one."""
    if _template is not None and _template.serves():
        return _template.fork(work, made)
    return _NewProcess(work, made)


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Fork the block's workers from one process that has imported jax, so that each starts in 0.1 seconds.

    The process starts with the block's first worker and ends with the block. This does nothing inside another
    such block with the same environment, and on systems other than Linux.
    """
    global _template
    outer = _template
    if not IS_LINUX or (outer is not None and outer.serves()):
        yield
        return
    _template = inner = _Template()
    try:
        yield
    finally:
        _template = outer
        inner.end()


class _NewProcess:
    """A worker in a new Python process."""

    def __init__(self, work: Path, made: Path) -> None:
        from meshwright.sandbox import start  # a program in the cache needs no process

        self._process = start(MODULE, work, made, said=work / STDERR_FILE)

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        end_session(self._process)


class _Template:
    """The process that workers are forked from. It ends when its standard input does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = _environment()
        self._starting = threading.Lock()  # several threads may compile side by side
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`

    def serves(self) -> bool:
        """Return whether a fork would have this process's present environment."""
        return _environment() == self._environment

    def fork(self, work: Path, made: Path) -> Worker:
        """Ask for a fork that serves the request in `work`; start the template first if it does not run."""
        late = {name: os.environ.get(name) for name in LATE}  # None: the caller has no such variable
        request = {"work": str(work), "made": str(made), "directory": os.getcwd(), "environment": late}
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._end_process()
                self._stderr.seek(0)
                self._stderr.truncate()
                self._process = subprocess.Popen(
                    own_python("-m", MODULE, str(os.getpid())),
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    start_new_session=True,
                )
            assert self._process.stdin is not None, "it was started with a pipe"
            with contextlib.suppress(BrokenPipeError):  # it has just ended: `poll` of the worker reports that
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return _Fork(self, work)

    def ended(self) -> int | None:
        """Return the exit status of the template, or None while it runs."""
        assert self._process is not None, "a fork was asked for before"
        return self._process.poll()

    def last_words(self) -> bytes:
        """Return what the template itself has printed."""
        self._stderr.seek(0)
        return self._stderr.read()

    def end(self) -> None:
        """End the template, and with it all forks that still run."""
        self._end_process()
        self._stderr.close()

    def _end_process(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None, "it was started with a pipe"
            self._process.stdin.close()
            end_session(self._process)


class _Fork:
    """A worker that the template process forks. Files in its folder give its number and exit status."""

    def __init__(self, template: _Template, work: Path) -> None:
        self._template = template
        self._work = work

    def poll(self) -> int | None:
        status = _number(self._work / STATUS_FILE)
        if status is None and (ended := self._template.ended()) is not None:
            status = _number(self._work / STATUS_FILE)  # it may have been written in between
            if status is None:
                with open(self._work / STDERR_FILE, "ab") as stderr:
                    stderr.write(self._template.last_words())
                return ended or 1
        return status

    def end(self) -> None:
        """End the worker. A request that is not yet served is dropped, because its folder is removed."""
        pid = _number(self._work / PID_FILE)
        if pid is None:
            return
        deadline = time.monotonic() + GRACE_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.poll() is None:
                os.kill(pid, signal.SIGTERM)  # its guard kills the rest
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            os.killpg(pid, signal.SIGKILL)  # the worker leads its own session; usually nothing is left


def _number(file: Path) -> int | None:
    """Return the number that another process writes into `file` in one step, or None before that."""
    text = from_child(file)
    try:
        return None if text is None else int(text)
    except ValueError as wrong:
        raise spoiled(file, "it is no number") from wrong


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LATE}


_template: _Template | None = None
