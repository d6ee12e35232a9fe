"""Measure this machine and the runs on it: rates of the host, and the seconds, memory and losses of runs.

Imports: `subprocesses`, `compiler` (versions and the cache folder), `hardware` (catalog, the `Calibration`
record), `ledger` and `predict` (their records), `registry`, `units`, `errors`. jax only inside functions.
Used by: `programs`, `trainer`, `results`, `report`, `api`, rooms of `contrib`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._kept_calibration import CPUINFO as CPUINFO
    from ._kept_calibration import KnownRates as KnownRates
    from ._kept_calibration import busy_share as busy_share
    from ._kept_calibration import calibration_for as calibration_for
    from ._kept_calibration import calibration_of_chip as calibration_of_chip
    from ._kept_calibration import calibration_of_this_machine as calibration_of_this_machine
    from ._kept_calibration import calibration_path as calibration_path
    from ._kept_calibration import cautions as cautions
    from ._kept_calibration import cpu_model as cpu_model
    from ._kept_calibration import describe_host as describe_host
    from ._kept_calibration import doubt_calibration as doubt_calibration
    from ._kept_calibration import forget_measured_runs as forget_measured_runs
    from ._kept_calibration import keep_measured_run as keep_measured_run
    from ._kept_calibration import known_rates as known_rates
    from ._kept_calibration import measured_runs_for as measured_runs_for
    from ._kept_calibration import measured_runs_path as measured_runs_path
    from ._kept_calibration import probe as probe
    from ._kept_calibration import usable_cores as usable_cores
    from ._own_run import WARM_UP_STEPS as WARM_UP_STEPS
    from ._own_run import ResidentGrowth as ResidentGrowth
    from ._own_run import StepClock as StepClock
    from ._own_run import bytes_on as bytes_on
    from ._reconciliation import STEP_SECONDS as STEP_SECONDS
    from ._reconciliation import Measurement as Measurement
    from ._reconciliation import PastRow as PastRow
    from ._reconciliation import Percentiles as Percentiles
    from ._reconciliation import Reconciliation as Reconciliation
    from ._reconciliation import Row as Row
    from ._reconciliation import first_steps as first_steps
    from ._reconciliation import past_rows as past_rows
    from ._reconciliation import reconcile as reconcile

__getattr__, __dir__ = names_on_first_use(__name__)
