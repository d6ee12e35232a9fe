"""Define the configuration of a run: `RunConfig`, `Layout`, presets and overrides.

Every key is checked and documented. Imports: `errors`, `units`, `hardware`, pydantic. No jax. Used by:
everything that builds, weighs or runs a step.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._layer_kinds import FIRST_LAYERS as FIRST_LAYERS
    from ._layer_kinds import GLOBAL_ATTENTION as GLOBAL_ATTENTION
    from ._layer_kinds import LayerKind as LayerKind
    from ._layer_kinds import Stretch as Stretch
    from ._layer_kinds import holds_layers as holds_layers
    from ._layer_kinds import pattern_of as pattern_of
    from ._layout import ACTIVATION_RULES as ACTIVATION_RULES
    from ._layout import AXES as AXES
    from ._layout import AXIS_ALIASES as AXIS_ALIASES
    from ._layout import BATCH_AXES as BATCH_AXES
    from ._layout import EXPERT_DIMS as EXPERT_DIMS
    from ._layout import MOST_GATHERED_BYTES as MOST_GATHERED_BYTES
    from ._layout import PARAMETER_RULES as PARAMETER_RULES
    from ._layout import REPLICA_AXES as REPLICA_AXES
    from ._layout import ZERO1_AXES as ZERO1_AXES
    from ._layout import FoldedExperts as FoldedExperts
    from ._layout import Layout as Layout
    from ._layout import PipelineSchedule as PipelineSchedule
    from ._layout import Rules as Rules
    from ._layout import Ticks as Ticks
    from ._layout import layout_reading as layout_reading
    from ._layout_checks import check_layout as check_layout
    from ._layout_checks import check_precision as check_precision
    from ._layout_checks import check_slices as check_slices
    from ._layout_checks import num_stacked_layers as num_stacked_layers
    from ._layout_checks import on_nearest_layout as on_nearest_layout
    from ._layout_checks import padded_layers as padded_layers
    from ._layout_checks import resolve_batch as resolve_batch
    from ._layout_checks import resolve_dispatch as resolve_dispatch
    from ._layout_checks import ticks_of as ticks_of
    from ._load import RUN_FILE as RUN_FILE
    from ._load import Overrides as Overrides
    from ._load import is_huggingface as is_huggingface
    from ._load import is_own_configuration as is_own_configuration
    from ._load import known_keys as known_keys
    from ._load import load_config as load_config
    from ._load import model_room as model_room
    from ._load import overridden as overridden
    from ._load import override_pairs as override_pairs
    from ._load import override_texts as override_texts
    from ._load import preset_about as preset_about
    from ._load import preset_names as preset_names
    from ._load import run_of_preset as run_of_preset
    from ._load import text_reading as text_reading
    from ._load import trainable as trainable
    from ._load import variants as variants
    from ._lora import NF4_BLOCK as NF4_BLOCK
    from ._lora import LoraConfig as LoraConfig
    from ._mixer_keys import StateKeys as StateKeys
    from ._model_kind import ModelKind as ModelKind
    from ._model_kind import ModelSizes as ModelSizes
    from ._models import CruncherModel as CruncherModel
    from ._models import LeNetModel as LeNetModel
    from ._models import LinearModel as LinearModel
    from ._models import ResNetModel as ResNetModel
    from ._offload import OFFLOADED as OFFLOADED
    from ._optimizers import AdamWOptimizer as AdamWOptimizer
    from ._optimizers import ConstantSchedule as ConstantSchedule
    from ._optimizers import CosineSchedule as CosineSchedule
    from ._optimizers import InverseRootSchedule as InverseRootSchedule
    from ._optimizers import LinearSchedule as LinearSchedule
    from ._optimizers import StableSchedule as StableSchedule
    from ._optimizers import schedule_problems as schedule_problems
    from ._remat import NAMED_REMAT as NAMED_REMAT
    from ._remat import POLICIES as POLICIES
    from ._remat import RESULTS as RESULTS
    from ._remat import SAVE as SAVE
    from ._remat import SEARCHED_REMAT as SEARCHED_REMAT
    from ._remat import Choices as Choices
    from ._remat import in_order as in_order
    from ._remat import policies_in_words as policies_in_words
    from ._remat import results_of as results_of
    from ._remat import saved_results as saved_results
    from ._run_config import TYPED_FORMATS as TYPED_FORMATS
    from ._run_config import BatchConfig as BatchConfig
    from ._run_config import CheckpointConfig as CheckpointConfig
    from ._run_config import FaultConfig as FaultConfig
    from ._run_config import IdxData as IdxData
    from ._run_config import InstructionData as InstructionData
    from ._run_config import LineData as LineData
    from ._run_config import MixtureData as MixtureData
    from ._run_config import Order as Order
    from ._run_config import RunConfig as RunConfig
    from ._run_config import StateConfig as StateConfig
    from ._run_config import StdlibData as StdlibData
    from ._run_config import TextData as TextData
    from ._run_config import TokenFileData as TokenFileData
    from ._run_config import TokenFormat as TokenFormat
    from ._run_config import holds_nothing as holds_nothing
    from ._section import LARGEST as LARGEST
    from ._section import PROBLEMS as PROBLEMS
    from ._section import PositiveFloat as PositiveFloat
    from ._section import Problem as Problem
    from ._section import Section as Section
    from ._section import input_error as input_error
    from ._section import is_table as is_table
    from ._section import near_divisors as near_divisors
    from ._section import near_multiples as near_multiples
    from ._section import or_list as or_list
    from ._transformer import TransformerModel as TransformerModel
    from ._transformer import block_policies as block_policies

__getattr__, __dir__ = names_on_first_use(__name__)
