"""Import what every compile worker needs once, and fork a worker for each request.

The caller's side, `compiler.warm_workers`, starts the template and writes requests to its standard input, a
line of JSON each: two folders, the working directory, and variables of the environment. Files in the first
folder tell the caller the fork's process number and, at its end, its exit status.

Imports: `compiler` (the names of those files); jax and `step` when the template starts. Used by: `_main`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ..compiler import PID_FILE, STATUS_FILE, STDERR_FILE

NEEDED = ("jax", "jax.experimental.topologies", "meshwright.step")
OWN = ("_traced", "_foreign")


def set_environment() -> None:
    """Set the variables that jax reads when it is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # jax's cached programs come without dumps
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"  # the chips are described, not used


def fork_for_each_request() -> tuple[str, str, int]:
    """Return in a new fork for each request: its two folders, and the process number of this template.

    The template itself never returns: it exits when its standard input ends, and its forks end with it.
    """
    set_environment()
    for module in (*NEEDED, *(f"{__package__}.{name}" for name in OWN)):
        import_module(module)
    # jax warns because of its threads. It starts them with its first backend, which only the forks make.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    template, folders = os.getpid(), dict[int, Path]()
    for request in _requests(folders):
        pid = os.fork()
        if not pid:
            _detach(Path(request["work"]))
            os.chdir(request["directory"])
            os.environ.update(request["environment"])
            return request["work"], request["made"], template
        folders[pid] = Path(request["work"])
        if not _write(folders[pid] / PID_FILE, pid):
            os.kill(pid, signal.SIGKILL)
    sys.exit(0)


def _requests(folders: dict[int, Path]) -> Iterator[dict[str, Any]]:
    """Yield each request whose caller still waits for it, until the standard input ends.

    Meanwhile write the exit status of each fork that ends into its folder, and remove it from `folders`.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    unread = b""
    while True:
        ready, _, _ = select.select([sys.stdin, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _write_statuses(folders)
        if sys.stdin in ready:
            received = os.read(sys.stdin.fileno(), 65536)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if Path(request["work"]).exists():
                    yield request


def _detach(work: Path) -> None:
    """Lead a session of its own, without the template's signals and input; print into `work`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(os.devnull) as nothing, open(work / STDERR_FILE, "a") as printed:
        os.dup2(nothing.fileno(), 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)


def _write_statuses(folders: dict[int, Path]) -> None:
    """Write the exit status of each fork that has ended into its folder."""
    for pid in tuple(folders):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _write(folders.pop(pid) / STATUS_FILE, os.waitstatus_to_exitcode(status))


def _write(file: Path, number: int) -> bool:
    """Write a number in one step. Return False if the folder is gone, since the caller no longer waits."""
    part = file.with_suffix(".part")
    try:
        part.write_text(str(number))
        part.rename(file)
    except FileNotFoundError:
        return False
    return True
