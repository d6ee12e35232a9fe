"""The train step: the one function that is weighed and that runs.
Imports: `models`, `sharding`, `config`, optax. Imported by: `training`, and by name in the compile worker.
"""

from ._build import TrainStep as TrainStep
from ._build import build_step as build_step
from ._gradients import FORMATS as FORMATS
from ._optimizer import optimizer_of as optimizer_of
