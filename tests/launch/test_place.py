import pytest

from meshwright.errors import InputError
from meshwright.launch import Place, place_in

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
    with pytest.raises(InputError, match="does not tell where process 0 runs") as error:
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
    with pytest.raises(InputError, match="is no HOST:PORT") as error:
        place_in(told)
    assert "node1:7717" in error.value.hint
