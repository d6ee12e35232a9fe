"""Steps that went wrong: whether one did, what its first bad tensor is, and whether a loss is a spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..config import FaultConfig

Tree = Any
WINDOW_STEPS = 100
LEAST_STEPS = 20  # before a deviation can be told
PARTS = ("batch", "parameters", "loss", "gradients")  # in the order in which one spoils the next


def what_is_bad(values: Mapping[str, float]) -> str:
    """ "loss is nan", of a step whose update was not applied; empty for a good one.

    A float16 step that overflows at a loss scale above 1 is no bad one: the scale is being found.
    """
    if values["applied"] or values.get("loss_scale", 1.0) > 1.0:
        return ""
    name = next((n for n in ("loss", "gradient_norm") if not math.isfinite(values[n])), "loss")
    return f"{name.replace('_', ' ')} is {values[name]}"


class BadSteps:
    """How many bad steps came in a row: good ones count once the run is beyond the last bad one."""

    def __init__(self, faults: FaultConfig) -> None:
        self._faults = faults
        self._last = 0
        self.in_row = 0

    def good(self, step: int) -> None:
        if step > self._last:
            self.in_row = 0

    def bad(self, step: int) -> str:
        """What to do: stop, skip or rollback."""
        self._last = max(self._last, step)
        self.in_row += 1
        return "stop" if self.in_row >= self._faults.most_bad_steps else self._faults.bad_step


class Spikes:
    """Flags a loss that lies far above the last hundred."""

    def __init__(self, sigmas: float) -> None:
        self._sigmas = sigmas
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def judge(self, loss: float) -> str:
        """In words what is wrong with a finite loss; empty where nothing is."""
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < LEAST_STEPS:
            return ""
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if not deviation or loss <= mean + self._sigmas * deviation:
            return ""
        above = (loss - mean) / deviation
        return f"loss {loss:.4g} is {above:.1f} standard deviations above the {mean:.4g} before it"


def first_bad_tensor(inspect: Callable[[Tree, Tree], Tree], state: Tree, batch: Tree, steps_ago: int) -> str:
    """Where numbers that are not finite come in, in words.

    The step is done once more, its update left out, at the parameters that are there now.

    Args:
        steps_ago: how many steps the state has made since it met `batch`.
    """
    try:
        counts = jax.block_until_ready(inspect({**state, "step": state["step"] - steps_ago}, batch))
    except RuntimeError as failed:  # jax's own: memory that is not enough, above all
        return f"which tensor came first could not be looked at: {str(failed).splitlines()[0]}"
    for part in PARTS:
        leaves = jax.tree_util.tree_leaves_with_path({part: counts[part]})
        found = [(path, int(count)) for path, count in leaves if int(count)]
        if found:
            path, count = found[0]
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            numbers = f", {count:,} of its numbers" if count > 1 else ""
            others = f"; and {len(found) - 1} other arrays of the {part}" if len(found) > 1 else ""
            return f"first not finite: {name}{numbers}{others}"
    return "done once more, all is finite: look at the machine's memory"
