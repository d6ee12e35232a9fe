"""Trace a few steps of a run with jax.profiler, for `meshwright calibrate --trace`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax

from ._interface import FIRST_TRACED, LAST_TRACED


class StepTrace:
    """Write a trace of steps 3 to 5 of this process into a folder; with `folder` None, do nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._steps = 0
        self._runs = False

    def before_step(self, state: Any) -> float:
        """Begin the trace if the next step is its first; return the seconds that this took."""
        self._steps += 1
        if self._folder is None or self._steps != FIRST_TRACED:
            return 0.0
        jax.block_until_ready(state)
        started = time.perf_counter()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows the steps, and nothing reads it
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._runs = True
        return time.perf_counter() - started

    def after_step(self, state: Any) -> float:
        """End the trace after its last step; return the seconds that this took."""
        if not self._runs or self._steps < LAST_TRACED:
            return 0.0
        jax.block_until_ready(state)
        started = time.perf_counter()
        self.close()
        return time.perf_counter() - started

    def close(self) -> None:
        """End a trace that still runs."""
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()
