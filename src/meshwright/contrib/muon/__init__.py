"""Make matrices nearly orthogonal, for Muon.

Imports: `trainer.step`, `trainer.models`, `sharding`, jax. Used by: `trainer.step`, by the entry point.
"""

from ._orthogonal import orthogonal as orthogonal
