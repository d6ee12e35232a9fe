"""Run a built train step over a run's batches."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import numpy as np

from meshwright.config import RunConfig, load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.step import TrainStep, build_step


def run_steps(config: RunConfig, built: TrainStep, state: Any, steps: int) -> tuple[list[float], Any]:
    """Return the loss of each step, and the last state."""
    data, losses = open_data(config), list[float]()
    for step in range(steps):
        batch = jax.tree.map(
            lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding),
            data.batch(step, "train"),
            built.batch,
        )
        state, metrics = built.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


IN_16_BITS = ("precision=bf16",)
SHORT = ("model.num_layers=1", "batch.sequences=8", "batch.sequence_length=64", "schedule.warmup_steps=0")


@cache
def trained_shortly(
    overrides: tuple[str, ...] = IN_16_BITS,
    axes: tuple[tuple[str, int], ...] = (("data", 1),),
    steps: int = 12,
) -> tuple[list[float], Any]:
    """Return the losses of a short run of bytes-nano, and its last state."""
    config = load_config("bytes-nano", (*SHORT, *overrides))
    built = build_step(config, mesh_of(axes, jax.devices()[: math.prod(size for _, size in axes)]))
    return run_steps(config, built, built.init(np.uint32(0)), steps)
