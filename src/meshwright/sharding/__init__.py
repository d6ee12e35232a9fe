"""Build the mesh of a layout, and map named dimensions to the axes that split them.

Imports: `config` (axis names and rules), `errors`, jax. Used by: `models`, `step`, `checkpoint`, `training`,
`worker`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._partition_rules import EXPERTS as EXPERTS
    from ._partition_rules import TABLE_ROWS as TABLE_ROWS
    from ._partition_rules import AnyMesh as AnyMesh
    from ._partition_rules import activation_spec as activation_spec
    from ._partition_rules import axes_of as axes_of
    from ._partition_rules import axis_size as axis_size
    from ._partition_rules import batch_axes as batch_axes
    from ._partition_rules import gather as gather
    from ._partition_rules import look_up as look_up
    from ._partition_rules import mean_over_manual as mean_over_manual
    from ._partition_rules import mesh_here as mesh_here
    from ._partition_rules import mesh_of as mesh_of
    from ._partition_rules import num_chunks_of as num_chunks_of
    from ._partition_rules import num_repeats as num_repeats
    from ._partition_rules import num_shards as num_shards
    from ._partition_rules import on_each_device as on_each_device
    from ._partition_rules import parameter_spec as parameter_spec
    from ._partition_rules import pin as pin
    from ._partition_rules import replica_axes as replica_axes
    from ._partition_rules import ring_size as ring_size
    from ._partition_rules import rows_here as rows_here
    from ._partition_rules import sequence_length as sequence_length
    from ._partition_rules import shape_of_layers as shape_of_layers
    from ._partition_rules import token_axes as token_axes
    from ._partition_rules import whole_size as whole_size
    from ._partition_rules import width_axes as width_axes
    from ._partition_rules import zeros_here as zeros_here

__getattr__, __dir__ = names_on_first_use(__name__)
