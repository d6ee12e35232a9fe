"""Build the train step: the same function is weighed and run.

Imports: `models`, `sharding`, `config`, optax. Used by: `training`, and `worker` for the compilation.
"""

from ._build import TrainStep as TrainStep
from ._build import build_step as build_step
from ._build import whole_parameters as whole_parameters
from ._gradients import FORMATS as FORMATS
from ._optimizer import optimizer_of as optimizer_of
