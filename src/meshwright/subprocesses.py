"""Start, guard and end the processes of Meshwright, and clean up their folders.

Child processes import no modules from the working directory. They end together with all their descendants.
Folders that killed processes left on the disk are removed.

Imports: the standard library, `errors`, psutil (late). Used by: all modules that start a process.
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
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from .errors import InputError

if TYPE_CHECKING:
    import psutil

ABANDONED_SECONDS = 86_400.0  # a folder older than a day was left by a killed process
OWNER = ".owner"  # the file in a working folder that its process keeps locked
PHASES = "phases"  # the file in a working folder with a line for each phase of its process
GRACE_SECONDS = 10.0  # time for a guard to end its processes
SAFE_PATH = "PYTHONSAFEPATH"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by a guard
LOOKS = 10  # rounds of killing, since processes may fork meanwhile
IS_LINUX = sys.platform == "linux"
POLL_SECONDS = 0.05  # between two looks at a process that is waited for


def own_python(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter without the working directory on its module path.

    `python -m` and `python -c` put the working directory first, so that a file `secrets.py` there would run
    in place of the standard library's module. PYTHONPATH still applies.
    """
    return [sys.executable, "-P", *arguments]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keep the working directory off the module path of the block's `multiprocessing` children."""
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

    A killed process leaves its folder behind. So this first removes the folders of the same prefix that are
    older than a day and belong to no living process.

    Args:
        prefix: the beginning of the folder's name.
        parent: the folder that contains it; by default the system's folder for temporary files.
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


def from_child(path: Path, *, errors: str = "strict") -> str | None:
    """Return the text of a file that a child has left in its working folder; None if it has not.

    The child may run a user's code, which can reach the folder. So a link is not followed, and nothing is
    waited for.

    Args:
        errors: what becomes of bytes that are not UTF-8, as for `bytes.decode`.

    Raises:
        InputError: the folder is gone, or something else is in the file's place.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise spoiled(path.parent, "it was deleted") from None
        return None
    except OSError as refused:
        raise spoiled(path, refused.strerror or str(refused)) from refused
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise spoiled(path, "it is not a file")
    with os.fdopen(file, "rb") as opened:
        try:
            return opened.read().decode(errors=errors)
        except UnicodeDecodeError as wrong:
            raise spoiled(path, "it is not text in UTF-8") from wrong


def spoiled(path: Path, why: str) -> InputError:
    """Return the error for files that a child's code deleted or overwrote in its working folder."""
    return InputError(
        f"the code that was run has changed {path}, through which its process answers: {why}",
        hint=f"let it write and delete only files of its own below {tempfile.gettempdir()}",
    )


def begin_phase(folder: Path, phase: str) -> None:
    """Append a phase of this process's work to the file in its working folder that the parent reads."""
    with (folder / PHASES).open("a") as file:
        file.write(f"{phase}\n")


def report_phases(folder: Path, on_phase: Callable[[str], None], reported: int = 0) -> list[str]:
    """Call `on_phase` with each phase of a folder after the first `reported`. Return all its phases."""
    lines = (from_child(folder / PHASES, errors="replace") or "").splitlines(keepends=True)
    phases = [line.rstrip("\n") for line in lines if line.endswith("\n")]  # the last may be half written
    for phase in phases[reported:]:
        on_phase(phase)
    return phases


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the working folders in `parent` that are older than a day and belong to no living process."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process has removed it meanwhile
            if not is_abandoned(folder):
                continue
            if (folder / OWNER).is_file():
                shutil.rmtree(folder, ignore_errors=True)
            else:  # its process was killed before locking it; `rmdir` spares folders that are not empty
                folder.rmdir()


def is_abandoned(folder: Path) -> bool:
    """Return whether a folder of this user is older than a day and no living process holds its lock.

    Raises:
        OSError: the folder no longer exists.
    """
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or time.time() - status.st_mtime < ABANDONED_SECONDS:
        return False
    if not (folder / OWNER).is_file():
        return True
    with (folder / OWNER).open() as owner:
        return _lock(owner)


def _lock(owner: IO[str]) -> bool:
    """Take the kernel's lock on a file until the process ends; return False if another process holds it."""
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: a folder's age alone decides
    return True


def end_after(work: Callable[[], object]) -> NoReturn:
    """Do the work of this process and end it at once, whatever threads a user's code has left running in it.

    Python would wait for them. The exit status is the one that Python would give; nothing registered with
    `atexit` runs.
    """
    status: object = 0
    try:
        work()
    except SystemExit as ended:
        status = 0 if ended.code is None else ended.code
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
    except BaseException:
        status = 1
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the code may have closed or replaced it
            stream.flush()
    os._exit(status if isinstance(status, int) else 1)


def guard(parent: int) -> None:
    """Continue in a forked child; this process waits, kills what the child leaves, and ends as it did.

    Processes that the child starts cannot outlive it. Neither a new session nor a second fork lets them
    escape, because a process that loses its parent becomes a child of this process. All of them also end if
    `parent`, the process that started this one, ends, or if a signal asks this process to end. Call this
    before any thread starts. It works on Linux only; elsewhere it does nothing.
    """
    if not IS_LINUX:
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    end_with_parent(parent, signal.SIGTERM)
    own = os.getpid()
    child = os.fork()
    if child:
        _wait_and_end(child)
    end_with_parent(own, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, which may be killed; Linux only."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before it could be watched
        os._exit(1)


def _wait_and_end(child: int) -> None:
    """Wait until `child` ends or a signal asks to end; kill all descendants; end as the child did."""
    status, number = None, signal.SIGCHLD
    while status is None and number == signal.SIGCHLD:
        number = signal.Signals(signal.sigwaitinfo(WAITED_FOR).si_signo)
        status = dict(_reaped()).get(child)
    end_descendants()
    code = -number if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core dump: the child has left its own
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield the process number and status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def end_descendants() -> None:
    """Kill all descendants of this process."""
    import psutil

    for _ in range(LOOKS):
        alive = [p for p in psutil.Process().children(recursive=True) if _runs(p)]
        if not alive:
            return
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a guarded process that leads its own session, and all processes that it started."""
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
