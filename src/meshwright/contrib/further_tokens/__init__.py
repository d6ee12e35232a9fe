"""Predict tokens beyond the next one, in modules after a Transformer's last layer.

Imports: `config`, `trainer.models`, jax. Used by: `trainer.models.transformer`, by the entry point, for a
model with `mtp_layers`.
"""

from .further_tokens import FurtherTokens as FurtherTokens
