"""Join this process to the others of its run, through `jax.distributed.initialize`."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import sys
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.subprocesses import IS_LINUX, end_with_parent
from meshwright.trainer.launch import COORDINATOR, JAX_COORDINATOR, PARENT, Place, processes_of_this_run

from ._coordination import Heartbeat

HEARTBEAT_SECONDS = 30  # after which jax ends all processes if ours has not; jax's default is 100
START_SECONDS = 300  # for all processes to arrive
END_SECONDS = 30  # for all to leave, once they have agreed that the run is over
# Time limit of a collective on a CPU. Without it, a dead process among more than two is noticed only by jax's
# heartbeat, which ends the others without a message of ours. The limit must leave time to draw a page: a
# process that only draws a page must not be taken for dead.
COLLECTIVE_SECONDS = 60
COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"
JAX_BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # jax reads it itself


def join(place: Place) -> Heartbeat | None:
    """Wait for the other processes of the run, and join them before jax creates its devices.

    Returns:
        What watches the others from now on; None if there are none.

    Raises:
        MeshwrightError: they do not arrive, or jax cannot find out who they are.
    """
    import jax

    _end_with_parent()
    _keep_stdout()
    flags = os.environ.get("XLA_FLAGS", "")
    if COLLECTIVE_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {COLLECTIVE_FLAG}={COLLECTIVE_SECONDS}".strip()
    # Meshwright handles signals itself: jax's service would take over SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        coordinator, is_first = _coordinator(place)
        jax.distributed.initialize(
            coordinator_address=coordinator,
            coordinator_bind_address=_bind_address(place, coordinator) if is_first and coordinator else None,
            num_processes=place.count,
            process_id=place.index,
            cluster_detection_method="deactivate" if place.count is not None else None,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=END_SECONDS,
        )
    except (RuntimeError, ValueError) as failed:  # jax raises both kinds
        raise MeshwrightError(
            f"the processes that {place.launcher} started could not connect to each other: {failed}",
            hint="process 0 must be up and its address reachable; the page on training shows job files that "
            "work. To train in this process alone, take the launcher's variables out of the environment",
        ) from failed
    peers = processes_of_this_run()
    if peers.count == 1:
        return None
    from jax._src import distributed

    heartbeat = Heartbeat(distributed.global_state.client, peers.index, peers.name)
    heartbeat.start()
    return heartbeat


def _coordinator(place: Place) -> tuple[str | None, bool]:
    """Return process 0's "host:port" (None if only jax knows it), and whether this is process 0."""
    from jax._src.clusters import ClusterEnv  # not public; jax itself calls it to find missing values

    given = place.coordinator or os.environ.get(JAX_COORDINATOR)
    if place.count is not None:
        return given, place.index == 0
    missing = (None, None, None, None)
    detected, _, index, _ = ClusterEnv.auto_detect_unset_distributed_params(given, *missing, START_SECONDS)
    return (detected, True) if index == 0 else (given, False)


def _bind_address(place: Place, coordinator: str) -> str | None:
    """Return the address on which process 0 listens: the coordinator's alone, if it belongs to this host.

    A JAX_COORDINATOR_BIND_ADDRESS that is set is returned as it is. None leaves the choice to jax, which
    listens on all interfaces. This is so if the address belongs to an address translator or a service in
    front of this host, or if the host's name resolves to its loopback, which no other host reaches. A port
    that is taken is an error here: jax would end the process without a message.
    """
    given = os.environ.get(JAX_BIND)
    host, _, port = (given or coordinator).rpartition(":")
    host = host.strip("[]")
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
            ip = ipaddress.ip_address(address[0])
            if ip.is_loopback and host != "localhost" and str(ip) != host:
                continue
            if _can_listen(family, address):
                return given or (f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}")
        _can_listen(socket.AF_INET, ("0.0.0.0", int(port)))
    except socket.gaierror:  # jax reports it itself
        return given
    except OSError as refused:
        name = f"{COORDINATOR}=HOST:PORT" if place.count is not None else "JAX_COORDINATOR_PORT=PORT"
        raise MeshwrightError(
            f"process 0 cannot listen on {host}:{port} for the other processes: {refused.strerror}",
            hint=f"end the process that uses the port, or give all processes a free one: {name}",
        ) from refused
    return given


def _can_listen(family: int, address: Any) -> bool:
    """Listen on a port for a moment; return False if the address does not belong to this host."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections do not count
        try:
            probe.bind(address)
            probe.listen()
        except OSError as refused:
            if refused.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return False
            raise
    return True


def _keep_stdout() -> None:
    """Keep stdout for Python's output, and redirect native libraries' output, such as Gloo's, to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding="utf-8")


def _end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, which may be killed before it can do so."""
    if PARENT in os.environ and IS_LINUX:
        end_with_parent(int(os.environ[PARENT]), signal.SIGKILL)
