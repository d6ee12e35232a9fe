"""Define the reference models: pure functions over declared parameters (docs/adr/0001).

Imports: `config`, `sharding`, jax. Used by: `step`, `training`.
"""

from ._base import Context as Context
from ._base import Model as Model
from ._base import Outcome as Outcome
from ._base import Parameter as Parameter
from ._base import initial_parameters as initial_parameters
from ._registry import MODELS as MODELS
from ._registry import model_of as model_of
