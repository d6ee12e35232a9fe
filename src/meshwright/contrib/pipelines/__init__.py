"""Train with the layers sharded over stages: pipelines, in one program.

Imports: `trainer.step`, `trainer.models`, `sharding`, `config`, jax. Used by: `trainer.step.build_step`,
by an entry point, for a layout with several stages.
"""

from ._pipeline import Pipeline as Pipeline
from ._pipeline import pipeline_of as pipeline_of
from ._pipeline_schedule import Schedule as Schedule
from ._stage import AXIS as AXIS
from ._stage import gather_positions as gather_positions
from ._stage import own_positions as own_positions
from ._stage import scatter_positions as scatter_positions
