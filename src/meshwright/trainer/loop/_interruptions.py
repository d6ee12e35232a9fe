"""End a run before its last step: together after a signal, or at once where it makes no progress."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.config import FaultConfig
from meshwright.errors import EXIT_BROKE_OFF
from meshwright.trainer.checkpoint import open_own
from meshwright.trainer.launch import SingleProcess
from meshwright.units import format_seconds

from ._interface import PhaseClock
from ._run_folder import RunFolder

LOOKS_PER_DEADLINE = 20


def stop_at_once(number: int, before: list[int]) -> None:
    """Raise KeyboardInterrupt at a second Ctrl-C; SIGTERM may come repeatedly, as some schedulers send it."""
    if number == signal.SIGINT and before:
        raise KeyboardInterrupt


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Place an array, which every process holds whole, on the devices of all processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or ...])


class Agreement:
    """Share the first signal of any process with all processes, after the same step.

    The signal is sent through the devices, in the order of the steps. A message on another channel could
    reach one process before a step begins and another process after it. A single process runs nothing.

    Args:
        waits: whether `on` returns the answer of the current step. Otherwise it returns that of the previous
            step, so that the host can run one step ahead of the devices.
    """

    def __init__(self, mesh: Mesh, peers: SingleProcess, *, waits: bool) -> None:
        self._is_alone, self._waits = peers.count == 1, waits
        self._before: jax.Array | None = None
        self._by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def on(self, number: int | None) -> int | None:
        """Return the signal that this or another process received; None if none did."""
        if self._is_alone:
            return number
        numbers = np.full(self._by_device.mesh.size, number or 0, np.int32)
        now = self._largest(put(numbers, self._by_device))
        answer, self._before = (now if self._waits else self._before), now
        return int(answer) or None if answer is not None else None


class Watchdog:
    """A thread that ends the run if `step_done` is not called within the deadlines.

    If a deadline passes, it writes the run's phase and all threads' stacks to hang.txt in the run's folder
    and to stderr. Then it ends the process with status 4 at once: a thread that hangs in a collective can be
    stopped in no other way. The checkpoints on disk are complete at any moment.

    Args:
        folder: of the run; processes after the first write hang-1.txt and so on.
        end: ends the process with a status.
    """

    def __init__(
        self,
        folder: RunFolder,
        faults: FaultConfig,
        phases: PhaseClock,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        peers = folder.peers
        self._faults, self._phases, self._end = faults, phases, end
        self._path = folder.path / ("hang.txt" if peers.is_first else f"hang-{peers.index}.txt")
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

    def _watch(self) -> None:
        at_start, between_steps = self._faults.startup_deadline_seconds, self._faults.step_deadline_seconds
        deadlines = [seconds for seconds in (at_start, between_steps) if seconds is not None]
        if not deadlines:
            return
        while not self._over.wait(min(deadlines) / LOOKS_PER_DEADLINE):
            deadline = at_start if self._step is None else between_steps
            waited = time.monotonic() - self._since
            if deadline is not None and waited > deadline:
                self._report(waited, deadline)
                self._end(EXIT_BROKE_OFF)
                return

    def _report(self, waited: float, deadline: float) -> None:
        kind = "startup" if self._step is None else "step"
        after = "before the first step" if self._step is None else f"after step {self._step}"
        words = (
            f"error: no progress for {format_seconds(waited)} {after}, in phase "
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
