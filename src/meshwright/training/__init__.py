"""Run the weighed step on attached or simulated devices, and measure the run.

Nothing is printed: the caller receives events. Used by `api`, `cli` and `report`. Imports `checkpoint`,
`launch`, `step`, `data`, `measure`, `reconciliation` (for `Measurement`) and jax, among others.

Names are imported on first use, so that a run's folder can be checked before jax is loaded.
"""

from typing import TYPE_CHECKING

from ..lazy import names_on_first_use

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

__getattr__ = names_on_first_use(__name__)
