"""Read a Kubernetes Job, JobSet or PyTorchJob: its pods' devices, their labels, and their commands."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.hardware import find_chip

from ._launch_lines import Launch, chip_of
from ._shell import Command
from ._tables import Seen, seen_keys, table, whole

KINDS = ("Job", "JobSet", "PyTorchJob")
_DEVICES = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu")
_LABELS = (
    "nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "gpu.nvidia.com/class",
    "gpu.nvidia.com/model", "karpenter.k8s.aws/instance-gpu-name", "skypilot.co/accelerator",
    "amd.com/gpu.product-name",
)  # fmt: skip
_TPU, _TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
_TPUS = {
    "tpu-v4-podslice": "v4", "tpu-v5-lite-podslice": "v5e", "tpu-v5-lite-device": "v5e",
    "tpu-v5p-slice": "v5p", "tpu-v6e-slice": "v6e", "tpu7x": "v7x",
}  # fmt: skip


def is_kubernetes(documents: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the documents are objects of Kubernetes."""
    return any("apiVersion" in each and "kind" in each for each in documents)


def kubernetes(file: str, documents: Sequence[Mapping[str, Any]], ignore: Collection[str] = ()) -> Launch:
    """Return what the one Job, JobSet or PyTorchJob of a file asks for; other objects run nothing on devices.

    Args:
        ignore: keys that the caller wants ignored, such as `pod.tolerations`.

    Raises:
        InputError: there is none, or several; or a key or a value is not understood.
    """
    jobs = [each for each in documents if each.get("kind") in KINDS]
    if len(jobs) != 1:
        kinds = ", ".join(sorted({str(each.get("kind"))[:40] for each in documents}))
        what = f"{file} has {len(jobs)} Jobs, JobSets and PyTorchJobs, among {kinds}"
        raise InputError(what, hint="gate a file with one; of other kinds name the fleet and what it runs: "
                         "meshwright weigh CONFIG --on FLEET --check")  # fmt: skip
    read = _Objects(file, ignore)
    spec = read.table(jobs[0].get("spec"), "spec")
    if jobs[0]["kind"] == "Job":
        return read.launch(spec, 1, "a Kubernetes Job", {})
    if jobs[0]["kind"] == "PyTorchJob":
        return read.launch(read.replicas(spec), 1, "a PyTorchJob", {})
    read.note("jobset", spec)
    found: list[tuple[Mapping[str, Any], int]] = []
    others: list[tuple[Mapping[str, Any], int]] = []
    for each in read.list(spec.get("replicatedJobs"), "replicatedJobs"):
        one = read.table(each, "replicatedJobs")
        read.note("replicated", one)
        inner = read.table(read.table(one.get("template"), "template").get("spec"), "template.spec")
        where = found if read.has_devices(inner) else others
        where.append((inner, whole(file, "replicas", one.get("replicas", 1))))
    found = found or others  # one alone may leave its devices to the caller
    if len(found) != 1:
        what = f"{file}: {len(found)} replicated jobs may be those with the devices"
        raise InputError(what, hint="gate one with devices in one of them")
    return read.launch(*found[0], "a JobSet", {})


