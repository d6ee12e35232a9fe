"""Tell whether a run is under way, from the lock of its folder, its measurement and its last step.

Imports: psutil. Used by: `_live_run`.
"""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from meshwright.files import read_text

LOCK, LOCKS = ".lock", Path("/proc/locks")
SILENT_SECONDS = 600.0  # after which a run of another machine, whose process cannot be seen, counts as silent


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a run: waiting, running, finished, stopped, dead or unknown; `words` say why."""

    name: str
    words: str


def state_of(folder: Path, measured_steps: int | None, signal: str, step: int, newest: float) -> State:
    """Return a run's state.

    Args:
        measured_steps, signal: from its measurement, which a run writes at its end; None without one.
        step: the newest that is recorded: beyond `measured_steps` the run has gone on.
        newest: when its files last changed, in seconds since 1970.
    """
    try:
        holder = re.fullmatch(r"process (\d{1,9}) on (.+)", read_text(folder / LOCK, 4096).strip())
    except (OSError, ValueError):
        holder = None
    if holder is not None and holder[2] == socket.gethostname() and _holds(int(holder[1]), folder / LOCK):
        return State(name="running", words="")
    if measured_steps is not None and measured_steps >= step:
        if signal:
            return State(name="stopped", words=f"stopped by {signal} after step {measured_steps}")
        return State(name="finished", words="")
    if holder is not None and holder[2] != socket.gethostname():
        if time.time() - newest < SILENT_SECONDS:
            return State(name="running", words="on another machine")
        return State(name="unknown", words="on another machine; its files no longer change")
    if holder is None and not step:
        return State(name="waiting", words="no run has begun in this folder")
    return State(name="dead", words=f"its process ended after step {step} without a measurement")


def _holds(process: int, lock: Path) -> bool:
    """Return whether a process holds a lock; looking does not touch the lock itself."""
    try:
        inode, taken = os.stat(lock).st_ino, os.stat(lock).st_mtime
        if LOCKS.exists():
            lines = (line.split() for line in LOCKS.read_text().splitlines())
            held = ((line[-4], line[-3].rpartition(":")[2]) for line in lines if "FLOCK" in line)
            return (str(process), str(inode)) in held
        return psutil.Process(process).create_time() <= taken + 1.0
    except (OSError, IndexError, psutil.Error):
        return False
