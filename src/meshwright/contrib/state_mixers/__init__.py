"""Mix tokens by a state, in attention's place: gated delta nets, KDA and Mamba-2.

Imports: `config`, `sharding`, `trainer.models`, jax. Used by: a block of the Transformer, by entry points;
`contrib.huggingface`.
"""

from typing import Any, NamedTuple

from .chunk_products import inverse_of_unit_lower as inverse_of_unit_lower
from .chunked_scan import Steps as Steps
from .chunked_scan import chunked_scan as chunked_scan
from .delta_net import apply_delta as apply_delta
from .delta_net import delta_parameters as delta_parameters
from .mamba import apply_mamba as apply_mamba
from .mamba import mamba_parameters as mamba_parameters
from .pieces import short_convolution as short_convolution
from .state_mixer import TAPS as TAPS


class Mixer(NamedTuple):
    """One kind of mixer: what declares its parameters, and what applies it."""

    parameters: Any
    apply: Any


DELTA = Mixer(delta_parameters, apply_delta)
MAMBA = Mixer(mamba_parameters, apply_mamba)
