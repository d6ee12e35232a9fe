"""What a run is: `RunConfig` with its sections, `Layout`, the presets and overrides; every key is checked.
Imports: `errors`, pydantic. No jax. Imported by: everything that builds, weighs or runs a step.
"""

from ._base import Problem as Problem
from ._data import IdxData as IdxData
from ._data import LineData as LineData
from ._data import Order as Order
from ._data import StdlibData as StdlibData
from ._data import SyntheticData as SyntheticData
from ._data import TokenFileData as TokenFileData
from ._divide import check_layout as check_layout
from ._divide import settled as settled
from ._layout import AXES as AXES
from ._layout import RESERVED_AXES as RESERVED_AXES
from ._layout import Layout as Layout
from ._layout import near_divisors as near_divisors
from ._layout import near_multiples as near_multiples
from ._layout import or_list as or_list
from ._load import config_schema as config_schema
from ._load import load_config as load_config
from ._load import overridden as overridden
from ._load import preset_names as preset_names
from ._models import CruncherModel as CruncherModel
from ._models import LeNetModel as LeNetModel
from ._models import LinearModel as LinearModel
from ._models import ResNetModel as ResNetModel
from ._models import TransformerModel as TransformerModel
from ._optimizers import AdafactorOptimizer as AdafactorOptimizer
from ._optimizers import AdaGradOptimizer as AdaGradOptimizer
from ._optimizers import AdamOptimizer as AdamOptimizer
from ._optimizers import AdamWOptimizer as AdamWOptimizer
from ._optimizers import ConstantSchedule as ConstantSchedule
from ._optimizers import CosineSchedule as CosineSchedule
from ._optimizers import InverseRootSchedule as InverseRootSchedule
from ._optimizers import LinearSchedule as LinearSchedule
from ._optimizers import LionOptimizer as LionOptimizer
from ._optimizers import MuonOptimizer as MuonOptimizer
from ._optimizers import RMSPropOptimizer as RMSPropOptimizer
from ._optimizers import SGDOptimizer as SGDOptimizer
from ._optimizers import StableSchedule as StableSchedule
from ._precision import check_precision as check_precision
from ._problems import input_error as input_error
from ._run import BatchConfig as BatchConfig
from ._run import CheckpointConfig as CheckpointConfig
from ._run import EvaluationConfig as EvaluationConfig
from ._run import FaultConfig as FaultConfig
from ._run import RunConfig as RunConfig
