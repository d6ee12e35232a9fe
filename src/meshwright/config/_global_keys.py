"""Define the keys of attention in layers that see all positions, where others have a window (Gemma 4)."""

from __future__ import annotations

from ._rope_keys import RopeKeys
from ._section import OptionalPositive


class GlobalKeys(RopeKeys):
    """The sizes of such attention, where they are not those of the other layers, and Gemma 4's factor."""

    global_head_dim: OptionalPositive = None
    """Width of a head in layers that see all positions, where others have a `window` (Gemma 4).
    Effect: the parameters and FLOPs of attention in those layers; no fused kernel takes more than 256.
    Unit: numbers"""
    global_kv_heads: OptionalPositive = None
    """Key and value heads of those layers; needs `global_head_dim`.
    Effect: that of `num_kv_heads`, in those layers. Unit: heads
    Default: `num_kv_heads`"""
    global_key_is_value: bool = False
    """In those layers the values are the keys, before norms and positions; needs `global_head_dim`.
    Effect: one matrix fewer in each of them."""
    layer_factor: bool = False
    """Multiply each layer's output by a number of its own, as Gemma 4 does.
    It is read from files and saved, and no gradient changes it.
    Effect: a number per layer, not counted as parameters."""
