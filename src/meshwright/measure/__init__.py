"""Measure a machine and the runs on it: bytes of arrays, seconds, memory, and the rates of the host.

Imports: `subprocesses`, `compiler` (versions and the cache folder), `hardware` (catalog, the `Calibration`
record), `reconciliation` (the `Percentiles` record), `formats`, `units`, `errors`. jax and torch only inside
functions; `_probe`, which runs in a separate process, imports jax directly.
Imported by: `training`, `results`, `tools`, `api`, and users as `mw.footprint` etc.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._array_storages import ArrayFootprint as ArrayFootprint
    from ._array_storages import Storage as Storage
    from ._chrome_events import ChromeEvent as ChromeEvent
    from ._chrome_events import ChromeTrace as ChromeTrace
    from ._device_memory import Live as Live
    from ._device_memory import LiveArray as LiveArray
    from ._device_memory import Memory as Memory
    from ._device_memory import ResidentGrowth as ResidentGrowth
    from ._device_memory import bytes_on as bytes_on
    from ._device_memory import live as live
    from ._device_memory import memory as memory
    from ._footprint import footprint as footprint
    from ._kept_calibration import KnownRates as KnownRates
    from ._kept_calibration import calibration_for as calibration_for
    from ._kept_calibration import calibration_of_chip as calibration_of_chip
    from ._kept_calibration import calibration_of_this_machine as calibration_of_this_machine
    from ._kept_calibration import calibration_path as calibration_path
    from ._kept_calibration import cautions as cautions
    from ._kept_calibration import describe_host as describe_host
    from ._kept_calibration import doubt_calibration as doubt_calibration
    from ._kept_calibration import forget_measured_runs as forget_measured_runs
    from ._kept_calibration import keep_measured_run as keep_measured_run
    from ._kept_calibration import known_rates as known_rates
    from ._kept_calibration import measured_runs_for as measured_runs_for
    from ._kept_calibration import measured_runs_path as measured_runs_path
    from ._kept_calibration import probe as probe
    from ._leaks import leak_error as leak_error
    from ._leaks import noting_leaks_in_threads as noting_leaks_in_threads
    from ._leaks import refuse_leaked as refuse_leaked
    from ._reconciliation import STEP_SECONDS as STEP_SECONDS
    from ._reconciliation import Calibrated as Calibrated
    from ._reconciliation import CalibratedClass as CalibratedClass
    from ._reconciliation import CalibratedStep as CalibratedStep
    from ._reconciliation import History as History
    from ._reconciliation import Measurement as Measurement
    from ._reconciliation import PastRow as PastRow
    from ._reconciliation import Percentiles as Percentiles
    from ._reconciliation import Reconciliation as Reconciliation
    from ._reconciliation import Row as Row
    from ._reconciliation import first_steps as first_steps
    from ._reconciliation import past_rows as past_rows
    from ._reconciliation import reconcile as reconcile
    from ._timing import WARM_UP_STEPS as WARM_UP_STEPS
    from ._timing import MatmulMFU as MatmulMFU
    from ._timing import StepClock as StepClock
    from ._timing import Timing as Timing
    from ._timing import clock as clock
    from ._timing import matmul_mfu as matmul_mfu
    from ._trace_files import class_of_kernel as class_of_kernel
    from ._trace_files import event_of as event_of
    from ._trace_files import is_xplane as is_xplane
    from ._trace_files import stats_of as stats_of
    from ._trace_files import xplane_events as xplane_events
    from ._trace_files import xplane_files as xplane_files
    from ._trace_files import xplane_planes as xplane_planes
    from ._traces import MESSAGES as MESSAGES
    from ._traces import TracedStep as TracedStep
    from ._traces import TraceEvent as TraceEvent
    from ._traces import kineto_step as kineto_step
    from ._traces import traced_step as traced_step

__getattr__, __dir__ = names_on_first_use(__name__)
