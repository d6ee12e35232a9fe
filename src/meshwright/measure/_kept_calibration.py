"""Measure this machine in a process of its own, keep its rates and the runs of each chip, describe its host.

The rates are a `Calibration`. They are kept in `cache_root()` until something puts them in doubt. Predictions
use them, and the measured runs given to `calibrate`, which are kept with them. A run describes the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.util import find_spec
from pathlib import Path

import psutil

from meshwright import hardware  # its records, and what they import, are loaded where there is one
from meshwright.compiler import (
    cache_lock,
    cache_root,
    installed_versions,
    make_folder,
    write_cached,
    writing_cache,
)
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import read_text, reason
from meshwright.hardware import Fleet
from meshwright.subprocesses import own_python, working_folder

TIME_LIMIT_SECONDS = 120
LAST_LINES = 8
STOPPED = "stopped while this machine's rates were measured, once for all predictions: the next command does"
OLD_DAYS = 30
LOAD_SECONDS = 0.3  # for which the load of the machine is observed
BUSY = 0.2  # share of cores that others use: rates come out 20 % too low, half the width of a CPU's interval
CPUINFO = Path("/proc/cpuinfo")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_share() -> float:
    """Return the share of the machine's cores that are busy while this process waits for `LOAD_SECONDS`."""
    return psutil.cpu_percent(interval=LOAD_SECONDS) / 100


