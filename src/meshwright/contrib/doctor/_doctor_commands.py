"""Define `meshwright doctor` and `meshwright probe`, which examine this machine.

`doctor` shows the targets that this machine can compile for, the devices that it can run on, and how to
install what is missing for either. NVIDIA's libraries are for running on a card: weighing needs none of them,
so without a card none is called for. `doctor` tries each target: it weighs the preset `linear` for one of its
chips with an empty cache, and it multiplies a matrix on the CPU. `doctor` loads jax only in child processes.
`probe` measures the attached device.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from meshwright.cli import JsonFlag, answer, phases, table
from meshwright.extras import how_to_install
from meshwright.plugins import has_nvidia_gpu
from meshwright.subprocesses import own_python, working_folder

SCHEMA = 1
TIME_LIMIT_SECONDS = 180
WORDS_LINES = 12
# By platform: the fleet to try, the extra that installs its compiler, and the purpose of each package.
TARGETS: dict[str, tuple[str, str, dict[str, str]]] = {
    "cuda": (
        "1xH100",
        "nvidia",
        {
            "jax-cuda13-plugin": "JAX's plugin",
            "jax-cuda13-pjrt": "the compiler",
        },
    ),
    "tpu": ("v5e-8", "tpu", {"libtpu": "the compiler"}),
    "cpu": ("1xCPU", "", {"jaxlib": "the compiler"}),
}
# The package that lists NVIDIA's libraries, and the name of its extra that brings them.
CARDS_PLUGIN, CARDS_EXTRA = "jax-cuda13-plugin", "with-cuda"
LOOK_FOR_DEVICES = """
import json, jax
square = jax.numpy.ones((64, 64))
assert jax.jit(lambda x: x @ x)(square)[0, 0] == 64, "the device multiplies wrongly"
print(json.dumps([[d.platform, d.device_kind] for d in jax.devices()]))
"""


def doctor(as_json: JsonFlag = False) -> None:
    """Show which compile targets and devices this machine has, and how to get the missing ones."""
    with phases("looking at this machine") as on_phase, ThreadPoolExecutor() as pool:
        on_phase("compiling a small step for each target")
        attached = pool.submit(_attached_devices)
        targets = list(pool.map(_checked, TARGETS))
        devices, device_error = attached.result()
    fields = {
        "schema": SCHEMA,
        "versions": {
            "python": f"{platform.python_version()} at {sys.executable}",
            **{package: _version(package) for package in ("meshwright", "jax", "jaxlib")},
        },
        "targets": targets,
        "only_simulated": _only_simulated(),
        "devices": devices,
        "device_error": device_error,
        "nvidia_gpu": _nvidia_gpu(devices),
        "machine": _machine(),
        "cache": _cache(),
    }
    answer(as_json, fields, lambda: _page(fields))
    if device_error or any(target["compiles"] is False for target in targets):
        raise typer.Exit(1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checked(name: str) -> dict[str, Any]:
    """Return the state of a compile target: the versions of its packages, and the result of a trial.

    `compiles` is None if a package is missing, so that it was not tried. `words` is the output of a failed
    trial.
    """
    fleet, extra, purposes = TARGETS[name]
    packages = {package: _version(package) for package in purposes}
    is_complete = None not in packages.values()
    compiles, words = _try(name, fleet) if is_complete else (None, "")
    install = "" if is_complete else how_to_install(extra)
    state = {"platform": name, "fleet": fleet, "packages": packages, "compiles": compiles}
    return {**state, "words": words, "install": install}


def _try(name: str, fleet: str) -> tuple[bool, str]:
    """Return whether something compiles for that platform, and if not, the last lines of stderr."""
    with working_folder("meshwright-doctor-") as cache:
        # Weighing for a CPU would measure this machine first, which takes longer than everything else.
        weigh = ["-m", "meshwright", "weigh", "linear", "--on", fleet, "--json"]
        command = ["-c", LOOK_FOR_DEVICES] if name == "cpu" else weigh
        environment = {"MESHWRIGHT_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
        status, _, words = _run(command, environment)
    return status == 0, "" if status == 0 else words


def _attached_devices() -> tuple[list[dict[str, Any]], str]:
    """Return kinds and counts of the devices that JAX finds, or its error message."""
    status, output, words = _run(["-c", LOOK_FOR_DEVICES], {})
    if status != 0:
        return [], words
    counts = Counter((name, kind) for name, kind in json.loads(output.splitlines()[-1]))
    return [{"platform": name, "kind": kind, "count": n} for (name, kind), n in counts.items()], ""


def _nvidia_gpu(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whether this machine has an NVIDIA GPU, whether JAX uses it, and the versions of its libraries.

    `install` is empty where nothing would be gained: without a GPU, and where JAX uses it. A toolkit of the
    machine may stand in for packages that are missing.
    """
    is_used = any(device["platform"] in ("gpu", "cuda") for device in devices)
    has_gpu = is_used or has_nvidia_gpu()
    return {
        "present": has_gpu,
        "used": is_used,
        "packages": {package: _version(package) for package in _libraries()},
        "install": how_to_install("cuda") if has_gpu and not is_used else "",
    }


