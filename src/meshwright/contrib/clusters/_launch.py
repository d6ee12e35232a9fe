"""Start a run's processes on this machine, and restart a run that dies.

With `train --restarts N` the run is a child process, which is resumed when it dies. With `train --processes
N` the same command runs in N processes of this machine, which end together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshwright.cli import own_command_for_children
from meshwright.errors import EXIT_BROKE_OFF, InputError
from meshwright.files import last_lines
from meshwright.sandbox import how_it_ended
from meshwright.subprocesses import own_python, working_folder
from meshwright.trainer.launch import COORDINATOR, INDEX, NUM_PROCESSES, PARENT, noting_signals, place_in


def run_with_restarts(
    restarts: int, config: str | None, folder: Path | None, begin_from: Path | None = None
) -> int:
    """Run this command as a child, restart it at most `restarts` times, and return its last exit status.

    A child is resumed if it was killed, broke off with an unforeseen error, or was ended by the watchdog. A
    child that ended with a message for the user is not: it would fail in the same way again. The child
    handles SIGTERM and Ctrl-C, which end both processes.

    Raises:
        InputError: no config, weights to begin from or folder is named, or this is one of several processes.
    """
    place = place_in(os.environ)
    if place is not None:
        raise InputError(
            f"--restarts in one of the processes that {place.launcher} started: it cannot rejoin them alone",
            hint="leave --restarts out, and let the job file begin all of them again, as those of deploy/ do",
        )
    arguments = without_option(sys.argv[1:], "--restarts")
    if folder is None:
        named = config if begin_from is None or config is not None else begin_from.resolve().name
        if named is None:
            raise InputError(
                "no config is named", hint="name a preset or a TOML file; `meshwright presets` lists some"
            )
        name = f"{Path(named).stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        arguments += ["--folder", str(Path("runs") / name)]
    for left in range(restarts, -1, -1):
        status, was_asked_to_end = _run(own_python("-m", "meshwright", *arguments))
        may_do_better = status < 0 or status == EXIT_BROKE_OFF
        if was_asked_to_end or not left or not may_do_better:
            return status if status >= 0 else 128 - status
        number = restarts - left + 1
        sys.stderr.write(f"restart {number} of {restarts}: the run {how_it_ended(status)}; it is resumed\n")
        if "--resume" not in arguments:
            arguments.append("--resume")
    raise AssertionError("the last run returns")


def _run(command: list[str]) -> tuple[int, bool]:
    """Run the child; return its exit status, and whether a signal asked it to end meanwhile."""
    child = subprocess.Popen(command, env={**os.environ, **own_command_for_children()})

    def pass_on(number: int, before: list[int]) -> None:
        if number == signal.SIGTERM:  # a terminal's Ctrl-C reaches the child as well; it needs it only once
            child.send_signal(number)

    with noting_signals(pass_on) as noted:
        return child.wait(), bool(noted)


def without_option(arguments: list[str], name: str) -> list[str]:
    """Return a command line without an option and its value."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == name:
            next(words)
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return kept


LOOK_SECONDS = 0.02
TOGETHER_SECONDS = 15.0  # processes that end for one reason end within it; the first process leaves last
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL; short, because no step can finish once a process is dead
LAST_LINES = 12
MERE_CONSEQUENCE = 2  # from this `_guilt` on, a child's end is a consequence of another's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """One of the processes, with the file of its stderr; None for the first, which shares ours."""

    index: int
    process: subprocess.Popen[bytes]
    stderr: Path | None

    @property
    def status(self) -> int | None:
        """Exit status: None while it runs, negative if a signal ended it."""
        return self.process.poll()

    @property
    def is_stopped(self) -> bool:
        """True if a signal (SIGSTOP, or a terminal's) has stopped it and none has continued it."""
        import psutil

        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def last_lines(self) -> list[str]:
        """Return its last lines on stderr."""
        if self.stderr is None:
            return []
        return last_lines(self.stderr, LAST_LINES)


def run_processes(num_processes: int, on: str) -> int:
    """Run this command in `num_processes` children that train together, and return the exit status.

    Only the first child's output is shown. Signals are passed on to each child. When one child dies, the
    others are ended, and a message names the child and the cause. Status 4 means that a child was killed and
    that the run may be resumed.

    Raises:
        InputError: the devices of `on` cannot be divided among them, or this is one of several processes.
    """
    _check(num_processes, on)
    arguments = without_option(sys.argv[1:], "--processes")
    command = own_python("-m", "meshwright", *arguments)
    with working_folder("meshwright-processes-") as folder:
        children: list[_Child] = []
        try:
            with noting_signals(lambda number, before: _send(children, number)) as noted:
                _start(children, command, num_processes, folder)
                while not any(child.status for child in children) and any(c.status is None for c in children):
                    time.sleep(LOOK_SECONDS)
                if not any(_was_killed(child, noted) for child in children):
                    _wait(children, TOGETHER_SECONDS)
            ended = [child for child in children if child.status is not None]  # by themselves
            stalled = [child for child in children if child.is_stopped]
        finally:
            _end(children)
        return _status_of_all(children, ended, stalled, noted)


