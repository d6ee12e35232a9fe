"""Report runs to Weights & Biases, MLflow, Trackio and TensorBoard: `train --report-to`.

Each is a class of its own module, registered by its name under `meshwright.trackers`, with an extra that
installs its library. `reporting` hands a run's events on to those that are asked for, each in a thread of its
own.
Imports: `registry`, `results`, `trainer.loop` (its events), `extras`. Used by: `api`, by the entry points.
"""

from ._reporting import TrackedRun as TrackedRun
from ._reporting import Tracker as Tracker
from ._reporting import reporting as reporting
