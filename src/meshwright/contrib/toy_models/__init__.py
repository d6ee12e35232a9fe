"""Define small models for learning and for tests: linear, deep linear, LeNet and ResNet-18.

Imports: `trainer.models`, jax. Used by: `trainer.models.model_of`, by entry points.
"""

from ._toy_models import BLOCKS as BLOCKS
from ._toy_models import STAGES as STAGES
from ._toy_models import Cruncher as Cruncher
from ._toy_models import LeNet as LeNet
from ._toy_models import Linear as Linear
from ._toy_models import ResNet as ResNet
from ._toy_models import batch_norm as batch_norm
from ._toy_models import classification_loss as classification_loss
from ._toy_models import norm_parameters as norm_parameters
from ._toy_models import norm_state as norm_state
