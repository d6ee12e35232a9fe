"""Write job files: texts that make a scheduler start `meshwright train --resume` on all hosts of a fleet.

How the processes join. Slurm: one task per GPU. `place_in` reads SLURM_STEP_NUM_TASKS, and jax's own
detection the rest (SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID). Kubernetes
and SkyPilot: one process per host, which gets MESHWRIGHT_COORDINATOR, MESHWRIGHT_NUM_PROCESSES and
MESHWRIGHT_PROCESS. So a pod needs neither the package `kubernetes` nor the right to ask the cluster.

What ends early. SIGTERM makes `train` save and end with status 143. Slurm sends it five minutes before the
time limit, and the file queues its own job again. Kubernetes sends it before it removes a pod. Statuses 1
and 2 (a message for the user) end the job. After any other there is another attempt, which goes on from the
newest checkpoint.

Source for Slurm: sbatch(1), srun(1) and scontrol(1) of Slurm 26.05. Not run on a cluster: the tests play one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, nearest_name

from ._job import SAVE_SECONDS, Job, attempt_numbers, check_path, check_word, comments, label
from ._job_kubernetes import kubernetes_file
from ._job_skypilot import skypilot_file

if TYPE_CHECKING:
    from meshwright.hardware import Fleet


_EARLY_SECONDS = 60  # Slurm's signal comes up to this much earlier


@dataclass(frozen=True, slots=True)
class JobKind:
    """One kind of job file: its name, the usual end of its file's name, and what writes it."""

    name: str
    suffix: str
    text_of: Callable[[Job], str]

    def write(self, **order: Any) -> str:
        """Return the text of the job file; `order`: as for `job_file`."""
        return job_file(self.name, **order)

    def check_chip(self, fleet: Fleet) -> None:
        """Raise an `InputError`, before a fleet is planned, if this scheduler has none of its chips."""
        _check_chip(self.name, fleet)


def job_file(
    kind: str,
    *,
    config_file: str,
    fleet: Fleet,
    name: str,
    steps: int | None,
    folder: str,
    hours: int = 24,
    image: str | None = None,
    volume: str = "runs",
) -> str:
    """Return the text of a job file that trains a configuration on a fleet and resumes after interruptions.

    Args:
        kind: "slurm", "k8s" (an Indexed Job with its Service and ConfigMap) or "skypilot".
        config_file: the TOML file. Slurm's hosts must see it; for "k8s" its text becomes part of the job
            file; SkyPilot copies it.
        name: of the job. Characters that the schedulers refuse become hyphens.
        steps: of the whole run; None for the configuration's.
        folder: the run's folder, which all hosts must share. Absolute for "k8s" and "skypilot".
        hours: the time limit; Slurm only.
        image: the container image that holds Meshwright, "k8s" only. None is published: `deploy/Dockerfile`
            makes one. Without it the pods name none, and Kubernetes refuses the file until you name it.
        volume: the PersistentVolumeClaim ("k8s") or SkyPilot volume that is mounted where `folder` lies.

    Raises:
        InputError: no such kind; the scheduler cannot have this fleet; a name, path or number is unusable; or
            the file cannot be read.

    >>> from meshwright.hardware import Fleet
    >>> eight = Fleet.parse("8xH100")
    >>> made = job_file("slurm", config_file="a b.toml", fleet=eight, name="try 1", steps=9, folder="runs/a")
    >>> [line.split("meshwright ")[1] for line in made.splitlines() if "srun" in line]
    ["train 'a b.toml' --folder runs/a --resume --steps 9"]
    """
    if kind not in KINDS:
        raise InputError(f"no job file is of the kind {kind!r}", hint=nearest_name(kind, KINDS))
    _check_chip(kind, fleet)
    for what, value in (("number of steps", steps), ("time limit in hours", hours)):
        if value is not None and value < 1:
            raise InputError(f"the {what} is {value}", hint="give at least 1")
    for what, path in (("configuration", config_file), ("run's folder", folder)):
        check_path(what, path)
    for what, word in (("image", image), ("volume", volume)):
        if word is not None:
            check_word(what, word)
    job = Job(
        config_file=config_file,
        fleet=fleet,
        name=label(name),
        steps=steps,
        folder=folder,
        hours=hours,
        image=image,
        volume=volume,
    )
    return KINDS[kind].text_of(job)


