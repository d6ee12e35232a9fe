"""Make queries, keys and values of attention from latents, as DeepSeek-V2 does.

Imports: `config`, `trainer.models`, jax. Used by: `trainer.models.transformer_block`, by the entry point, for
a model with `latent_rank`.
"""

from .latent_attention import latent_parameters as latent_parameters
from .latent_attention import latent_projections as latent_projections
