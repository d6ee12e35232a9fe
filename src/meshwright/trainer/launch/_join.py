"""Find this process's place among the processes of a run, join them, leave them, and note end signals.

The place is read from the environment, where the launcher has left it. This needs no jax. `join` then makes
this process one of the run's, by a room outside the core.

A scheduler's variables alone do not show that there are several processes. An interactive allocation has them
too, and JAX would wait there for processes that nobody starts. So a place is returned only if the step or job
to which this process belongs has more than one process.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from meshwright.errors import InputError
from meshwright.registry import room

from ._single_process import SINGLE_PROCESS, SingleProcess

# `meshwright train --processes N` sets these for its children. Any other launcher may set them too.
COORDINATOR = "MESHWRIGHT_COORDINATOR"  # HOST:PORT of process 0
NUM_PROCESSES = "MESHWRIGHT_NUM_PROCESSES"
INDEX = "MESHWRIGHT_PROCESS"  # from 0
PARENT = "MESHWRIGHT_PARENT"  # process id of the parent; when the parent ends, so must this process
JAX_COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # jax reads it itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of one process: `index` of `count`.

    `launcher`: the program that started it. `coordinator`: "host:port" of process 0. If `index`, `count` or
    `coordinator` is None, jax's own detection finds it.
    """

    launcher: str
    index: int | None = None
    count: int | None = None
    coordinator: str | None = None


def place_in(environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process among several; None if it is alone.

    Raises:
        InputError: the environment's description is incomplete or invalid, or does not name the first host.
    """
    if given := [name for name in (COORDINATOR, NUM_PROCESSES, INDEX) if name in environment]:
        return _place_of_launcher(environment, given)
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        return Place(launcher="Slurm")
    if _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return _open_mpi(environment)
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return Place(launcher="Kubernetes")
    return None


def _place_of_launcher(environment: Mapping[str, str], given: list[str]) -> Place:
    """Return the place that Meshwright's own variables describe, of which those in `given` are set."""
    absent = [name for name in (COORDINATOR, NUM_PROCESSES, INDEX) if name not in given]
    if absent:
        raise InputError(
            f"{given[0]} is set, and {' and '.join(absent)} is not",
            hint=f"set all of {COORDINATOR}=HOST:PORT, {NUM_PROCESSES} and {INDEX}, or none",
        )
    coordinator = environment[COORDINATOR]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"{COORDINATOR}={coordinator!r} is not of the form HOST:PORT",
            hint="name the host of process 0, and a port that is free there: node1:7717",
        )
    index, count = _number(environment, INDEX), _number(environment, NUM_PROCESSES)
    if not 0 <= index < count:
        raise InputError(
            f"{INDEX}={environment[INDEX]} and {NUM_PROCESSES}={environment[NUM_PROCESSES]}",
            hint=f"number the processes from 0 to {NUM_PROCESSES} - 1",
        )
    return Place(launcher="meshwright", index=index, count=count, coordinator=coordinator)


def _open_mpi(environment: Mapping[str, str]) -> Place:
    """Return Open MPI's place; before version 5 it states where it was started, and jax reads that."""
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return Place(launcher="Open MPI")
    if JAX_COORDINATOR not in environment:
        raise InputError(
            "Open MPI does not say on which host process 0 runs",
            hint=f"mpirun -x {JAX_COORDINATOR}=HOST:PORT ..., HOST the first, PORT one that is free there",
        )
    index, count = (_number(environment, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE"))
    return Place(launcher="Open MPI", index=index, count=count, coordinator=environment[JAX_COORDINATOR])


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the value of a variable; -1 if it is missing or not a number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else -1


_HEARTBEAT: list[Any] = []  # of this process, once it has joined others


def join(place: Place) -> SingleProcess:
    """Wait for the other processes of the run, and join them before jax creates its devices.

    Raises:
        MeshwrightError: they do not arrive, or jax cannot find out who they are.
    """
    heartbeat = room("clusters").join(place)
    if heartbeat is not None:
        _HEARTBEAT.append(heartbeat)
    return processes_of_this_run()


def leave(words: str, status: int) -> None:
    """End this process before the run is over, and report the reason, in words, to the others.

    It ends at once with `status`, because jax would wait for the others to end as well. Does nothing if the
    run has one process.
    """
    if _HEARTBEAT:
        sys.stdout.flush()
        sys.stderr.flush()
        _HEARTBEAT.pop().leave(words, status)


def await_verdict() -> None:
    """Wait while the end of another process may be the cause of an error in this one; that ends it in words.

    Call this before an unforeseen error is shown: a collective that lost a peer fails in many ways. Does
    nothing if the run has one process.
    """
    if _HEARTBEAT:
        _HEARTBEAT[0].await_verdict()


def over() -> None:
    """Stop watching the other processes: the run is over for all of them, successfully or not."""
    if _HEARTBEAT:
        _HEARTBEAT[0].stop()


def processes_of_this_run() -> SingleProcess:
    """Return this process's place among those that jax has joined; `SingleProcess` if it has joined none."""
    if "jax" not in sys.modules:
        return SINGLE_PROCESS
    state = _state()
    return (
        SINGLE_PROCESS
        if state.client is None
        else _peers(state.client, state.process_id, state.num_processes)
    )


def _state() -> Any:
    """Return jax's state of the joined processes: not public, but the only way to the coordination service.

    Other libraries use it too (Orbax's `multihost.get_jax_distributed_client`).
    """
    from jax._src import distributed

    return distributed.global_state


@functools.cache
def _peers(client: Any, index: int, count: int) -> SingleProcess:
    return room("clusters").ProcessGroup(client, index, count) if count > 1 else SINGLE_PROCESS


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def noting_signals(on_signal: Callable[[int, list[int]], None]) -> Iterator[list[int]]:
    """Yield the list of the end signals received so far; they end nothing during the block.

    Only the main thread can handle signals: any other notes none, and the owner of the main thread decides.

    Args:
        on_signal: called in the signal's handler with its number and the signals before it.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        on_signal(number, noted)
        noted.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
