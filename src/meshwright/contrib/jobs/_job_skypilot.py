"""Write a job file for SkyPilot: a task with one process per host.

Sources: docs.skypilot.co (YAML, distributed jobs, managed jobs, volumes), the schemas of its release 0.14.1
(sky/utils/schemas.py), and the accelerators' names in its catalog, schema v8 (skypilot-org/skypilot-catalog,
catalogs/v8/common/accelerators.csv, d4d53f0). Checked once by those schemas, not run with SkyPilot.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from meshwright.errors import InputError
from meshwright.trainer.launch import COORDINATOR, INDEX, NUM_PROCESSES

from ._job import PORT, Job, attempt_numbers, check_shared_folder, comments
from ._yaml import yaml_text

if TYPE_CHECKING:
    from meshwright.hardware import Fleet

# By our chip's name. A chip that is missing has no name there that means it and no other.
_SKY_NAMES = {
    "V100-16GB": "V100",
    "V100-32GB": "V100-32GB",
    "T4": "T4",
    "A100-40GB": "A100",
    "A100-80GB": "A100-80GB",
    "A10": "A10",
    "A10G": "A10G",
    "A6000": "A6000",
    "RTX-3090": "RTX3090",
    "RTX-4090": "RTX4090",
    "RTX-5090": "RTX5090",
    "RTX-PRO-6000": "RTXPRO6000",
    "L4": "L4",
    "L40S": "L40S",
    "H100": "H100",
    "H100-NVL": "H100-NVL",
    "H200": "H200",
    "GH200": "GH200",
    "B200": "B200",
    "B300": "B300",
    "MI300X": "MI300X",
}
_SKY_SLICES = {"v3": "tpu-v3", "v4": "tpu-v4", "v5e": "tpu-v5litepod", "v5p": "tpu-v5p", "v6e": "tpu-v6e"}
_SKY_MEANS_SEVERAL = {"V100-16GB", "A100-40GB", "A100-80GB", "H100"}  # SXM on some clouds, PCIe on others


def skypilot_file(job: Job) -> str:
    """Return the job file.

    Raises:
        InputError: SkyPilot has no name for the chip, or a path is unusable there.
    """
    accelerators = _sky_accelerators(job.fleet)
    check_shared_folder(job, "SkyPilot")
    for path in (job.config_file, job.folder):
        if "$" in path:
            what = f"SkyPilot would read a variable in the path {path!r}"
            raise InputError(what, hint="use a path without a dollar sign")
    fleet, has_volume = job.fleet, job.fleet.chip.slices is None
    copy = f"/tmp/{job.name}.toml"
    task = {
        "name": job.name,
        "num_nodes": fleet.num_hosts,
        "resources": {"accelerators": accelerators},
        "file_mounts": {copy: job.config_file},
        **({"volumes": {job.mount: job.volume}} if has_volume else {}),
        "setup": _SKY_SETUP,
        "run": _sky_script(job, copy),
    }
    head = [f"Trains on {fleet.name}. Set before: `setup`, which must install Meshwright."]
    if has_volume:
        head += [
            "Start: sky jobs launch FILE. When a host is lost, it goes on from the newest checkpoint.",
            f"All hosts must be able to write the volume {job.volume} at once: on Kubernetes make it by `sky",
            "volumes apply` with access_mode ReadWriteMany. A mounted bucket does not do: the run locks,",
            "renames and appends to files. On clouds without volumes remove `volumes`, and let `setup` mount",
            "a folder that the hosts share.",
        ]
    else:
        head += [f"Start: sky launch FILE. {job.folder} is on the machine's own disk, and lost with it."]
    if fleet.chip.name in _SKY_MEANS_SEVERAL:
        head += [
            f"What SkyPilot calls {_SKY_NAMES[fleet.chip.name]} is a PCIe card on some clouds: choose a",
            f"cloud with {fleet.chip.name} (`sky show-gpus`), and add it to the resources as `infra`.",
        ]
    return "\n".join(comments(*head)) + "\n" + yaml_text(task)


def _sky_accelerators(fleet: Fleet) -> str:
    """Return what SkyPilot calls the accelerators of one host, or a whole TPU slice.

    Raises:
        InputError: it has no name for them, or its hosts could not share the run's folder.
    """
    chip = fleet.chip
    if chip.slices is None:
        if chip.name not in _SKY_NAMES:
            raise InputError(
                f"no job file for SkyPilot on {fleet.name}: its catalog has no name for {chip.name}",
                hint=f"use the kind slurm or k8s, or one of {', '.join(_SKY_NAMES)}",
            )
        return f"{_SKY_NAMES[chip.name]}:{fleet.chips_per_host}"
    if chip.name not in _SKY_SLICES:
        what = f"no job file for SkyPilot on {fleet.name}: its catalog has no {chip.name}"
        raise InputError(what, hint=f"use the kind k8s, or one of {', '.join(_SKY_SLICES)}")
    if fleet.num_hosts > 1:
        raise InputError(
            f"no job file for SkyPilot on the {fleet.num_hosts} hosts of {fleet.name}: it mounts no volume "
            "there that all of them can write, and the run's folder needs one",
            hint="use the kind k8s, for Google Kubernetes Engine",
        )
    number = chip.slices.number_in_name(fleet.topology.partition(":")[2])
    return f"{_SKY_SLICES[chip.name]}-{number}"


_SKY_SETUP = """\
# Install Meshwright here, with the extra of the hosts' accelerator.
command -v meshwright || { echo "setup must install meshwright" >&2; exit 1; }
"""
_SKY_SCRIPT = """\
{place}\
for attempt in {attempts}; do
    status=0
    {command} || status=$?
    case $status in
    # Done; stopped with a message for you, which another attempt would repeat; asked to end.
    0 | 1 | 2 | 130 | 143) exit $status ;;
    esac
    echo "attempt $attempt ended with status $status" >&2
done
exit $status
"""


def _sky_script(job: Job, config_file: str) -> str:
    several = f"""\
export {COORDINATOR}="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"
export {NUM_PROCESSES}="$SKYPILOT_NUM_NODES" {INDEX}="$SKYPILOT_NODE_RANK"
"""
    return _SKY_SCRIPT.format(
        place=several if job.fleet.num_hosts > 1 else "",
        attempts=attempt_numbers(),
        command=shlex.join(job.command(config_file)),
    )
