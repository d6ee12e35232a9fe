"""What this machine and a run on it really do: rates of the host, memory, seconds of each step.
Imports: `predict` (the `Calibration` record), `compiler` (where the cache lies). jax only in `_probe`,
which runs as a process of its own. Imported by: `training`, `api`.
"""

from ._calibration import calibration_of_this_machine as calibration_of_this_machine
from ._clock import Spread as Spread
from ._clock import StepClock as StepClock
from ._host import describe_host as describe_host
from ._memory import ResidentGrowth as ResidentGrowth
from ._memory import bytes_on as bytes_on
