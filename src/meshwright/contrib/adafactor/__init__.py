"""Let the update of Adafactor see each layer's matrices alone.

Imports: `trainer.step`, `trainer.models`, jax, optax. Used by: `trainer.step`, by the entry point.
"""

from ._by_matrix import by_matrix as by_matrix
