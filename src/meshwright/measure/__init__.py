"""What this machine and a run on it really do: bytes of arrays, seconds, memory, rates of the host.
Imports: `hardware`, `formats`, `tables`, `predict` (the `Calibration` record), `compiler` (where the cache
lies). jax and torch only inside functions. Imported by: `training`, `api`, and users as `mw.footprint` etc.
"""

from ._calibration import calibration_of_chip as calibration_of_chip
from ._calibration import calibration_of_this_machine as calibration_of_this_machine
from ._calibration import cautions as cautions
from ._calibration import describe_host as describe_host
from ._calibration import doubt_calibration as doubt_calibration
from ._calibration import probe as probe
from ._footprint import ArrayFootprint as ArrayFootprint
from ._footprint import Footprint as Footprint
from ._footprint import footprint as footprint
from ._live import Live as Live
from ._live import LiveArray as LiveArray
from ._live import live as live
from ._matmul import MatmulMFU as MatmulMFU
from ._matmul import matmul_mfu as matmul_mfu
from ._memory import DeviceMemory as DeviceMemory
from ._memory import Memory as Memory
from ._memory import ResidentGrowth as ResidentGrowth
from ._memory import bytes_on as bytes_on
from ._memory import memory as memory
from ._timing import StepClock as StepClock
from ._timing import Timing as Timing
from ._timing import clock as clock
