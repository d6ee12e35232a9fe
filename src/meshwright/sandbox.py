"""Run somebody's code in a process of its own, which the code may end, crash or never leave.

The process is a module of Meshwright, started by this Python in a session of its own. It reads a request from
a folder and writes its answer there as JSON; nothing is unpickled. It ends with the process that started it.

Imports: `subprocesses`. Used by: `compiler` (its workers), and rooms of `contrib` that run a user's script
or function, or start the processes of a run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .subprocesses import POLL_SECONDS, end_session, own_python

TIME_LIMIT_SECONDS = 1200.0  # for a user's code
LAST_LINES = 15  # of what it printed, in an error


def start(module: str, *arguments: str | Path, said: Path) -> subprocess.Popen[bytes]:
    """Start a module of Meshwright as a process. It gets this process's number, then the arguments.

    Args:
        said: the file that holds what it prints.
    """
    with open(said, "wb") as output:
        return subprocess.Popen(
            own_python("-m", module, str(os.getpid()), *map(str, arguments)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait(
    process: subprocess.Popen[bytes],
    seconds: float = TIME_LIMIT_SECONDS,
    on_poll: Callable[[], object] = lambda: None,
) -> int | None:
    """Wait for a process, and end it with all that it started. Return its status; None if its time was over.

    Args:
        on_poll: called from time to time while it runs, and once after its end.
    """
    deadline = time.monotonic() + seconds
    try:
        while process.poll() is None:
            on_poll()
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        on_poll()
        return process.returncode
    finally:
        end_session(process)


def how_it_ended(status: int) -> str:
    """Return the end of a process in words, by its exit status; a negative one is a signal's number.

    >>> how_it_ended(-9), how_it_ended(3)
    ('was killed by SIGKILL', 'ended with status 3')
    """
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