class _Objects:
    """Reads the parts of a file's objects, and keeps which of their keys count."""

    def __init__(self, file: str, ignore: Collection[str]) -> None:
        self.file, self.ignore = file, ignore
        self.understood: dict[str, str] = {}
        self.ignored: dict[str, str] = {}

    def note(self, prefix: str, tree: Mapping[str, Any]) -> None:
        values = {f"{prefix}.{key}": value for key, value in tree.items()}
        seen = seen_keys(table("kubernetes"), self.file, values, self.ignore)
        self.understood |= seen.understood
        self.ignored |= seen.ignored

    def table(self, value: Any, name: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise InputError(f"{self.file}: {name} is no mapping", hint="correct the file")
        return value  # pyright: ignore[reportUnknownVariableType]

    def list(self, value: Any, name: str) -> Sequence[Any]:
        if not isinstance(value, list):
            raise InputError(f"{self.file}: {name} is no list", hint="correct the file")
        return value  # pyright: ignore[reportUnknownVariableType]

    def pod(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.table(self.table(job.get("template"), "template").get("spec"), "template.spec")

    def replicas(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the Job with the pods of a PyTorchJob's master and workers.

        Raises:
            InputError: they ask for different devices, or run different commands.
        """
        self.note("pytorchjob", spec)
        policy = self.table(spec.get("runPolicy") or {}, "runPolicy")
        self.note("policy", policy)
        parts = self.table(spec.get("pytorchReplicaSpecs"), "pytorchReplicaSpecs")
        pods, shapes, counts = [], [], []
        for name in parts:
            one = self.table(parts[name], name)
            self.note("replica", one)
            pods.append(one.get("template"))
            counts.append(whole(self.file, f"{name}.replicas", one.get("replicas", 1)))
            containers = self.list(self.pod(one).get("containers"), "containers")
            shapes.append([
                (self.devices(each), each.get("command"), each.get("args"))
                for each in (self.table(each, "containers") for each in containers)
            ])  # fmt: skip
        if not pods or any(shape != shapes[0] for shape in shapes):
            names = ", ".join(map(str, parts))[:60]
            what = f"{self.file}: the replicas {names} have different devices or commands"
            raise InputError(what, hint="name the fleet and what they train: --on 16xH100 --program WORDS")
        deadline = {key: policy[key] for key in ("activeDeadlineSeconds",) if policy.get(key) is not None}
        return {"template": pods[0], "parallelism": sum(counts), **deadline}

    def devices(self, container: Mapping[str, Any]) -> dict[str, Any]:
        resources = self.table(container.get("resources") or {}, "resources")
        parts = [self.table(resources.get(name) or {}, name) for name in ("requests", "limits")]
        return {key: part[key] for part in parts for key in part if key in _DEVICES}

    def has_devices(self, job: Mapping[str, Any]) -> bool:
        containers = self.list(self.pod(job).get("containers"), "containers")
        return any(self.devices(self.table(each, "containers")) for each in containers)

    def launch(self, job: Mapping[str, Any], replicas: int, kind: str, labels: dict[str, str]) -> Launch:
        """Return what the pods of a job ask for, `replicas` times."""
        self.note("job", job)
        pod = self.pod(job)
        self.note("pod", pod)
        containers = [
            self.table(each, "containers") for each in self.list(pod.get("containers"), "containers")
        ]
        using = [each for each in containers if self.devices(each)] or containers
        if len(using) != 1:
            what = f"{self.file}: {len(using)} containers of a pod ask for devices"
            raise InputError(what, hint="gate a job with one of them, or name the fleet and what it runs")
        self.note("container", using[0])
        counts = self.devices(using[0])
        pods = whole(self.file, "parallelism", job.get("parallelism", 1))
        runs = whole(self.file, "completions", job.get("completions") or pods)
        if runs != pods:
            what = f"{self.file}: completions = {runs}, and {pods} pods run at a time: it runs several times"
            raise InputError(what, hint="gate one with as many completions as parallelism")
        labels = self._labels(pod)
        per_host = next((whole(self.file, name, count) for name, count in counts.items()), None)
        named = {chip for label in _LABELS if label in labels and (chip := chip_of(labels[label]))}
        deadline = job.get("activeDeadlineSeconds")
        return Launch(
            kind=kind,
            file=self.file,
            seen=Seen(understood=self.understood, ignored=self.ignored),
            num_hosts=replicas * pods,
            per_host=per_host,
            chip=named.pop() if len(named) == 1 else "",
            fleet=self._slices(labels, replicas, pods, per_host) if _TPU in labels else "",
            seconds=None if deadline is None else float(whole(self.file, "activeDeadlineSeconds", deadline)),
            commands=self._commands(using[0]),
            variables=self._variables(using[0]),
            is_of_pods=True,
        )

    def _labels(self, pod: Mapping[str, Any]) -> dict[str, str]:
        """Return the labels that a pod's host must have, of its selector and of its required affinity."""
        found = {
            str(key): str(value)
            for key, value in self.table(pod.get("nodeSelector") or {}, "nodeSelector").items()
        }
        affinity: Any = pod.get("affinity") or {}
        for name in ("nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"):
            affinity = affinity.get(name) or {} if isinstance(affinity, dict) else {}
        terms = affinity if isinstance(affinity, list) and len(affinity) == 1 else []
        for term in terms:
            for rule in self.list(
                self.table(term, "affinity").get("matchExpressions") or [], "matchExpressions"
            ):
                given = self.table(rule, "matchExpressions")
                values = given.get("values")
                if given.get("operator") == "In" and isinstance(values, list) and len(values) == 1:
                    found.setdefault(str(given.get("key")), str(values[0]))
        return found

    def _slices(self, labels: Mapping[str, str], replicas: int, pods: int, per_host: int | None) -> str:
        """Return the fleet of TPU slices, one for each replica."""
        kind, shape = labels[_TPU], labels.get(_TOPOLOGY, "")
        if kind not in _TPUS or not re.fullmatch(r"\d{1,3}x\d{1,3}(x\d{1,3})?", shape, re.ASCII):
            what = f"{self.file}: {_TPU} = {kind[:40]!r} with {_TOPOLOGY} = {shape[:40]!r} is not understood"
            raise InputError(what, hint="name the slices: --on 2xv6e-16")
        chips = math.prod(int(side) for side in shape.split("x"))
        if per_host is not None and per_host * pods != chips:
            what = f"{self.file}: {pods} pods with {per_host} chips each, and a slice {shape} has {chips}"
            raise InputError(what, hint="let parallelism times google.com/tpu be the chips of the topology")
        chip = find_chip(_TPUS[kind])
        assert chip.slices is not None, "TPUs come in slices"
        name = f"{chip.name}-{chips * chip.slices.cores_per_chip_in_name}"
        return name if replicas == 1 else f"{replicas}x{name}"

    def _commands(self, container: Mapping[str, Any]) -> tuple[Command, ...]:
        words: list[str] = []
        for name in ("command", "args"):
            given = container.get(name) or []
            words += [str(each) for each in self.list(given, name)]
        return (Command(tuple(words)),) if words else ()

    def _variables(self, container: Mapping[str, Any]) -> dict[str, str]:
        listed = (self.table(each, "env") for each in self.list(container.get("env") or [], "env"))
        return {str(each.get("name")): str(each["value"]) for each in listed if "value" in each}