def _libraries() -> list[str]:
    """Return the packages of NVIDIA's libraries, as JAX's plugin lists them; empty if it is not installed."""
    try:
        required = importlib.metadata.requires(CARDS_PLUGIN) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in required if f'extra == "{CARDS_EXTRA}"' in line]


def _run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Run this interpreter with `arguments`; return exit status, stdout and the last lines of stderr."""
    try:
        done = subprocess.run(
            own_python(*arguments),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"not done after {TIME_LIMIT_SECONDS} s"
    return done.returncode, done.stdout, "\n".join(done.stderr.strip().splitlines()[-WORDS_LINES:])


def _only_simulated() -> dict[str, list[str]]:
    """Return the chips that no compiler supports without the chip itself, grouped by the reason."""
    from meshwright.hardware import CATALOG, why_simulated

    chips_by_reason: dict[str, list[str]] = {}
    for chip in CATALOG.values():
        if why := why_simulated(chip):
            chips_by_reason.setdefault(why, []).append(chip.name)
    return chips_by_reason


def _machine() -> dict[str, Any]:
    import psutil

    return {
        "cores": len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_memory_bytes": psutil.virtual_memory().available,
    }


def _cache() -> dict[str, Any]:
    from meshwright.compiler import cache_root, others_who_write

    root = cache_root()
    return {"folder": str(root), "num_bytes": _folder_bytes(root), "others_who_write": others_who_write(root)}


def _folder_bytes(root: Path) -> int:
    """Return the bytes of all files below `root`; one that is gone meanwhile or may not be seen counts 0."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _page(fields: dict[str, Any]) -> tuple[Any, ...]:
    from rich.text import Text

    from meshwright.units import format_bytes

    machine, cache = fields["machine"], fields["cache"]
    total, free = (format_bytes(machine[key]) for key in ("memory_bytes", "available_memory_bytes"))
    here = [(name, version or "not installed as a package") for name, version in fields["versions"].items()]
    here += [("cores", str(machine["cores"])), ("memory", f"{total}, {free} free")]
    others = f"; {words}" if (words := cache["others_who_write"]) else ""
    here += [("cache", f"{cache['folder']}, {format_bytes(cache['num_bytes'])}{others}")]
    here += [("attached", f"{d['count']} x {d['kind']} ({d['platform']})") for d in fields["devices"]]
    if fields["device_error"]:
        here.append(("attached", f"JAX finds no device: {fields['device_error']}"))
    states = {True: "compiles", False: "FAILS", None: "missing"}
    targets: list[tuple[str, str, str]] = []
    notes: list[str | Text] = []
    if fields["nvidia_gpu"]["install"]:
        notes += ["", Text(f"NVIDIA GPU: {fields['nvidia_gpu']['install']}")]
    for target in fields["targets"]:
        name, fleet, purposes = target["platform"], target["fleet"], TARGETS[target["platform"]][2]
        packages = (f"{p} {v or 'missing'} ({purposes[p]})" for p, v in target["packages"].items())
        targets.append((f"{name} ({fleet})", states[target["compiles"]], "\n".join(packages)))
        if target["install"]:
            notes += ["", Text(f"{name}: {target['install']}")]
        if target["compiles"] is False:
            notes += ["", Text(f"{name} failed on {fleet}:\n{target['words']}")]
    simulated = [(", ".join(chips), why) for why, chips in fields["only_simulated"].items()]
    return (
        table(("here", ""), here),
        "",
        table(("compile target, to weigh", "state", "packages"), targets),
        "",
        table(("device, to run on", "state", "packages"), [_gpu_row(fields["nvidia_gpu"])]),
        "",
        table(("only with --simulate", "why"), simulated),
        *notes,
    )


def _gpu_row(gpu: dict[str, Any]) -> tuple[str, str, str]:
    missing = [package for package, version in gpu["packages"].items() if version is None]
    state = "in use" if gpu["used"] else "NOT IN USE" if gpu["present"] else "none here"
    words = f"all {len(gpu['packages'])} libraries of NVIDIA's are installed"
    if missing or not gpu["packages"]:
        some = f"{len(missing)} of {len(gpu['packages'])}" if gpu["packages"] else "NVIDIA's"
        words = f"{some} libraries are not installed; weighing needs none"
    return "NVIDIA GPU", state, "\n".join([words, *(missing if gpu["install"] else ())])


def probe(as_json: JsonFlag = False) -> None:
    """Measure the rates of the attached device, and keep them: predictions then use them."""
    from meshwright import measure

    with phases("measuring this machine, best done while nothing else runs") as on_phase:
        on_phase("products, attention, memory, messages")
        calibration = measure.probe()

    def page() -> Any:
        from meshwright.report import renderable

        return renderable(calibration)

    answer(as_json, dataclasses.asdict(calibration), page)
