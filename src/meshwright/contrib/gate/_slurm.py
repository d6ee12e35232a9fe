"""Read an sbatch script: its options, and its commands."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from meshwright.errors import InputError

from ._launch_lines import Launch, chip_of, slurm_seconds
from ._shell import commands_of
from ._tables import seen_keys, table, whole

_SHORT = {
    "N": "nodes", "n": "ntasks", "G": "gpus", "t": "time", "C": "constraint", "p": "partition",
    "J": "job-name", "o": "output", "e": "error", "A": "account", "c": "cpus-per-task", "q": "qos",
    "w": "nodelist", "x": "exclude", "d": "dependency", "a": "array", "D": "chdir", "i": "input",
    "L": "licenses", "m": "distribution", "M": "clusters", "b": "begin", "H": "hold", "W": "wait",
    "s": "oversubscribe", "O": "overcommit", "k": "no-kill", "Q": "quiet", "v": "verbose",
}  # fmt: skip
_FLAGS = frozenset({
    "exclusive", "requeue", "no-requeue", "overcommit", "parsable", "contiguous", "hold", "spread-job",
    "wait", "verbose", "quiet", "oversubscribe", "get-user-env", "propagate", "no-kill", "test-only",
    "ignore-pbs", "reboot", "use-min-nodes", "hetjob", "packjob",
})  # fmt: skip
_NO_LIMIT = ("0", "UNLIMITED", "INFINITE", "-1")
_COUNTED = ("gres", "gpus-per-node", "gpus-per-task", "gpus")  # the first that is given says a host's devices
_DEVICE = re.compile(r"(?:gres[:/])?gpu(?::([A-Za-z][\w.-]*))?(?:[:=](\d{1,6}))?(?:\(.*\))?", re.ASCII)


def is_sbatch(text: str) -> bool:
    """Return whether a text has sbatch's comments."""
    return re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None


def sbatch(
    file: str, text: str, ignore: Collection[str] = (), options: Mapping[str, Any] | None = None
) -> Launch:
    """Return what a script asks for.

    Args:
        ignore: options that the caller wants ignored.
        options: what sbatch was given beside the script, which counts more than its own.

    Raises:
        InputError: an option or a value is not understood.
    """
    known = table("slurm")
    given = {key.replace("_", "-"): value for key, value in (options or {}).items()}
    values = _options(file, text) | {key: value for key, value in given.items() if key in known.understood}
    seen = seen_keys(known, file, values, ignore)
    values = {key: str(value) for key, value in values.items() if key in seen.understood}
    named = {key for key in values if key not in ("constraint", "partition")}
    for key in named:
        if "%" in values[key] or "$" in values[key] or "{{" in values[key]:
            what = f"{file}: --{key}={values[key][:60]} is a template that was not filled in"
            raise InputError(what, hint="fill it in; Slurm itself does not read variables there")
    hosts, per_host, chip = _devices(file, values)
    if not chip:
        words = re.split(r"[&|,()\[\]*\s]+", values.get("constraint", ""))
        found = {name for word in words if word and (name := chip_of(word))}
        chip = found.pop() if len(found) == 1 else ""
    seconds = slurm_seconds(values["time"]) if "time" in values else None
    if seconds is None and values.get("time", "0").upper() not in _NO_LIMIT:
        what = f"{file}: --time={values['time'][:40]} is no time of Slurm's"
        raise InputError(what, hint="write days-hours:minutes:seconds, or UNLIMITED")
    tasks = values.get("ntasks") or str(hosts * int(values.get("ntasks-per-node", "1")))
    variables = {
        "SLURM_NNODES": str(hosts),
        "SLURM_JOB_NUM_NODES": str(hosts),
        "SLURM_NTASKS": tasks,
        **(
            {}
            if per_host is None
            else {"SLURM_GPUS_ON_NODE": str(per_host), "SLURM_GPUS_PER_NODE": str(per_host)}
        ),
    }
    return Launch(
        kind="an sbatch script",
        file=file,
        seen=seen,
        num_hosts=hosts,
        per_host=per_host,
        chip=chip,
        seconds=seconds,
        commands=tuple(commands_of(file, text, variables)),
        variables=variables,
    )


def _options(file: str, text: str) -> dict[str, Any]:
    """Return the options of the comments before the first command, by their long names."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if not re.match(r"#SBATCH\s", line):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError as wrong:
            raise InputError(
                f"{file}: cannot read {line[:80]!r}: {wrong}", hint="close its quotes"
            ) from wrong
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, sign, value = word[2:].partition("=")
            elif word.startswith("-") and len(word) > 1:
                name, value = _SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
                sign = value
            else:
                raise InputError(
                    f"{file}: cannot read {word[:60]!r} in {line[:80]!r}", hint="write --name=value"
                )
            if not sign and name not in _FLAGS:
                value = words.pop(0) if words and not words[0].startswith("-") else ""
            found[name] = value if value or name not in _FLAGS else True
    return found


def _devices(file: str, values: Mapping[str, str]) -> tuple[int, int | None, str]:
    """Return the hosts, the devices of each (None if nothing says them), and their chip."""
    least = values.get("nodes", "").partition("-")
    if least[1] and least[0] != least[2]:
        what = f"{file}: --nodes={values['nodes'][:40]} leaves open how many hosts there are"
        raise InputError(what, hint="write one number")
    tasks_per_host = whole(file, "--ntasks-per-node", values.get("ntasks-per-node", "1"))
    tasks = whole(file, "--ntasks", values["ntasks"]) if "ntasks" in values else None
    hosts = whole(file, "--nodes", least[0]) if least[0] else 1
    counted = {key: _counted(file, key, values[key]) for key in _COUNTED if key in values}
    by_host = next((counted[key][1] for key in ("gres", "gpus-per-node") if counted.get(key, ("", 0))[1]), 0)
    if not least[0] and tasks is not None and "ntasks-per-node" in values:
        hosts = math.ceil(tasks / tasks_per_host)
    elif not least[0] and by_host and "gpus" in counted:
        hosts = math.ceil(counted["gpus"][1] / by_host)
    chips = {chip for chip, _ in counted.values() if chip}
    for key, (chip, count) in counted.items():
        if not count:
            continue
        times = {"gpus": 1 / hosts, "gpus-per-task": tasks_per_host if tasks is None else tasks / hosts}
        per_host = count * times.get(key, 1)
        if per_host != int(per_host) or per_host < 1:
            what = f"{file}: --{key}={values[key][:40]} does not share out evenly among {hosts} hosts"
            raise InputError(what, hint="ask for the same number on each host: --gpus-per-node")
        return hosts, int(per_host), chip or (chips.pop() if len(chips) == 1 else "")
    return hosts, None, ""


def _counted(file: str, key: str, text: str) -> tuple[str, int]:
    """Return the chip and the number that an option asks for: "gpu:h100:8", "h100:8", "8"."""
    if key == "gres":
        parts = re.split(r",(?![^()]*\))", text)
        devices = [found for part in parts if (found := _DEVICE.fullmatch(part.strip()))]
        if len(devices) > 1:
            what = f"{file}: --gres={text[:80]} asks for devices of several kinds on one host"
            raise InputError(what, hint="one program runs on one kind: ask for one, as --gres=gpu:h100:8")
        return (chip_of(devices[0][1] or ""), int(devices[0][2] or 1)) if devices else ("", 0)
    name, sign, count = text.strip().rpartition(":")
    return (chip_of(name) if sign else ""), whole(file, f"--{key}", count)
