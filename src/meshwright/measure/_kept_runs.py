"""Keep the measured runs of each chip beside its rates in the cache, and find what is known about a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.compiler import cache_lock, write_cached
from meshwright.errors import InputError
from meshwright.files import read_text, reason
from meshwright.hardware import Calibration, Fleet, MeasuredRun, MeasuredRuns

from ._kept_calibration import calibration_of_chip, calibration_of_this_machine, path_of


def calibration_for(fleet: Fleet) -> Calibration | None:
    """Return the calibration of a fleet's chip: for a CPU always, for an accelerator if `probe` ran."""
    if fleet.chip.platform == "cpu":
        return calibration_of_this_machine()
    return calibration_of_chip(fleet.chip.name)


def measured_runs_for(fleet: Fleet) -> MeasuredRuns | None:
    """Return the runs measured on a fleet's chip, for a CPU on this host; None if there are none.

    Raises:
        InputError: the file of the runs is damaged, or cannot be read.
    """
    path = measured_runs_path(fleet)
    try:
        return MeasuredRuns.from_json(read_text(path))
    except FileNotFoundError:
        return None
    except InputError as damaged:
        raise InputError(f"{path}: {damaged.message}", hint=_way_back(fleet)) from damaged
    except (OSError, ValueError) as refused:
        raise InputError(f"{path} cannot be read: {reason(refused)}", hint=_way_back(fleet)) from refused


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRates:
    """Hold the rates and the steps that were measured of a fleet's chip when a step was weighed, if any."""

    calibration: Calibration | None = None
    measured: MeasuredRuns | None = None


def known_rates(fleet: Fleet) -> KnownRates:
    """Return what is measured of a fleet's chip; raises as `calibration_for` and `measured_runs_for`."""
    return KnownRates(calibration=calibration_for(fleet), measured=measured_runs_for(fleet))


def keep_measured_run(fleet: Fleet, run: MeasuredRun) -> MeasuredRuns:
    """Add a run to those of a fleet's chip, and return them all.

    It takes the place of an earlier run of the same program on the same fleet.

    Raises:
        InputError: as `measured_runs_for`; or the cache cannot be written.
    """
    path = measured_runs_path(fleet)
    with cache_lock(path):  # another process may add a run at the same time
        runs = (measured_runs_for(fleet) or MeasuredRuns(chip=fleet.chip.name, runs=())).adding(run)
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
    kept = path_of(fleet.chip.name)
    return kept.with_name(kept.name.replace("calibration-", "factors-", 1))


def _way_back(fleet: Fleet) -> str:
    return f"remove it: meshwright calibrate --forget --on {fleet.name}; then calibrate again"
