"""Start compile workers: each as a new Python process, or as a fork of a process that has imported jax.

Starting Python and importing jax takes about two seconds of a worker's time. Where several programs are
compiled one after another (a sweep, `explain`), `warm_workers` pays it once: it starts a *template* process
that imports what every worker needs, and forks it for each request. A caller that has changed its environment
since then gets a new process instead.

Imports: `children`. Used by: `_run`, which watches the workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from ..children import GRACE_SECONDS, IS_LINUX, end_session, own_python

MODULE = "meshwright.worker._main"
PID_FILE, STATUS_FILE, STDERR_FILE = "guard", "status", "stderr"  # in a worker's folder
POLL_SECONDS = 0.02
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
        with open(work / STDERR_FILE, "wb") as stderr:
            self._process = subprocess.Popen(
                own_python("-m", MODULE, str(os.getpid()), str(work), str(made)),
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )

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
        late = {name: os.environ[name] for name in LATE if name in os.environ}
        request = {"work": str(work), "made": str(made), "directory": os.getcwd(), "environment": late}
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._end_process()
                self._stderr.truncate(0)
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
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LATE}


_template: _Template | None = None
