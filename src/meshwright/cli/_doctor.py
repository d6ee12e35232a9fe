"""Define `meshwright doctor` and `meshwright probe`, which examine this machine.

`doctor` shows the targets that this machine can compile for, the devices that it can run on, and how to
install what is missing. It tries each target: it weighs the preset `linear` for one of its chips with an
empty cache, and it multiplies a matrix on the CPU. `doctor` loads jax only in child processes. `probe`
measures the attached device.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from meshwright.children import own_python, working_folder

from ._console import JsonFlag, phases, print_json, row, show, table

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
            "nvidia-cuda-nvcc": "ptxas",
            "nvidia-nvvm": "libdevice",
            "nvidia-cudnn-cu13": "cuDNN, for flash attention",
        },
    ),
    "tpu": ("v5e-8", "tpu", {"libtpu": "the compiler"}),
    "cpu": ("1xCPU", "", {"jaxlib": "the compiler"}),
}
LOOK_FOR_DEVICES = """
import json, jax
square = jax.numpy.ones((64, 64))
assert jax.jit(lambda x: x @ x)(square)[0, 0] == 64, "the device multiplies wrongly"
print(json.dumps([[d.platform, d.device_kind] for d in jax.devices()]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCheck:
    """The state of one compile target: the versions of its packages, and the result of a trial.

    `compiles` is None if packages are missing, so that it was not tried. `words` is the output of a failed
    trial.
    """

    platform: str
    fleet: str
    packages: dict[str, str | None]
    compiles: bool | None
    words: str
    install: str


def doctor(as_json: JsonFlag = False) -> None:
    """Which compile targets and devices this machine has, and how to get the missing ones."""
    with phases("looking at this machine") as on_phase, ThreadPoolExecutor() as pool:
        on_phase("compiling a small step for each target")
        attached = pool.submit(_attached_devices)
        checks = list(pool.map(_check, TARGETS))
        devices, device_words = attached.result()
    answer = {
        "schema": SCHEMA,
        "versions": _versions(),
        "targets": [asdict(check) for check in checks],
        "only_simulated": _only_simulated(),
        "devices": devices,
        "device_error": device_words,
        "machine": _machine(),
        "cache": _cache_facts(),
    }
    if as_json:
        print_json(answer)
    else:
        _show(answer, checks)
    if device_words or any(check.compiles is False for check in checks):
        raise typer.Exit(1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    return {
        "python": f"{platform.python_version()} at {sys.executable}",
        **{package: _version(package) for package in ("meshwright", "jax", "jaxlib")},
    }


def _check(name: str) -> TargetCheck:
    """Try one target if its packages are installed."""
    fleet, extra, needs = TARGETS[name]
    packages = {package: _version(package) for package in needs}
    install = f"pip install 'meshwright[{extra}]'" if None in packages.values() else ""
    compiles, words = (None, "") if install else _try(name, fleet)
    return TargetCheck(
        platform=name, fleet=fleet, packages=packages, compiles=compiles, words=words, install=install
    )


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
    found = [tuple(each) for each in json.loads(output.splitlines()[-1])]
    kinds = dict.fromkeys(found)
    return [{"platform": p, "kind": k, "count": found.count((p, k))} for p, k in kinds], ""


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


def _cache_facts() -> dict[str, Any]:
    from meshwright.compiler import cache_root

    root = cache_root()
    return {"folder": str(root), "num_bytes": _folder_bytes(root)}


def _folder_bytes(root: Path) -> int:
    """Return the bytes of all files below `root`; a file that another process removes meanwhile counts 0."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _show(answer: dict[str, Any], checks: list[TargetCheck]) -> None:
    from rich.text import Text

    from meshwright.units import format_bytes

    facts = table("here", "")
    for package, version in answer["versions"].items():
        row(facts, package, version or "not installed as a package")
    machine, cache = answer["machine"], answer["cache"]
    memory = (
        f"{format_bytes(machine['memory_bytes'])}, {format_bytes(machine['available_memory_bytes'])} free"
    )
    row(facts, "cores", str(machine["cores"]))
    row(facts, "memory", memory)
    row(facts, "cache", f"{cache['folder']}, {format_bytes(cache['num_bytes'])}")
    for device in answer["devices"]:
        row(facts, "attached", f"{device['count']} x {device['kind']} ({device['platform']})")
    if answer["device_error"]:
        row(facts, "attached", f"JAX finds no device: {answer['device_error']}")
    targets = table("compile target", "state", "packages")
    for check in checks:
        state = {True: "compiles", False: "FAILS", None: "missing"}[check.compiles]
        what = TARGETS[check.platform][2]
        packages = [
            f"{name} {version or 'missing'} ({what[name]})" for name, version in check.packages.items()
        ]
        row(targets, f"{check.platform} ({check.fleet})", state, "\n".join(packages))
    simulated = table("only with --simulate", "why")
    for why, chips in answer["only_simulated"].items():
        row(simulated, ", ".join(chips), why)
    show(facts, "", targets, "", simulated)
    for check in checks:
        if check.install:
            show("", Text(f"{check.platform}: {check.install}"))
        if check.compiles is False:
            show("", Text(f"{check.platform} failed on {check.fleet}:\n{check.words}"))


def probe(as_json: JsonFlag = False) -> None:
    """Measure what the attached device really does, and keep it: predictions use it from then on."""
    from meshwright import measure

    with phases("measuring this machine, best done while nothing else runs") as on_phase:
        on_phase("products, attention, memory, messages")
        calibration = measure.probe()
    if as_json:
        print_json(dataclasses.asdict(calibration))
        return
    from meshwright.report import calibration_text

    show(calibration_text(calibration))