def cpu_model() -> str:
    """Return the processor's name if the system provides it, or else its architecture."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_host() -> str:
    """Describe processor, usable cores and system: "AMD EPYC 7B13, 2 cores, Linux"."""
    return f"{cpu_model()}, {usable_cores()} cores, {platform.system()}"


def calibration_of_this_machine() -> hardware.Calibration:
    """Return this host's measured rates; measure them now (a few seconds) if the cache has none.

    The cache key is the description of the host (processor, cores, system), the version of jaxlib and the
    source of the probe. Rates are measured again if their file cannot be read, if a run disagreed with them
    (`doubt_calibration`), or if the machine was busy when they were measured and is now less than half as
    busy.

    Raises:
        MeshwrightError: the probe failed; the message ends with its last lines of output.
    """
    path = calibration_path("CPU")
    doubt = _doubt_of(path)  # first: a process that measures writes the rates before it ends the doubt
    before = _kept(path)
    if before is not None and not _is_outdated(before, doubt):
        return before
    with cache_lock(path):  # of several processes one measures, undisturbed by the others, which wait
        doubt, kept = _doubt_of(path), _kept(path)
        if kept is not None and (kept != before or not _is_outdated(kept, doubt)):
            return kept  # another process has measured meanwhile
        calibration = _measure_cpu(path, detailed=kept is not None and bool(kept.details), why=doubt)
        _doubt_file(path).unlink(missing_ok=True)
    return calibration


def _is_outdated(kept: hardware.Calibration, doubt: str) -> bool:
    """Return whether a run disagrees with the rates, or the machine is idler than when they were measured."""
    load = kept.load or 0.0
    return bool(doubt) or (load > BUSY and busy_share() < load / 2)


def calibration_of_chip(name: str) -> hardware.Calibration | None:
    """Return the rates that `probe` measured on such a chip; None if none are kept or readable."""
    return _kept(cache_root() / f"calibration-{name}.json")


def doubt_calibration(chip: str, reason: str) -> None:
    """Record that a run disagreed with a chip's rates.

    A CPU's rates are then measured again when next needed, but not twice in 30 days for this reason: if a run
    disagrees with the new rates too, the prediction is wrong. For an accelerator, `cautions` reports the
    doubt until `probe` measures again.
    """
    path = calibration_path(chip)
    kept = _kept(path)
    if kept is None or (kept.measured_again and _age_days(kept) <= OLD_DAYS):
        return
    with contextlib.suppress(MeshwrightError):  # a cache that cannot be written stays as it is
        write_cached(_doubt_file(path), reason)


def cautions(calibration: hardware.Calibration) -> tuple[str, ...]:
    """Return the doubts about rates: their age, another jaxlib, a busy machine, or a run that disagreed."""
    doubts: list[str] = []
    if (days := _age_days(calibration)) > OLD_DAYS:
        doubts.append(f"the rates were measured {days} days ago: `meshwright probe` measures again")
    installed = installed_versions()["jaxlib"]
    if calibration.jaxlib not in ("", installed):
        doubts.append(f"the rates were measured with jaxlib {calibration.jaxlib}, installed is {installed}")
    if calibration.load is not None and calibration.load > BUSY:
        doubts.append(
            f"others kept {100 * calibration.load:.0f} % of the cores busy while they were measured"
        )
    if doubt := _doubt_of(calibration_path(calibration.chip)):
        doubts.append(f"{doubt}: `meshwright probe` measures again")
    return tuple(doubts)


def probe() -> hardware.Calibration:
    """Measure the attached CPU or accelerator now, in detail, and keep the rates for predictions.

    For a CPU they replace the rates that `calibration_of_this_machine` kept. For an accelerator they are kept
    under the chip's name in the catalog.

    Raises:
        MeshwrightError: the probe failed; the message ends with its last lines of output.
    """
    with cache_lock(calibration_path("CPU")), working_folder("meshwright-probe-") as folder:
        calibration = _run_probe(folder / "calibration.json", detailed=True)
    path = calibration_path(calibration.chip)
    write_cached(path, calibration.to_json())
    _doubt_file(path).unlink(missing_ok=True)
    return calibration


def _measure_cpu(path: Path, *, detailed: bool = False, why: str = "") -> hardware.Calibration:
    """Measure the CPU and keep the rates; `why`: the run that caused a repeated measurement."""
    with contextlib.ExitStack() as stack:
        with writing_cache():
            make_folder(path.parent)
            folder = stack.enter_context(working_folder(".calibration-", path.parent))
        calibration = _run_probe(folder / "calibration.json", detailed=detailed, cpu=True)
        calibration = dataclasses.replace(calibration, measured_again=why)
    write_cached(path, calibration.to_json())
    return calibration


def _probe() -> str:
    """Return the module that measures, which runs in a process of its own: a room outside the core has it."""
    from meshwright.registry import room_module  # a weighing for a GPU measures nothing

    return f"{room_module('calibration')}._probe"


def _run_probe(path: Path, *, detailed: bool = False, cpu: bool = False) -> hardware.Calibration:
    """Measure the CPU if `cpu`, else the attached device; the probe writes to `path`."""
    command = own_python("-m", _probe(), str(path), *(["--detailed"] if detailed else []))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"} if cpu else None
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS
        )
        lines = (done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:]
    except KeyboardInterrupt as stopped:
        stopped.add_note(STOPPED)
        raise
    except subprocess.TimeoutExpired:
        lines = [f"not done after {TIME_LIMIT_SECONDS} s"]
    if not path.exists():
        raise MeshwrightError(
            "measuring this machine failed. The probe's last lines:\n    " + "\n    ".join(lines),
            hint=f"run it alone: {Path(sys.executable).name} -m {_probe()} calibration.json",
        )
    return hardware.Calibration.from_json(path.read_text())


def _age_days(calibration: hardware.Calibration) -> int:
    try:
        measured = date.fromisoformat(calibration.date)
    except ValueError:
        return 0  # a person wrote the date, in words
    return (datetime.now(UTC).date() - measured).days


def calibration_path(chip: str) -> Path:
    """Return the file of a chip's rates; a CPU's is named by a digest of its host, jaxlib and the probe."""
    if chip != "CPU":
        return cache_root() / f"calibration-{chip}.json"
    origin = getattr(find_spec(_probe()), "origin", None)
    source = b"" if origin is None else Path(origin).read_bytes()
    key = (describe_host().encode(), installed_versions()["jaxlib"].encode(), source)
    digest = hashlib.sha256(b"\0".join(key)).hexdigest()
    return cache_root() / f"calibration-{digest[:16]}.json"


def _kept(path: Path) -> hardware.Calibration | None:
    try:
        text = read_text(path)
        return hardware.Calibration.from_json(text)
    except (OSError, InputError, ValueError):
        return None


def _doubt_file(path: Path) -> Path:
    """Return the path of the file with the reason for measuring the rates at `path` again."""
    return path.with_suffix(".doubt")


def _doubt_of(path: Path) -> str:
    try:
        return read_text(_doubt_file(path))
    except (OSError, ValueError):
        return ""


def calibration_for(fleet: Fleet) -> hardware.Calibration | None:
    """Return the calibration of a fleet's chip: for a CPU always, for an accelerator if `probe` ran."""
    if fleet.chip.platform == "cpu":
        return calibration_of_this_machine()
    return calibration_of_chip(fleet.chip.name)


