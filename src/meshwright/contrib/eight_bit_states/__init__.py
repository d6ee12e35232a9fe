"""Keep moments of optimizers in eight bits, with a scale for each block of numbers.

Imports: `trainer.step`, `trainer.models`, `sharding`, jax. Used by: `trainer.step`, by the entry point, for a
run with `state.moments = "8bit"`.
"""

from ._eight_bits import blocks_of as blocks_of
from ._eight_bits import codes_of as codes_of
from ._eight_bits import spec_of_scales as spec_of_scales
from ._eight_bits import values_of as values_of
