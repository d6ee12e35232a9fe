"""Which process of how many this is, as whoever started it has left in the environment. No jax.

A scheduler's variables alone do not say that there are several processes: an interactive allocation has them
too, and JAX would wait there for processes that nobody starts. So a place is only told where the step or the
job that this process belongs to has more than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InputError

# How `meshwright train --processes N` tells its children, and how any other launcher may.
COORDINATOR = "MESHWRIGHT_COORDINATOR"  # HOST:PORT, of process 0
NUM_PROCESSES = "MESHWRIGHT_NUM_PROCESSES"
INDEX = "MESHWRIGHT_PROCESS"  # from 0
PARENT = "MESHWRIGHT_PARENT"  # the number of a parent whose end is to be this process's end
JAX_COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # jax reads it itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Process `index` of `count`.

    `launcher`: who started it. `coordinator`: "host:port" of process 0. Where one of the three figures is
    None, jax's own detection finds it.
    """

    launcher: str
    index: int | None = None
    count: int | None = None
    coordinator: str | None = None


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place of this process among several; None where it is alone.

    Raises:
        InputError: the environment is half told, or jax cannot find the first host in it.
    """
    if told := [name for name in (COORDINATOR, NUM_PROCESSES, INDEX) if name in environment]:
        return _told(environment, told)
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        return Place(launcher="Slurm")
    if _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return _open_mpi(environment)
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return Place(launcher="Kubernetes")
    return None


def _told(environment: Mapping[str, str], told: list[str]) -> Place:
    absent = [name for name in (COORDINATOR, NUM_PROCESSES, INDEX) if name not in told]
    if absent:
        raise InputError(
            f"{told[0]} is set, and {' and '.join(absent)} is not",
            hint=f"set all of {COORDINATOR}=HOST:PORT, {NUM_PROCESSES} and {INDEX}, or none",
        )
    host, _, port = environment[COORDINATOR].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"{COORDINATOR}={environment[COORDINATOR]!r} is no HOST:PORT",
            hint="name the host of process 0, and a port that is free there: node1:7717",
        )
    index, count = _number(environment, INDEX), _number(environment, NUM_PROCESSES)
    if not 0 <= index < count:
        raise InputError(
            f"{INDEX}={environment[INDEX]} and {NUM_PROCESSES}={environment[NUM_PROCESSES]}",
            hint=f"number the processes from 0 to {NUM_PROCESSES} - 1",
        )
    return Place(launcher="meshwright", index=index, count=count, coordinator=environment[COORDINATOR])


def _open_mpi(environment: Mapping[str, str]) -> Place:
    """Open MPI before 5 tells where it was started, and jax reads that; from 5 on it does not."""
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return Place(launcher="Open MPI")
    if JAX_COORDINATOR not in environment:
        raise InputError(
            "Open MPI does not tell where process 0 runs",
            hint=f"mpirun -x {JAX_COORDINATOR}=HOST:PORT ..., HOST the first, PORT one that is free there",
        )
    return Place(
        launcher="Open MPI",
        index=_number(environment, "OMPI_COMM_WORLD_RANK"),
        count=_number(environment, "OMPI_COMM_WORLD_SIZE"),
        coordinator=environment[JAX_COORDINATOR],
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    """-1 where it is not told, or is no number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else -1
