"""Bound the memory of the public sweep's candidates as its program needs it, and say how likely they fit.
A layer keeps at least what no gather makes again (the lower estimate), at most its two gathered inputs
besides (the upper): the runs lie between them, and no column says where. Both count the fp32 master weights
and moments (sharded with ZeRO-1), bf16 weights, fp32 and bf16 gradients, the saved activations of the
microbatches in flight, and logits with their gradient on the head's stage. The stage that needs most
counts. What a program may reserve is the planner's (`planning.room_of`): what the card's runtime allows,
less context, kernels and NCCL. The lower estimate refuses, the upper warns, and a choice weighs the
probability (`planning.promise_of`). Not counted: fragmentation, ZeRO-1's temporary buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from _sweep_program import Numbers, Stacked
from numpy.typing import NDArray

from meshwright.planning import Priors, fitting_probability

SPARE_SHARE = 0.1  # of the room, for "fits with room to spare"
ALLOCATOR_SHARE = 0.05  # of the room, that PyTorch's caching allocator needs to reuse what it freed
STATE_BYTES = 8.0  # bf16 weight and gradient, fp32 gradient sum: per weight of a rank
SHARDED_STATE_BYTES = 12.0  # fp32 master weight and two moments: divided by dp with ZeRO-1
LOGIT_BYTES = 8.0  # bf16 and fp32 copies, and the gradient
GATHERED_BYTES = 6.0  # buffers of gathered inputs, per token and width
SAVED = {  # bytes per token of a layer: whole width, split width, split MLP
    "lower": (0.0, 18.0, 8.0),
    "upper": (4.0, 14.0, 8.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The estimates of each candidate, and what it may reserve, in bytes."""

    lower: Numbers
    upper: Numbers
    room: Numbers

    @property
    def refused(self) -> NDArray[np.bool_]:
        """True where we say that the candidate does not fit."""
        return self.lower > self.room

    @property
    def with_spare(self) -> NDArray[np.bool_]:
        """True where we say that the candidate fits with memory to spare."""
        return self.upper <= (1 - SPARE_SHARE) * self.room

    @property
    def fits(self) -> Numbers:
        """The probability that the candidate fits, with what the allocator needs.

        The lower estimate is expected. Half of the way to the upper is a standard deviation, besides the
        noise that the planner's search takes a compiled candidate's memory to have.
        """
        half = np.log(self.upper / self.lower) / 2
        spread = np.sqrt(half**2 + Priors().memory_noise ** 2)
        return fitting_probability(self.lower, spread, (1 - ALLOCATOR_SHARE) * self.room)


def memory_of(stacked: Stacked, room: Numbers) -> Memory:
    """Return the estimates of the stage of each candidate that needs most, beside the room that it has."""
    form, shape, stages = stacked.form, stacked.shape, stacked.stages
    tokens = form.tokens
    own = np.where(form.zero1, 1 / form.data, 1.0)
    held = stages.weights(shape, form.tensor) * (STATE_BYTES + SHARDED_STATE_BYTES * own)[:, None]
    held[np.arange(len(held)), stages.head] += LOGIT_BYTES * tokens * shape.vocabulary / form.tensor
    ahead = form.stage[:, None] - np.arange(held.shape[1])  # 1F1B: later stages hold fewer microbatches
    in_flight = np.clip(np.minimum(ahead, form.passes[:, None]), 0, None) * stages.layers
    rest = GATHERED_BYTES * tokens * shape.width
    bounds: dict[str, Numbers] = {}
    for name, (whole, split, mlp) in SAVED.items():
        saved = tokens * (whole * shape.width + (split * shape.width + mlp * shape.mlp) / form.tensor)
        bounds[name] = (held + saved[:, None] * in_flight).max(1) + rest
    return Memory(lower=bounds["lower"], upper=bounds["upper"], room=room)
