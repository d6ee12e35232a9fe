"""Define the configuration of a run: `RunConfig`, `Layout`, presets and overrides.

Every key is checked and documented. Imports: `errors`, `units`, `hardware`, pydantic. No jax. Used by:
everything that builds, weighs or runs a step.
"""

from ._base import Problem as Problem
from ._base import input_error as input_error
from ._base import near_divisors as near_divisors
from ._base import near_multiples as near_multiples
from ._base import or_list as or_list
from ._huggingface import huggingface_of_model as huggingface_of_model
from ._layout import ACTIVATION_RULES as ACTIVATION_RULES
from ._layout import AXES as AXES
from ._layout import AXIS_ALIASES as AXIS_ALIASES
from ._layout import PARAMETER_RULES as PARAMETER_RULES
from ._layout import ZERO1_RULES as ZERO1_RULES
from ._layout import Layout as Layout
from ._layout import PipelineSchedule as PipelineSchedule
from ._layout import Rules as Rules
from ._layout import Ticks as Ticks
from ._layout import layout_reading as layout_reading
from ._layout_checks import check_layout as check_layout
from ._layout_checks import check_precision as check_precision
from ._layout_checks import resolve_batch as resolve_batch
from ._layout_checks import ticks_of as ticks_of
from ._load import Overrides as Overrides
from ._load import config_schema as config_schema
from ._load import load_config as load_config
from ._load import overridden as overridden
from ._load import preset_about as preset_about
from ._load import preset_names as preset_names
from ._load import trainable as trainable
from ._models import CruncherModel as CruncherModel
from ._models import LeNetModel as LeNetModel
from ._models import LinearModel as LinearModel
from ._models import ModelKind as ModelKind
from ._models import ModelSizes as ModelSizes
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
from ._reference import commented_toml as commented_toml
from ._reference import key_docs as key_docs
from ._reference import reference_page as reference_page
from ._run import BatchConfig as BatchConfig
from ._run import CheckpointConfig as CheckpointConfig
from ._run import EvaluationConfig as EvaluationConfig
from ._run import FaultConfig as FaultConfig
from ._run import IdxData as IdxData
from ._run import LineData as LineData
from ._run import Order as Order
from ._run import Remat as Remat
from ._run import RunConfig as RunConfig
from ._run import StdlibData as StdlibData
from ._run import SyntheticData as SyntheticData
from ._run import TokenFileData as TokenFileData
