"""This process made one of a run's, through `jax.distributed.initialize`."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from typing import Any

from ..errors import MeshwrightError
from ._peers import Alone, Peers
from ._place import PARENT, Place
from ._roll import Roll

HEARTBEAT_SECONDS = 30  # after which jax ends all if the roll has not; its own is 100
START_SECONDS = 300  # for all processes to be there
END_SECONDS = 30  # for all to leave, once they have agreed that the run is over
# Of a collective on a CPU. A dead peer of more than two is else noticed by the heartbeat alone, which ends a
# process without a word of ours; a process that only draws a page must not be taken for dead.
COLLECTIVE_SECONDS = 60
COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"
PR_SET_PDEATHSIG = 1
_ROLL: list[Roll] = []  # of this process, once it has joined others


def join(place: Place) -> Alone:
    """Wait for the other processes of the run, before jax makes its devices.

    Raises:
        MeshwrightError: they do not come, or jax cannot tell who they are.
    """
    import jax

    _end_with_parent()
    _keep_stdout()
    flags = os.environ.get("XLA_FLAGS", "")
    if COLLECTIVE_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {COLLECTIVE_FLAG}={COLLECTIVE_SECONDS}".strip()
    # Signals are ours: jax's service would take SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.count,
            process_id=place.index,
            cluster_detection_method="deactivate" if place.count is not None else None,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=END_SECONDS,
        )
    except (RuntimeError, ValueError) as failed:  # jax's own words, of both kinds
        raise MeshwrightError(
            f"the processes that {place.launcher} started did not find each other: {failed}",
            hint="process 0 must be up and its address reachable; the page on training shows job files that "
            "work. To train in this process alone, take the launcher's variables out of the environment",
        ) from failed
    peers = processes_of_this_run()
    if peers.count > 1:
        roll = Roll(_state().client, peers.index, peers.name)
        roll.start()
        _ROLL.append(roll)
    return peers


def leave(words: str, status: int, *, wait: bool = False) -> None:
    """Where this is one of several processes: tell the others that it ends before the run is over, and end it
    with `status` at once, for jax would wait for the others to end as well.

    Args:
        wait: whether another process's end may be the reason, which is then to be named first.
    """
    if _ROLL:
        sys.stdout.flush()
        sys.stderr.flush()
        _ROLL.pop().leave(words, status, wait)


def over() -> None:
    """The run is over, well or not, for all processes: this one misses no other from now on."""
    if _ROLL:
        _ROLL[0].stop()


def processes_of_this_run() -> Alone:
    """This process's place among those that jax has joined; alone where it has joined none."""
    if "jax" not in sys.modules:
        return Alone()
    state = _state()
    return Alone() if state.client is None else _peers(state.client, state.process_id, state.num_processes)


def _state() -> Any:
    """Not public, and the only way to the coordination service; other libraries go it too (Orbax's
    `multihost.get_jax_distributed_client`)."""
    from jax._src import distributed

    return distributed.global_state


@functools.cache
def _peers(client: Any, index: int, count: int) -> Alone:
    return Peers(client, index, count) if count > 1 else Alone()


def _keep_stdout() -> None:
    """Gloo writes to stdout which of its ranks are connected, where a run's answer belongs: what is written
    there beside Python goes to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding="utf-8")


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children; the kernel does."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was killed before it could be watched
        sys.exit(1)
