"""Compile the programs of a run side by side, before it writes to its folder.

Two threads compile: the train step begins first, and the smaller programs follow beside it. The processes of
a run need not compile in one order, because nothing is executed here. All is compiled before the first step:
a CPU compiles on the cores that train, so the measured time and memory of its steps would be wrong.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.compiler import (
    Autotuning,
    OptionValue,
    accepted_options,
    check_refused_results,
    fingerprint_of,
    loading_results,
    requested_options,
    writing_results,
)
from meshwright.config import RunConfig
from meshwright.registry import room
from meshwright.trainer.step import TrainStep, build_step, lowered_step, whole_parameters

NUM_THREADS = 2  # the step's memory is then added to that of one smaller program


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The compiled programs of a run: the train step, the initial state, the held-out evaluation, a sample.

    `sample`: None if none was asked for. `traced`: the digest of the step before it is compiled, which does
    not depend on the host. `compile_seconds`: of the train step. `xla_flops`: None for the
    reason in `no_xla_flops`. `results`: the file that holds the kernels that this compilation timed, or None.
    """

    built: TrainStep
    step: Callable[[Any, Any], tuple[Any, Any]]
    init: Callable[[Any], Any]
    evaluate: Callable[[Any, Any, Any], dict[str, jax.Array]]
    sample: Callable[..., jax.Array] | None
    compile_seconds: float
    fingerprint: str
    traced: str
    xla_flops: int | None
    no_xla_flops: str
    results: Path | None


def compile_programs(
    config: RunConfig,
    mesh: Mesh,
    platform: str,
    *,
    begins: bool = True,
    samples: bool = False,
    times_kernels: bool = False,
) -> Programs:
    """Compile a run's programs, the step as the worker compiles it: same builder, platform and options.

    Args:
        begins: whether the run starts from an initial state. Otherwise `init` compiles when it is called.
        samples: whether to compile the sample that ends the run.
        times_kernels: whether to write the config's file of autotuning results instead of reading it.

    Raises:
        RuntimeError: a program does not compile; of several, the step's error is raised.
    """
    built = build_step(config, mesh)
    named = None if config.autotune_results is None else Path(config.autotune_results).absolute()
    writes = named if times_kernels else None
    options: Any = _options(config, platform, [*mesh.shape.items()], named, writes) or None
    seed = jax.ShapeDtypeStruct((), np.uint32)
    parameters = whole_parameters(built.state)
    evaluated = parameters, built.state["model_state"], built.batch
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="meshwright-compile")
    try:
        started = time.monotonic()
        traced = built.step.trace(built.state, built.batch)  # type: ignore[attr-defined]
        lowered = lowered_step(traced, platform)

        def compiled_step() -> tuple[Any, float]:
            try:
                return lowered.compile(compiler_options=options), time.monotonic() - started
            except Exception as failed:  # XLA raises RuntimeErrors of many kinds
                check_refused_results(failed)
                raise

        stepping = pool.submit(compiled_step)
        # Tracing holds Python's lock, so these are traced here while the step compiles.
        init = pool.submit(built.init.lower(seed).compile) if begins else None  # type: ignore[attr-defined]
        evaluate = pool.submit(built.evaluate.lower(*evaluated).compile)  # type: ignore[attr-defined]
        sample = None
        if samples:
            lowered_sample = room("trained").lowered_sample  # a room outside the core
            sample = pool.submit(lowered_sample(config, mesh, parameters).compile)
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
            traced=hashlib.sha256(lowered.as_text().encode()).hexdigest(),
            xla_flops=flops,
            no_xla_flops=why_not,
            results=writes,
        )
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C no other program begins


def _options(
    config: RunConfig,
    platform: str,
    mesh_axes: Sequence[tuple[str, int]],
    results: Path | None,
    writes: Path | None,
) -> dict[str, OptionValue]:
    """Return the options of the step's compilation.

    Args:
        results: the config's file of autotuning results. It is read, unless it is the one to write.
        writes: the same file if it is to be written, by the first process.
    """
    files: dict[str, OptionValue] = {}
    autotuning: Autotuning = "off" if results is None else "load" if writes is None else "write"
    if results is not None and autotuning == "load":
        files = loading_results(results)
    elif writes is not None and jax.process_index() == 0:
        files = writing_results(writes)
    requested = requested_options(
        platform,
        mesh_axes,
        deterministic=config.deterministic,
        eight_bits=config.precision == "fp8",
        autotuning=autotuning,
    )
    return {**accepted_options(requested, jax.jit(lambda x: x).lower(0.0)).options, **files}


def _xla_flops(executable: Any, text: str, num_devices: int) -> tuple[int | None, str]:
    """Return XLA's own FLOP count for all devices, which all run this program, or None and the reason."""
    if " while(" in text:
        return None, "XLA's cost analysis counts a loop's body once, and this program has loops"
    analysis = executable.cost_analysis() or {}
    if "flops" not in analysis:
        return None, "this backend's cost analysis reports no FLOPs"
    return int(analysis["flops"]) * num_devices, ""
