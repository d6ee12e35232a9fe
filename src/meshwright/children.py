"""The processes that Meshwright starts: kept out of the working directory, ended with all that they have
started, and what they leave on the disk removed.

Imports: the standard library, psutil (late). Imported by: whatever starts a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

ABANDONED_SECONDS = 86_400.0  # what nobody finished for a day was left by a process that was killed
OWNER = ".owner"  # the file in a working folder that its process keeps locked
GRACE_SECONDS = 10.0  # for a guard to end what it guards
SAFE_PATH = "PYTHONSAFEPATH"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by a guard
LOOKS = 10  # at what is left, since it may fork while it is being killed
IS_LINUX = sys.platform == "linux"


def own_python(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter without the working directory on its module path.

    `python -m` and `python -c` put the working directory first, so that a file `secrets.py` there would run
    in place of the standard library's. PYTHONPATH works as ever.
    """
    return [sys.executable, "-P", *arguments]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keep the working directory off the module path of what `multiprocessing` starts inside the block."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


@contextlib.contextmanager
def working_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for the block, and remove it afterwards.

    A process that is killed leaves its folder behind. So this first removes the folders of the same prefix
    that are older than a day and belong to no living process.

    Args:
        prefix: the beginning of its name.
        parent: where it is made; the folder for temporary files unless told.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with (folder / OWNER).open("w") as owner:
        _lock(owner)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the working folders in `parent` that are older than a day and belong to no living process."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process has just removed it
            if not is_abandoned(folder):
                continue
            if (folder / OWNER).is_file():
                shutil.rmtree(folder, ignore_errors=True)
            else:  # its process was killed before it could lock it; anything else is not ours
                folder.rmdir()


def is_abandoned(folder: Path) -> bool:
    """Return whether a folder of this user is older than a day and no living process holds its lock.

    Raises:
        OSError: the folder has gone.
    """
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        return False
    if time.time() - facts.st_mtime < ABANDONED_SECONDS:
        return False
    if not (folder / OWNER).is_file():
        return True
    with (folder / OWNER).open() as owner:
        return _lock(owner)


def _lock(owner: IO[str]) -> bool:
    """Take the kernel's lock on a file, which ends with the process; return False where another holds it."""
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: a folder's age alone decides
        return True
    return True


def guard(parent: int) -> None:
    """Go on in a child of this process, which waits for it, kills all that it has left, and ends as it did.

    What the child starts cannot outlive it. Neither a session of its own nor a second fork helps, for what
    has lost its parent becomes a child of this process. The end of `parent`, the process that started this
    one, ends them all; so does a signal that asks this process to end. Call it before there are threads. Only
    Linux has what it takes: elsewhere it does nothing.
    """
    if not IS_LINUX:
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    _end_with(parent, signal.SIGTERM)
    own = os.getpid()
    child = os.fork()
    if child:
        _wait_and_end(child)
    _end_with(own, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)


def _wait_and_end(child: int) -> None:
    """Wait until `child` ends or a signal asks for it, kill all descendants, and end as the child did."""
    status, number = None, signal.SIGCHLD
    while status is None and number == signal.SIGCHLD:
        number = signal.Signals(signal.sigwaitinfo(WAITED_FOR).si_signo)
        status = dict(_reaped()).get(child)
    end_descendants()
    code = -number if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its own
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield the process number and status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


@contextlib.contextmanager
def ending_descendants() -> Iterator[None]:
    """End whatever the block has started and left running, also where SIGTERM ends the block.

    For user's code that runs in this very process; `guard` is for a process of its own.
    """
    import psutil

    before = {each.pid for each in psutil.Process().children(recursive=True)}
    if IS_LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    handler = signal.getsignal(signal.SIGTERM)
    if handler is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        end_descendants(spare=before)
        if handler is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, handler)
        if IS_LINUX:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)


def end_descendants(spare: set[int] | frozenset[int] = frozenset()) -> None:
    """Kill all processes that descend from this one, but those of the numbers in `spare`."""
    import psutil

    for _ in range(LOOKS):
        alive = [
            each
            for each in psutil.Process().children(recursive=True)
            if each.pid not in spare and _runs(each)
        ]
        if not alive:
            return
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(alive, timeout=1)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a guarded process that leads a session of its own, with all that it has started."""
    if process.poll() is None:
        process.terminate()  # its guard kills the rest
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left, the usual case
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _runs(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
