"""Write a Kubernetes job file: an Indexed Job with one pod per host, its headless Service and its ConfigMap.

Sources: the Job API of batch/v1, stable since Kubernetes 1.31; for TPUs the node labels of
AI-Hypercomputer/xpk (core/system_characteristics.py, 367c838) and the variables of jax's GkeTpuCluster
(jax/_src/clusters/cloud_tpu_cluster.py). Checked against Kubernetes' schemas, not run on a cluster.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.files import read_text, reason
from meshwright.trainer.launch import COORDINATOR, INDEX, NUM_PROCESSES

from ._job import ATTEMPTS, PORT, SAVE_SECONDS, Job, check_shared_folder, comments
from ._yaml import yaml_text

if TYPE_CHECKING:
    from meshwright.hardware import Fleet

_LARGEST_CONFIG_BYTES = 2**20  # of a ConfigMap
_CONFIG_FOLDER, _CONFIG_KEY = "/etc/meshwright", "run.toml"
# Values of cloud.google.com/gke-tpu-accelerator.
_GKE_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "v7x": "tpu7x",
}
_GPU_RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
# GKE sets both variables in a TPU slice's pods, and jax itself finds the first worker in the same way.
_TPU_SCRIPT = (
    f'export {COORDINATOR}="${{TPU_WORKER_HOSTNAMES%%,*}}:{PORT}" {INDEX}="$TPU_WORKER_ID"; exec "$@"'
)


def kubernetes_file(job: Job) -> str:
    """Return the job file.

    Raises:
        InputError: the configuration cannot be read, the folder cannot be mounted, or no nodes are known.
    """
    check_shared_folder(job, "Kubernetes")
    fleet = job.fleet
    text = _config_text(job.config_file)
    documents = [_config_map(job, text), _job_of_pods(job)]
    if fleet.num_hosts > 1:
        documents.insert(0, _service(job))
    head = comments(
        f"Trains on {fleet.name}: kubectl apply -f FILE. Set before:",
        *_which_image(job),
        f"the claim {job.volume}: a volume that all pods can write at once (ReadWriteMany), mounted on",
        f"{job.mount}. Data files that the configuration names must lie there too. One pod per host; the",
        "pods find each other through the headless service. A pod that breaks off is made again, and all",
        "go on from the newest checkpoint. To end the run: kubectl delete -f FILE; it saves first.",
        *_which_nodes(fleet),
    )
    return "\n".join(head) + "\n" + "---\n".join(yaml_text(document) for document in documents)


def _which_image(job: Job) -> list[str]:
    """Return lines about the image that the pods run."""
    if job.image is not None:
        return [f"the image {job.image}, which must hold Meshwright (deploy/Dockerfile makes one), and"]
    return [
        "an `image` below `name: train`, which must hold Meshwright. None is published, so none is named",
        "here, and Kubernetes refuses the file until you name it: deploy/Dockerfile makes one. And",
    ]


def _which_nodes(fleet: Fleet) -> list[str]:
    """Return lines about the choice of nodes, which only TPUs' labels settle."""
    chip = fleet.chip
    if chip.platform == "tpu":
        return ["For Google Kubernetes Engine, by its published labels. Not yet run on TPUs."]
    lines = [f"If the cluster has other GPUs than {chip.name}, add a nodeSelector to the pods' spec."]
    if chip.platform == "cuda" and chip.device_kinds:
        product = re.sub(r"\s+", "-", chip.device_kinds[0])
        lines.append(f"Where NVIDIA's GPU feature discovery runs: {{nvidia.com/gpu.product: {product}}}")
    return lines


def _config_text(config_file: str) -> str:
    """Return the text of the configuration, which becomes part of the job file.

    Raises:
        InputError: there is no such file, it is not text, or it is too large.
    """
    try:
        text = read_text(config_file)
    except (OSError, ValueError) as failed:
        raise InputError(
            f"the configuration {config_file!r} cannot be read: {reason(failed)}",
            hint="name a TOML file: `meshwright init FILE.toml --from PRESET` writes one",
        ) from failed
    if len(text.encode()) > _LARGEST_CONFIG_BYTES:
        what = f"the configuration {config_file!r} exceeds {_LARGEST_CONFIG_BYTES} bytes, a ConfigMap's limit"
        raise InputError(what, hint="name the TOML file of a run")
    return text


