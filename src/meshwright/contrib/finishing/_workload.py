"""State what a weighed run has to do until it is finished, from its compiled program and its configuration.

Counted: held-out batches, each as the forward pass of a step; the copy of the state off the devices by the
link to the host at its full rate, for which our trainer's steps wait. Not counted: reading the state again.
"""

from __future__ import annotations

import math

from meshwright.compiler import Argument, Compiled
from meshwright.config import RunConfig
from meshwright.hardware import Fleet
from meshwright.predict import Prediction

from ._finish import Workload

STATE = ("parameters", "optimizer_state", "model_state")  # roles of what a checkpoint holds


def workload_of(
    prediction: Prediction, steps: int, fleet: Fleet, compiled: Compiled | None, config: RunConfig | None
) -> Workload:
    """Return what a run has to do.

    Args:
        compiled: its program; None of a step that PyTorch runs eagerly.
        config: its configuration; None of a program of somebody else's, whose checkpoints are not known.
    """
    made = Workload(
        step_seconds=prediction.step_seconds,
        steps=steps,
        hosts=fleet.num_hosts,
        chips_per_host=fleet.chips_per_host,
        start_seconds=0.0 if compiled is None else compiled.compile_seconds,
    )
    if compiled is None or config is None:
        return made
    state = [argument for argument in compiled.arguments if argument.role in STATE]
    on_device = sum(argument.device_bytes for argument in state if not argument.host)
    link = fleet.chip.host
    work, evaluation = compiled.traced_flops.by_phase, config.evaluation
    share = work.get("forward", 0) / (sum(work.values()) or 1)
    return Workload(
        step_seconds=made.step_seconds,
        steps=steps,
        hosts=made.hosts,
        chips_per_host=made.chips_per_host,
        start_seconds=made.start_seconds,
        extra_share=share * evaluation.batches / evaluation.every_steps,
        copy_seconds=None if link is None else on_device / link.bytes_per_second,
        checkpoint_bytes=sum(map(_bytes_of, state)),
        save_every=config.checkpoint.every_steps,
    )


def _bytes_of(argument: Argument) -> float:
    """Return the bytes of a whole array, of which each device holds a shard."""
    bits = "".join(letter for letter in argument.dtype.partition("_")[0] if letter.isdigit())
    return math.prod(argument.shape) * int(bits or 8) / 8
