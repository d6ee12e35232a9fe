"""Build the train step: the same function is weighed and run.

Imports: `models`, `sharding`, `config`, optax. Used by: `training`, and `worker` for the compilation.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._build import TrainStep as TrainStep
    from ._build import build_step as build_step
    from ._build import whole_parameters as whole_parameters
    from ._gradients import FORMATS as FORMATS
    from ._optimizer import optimizer_of as optimizer_of
    from ._pipeline_schedule import Schedule as Schedule

__getattr__, __dir__ = names_on_first_use(__name__)