def _config_map(job: Job, text: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name},
        "data": {_CONFIG_KEY: text},
    }


def _service(job: Job) -> dict[str, Any]:
    """Return the headless service through which pods find each other, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
        },
    }


def _job_of_pods(job: Job) -> dict[str, Any]:
    hosts = job.fleet.num_hosts
    several = {"completionMode": "Indexed"} if hosts > 1 else {}
    codes = {"containerName": "train", "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": [1, 2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [143]}},
    ]
    spec = {
        **several,
        "completions": hosts,
        "parallelism": hosts,
        # When one breaks off, all do: each attempt counts once for every host.
        "backoffLimit": (ATTEMPTS - 1) * hosts,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _pod(job)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}, "spec": spec}


def _pod(job: Job) -> dict[str, Any]:
    fleet = job.fleet
    resource, selector = _resource_and_selector(fleet)
    command = [_unexpanded(word) for word in job.command(f"{_CONFIG_FOLDER}/{_CONFIG_KEY}")]
    is_tpu_slice = fleet.chip.platform == "tpu" and fleet.num_hosts > 1
    if is_tpu_slice:
        command = ["sh", "-c", _unexpanded(_TPU_SCRIPT), "sh", *command]
    container = {
        "name": "train",
        **({} if job.image is None else {"image": job.image}),
        "command": command,
        **({"env": _environment(job, knows_place=not is_tpu_slice)} if fleet.num_hosts > 1 else {}),
        "resources": {"limits": resource},
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
            {"name": "runs", "mountPath": job.mount},
            {"name": "memory", "mountPath": "/dev/shm"},  # NCCL's, which is too small by default
        ],
    }
    return {
        **({"subdomain": job.name} if fleet.num_hosts > 1 else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": job.name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.volume}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _unexpanded(word: str) -> str:
    """Return a word of a command so that Kubernetes does not read `$(NAME)` in it as a variable."""
    return word.replace("$", "$$")


def _environment(job: Job, *, knows_place: bool) -> list[dict[str, Any]]:
    """Return the variables by which the processes find each other.

    `knows_place`: whether the job's index is the process's number; a TPU slice has its own, which GKE sets.
    """
    count = {"name": NUM_PROCESSES, "value": str(job.fleet.num_hosts)}
    if not knows_place:
        return [count]
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": COORDINATOR, "value": f"{job.name}-0.{job.name}:{PORT}"},
        count,
        {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": annotation}}},
    ]


def _resource_and_selector(fleet: Fleet) -> tuple[dict[str, int], dict[str, str]]:
    """Return the devices that a pod asks for, and the labels of the nodes that have them.

    Raises:
        InputError: GKE has no such slices, or the fleet is several of them.
    """
    chip = fleet.chip
    if chip.slices is None:
        return {_GPU_RESOURCES[chip.platform]: fleet.chips_per_host}, {}
    if fleet.num_domains > 1:
        what = f"no job file for Kubernetes on {fleet.name}: a Job cannot place its pods slice by slice"
        raise InputError(
            what, hint="start `meshwright train` by a JobSet of one Job a slice (xpk makes such)"
        )
    if chip.name not in _GKE_ACCELERATORS:
        what = f"no job file for Kubernetes on {fleet.name}: no label of such nodes is known here"
        raise InputError(what, hint=f"GKE's known ones are {', '.join(_GKE_ACCELERATORS)}")
    labels = {
        "cloud.google.com/gke-tpu-accelerator": _GKE_ACCELERATORS[chip.name],
        "cloud.google.com/gke-tpu-topology": fleet.topology.partition(":")[2],
    }
    return {"google.com/tpu": fleet.chips_per_host // chip.slices.devices_per_chip}, labels
