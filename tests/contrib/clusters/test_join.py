"""Real processes that find each other, and ones that do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from meshwright.contrib.clusters import _connect as _join
from meshwright.errors import InputError, MeshwrightError
from meshwright.trainer.launch import Place, join, place_in, processes_of_this_run

TALK = """
import os, sys
from meshwright.trainer.launch import join, place_in, processes_of_this_run
before = processes_of_this_run()
assert before.count == 1
peers = join(place_in(os.environ))
assert processes_of_this_run() is peers
os.write(1, b"as gloo writes\\n")
print(peers.name, peers.gathered("x", peers.index * 10), peers.broadcast("y", lambda: peers.index))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def talk(places: list[dict[str, str]]) -> list[tuple[str, str]]:
    """What processes so placed say on stdout and stderr."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TALK],
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said
    return said


def ours(count: int) -> list[dict[str, str]]:
    told = {"MESHWRIGHT_COORDINATOR": f"127.0.0.1:{free_port()}", "MESHWRIGHT_NUM_PROCESSES": str(count)}
    return [{**told, "MESHWRIGHT_PROCESS": str(index)} for index in range(count)]


def srun(count: int) -> list[dict[str, str]]:
    """What srun sets for the tasks of one step on one host."""
    told = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
    }
    return [{**told, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} for index in range(count)]


def mpirun(count: int) -> list[dict[str, str]]:
    """What Open MPI 4 sets for the processes of one host."""
    job = free_port() * 2**12
    told = {"OMPI_COMM_WORLD_SIZE": str(count), "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1"}
    return [
        {**told, "OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_LOCAL_RANK": str(index)}
        for index in range(count)
    ]


@pytest.mark.parametrize("places", [ours, srun, pytest.param(mpirun, marks=pytest.mark.wide)])
def test_processes_find_each_other_as_their_launcher_placed_them(places):
    here = socket.gethostname()
    said = talk(places(2))
    assert [out for out, _ in said] == [f"process {n} of 2 on {here} [0, 10] 0\n" for n in range(2)]
    assert all("as gloo writes" in err for _, err in said)


def test_processes_that_do_not_come_are_an_error_with_jaxs_words(monkeypatch):
    import jax

    def fail(**told):
        raise RuntimeError("DEADLINE_EXCEEDED: 3 of 4 tasks connected")

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(_join, "_keep_stdout", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", fail)
    monkeypatch.setattr(jax.config, "update", lambda *told: None)
    with pytest.raises(
        MeshwrightError, match="Slurm started could not connect to each other: DEADLINE_EXCEEDED: 3 of 4"
    ):
        join(Place(launcher="Slurm"))


def test_a_process_that_has_joined_none_is_alone():
    assert processes_of_this_run().count == 1


def test_a_child_ends_with_its_parent():
    told = {"MESHWRIGHT_PARENT": str(os.getpid() + 1)}  # another process than the one that starts it
    code = "from meshwright.contrib.clusters import _connect; _connect._end_with_parent()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **told}, check=False)
    assert done.returncode == 1


def test_a_port_that_is_taken_is_an_error_in_words_before_jax_starts():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        told = {"MESHWRIGHT_COORDINATOR": address, "MESHWRIGHT_NUM_PROCESSES": "2", "MESHWRIGHT_PROCESS": "0"}
        train = [sys.executable, "-m", "meshwright", "train", "linear", "--on", "2xCPU"]
        done = subprocess.run(train, env={**os.environ, **told}, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        f"error: process 0 cannot listen on {address} for the other processes: Address already" in done.stderr
    )
    assert "MESHWRIGHT_COORDINATOR=HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("told", "bound"),
    [
        ("127.0.0.1:{port}", "127.0.0.1:{port}"),
        ("localhost:{port}", "127.0.0.1:{port}"),
        ("own-name:{port}", None),  # a name that stands for the loopback here, as in many /etc/hosts
        ("198.51.100.7:{port}", None),  # a translated address, which is none of this host's
        ("no-such-host:{port}", None),
    ],
)
def test_the_coordinator_listens_on_the_address_told_where_it_is_this_hosts(monkeypatch, told, bound):
    known = {"localhost": "127.0.0.1", "own-name": "127.0.1.1"}

    def resolved(host, port, **more):
        if host == "no-such-host":
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (known.get(host, host), port))]

    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    port = free_port()
    place = Place(launcher="meshwright", index=0, count=2, coordinator=told.format(port=port))
    assert _join._bind_address(place, place.coordinator) == (bound and bound.format(port=port))


def test_processes_of_one_machine_are_reached_on_its_loopback_alone():
    places = ours(2)
    port = int(places[0]["MESHWRIGHT_COORDINATOR"].partition(":")[2])
    code = (
        TALK
        + "import psutil; print([c.laddr for c in psutil.net_connections('tcp') if c.status == 'LISTEN'])"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **place}, stdout=subprocess.PIPE, text=True
        )
        for place in places
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    listening = next(line for line in said[0].splitlines() if line.startswith("[addr"))
    assert f"port={port}" in listening
    (own,) = [part for part in listening.split("addr(") if f"port={port})" in part]
    assert "127.0.0.1" in own


OURS = {"MESHWRIGHT_COORDINATOR": "h:1", "MESHWRIGHT_NUM_PROCESSES": "4", "MESHWRIGHT_PROCESS": "3"}
# What srun sets in each task of `srun --ntasks=4` (https://slurm.schedmd.com/srun.html).
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_a_process_that_nobody_placed_is_alone():
    assert place_in({"PATH": "/bin"}) is None


def test_what_a_parent_or_any_launcher_tells_is_taken_as_it_is():
    assert place_in(OURS) == Place(launcher="meshwright", index=3, count=4, coordinator="h:1")


@pytest.mark.parametrize("name", OURS)
def test_what_is_told_in_part_is_refused(name):
    told = {each: value for each, value in OURS.items() if each != name}
    with pytest.raises(InputError, match=f"is set, and {name} is not"):
        place_in(told)


@pytest.mark.parametrize("index", ["4", "x"])
def test_a_number_beyond_the_last_is_refused(index):
    with pytest.raises(
        InputError, match=f"MESHWRIGHT_PROCESS={index} and MESHWRIGHT_NUM_PROCESSES=4"
    ) as error:
        place_in({**OURS, "MESHWRIGHT_PROCESS": index})
    assert "from 0 to" in error.value.hint


def test_a_task_of_srun_leaves_the_rest_to_jax():
    assert place_in(SRUN) == Place(launcher="Slurm")


def test_an_interactive_allocation_of_several_tasks_is_one_process():
    # `salloc --ntasks=4` with an interactive step: jax's own detection would wait for three that never come.
    assert place_in({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_the_script_of_sbatch_is_one_process():
    batch = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")}
    assert place_in(batch) is None


def test_open_mpi_before_5_leaves_the_rest_to_jax():
    assert place_in({**MPIRUN, "OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:1"}) == Place(launcher="Open MPI")


def test_open_mpi_5_needs_the_first_hosts_address():
    told = Place(launcher="Open MPI", index=1, count=2, coordinator="first:1234")
    assert place_in({**MPIRUN, "JAX_COORDINATOR_ADDRESS": "first:1234"}) == told
    with pytest.raises(InputError, match="does not say on which host process 0 runs") as error:
        place_in(MPIRUN)
    assert "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT" in error.value.hint


def test_mpirun_of_one_process_is_alone():
    assert place_in({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_a_pod_of_an_indexed_job_leaves_the_rest_to_jax_and_any_other_pod_is_alone():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert place_in(pod) is None
    assert place_in({**pod, "JOB_COMPLETION_INDEX": "0"}) == Place(launcher="Kubernetes")


@pytest.mark.parametrize("address", ["node1", ":77", "node1:", "node1:x", "node1:0", "node1:65536"])
def test_a_coordinator_that_is_no_host_and_port_is_refused(address):
    told = {"MESHWRIGHT_COORDINATOR": address, "MESHWRIGHT_NUM_PROCESSES": "2", "MESHWRIGHT_PROCESS": "0"}
    with pytest.raises(InputError, match="is not of the form HOST:PORT") as error:
        place_in(told)
    assert "node1:7717" in error.value.hint