def _check(num_processes: int, on: str) -> None:
    from meshwright.config import near_divisors, or_list
    from meshwright.hardware import Fleet

    place = place_in(os.environ)
    if place is not None:
        raise InputError(
            f"--processes {num_processes} in one of the processes that {place.launcher} has started",
            hint="leave --processes out: these processes train together as they are",
        )
    fleet = None if on == "local" else Fleet.parse(on)
    if fleet is not None and fleet.num_devices % num_processes:
        raise InputError(
            f"{num_processes} processes cannot share the {fleet.num_devices} devices of {fleet.name} evenly",
            hint=f"use --processes {or_list(near_divisors(fleet.num_devices, num_processes))}",
        )


def _start(children: list[_Child], command: list[str], num_processes: int, folder: Path) -> None:
    """Start the children in sessions of their own: a terminal's Ctrl-C reaches them once, from here.

    Each joins `subprocesses` at once, so that a signal during the start reaches those that run.
    """
    environment = {
        **os.environ,
        **own_command_for_children(),
        COORDINATOR: f"127.0.0.1:{_free_port()}",
        NUM_PROCESSES: str(num_processes),
        PARENT: str(os.getpid()),
    }
    for index in range(num_processes):
        stderr = folder / str(index) if index else None
        with stderr.open("wb") if stderr else contextlib.nullcontext() as file:
            process = subprocess.Popen(
                command,
                env={**environment, INDEX: str(index)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if index else None,
                stderr=file,
                start_new_session=True,
            )
        children.append(_Child(index=index, process=process, stderr=stderr))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _send(children: list[_Child], number: int) -> None:
    for child in children:
        if child.status is None:
            child.process.send_signal(number)


def _wait(children: list[_Child], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(child.status is None for child in children):
        time.sleep(LOOK_SECONDS)


def _end(children: list[_Child]) -> None:
    """End all children, first by SIGTERM and then by SIGKILL."""
    for end, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        _send(children, end)
        _wait(children, seconds)


def _status_of_all(
    children: list[_Child], ended: list[_Child], stalled: list[_Child], noted: list[int]
) -> int:
    """Return the exit status of all, and print to stderr what the first child could not report itself.

    `ended` are the children that had ended before the rest were ended, `stalled` those that a signal had
    stopped, and `noted` the signals that were passed on.
    """
    failed = [child for child in ended if child.status]
    if not failed:
        return 0
    for number in noted:
        if all(child.status in (-number, 128 + number) for child in failed):
            return 128 + number
    guilty, first = min(failed, key=_guilt), children[0]
    status = guilty.status
    assert status, "it has failed"
    if stalled and first not in ended and _guilt(guilty) >= MERE_CONSEQUENCE:
        _blame(stalled[0], len(children), "was stopped by a signal and did not continue")
        return EXIT_BROKE_OFF
    if first not in ended or (first.status != status and status != EXIT_BROKE_OFF) or status < 0:
        _blame(guilty, len(children), how_it_ended(status))
    return status if status > 0 else EXIT_BROKE_OFF


def _blame(child: _Child, num_children: int, how: str) -> None:
    """Name the process whose end or silence ended all, with its last lines on stderr."""
    who = f"process {child.index} of {num_children} ({child.process.pid} on {socket.gethostname()})"
    words = "".join(f"\n    {line}" for line in child.last_lines())
    words = f". Its last words:{words}" if words else ""
    sys.stderr.write(f"error: {who} {how}; the others were ended{words}\n")


def _was_killed(child: _Child, noted: list[int]) -> bool:
    """Return whether it was ended by a signal that did not pass through here and was not its own abort."""
    status = child.status
    return status is not None and status < 0 and -status not in (signal.SIGABRT, *noted)


def _guilt(child: _Child) -> int:
    """Return a rank; the child with the lowest rank most likely caused the others' end.

    jax aborts a process whose peer is gone, and a collective that lost a peer breaks off.
    """
    if child.status == -signal.SIGABRT:
        return 3
    if child.status == EXIT_BROKE_OFF:
        return MERE_CONSEQUENCE
    return 0 if child.status is not None and child.status < 0 else 1
