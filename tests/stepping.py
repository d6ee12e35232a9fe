"""Run a built train step over a run's batches."""

from __future__ import annotations

from typing import Any

import jax

from meshwright.config import RunConfig
from meshwright.trainer.data import open_data
from meshwright.trainer.step import TrainStep


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
