"""The job files of deploy/: read as their schedulers read them, and run with schedulers played here."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.trainer.launch import Place, place_in

DEPLOY = Path(__file__).parents[2] / "deploy"
# Starts its command once for each task on this host, with the variables that the scheduler sets, and ends as
# the first task that fails: srun --kill-on-bad-exit, mpirun.
SCHEDULER = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
own, command = words[: words.index("meshwright")], words[words.index("meshwright") :]
for place, word in enumerate(own):
    if word == "-x" and "=" in own[place + 1]:
        name, _, value = own[place + 1].partition("=")
        os.environ[name] = value
tasks = {tasks!r}
command = [sys.executable, "-m", *command]
started = [subprocess.Popen(command, env={{**os.environ, **task}}) for task in tasks]
sys.exit(max(task.wait() for task in started))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def played(folder: Path, name: str, tasks: list[dict[str, str]]) -> dict[str, str]:
    """An environment in which `name` starts such tasks here."""
    program = folder / name
    program.write_text(SCHEDULER.format(python=sys.executable, tasks=tasks))
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def options_of(script: str) -> dict[str, str]:
    """`#SBATCH --name=value` as sbatch reads it: only above the first command."""
    head = script.partition("\nset -u")[0]
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.M))


def test_the_file_for_slurm_asks_for_one_task_per_gpu():
    options = options_of((DEPLOY / "slurm.sbatch").read_text())
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
    assert options["signal"] == "TERM@300"
    assert "requeue" in options


@pytest.mark.wide
def test_the_file_for_slurm_trains_in_all_tasks_of_a_step(tmp_path):
    told = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    tasks = [{**told, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} for index in range(2)]
    trained(["slurm.sbatch"], played(tmp_path, "srun", tasks), tmp_path / "run")


@pytest.mark.long
def test_the_script_for_open_mpi_trains_in_all_processes(tmp_path):
    hosts = tmp_path / "hostfile"
    hosts.write_text("# mine\n127.0.0.1 slots=8\n127.0.0.2 slots=8\n")
    tasks = [{"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(index)} for index in range(2)]
    environment = {**played(tmp_path, "mpirun", tasks), "PORT": str(free_port())}
    trained(["openmpi.sh", str(hosts)], environment, tmp_path / "run")


def trained(script: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run a job file on four simulated devices."""
    said = [
        "bash",
        str(DEPLOY / script[0]),
        *script[1:],
        "linear",
        str(folder),
        "--on",
        "4xCPU",
        "--steps",
        "4",
    ]
    done = subprocess.run(said, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 steps on 4 x cpu") == 1
    assert json.loads((folder / "measurement.json").read_text())["num_devices"] == 4


def test_a_run_that_ended_with_words_is_not_begun_again_by_the_file_for_slurm(tmp_path):
    environment = played(tmp_path, "srun", [{}])
    (tmp_path / "srun").write_text(f"#!/bin/bash\necho again >> {tmp_path}/count\nexit $STATUS\n")
    for status, times in ((2, 1), (143, 1), (4, 4), (137, 4)):
        (tmp_path / "count").write_text("")
        said = ["bash", str(DEPLOY / "slurm.sbatch"), "linear", "here"]
        done = subprocess.run(said, env={**environment, "STATUS": str(status)}, capture_output=True)
        assert done.returncode == status
        assert len((tmp_path / "count").read_text().splitlines()) == times


def documents(name: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / name).read_text())}


def test_the_pods_of_the_job_are_what_jax_looks_for():
    # jax/_src/clusters/k8s_cluster.py: an indexed job, whose pods' subdomain is a headless service.
    made = documents("kubernetes-job.yaml")
    job, service, role = made["Job"]["spec"], made["Service"]["spec"], made["Role"]["rules"]
    pod = job["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == {"job-name": made["Job"]["metadata"]["name"]}
    assert pod["subdomain"] == made["Service"]["metadata"]["name"]
    assert pod["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]
    assert {resource for rule in role for resource in rule["resources"]} == {"pods", "services", "jobs"}
    assert made["RoleBinding"]["roleRef"]["name"] == made["Role"]["metadata"]["name"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
    assert place_in({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"}) == Place(
        launcher="Kubernetes"
    )


def test_the_jobset_has_one_indexed_job_with_the_pods_of_the_job():
    (hosts,) = documents("kubernetes-jobset.yaml")["JobSet"]["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    alone = documents("kubernetes-job.yaml")["Job"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == alone["parallelism"]
    theirs, ours = (spec["template"]["spec"]["containers"][0] for spec in (alone, job))
    assert (ours["command"], ours["resources"]) == (theirs["command"], theirs["resources"])


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "kubernetes-jobset.yaml"])
def test_the_command_of_a_pod_is_one_that_meshwright_reads(name):
    from typer.testing import CliRunner

    from meshwright.cli import app_for

    made = documents(name)
    spec = (
        made["Job"]["spec"]
        if "Job" in made
        else made["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    )
    verb, *words = spec["template"]["spec"]["containers"][0]["command"][1:]
    read = CliRunner().invoke(app_for([]), [verb, *words, "--help"])
    assert read.exit_code == 0
    refused = CliRunner().invoke(app_for([]), [verb, *words, "--restarts", "none"])
    assert "--restarts" in refused.output  # all that stands before it was read