def measured_runs_for(fleet: Fleet) -> hardware.MeasuredRuns | None:
    """Return the runs measured on a fleet's chip, for a CPU on this host; None if there are none.

    Raises:
        InputError: the file of the runs is damaged, or cannot be read.
    """
    path = measured_runs_path(fleet)
    try:
        text = read_text(path)
        return hardware.MeasuredRuns.from_json(text)
    except FileNotFoundError:
        return None
    except InputError as damaged:
        raise InputError(f"{path}: {damaged.message}", hint=_way_back(fleet)) from damaged
    except (OSError, ValueError) as refused:
        raise InputError(f"{path} cannot be read: {reason(refused)}", hint=_way_back(fleet)) from refused


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRates:
    """Hold the rates and the steps that were measured of a fleet's chip when a step was weighed, if any."""

    calibration: hardware.Calibration | None = None
    measured: hardware.MeasuredRuns | None = None


def known_rates(fleet: Fleet) -> KnownRates:
    """Return what is measured of a fleet's chip; raises as `calibration_for` and `measured_runs_for`."""
    return KnownRates(calibration=calibration_for(fleet), measured=measured_runs_for(fleet))


def keep_measured_run(fleet: Fleet, run: hardware.MeasuredRun) -> hardware.MeasuredRuns:
    """Add a run to those of a fleet's chip, and return them all.

    It takes the place of an earlier run of the same program on the same fleet.

    Raises:
        InputError: as `measured_runs_for`; or the cache cannot be written.
    """
    path = measured_runs_path(fleet)
    with cache_lock(path):  # another process may add a run at the same time
        runs = (measured_runs_for(fleet) or hardware.MeasuredRuns(chip=fleet.chip.name, runs=())).adding(run)
        write_cached(path, runs.to_json())
    return runs


def forget_measured_runs(fleet: Fleet) -> int | None:
    """Remove the runs of a fleet's chip; return their number, or None where the file was damaged.

    Raises:
        InputError: the file cannot be removed.
        MeshwrightError: the cache cannot be written.
    """
    path = measured_runs_path(fleet)
    with cache_lock(path):
        try:
            runs = measured_runs_for(fleet)
            number = 0 if runs is None else len(runs.runs)
        except InputError:
            number = None
        try:
            path.unlink(missing_ok=True)
        except OSError as refused:
            hint = "remove it yourself"
            raise InputError(f"cannot remove {path}: {refused.strerror}", hint=hint) from refused
    return number


def measured_runs_path(fleet: Fleet) -> Path:
    """Return the file of the runs measured on a fleet's chip; a CPU's is named by a digest of its host."""
    kept = calibration_path(fleet.chip.name)
    return kept.with_name(kept.name.replace("calibration-", "factors-", 1))


def _way_back(fleet: Fleet) -> str:
    return f"remove it: meshwright calibrate --forget --on {fleet.name}; then calibrate again"
