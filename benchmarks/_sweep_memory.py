"""Bound the memory of layouts of the public sweep's program, in closed form, and say whether they fit.

Two generations of the program ran the sweep. One keeps the two gathered inputs of a layer for the backward
pass, the other gathers them again. The first is the upper estimate, the second the lower; rows do not say
which they are. Both count the fp32 master weights and moments (sharded with ZeRO-1), bf16 weights, fp32 and
bf16 gradients, the saved activations of the microbatches in flight, and logits with their gradient on the
head's stage. The stage that needs most counts.
Not counted: fragmentation, NCCL's buffers beyond a constant, ZeRO-1's temporary buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from _sweep_program import Layouts, Numbers, Shape, Stages
from numpy.typing import NDArray

FAILS_ABOVE_BYTES = 80e9  # the card's; a layout whose lower estimate is above it is refused
SPARE_BYTES = 72e9  # 10 % to spare: above about 73 GB 3B's runs crawl (allocator retries)
STATE_BYTES = 8.0  # bf16 weight and gradient, fp32 gradient sum: per weight of a rank
SHARDED_STATE_BYTES = 12.0  # fp32 master weight and two moments: divided by dp with ZeRO-1
LOGIT_BYTES = 8.0  # bf16 and fp32 copies, and the gradient
GATHERED_BYTES = 6.0  # buffers of gathered inputs, per token and width
CONSTANT_BYTES = 0.5e9  # NCCL, CUDA's context
SAVED = {  # bytes per token of a layer: whole width, split width, split MLP; read off 3B's memory by tp
    "lower": (0.0, 18.0, 8.0),
    "upper": (4.0, 14.0, 8.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The estimates of each layout in bytes."""

    lower: Numbers
    upper: Numbers

    @property
    def refused(self) -> NDArray[np.bool_]:
        """True where we say that the layout does not fit."""
        return self.lower > FAILS_ABOVE_BYTES

    @property
    def with_spare(self) -> NDArray[np.bool_]:
        """True where we say that the layout fits with more than 10 % of memory to spare."""
        return self.upper <= SPARE_BYTES


def memory_of(shape: Shape, layouts: Layouts, stages: Stages) -> Memory:
    """Return the estimates of the stage of each layout that needs most."""
    tokens = layouts.microbatch * shape.sequence
    own = np.where(layouts.zero == 1, 1 / layouts.data, 1.0)
    held = stages.weights(shape, layouts) * (STATE_BYTES + SHARDED_STATE_BYTES * own)[:, None]
    held[np.arange(len(held)), stages.head] += LOGIT_BYTES * tokens * shape.vocabulary / layouts.tensor
    ahead = layouts.stages[:, None] - np.arange(held.shape[1])  # 1F1B: later stages hold fewer microbatches
    in_flight = np.clip(np.minimum(ahead, layouts.count[:, None]), 0, None) * stages.layers
    rest = GATHERED_BYTES * tokens * shape.width + CONSTANT_BYTES
    bounds = {}
    for name, (whole, split, mlp) in SAVED.items():
        saved = tokens * (whole * shape.width + (split * shape.width + mlp * shape.mlp) / layouts.tensor)
        bounds[name] = (held + saved[:, None] * in_flight).max(1) + rest
    return Memory(lower=bounds["lower"], upper=bounds["upper"])
