"""Run the weighed step on attached or simulated devices, and measure the run.

Nothing is printed: the caller receives events. Used by `api`, `cli` and `report`. Imports `checkpoint`,
`launch`, `step`, `data`, `measure`, `reconciliation` (for `Measurement`) and jax, among others.

Names are imported on first use, so that a run's folder can be checked before jax is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._devices import devices_of as devices_of
    from ._devices import local_fleet as local_fleet
    from ._events import CheckpointSaved as CheckpointSaved
    from ._events import Compiled as Compiled
    from ._events import EpochDone as EpochDone
    from ._events import Evaluated as Evaluated
    from ._events import Event as Event
    from ._events import Finished as Finished
    from ._events import FirstStepsDone as FirstStepsDone
    from ._events import Noticed as Noticed
    from ._events import Sampled as Sampled
    from ._events import Started as Started
    from ._events import StepDone as StepDone
    from ._recorder import StepFlops as StepFlops
    from ._recorder import not_written as not_written
    from ._run import check_resumed_state as check_resumed_state
    from ._run import run_training as run_training
    from ._run_folder import RunFolder as RunFolder
    from ._run_folder import config_of as config_of
    from ._run_folder import write_whole as write_whole
    from ._sample import SampleOfRun as SampleOfRun
    from ._sample import sample_run as sample_run

_HOMES = {
    "devices_of": "_devices",
    "local_fleet": "_devices",
    "CheckpointSaved": "_events",
    "Compiled": "_events",
    "EpochDone": "_events",
    "Evaluated": "_events",
    "Event": "_events",
    "Finished": "_events",
    "FirstStepsDone": "_events",
    "Noticed": "_events",
    "Sampled": "_events",
    "Started": "_events",
    "StepDone": "_events",
    "StepFlops": "_recorder",
    "not_written": "_recorder",
    "check_resumed_state": "_run",
    "run_training": "_run",
    "RunFolder": "_run_folder",
    "config_of": "_run_folder",
    "write_whole": "_run_folder",
    "SampleOfRun": "_sample",
    "sample_run": "_sample",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
