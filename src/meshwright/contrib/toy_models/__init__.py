"""Define small models for learning and for tests: linear, deep linear, LeNet and ResNet-18.

Imports: `trainer.models`, jax. Used by: `trainer.models.model_of`, by entry points.
"""

from .toy_models import BLOCKS as BLOCKS
from .toy_models import STAGES as STAGES
from .toy_models import Cruncher as Cruncher
from .toy_models import LeNet as LeNet
from .toy_models import Linear as Linear
from .toy_models import ResNet as ResNet
from .toy_models import batch_norm as batch_norm
from .toy_models import classification_loss as classification_loss
from .toy_models import norm_parameters as norm_parameters
from .toy_models import norm_state as norm_state