def _check_chip(kind: str, fleet: Fleet) -> None:
    if fleet.chip.platform == "cpu":
        what = f"{fleet.name} is one machine's simulated devices, for which no scheduler is asked"
        raise InputError(what, hint=f"run it here: `meshwright train CONFIG --on {fleet.name}`")
    if kind == "slurm" and fleet.chip.slices is not None:
        what = f"no job file for Slurm: {fleet.chip.name} comes in whole slices, which Google rents out"
        raise InputError(what, hint="use the kind k8s, for Google Kubernetes Engine")


def _slurm_file(job: Job) -> str:
    fleet, chip = job.fleet, job.fleet.chip
    whole = fleet.chips_per_host >= chip.chips_per_host
    # The whole host brings all of its cores and memory. A part of one needs a number, which is a guess.
    cores = ["--exclusive", "--mem=0"] if whole else ["--cpus-per-task=8"]
    options = [
        f"--job-name={job.name}",
        f"--nodes={fleet.num_hosts}",
        f"--ntasks-per-node={fleet.chips_per_host}",
        f"--gpus-per-node={fleet.chips_per_host}",
        *cores,
        f"--time={job.hours}:00:00",
        f"--signal=TERM@{SAVE_SECONDS}",
        "--requeue",
        "--open-mode=append",
    ]
    bind = "--cpu-bind=none" if whole else '--cpus-per-task="$SLURM_CPUS_PER_TASK"'
    head = comments(
        f"Trains on {fleet.name}: sbatch FILE, from a shell with `meshwright` on its path. All hosts must",
        "see the configuration and the run's folder. Your cluster may also need --account, --partition or a",
        "type in --gpus-per-node. One task for each GPU: `meshwright train` sees Slurm's step, and JAX finds",
        f"the other tasks through it. Slurm sends SIGTERM {SAVE_SECONDS} seconds before the time limit: the",
        "run saves and ends, and its job is queued again. It then goes on from its newest checkpoint, as it",
        "does after a host has failed (--requeue).",
    )
    if not whole:
        head += comments("--cpus-per-task is a guess: use the cores of a host, divided by its GPUs.")
    srun = f"srun --kill-on-bad-exit=1 {bind} {shlex.join(job.command(job.config_file))}"
    script = _SLURM_SCRIPT.format(
        attempts=attempt_numbers(),
        srun=srun,
        near=SAVE_SECONDS + 2 * _EARLY_SECONDS,
    )
    return "\n".join(["#!/bin/bash", *head, *(f"#SBATCH {option}" for option in options), script])


# srun returns the highest status. One task's message for the user (1, 2) may hide behind the signal that srun
# then sends the others (143), so the clock, and not the status, tells whether the time limit ended the run.
_SLURM_SCRIPT = """\
set -u
for attempt in {attempts}; do
    {srun}
    status=$?
    case $status in
    # Done; stopped with a message for you, which another attempt would repeat; interrupted.
    0 | 1 | 2 | 130) exit $status ;;
    esac
    if [ "$(date +%s)" -ge "$((${{SLURM_JOB_END_TIME:-9999999999}} - {near}))" ]; then
        scontrol requeue Incomplete "$SLURM_JOB_ID" || echo "submit this file again to go on" >&2
        exit $status
    fi
    if [ $status -eq 143 ]; then exit $status; fi # asked to end before the time limit
    echo "attempt $attempt ended with status $status" >&2
done
exit $status
"""


SLURM = JobKind("slurm", ".sbatch", _slurm_file)
K8S = JobKind("k8s", ".k8s.yaml", kubernetes_file)
SKYPILOT = JobKind("skypilot", ".sky.yaml", skypilot_file)
KINDS = {kind.name: kind for kind in (SLURM, K8S, SKYPILOT)}
