"""Run the weighed step on attached or simulated devices, and measure the run.

Nothing is printed: the caller receives events. Used by `programs`, `api`, `cli` and `run_lines`. Imports
`checkpoint`, `launch`, `step`, `data`, `measure` and jax, among others.

Names are imported on first use, so that a run's folder can be checked before jax is loaded.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._common_facts import facts_of_run as facts_of_run
    from ._devices import devices_of as devices_of
    from ._devices import local_fleet as local_fleet
    from ._interface import LAST_TRACED as LAST_TRACED
    from ._interface import CheckpointSaved as CheckpointSaved
    from ._interface import EpochDone as EpochDone
    from ._interface import Evaluated as Evaluated
    from ._interface import Event as Event
    from ._interface import Finished as Finished
    from ._interface import FinishEstimated as FinishEstimated
    from ._interface import FirstParameters as FirstParameters
    from ._interface import FirstStepsDone as FirstStepsDone
    from ._interface import Noticed as Noticed
    from ._interface import PhaseClock as PhaseClock
    from ._interface import RunRequest as RunRequest
    from ._interface import Sampled as Sampled
    from ._interface import Started as Started
    from ._interface import StepCompiled as StepCompiled
    from ._interface import StepDone as StepDone
    from ._interface import StepFlops as StepFlops
    from ._interruptions import Agreement as Agreement
    from ._interruptions import Watchdog as Watchdog
    from ._interruptions import stop_at_once as stop_at_once
    from ._loop import Saving as Saving
    from ._loop import batches_ahead as batches_ahead
    from ._programs import compile_programs as compile_programs
    from ._recording import metrics_of as metrics_of
    from ._recording import not_written as not_written
    from ._run_folder import RunFolder as RunFolder
    from ._run_folder import about_complaint as about_complaint
    from ._run_folder import about_of as about_of
    from ._run_folder import changes_since as changes_since
    from ._run_folder import check_shared as check_shared
    from ._run_folder import config_of as config_of
    from ._run_folder import last_recorded_step as last_recorded_step
    from ._run_folder import write_whole as write_whole
    from ._training_run import check_resumed_state as check_resumed_state
    from ._training_run import run_training as run_training

__getattr__, __dir__ = names_on_first_use(__name__)
