"""Compile the programs of a run side by side, before it writes to its folder.

Two threads compile: the train step begins first, and the smaller programs follow beside it. The processes of
a run need not compile in one order, because nothing is executed here. All is compiled before the first step:
a CPU compiles on the cores that train, so the measured time and memory of its steps would be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..compiler import accepted_options, fingerprint_of, requested_options
from ..config import RunConfig
from ..step import TrainStep, build_step, whole_parameters
from ._sample import lowered_sample

NUM_THREADS = 2  # the step's memory is then added to that of one smaller program


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The compiled programs of a run: the train step, the initial state, the held-out evaluation, a sample.

    `sample`: None if none was asked for. `compile_seconds`: of the train step. `xla_flops`: None for the
    reason in `no_xla_flops`.
    """

    built: TrainStep
    step: Callable[[Any, Any], tuple[Any, Any]]
    init: Callable[[Any], Any]
    evaluate: Callable[[Any, Any, Any], dict[str, jax.Array]]
    sample: Callable[..., jax.Array] | None
    compile_seconds: float
    fingerprint: str
    xla_flops: int | None
    no_xla_flops: str


def compile_programs(
    config: RunConfig, mesh: Mesh, platform: str, *, begins: bool = True, samples: bool = False
) -> Programs:
    """Compile a run's programs, the step as the worker compiles it: same builder, platform and options.

    Args:
        begins: whether the run starts from an initial state. Otherwise `init` compiles when it is called.
        samples: whether to compile the sample that ends the run.

    Raises:
        RuntimeError: a program does not compile; of several, the step's error is raised.
    """
    built = build_step(config, mesh)
    requested = requested_options(
        platform, mesh.size, deterministic=config.deterministic, eight_bits=config.precision == "fp8"
    )
    options: Any = accepted_options(requested, jax.jit(lambda x: x).lower(0.0)).options or None
    seed = jax.ShapeDtypeStruct((), np.uint32)
    parameters = whole_parameters(built.state)
    evaluated = parameters, built.state["model_state"], built.batch
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="meshwright-compile")
    try:
        started = time.monotonic()
        lowered = built.step.trace(built.state, built.batch).lower(lowering_platforms=(platform,))  # type: ignore[attr-defined]

        def compiled_step() -> tuple[Any, float]:
            return lowered.compile(compiler_options=options), time.monotonic() - started

        stepping = pool.submit(compiled_step)
        # Tracing holds Python's lock, so these are traced here while the step compiles.
        init = pool.submit(built.init.lower(seed).compile) if begins else None  # type: ignore[attr-defined]
        evaluate = pool.submit(built.evaluate.lower(*evaluated).compile)  # type: ignore[attr-defined]
        sample = pool.submit(lowered_sample(config, mesh, parameters).compile) if samples else None
        step, seconds = stepping.result()
        text = step.as_text()
        flops, why_not = _xla_flops(step, text, mesh.size)
        return Programs(
            built=built,
            step=step,
            init=built.init if init is None else init.result(),
            evaluate=evaluate.result(),
            sample=None if sample is None else sample.result(),
            compile_seconds=seconds,
            fingerprint=fingerprint_of(text),
            xla_flops=flops,
            no_xla_flops=why_not,
        )
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C no other program begins


def _xla_flops(executable: Any, text: str, num_devices: int) -> tuple[int | None, str]:
    """Return XLA's own FLOP count for all devices, which all run this program, or None and the reason."""
    if " while(" in text:
        return None, "XLA's cost analysis counts a loop's body once, and this program has loops"
    analysis = executable.cost_analysis() or {}
    if "flops" not in analysis:
        return None, "this backend's cost analysis reports no FLOPs"
    return int(analysis["flops"]) * num_devices, ""
