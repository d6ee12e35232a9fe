"""A training run on the attached or simulated devices: the step that was weighed, run and measured.
Imports: `checkpoint`, `step`, `data`, `measure`, `reconcile` (for `Measurement`), jax. Prints nothing: it
emits events.
Imported by: `api`, the command line.
"""

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
from ._files import check_shared as check_shared
from ._files import prepare_folder as prepare_folder
from ._files import write_document as write_document
from ._recorder import StepFlops as StepFlops
from ._run import run_training as run_training
from ._sample_run import SampleOfRun as SampleOfRun
from ._sample_run import config_of as config_of
from ._sample_run import sample_run as sample_run
