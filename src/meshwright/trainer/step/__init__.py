"""Build the train step: the same function is weighed and run.

Imports: `models`, `sharding`, `config`, optax. Used by: `loop`, and `worker` for the compilation.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._build import TrainStep as TrainStep
    from ._build import abstract_batch as abstract_batch
    from ._build import build_step as build_step
    from ._build import whole_over_replicas as whole_over_replicas
    from ._build import whole_parameters as whole_parameters
    from ._gradients import FIRST_SCALE as FIRST_SCALE
    from ._gradients import FORMATS as FORMATS
    from ._gradients import GOOD_STEPS as GOOD_STEPS
    from ._gradients import LEAST_SCALE as LEAST_SCALE
    from ._gradients import MOST_SCALE as MOST_SCALE
    from ._gradients import axes_beside as axes_beside
    from ._gradients import gradients_by_replica as gradients_by_replica
    from ._gradients import gradients_of as gradients_of
    from ._gradients import mean_over_parts as mean_over_parts
    from ._gradients import next_scale as next_scale
    from ._gradients import only_axes as only_axes
    from ._gradients import rows_spec as rows_spec
    from ._gradients import without_axes as without_axes
    from ._lowering import lowered_step as lowered_step
    from ._matrices import MatrixDims as MatrixDims
    from ._matrices import merged_entry as merged_entry
    from ._optimizer import EightBits as EightBits
    from ._optimizer import is_eight_bits as is_eight_bits
    from ._optimizer import is_hidden_matrix as is_hidden_matrix
    from ._optimizer import is_matrix as is_matrix
    from ._optimizer import matrix_dims as matrix_dims
    from ._optimizer import moment_shardings as moment_shardings
    from ._optimizer import optimizer_of as optimizer_of
    from ._optimizer import parameters_by_path as parameters_by_path
    from ._optimizer import schedule_of as schedule_of
    from ._padded_tables import spec_in_step as spec_in_step
    from ._state_update import Change as Change
    from ._state_update import MomentFormats as MomentFormats
    from ._state_update import Scalars as Scalars
    from ._state_update import Update as Update
    from ._state_update import by_chance as by_chance
    from ._state_update import formats_of_moments as formats_of_moments
    from ._state_update import on_host as on_host
    from ._state_update import rounded_as as rounded_as
    from ._state_update import stacked_layers as stacked_layers

__getattr__, __dir__ = names_on_first_use(__name__)
