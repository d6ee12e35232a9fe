"""End a run that makes no progress, after writing the stacks of all its threads."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..checkpoint import open_own
from ..config import FaultConfig
from ..errors import EXIT_BROKE_OFF
from ..launch import Alone
from ..units import format_seconds
from ._events import Phases

LOOKS_PER_DEADLINE = 20
ALONE = Alone()


class Watchdog:
    """A thread that ends the run if `step_done` is not called within the deadlines.

    If a deadline passes, it writes the run's phase and all threads' stacks to hang.txt in the run's folder
    and to stderr. Then it ends the process with status 4 at once: a thread that hangs in a collective can be
    stopped in no other way. The checkpoints on disk are complete at any moment.

    Args:
        end: ends the process with a status.
        peers: the processes of the run; those after the first write hang-1.txt and so on.
    """

    def __init__(
        self,
        folder: Path,
        faults: FaultConfig,
        phases: Phases,
        end: Callable[[int], object] = os._exit,
        peers: Alone = ALONE,
    ) -> None:
        self._faults, self._phases, self._end = faults, phases, end
        self._path = folder / ("hang.txt" if peers.is_first else f"hang-{peers.index}.txt")
        self._number = f" ({peers.index} of the run's {peers.count})" if peers.count > 1 else ""
        self._over = threading.Event()
        self._step: int | None = None  # the last one done in this process
        self._since = time.monotonic()

    def step_done(self, step: int) -> None:
        """Note that a step is done, or anything else that shows progress."""
        self._step, self._since = step, time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watchdog]:
        """Watch the run during the block."""
        self._since = time.monotonic()
        thread = threading.Thread(target=self._watch, name="meshwright-watchdog", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _deadline(self) -> float | None:
        faults = self._faults
        return faults.startup_deadline_seconds if self._step is None else faults.step_deadline_seconds

    def _watch(self) -> None:
        known = (self._faults.startup_deadline_seconds, self._faults.step_deadline_seconds)
        deadlines = [each for each in known if each is not None]
        if not deadlines:
            return
        while not self._over.wait(min(deadlines) / LOOKS_PER_DEADLINE):
            deadline, waited = self._deadline(), time.monotonic() - self._since
            if deadline is not None and waited > deadline:
                self._tell(waited, deadline)
                self._end(EXIT_BROKE_OFF)
                return

    def _tell(self, waited: float, deadline: float) -> None:
        kind = "startup" if self._step is None else "step"
        after = "before the first step" if self._step is None else f"after step {self._step}"
        words = (
            f"error: nothing has gone on for {format_seconds(waited)} {after}, in phase "
            f"{self._phases.current!r}: process {os.getpid()}{self._number} on {socket.gethostname()} "
            "hangs and is ended\n"
            f"hint: the threads' stacks are in {self._path}; resume with --resume. If the run "
            f"was only slow, raise faults.{kind}_deadline_seconds, which is {deadline:g}\n"
        )
        sys.stderr.write(words)
        sys.stderr.flush()
        # One of the two may fail: a captured stderr has no file descriptor, and the disk may be full.
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        with (
            contextlib.suppress(OSError),
            os.fdopen(open_own(self._path, os.O_WRONLY | os.O_TRUNC), "w") as file,
        ):
            file.write(words)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
