"""Keep this machine's calibration, and describe the machine in words.

Which machine this is, in words.

This machine's calibration: measured by a process of its own, and kept until it is in doubt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, date, datetime
from pathlib import Path

import psutil

from ..children import own_python, working_folder
from ..compiler import cache_root, installed_versions, writing_cache
from ..errors import InputError, MeshwrightError
from ..hardware import Calibration

LOOKED_SECONDS, PERCENT = 0.3, 100
_CPUINFO = Path("/proc/cpuinfo")


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_share() -> float:
    """Return the share of the machine's cores that is busy while this process waits for a moment."""
    return psutil.cpu_percent(interval=LOOKED_SECONDS) / PERCENT


def cpu_model() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_host() -> str:
    """Processor, usable cores and system: "AMD EPYC 7B13, 2 cores, Linux"."""
    return f"{cpu_model()}, {usable_cores()} cores, {platform.system()}"


PROBE = "meshwright.measure._probe"
TIME_LIMIT_SECONDS = 120
LAST_LINES = 8
OLD_DAYS = 30
BUSY = 0.2  # of the cores, kept so by others: rates come out about as much too low, half of a CPU's width


def calibration_of_this_machine() -> Calibration:
    """Return what this host was measured to do; measured now (a few seconds) where that is not yet known.

    Kept under `cache_root()` by processor, cores, version of jaxlib and the probe's own source. Measured
    again: a file that cannot be read; rates that a run disagreed with (`doubt_calibration`); and rates of a
    busy machine, once it is half as busy.

    Raises:
        MeshwrightError: the probe failed; its last words are in the message.
    """
    path = _path()
    kept = _kept(path)
    if kept is None:
        return _measure(path)
    doubt = _doubt_of(path)
    load = kept.load or 0.0
    if not doubt and not (load > BUSY and busy_share() < load / 2):
        return kept
    made = _measure(path, detailed=bool(kept.details), why=doubt)
    _doubts(path).unlink(missing_ok=True)
    return made


def doubt_calibration(chip: str, reason: str) -> None:
    """Have a chip's rates measured again when they are next needed, because a run disagreed with them.

    A CPU's are measured again by themselves, but not twice in 30 days for such a reason: then it is the
    prediction that is wrong. Of an accelerator `cautions` says it until `probe` measures again.
    """
    path = _path() if chip == "CPU" else _path_of(chip)
    kept = _kept(path)
    if kept is None or (kept.measured_again and _age_days(kept) <= OLD_DAYS):
        return
    with contextlib.suppress(OSError):  # a cache that cannot be written keeps what it has
        _doubts(path).write_text(reason)


def cautions(calibration: Calibration) -> tuple[str, ...]:
    """Return what makes rates doubtful: their age, another jaxlib, a busy machine, a run that disagreed."""
    found: list[str] = []
    if (days := _age_days(calibration)) > OLD_DAYS:
        found.append(f"the rates were measured {days} days ago: `meshwright probe` measures again")
    installed = installed_versions()["jaxlib"]
    if calibration.jaxlib not in ("", installed):
        found.append(f"the rates were measured with jaxlib {calibration.jaxlib}, installed is {installed}")
    if calibration.load is not None and calibration.load > BUSY:
        found.append(f"others kept {100 * calibration.load:.0f} % of the cores busy while they were measured")
    path = _path() if calibration.chip == "CPU" else _path_of(calibration.chip)
    if doubt := _doubt_of(path):
        found.append(f"{doubt}: `meshwright probe` measures again")
    return tuple(found)


def _age_days(calibration: Calibration) -> int:
    try:
        measured = date.fromisoformat(calibration.date)
    except ValueError:
        return 0  # written by hand, in words
    return (datetime.now(UTC).date() - measured).days


def _kept(path: Path) -> Calibration | None:
    try:
        return Calibration.from_json(path.read_text())
    except (OSError, InputError, UnicodeDecodeError):
        return None


def _doubts(path: Path) -> Path:
    """Return where the reason stands for which the rates at `path` are to be measured again."""
    return path.with_suffix(".doubt")


def _doubt_of(path: Path) -> str:
    try:
        return _doubts(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def probe() -> Calibration:
    """Measure the attached device now, in detail, and keep it for predictions: the CPU, or an accelerator.

    Of a CPU it takes the place of what `calibration_of_this_machine` kept; of an accelerator it is kept by
    the chip's name in the catalog.

    Raises:
        MeshwrightError: the probe failed; its last words are in the message.
    """
    with working_folder("meshwright-probe-") as folder:
        made = folder / "calibration.json"
        words = _run_probe(made, detailed=True)
        if not made.exists():
            raise _failed(words)
        calibration = Calibration.from_json(made.read_text())
    path = _path() if calibration.chip == "CPU" else _path_of(calibration.chip)
    _keep(calibration, path)
    _doubts(path).unlink(missing_ok=True)
    return calibration


def calibration_of_chip(name: str) -> Calibration | None:
    """What `probe` measured of such a chip; None where it never did, or the file cannot be read."""
    return _kept(_path_of(name))


def _path_of(chip: str) -> Path:
    return cache_root() / f"calibration-{chip}.json"


def _keep(calibration: Calibration, path: Path) -> None:
    """Whole or not at all, whoever else measures now."""
    with writing_cache():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".calibration-", delete=False) as file:
            file.write(calibration.to_json())
        Path(file.name).replace(path)


def _failed(words: list[str]) -> MeshwrightError:
    return MeshwrightError(
        "measuring this machine failed. The probe's last words:\n    " + "\n    ".join(words),
        hint=f"run it alone: {Path(sys.executable).name} -m {PROBE} calibration.json",
    )


def _path() -> Path:
    source = Path(__file__).with_name("_probe.py").read_bytes()
    parts = (describe_host().encode(), installed_versions()["jaxlib"].encode(), source)
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return cache_root() / f"calibration-{digest[:16]}.json"


def _measure(path: Path, *, detailed: bool = False, why: str = "") -> Calibration:
    """Measure the CPU and keep it; `why`: the run for which it is measured again."""
    with contextlib.ExitStack() as held:
        with writing_cache():
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = held.enter_context(working_folder(".calibration-", path.parent))
        made = folder / "calibration.json"
        words = _run_probe(made, detailed=True, cpu=True) if detailed else _run_probe(made)
        if not made.exists():
            raise _failed(words)
        calibration = dataclasses.replace(Calibration.from_json(made.read_text()), measured_again=why)
    _keep(calibration, path)
    return calibration


def _run_probe(made: Path, *, detailed: bool = False, cpu: bool = False) -> list[str]:
    """Run the probe to its end; the last lines it wrote. In detail it measures what there is, or the CPU."""
    command = own_python("-m", PROBE, str(made), *(["--detailed"] if detailed else []))
    plain = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment = dict(os.environ) if detailed and not cpu else plain
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [f"not done after {TIME_LIMIT_SECONDS} s"]
    return (done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:]
