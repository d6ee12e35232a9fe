"""The loop: batches in, metrics out.

On an accelerator the host runs one step ahead of what it reads, so that the device never waits for
it. On a CPU each step is waited for: the collectives of several programs in flight would share one
pool of threads, and can then wait for each other forever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import numpy as np

from ..config import RunConfig
from ..data import Dataset
from ..errors import MeshwrightError
from ..measure import StepClock, bytes_on
from ._ahead import batches_ahead
from ._events import Evaluated, Event, StepDone
from ._files import RunFiles
from ._interrupt import noting_interrupts
from ._programs import Programs


class Loop:
    """One run's steps and evaluations, and what they left: `state`, losses by step, step seconds."""

    def __init__(
        self,
        config: RunConfig,
        programs: Programs,
        dataset: Dataset,
        files: RunFiles,
        on_event: Callable[[Event], None],
        steps: int,
    ) -> None:
        self.programs = programs
        self.dataset = dataset
        self.clock = StepClock()
        self.losses: dict[int, float] = {}
        self.held_out_losses: dict[int, float] = {}
        self.interrupted = False
        self.argument_bytes = 0
        self._config = config
        self._files = files
        self._on_event = on_event
        self._steps = steps
        self.state = programs.init(np.uint32(config.seed))

    def run(self, *, waits: bool) -> None:
        """All steps, with an evaluation before the first, after the last, and every so often between.

        Args:
            waits: whether each step is waited for before the next is started.
        """
        self._evaluate(0)
        every, pending = self._config.evaluation.every_steps, None
        batches = batches_ahead(lambda step: self._batch(step, "train"), range(self._steps))
        with closing(batches), noting_interrupts() as stop_asked:
            self.clock.start()
            for step, batch in enumerate(batches, start=1):
                self._count_arguments(batch)
                self.state, metrics = self.programs.step(self.state, batch)
                if pending is not None:
                    self._record(*pending)
                pending = (step, metrics)
                self.interrupted = stop_asked()
                evaluates = step % every == 0 or step == self._steps
                if waits or evaluates or self.interrupted:
                    jax.block_until_ready(self.state)
                    self._record(*pending)
                    pending = None
                if self.interrupted:
                    return
                if evaluates:
                    self._evaluate(step)
                    self.clock.start()

    def _batch(self, step: int, split: Any) -> Any:
        """A batch on its devices: [microbatches, rows, ...] as the step takes it."""
        rows = self.dataset.batch(step, split)
        return jax.tree.map(
            lambda array, abstract: jax.device_put(array.reshape(abstract.shape), abstract.sharding),
            rows,
            self.programs.built.batch,
        )

    def _count_arguments(self, batch: Any) -> None:
        """What the first step is given, before its state is given up."""
        if not self.argument_bytes:
            arrays = jax.tree.leaves((self.state, batch))
            first = arrays[0].sharding.mesh.devices.flat[0]
            self.argument_bytes = bytes_on(first, arrays)

    def _record(self, step: int, metrics: Any) -> None:
        """Fetch a step's metrics, which waits for that step, and tell them."""
        values = {name: float(value) for name, value in metrics.items()}
        seconds = self.clock.tick()
        self._check_finite(step, values)
        self.losses[step] = values["loss"]
        tokens_per_second = self._config.batch.tokens_per_step / seconds
        self._files.write(
            step, "train", {**values, "seconds": seconds, "tokens_per_second": tokens_per_second}
        )
        self._on_event(
            StepDone(
                step=step,
                steps=self._steps,
                loss=values["loss"],
                gradient_norm=values["gradient_norm"],
                learning_rate=values["learning_rate"],
                tokens_per_second=tokens_per_second,
                seconds_left=self.clock.usual_seconds() * (self._steps - step),
            )
        )

    def _evaluate(self, step: int) -> None:
        """Held-out loss of the state's parameters: the mean over the first held-out batches."""
        total = 0.0
        for index in range(self._config.evaluation.batches):
            batch = self._batch(index, "held-out")
            metrics = self.programs.evaluate(self.state["parameters"], self.state["model_state"], batch)
            total += float(metrics["loss"])
        loss = total / self._config.evaluation.batches
        self._check_finite(step, {"held-out loss": loss})
        self.held_out_losses[step] = loss
        self._files.write(step, "held-out", {"held_out_loss": loss})
        self._on_event(Evaluated(step=step, held_out_loss=loss))

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                optimizer = self._config.optimizer
                rate, clips = optimizer.learning_rate, optimizer.clip_norm is not None
                raise MeshwrightError(
                    f"step {step}: the {name.replace('_', ' ')} is {value}; training stopped",
                    hint=f"lower optimizer.learning_rate, which is {rate:g}, to {rate / 10:g}"
                    + ("" if clips else ", or set optimizer.clip_norm = 1.0"),
                )
