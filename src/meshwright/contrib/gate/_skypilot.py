"""Read a SkyPilot task: its accelerators, its nodes, and what it runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError

from ._launch_lines import Launch, chip_of
from ._shell import commands_of
from ._tables import flattened, seen_keys, table, whole

_MEANT = {"a100": "A100-40GB", "v100": "V100-16GB"}  # SkyPilot's names that mean another of our chips
_TPU = re.compile(r"tpu-(v\d+(?:p|e)?|v5litepod)-(\d{1,5})", re.ASCII)


def is_skypilot(tree: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a task."""
    return "resources" in tree and ("run" in tree or "setup" in tree) and "apiVersion" not in tree


def skypilot(file: str, documents: Sequence[Mapping[str, Any]], ignore: Collection[str] = ()) -> Launch:
    """Return what a task asks for.

    Args:
        documents: of its file; a document with a name alone begins a list of several tasks.
        ignore: keys that the caller wants ignored.

    Raises:
        InputError: there are several tasks, or a key or a value is not understood.
    """
    tasks = [each for each in documents if is_skypilot(each)]
    if len(tasks) != 1:
        raise InputError(f"{file} has {len(tasks)} tasks", hint="gate each in a file of its own")
    task = tasks[0]
    resources: Any = task.get("resources") or {}
    if not isinstance(resources, dict):
        raise InputError(f"{file}: resources is no mapping", hint="correct the file")
    values = {**{key: value for key, value in task.items() if key != "resources"}}
    values |= {f"resources.{key}": value for key, value in resources.items()}
    if not any(
        "accelerators" in each for each in _choices(resources)
    ):  # clouds alone do not change the devices
        values = {key: value for key, value in values.items() if key not in _CHOICES}
    values |= dict(flattened({"config": task["config"]})) if isinstance(task.get("config"), dict) else {}
    seen = seen_keys(table("skypilot"), file, values, ignore)
    fleet, per_host, chip = _accelerators(file, resources.get("accelerators"))
    hosts = whole(file, "num_nodes", task.get("num_nodes") or 1)
    if fleet and hosts > 1:
        fleet = f"{hosts}x{fleet}"
    envs: Any = task.get("envs") or {}
    known = (
        {str(key): str(value) for key, value in envs.items() if value is not None}
        if isinstance(envs, dict)
        else {}
    )
    known |= {"SKYPILOT_NUM_NODES": str(hosts)}
    known |= {} if per_host is None else {"SKYPILOT_NUM_GPUS_PER_NODE": str(per_host)}
    mounts: Any = task.get("file_mounts") or {}
    notes = ("a spot instance costs less than the list price",) if resources.get("use_spot") else ()
    run = task.get("run")
    return Launch(
        kind="a SkyPilot task",
        file=file,
        seen=seen,
        num_hosts=hosts,
        per_host=per_host,
        chip=chip,
        fleet=fleet,
        commands=tuple(commands_of(file, run, known)) if isinstance(run, str) else (),
        notes=notes,
        variables=known,
        folder=str(task.get("workdir") or ""),
        mounts={str(there): here for there, here in mounts.items() if isinstance(here, str)}
        if isinstance(mounts, dict)
        else {},
    )


_CHOICES = ("resources.any_of", "resources.ordered")


def _choices(resources: Mapping[str, Any]) -> list[Any]:
    lists = (resources.get("any_of"), resources.get("ordered"))
    return [each for listed in lists if isinstance(listed, list) for each in listed if isinstance(each, dict)]


def _accelerators(file: str, given: Any) -> tuple[str, int | None, str]:
    """Return a TPU slice, or else the devices of a host and their chip.

    Raises:
        InputError: several kinds are allowed, or the count is no whole number.
    """
    if isinstance(given, dict) and len(given) == 1:
        given = ":".join(str(part) for part in next(iter(given.items())))
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if given is None:
        return "", None, ""
    if not isinstance(given, str):
        what = f"{file}: resources.accelerators names several kinds, and which one it will be is open"
        raise InputError(what, hint="gate each: --on 8xH100")
    name, _, count = given.partition(":")
    if (found := _TPU.fullmatch(name.lower())) is not None:
        kind = "v5e" if found[1] == "v5litepod" else found[1]
        return f"{kind}-{found[2]}", None, ""
    chip = _MEANT.get(name.strip().lower(), "") or chip_of(name)
    return "", whole(file, "resources.accelerators", count or "1"), chip
