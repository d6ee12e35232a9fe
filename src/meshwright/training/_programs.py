"""The programs of a run, compiled before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..compiler import accepted_options, fingerprint_of, requested_options
from ..config import RunConfig
from ..step import TrainStep, build_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Executables of the train step, of what makes its state, and of the held-out loss.

    `compile_seconds` is of the step alone. `xla_flops` is None where `no_xla_flops` says why.
    """

    built: TrainStep
    step: Callable[[Any, Any], tuple[Any, Any]]
    init: Callable[[np.uint32], Any]
    evaluate: Callable[[Any, Any, Any], dict[str, jax.Array]]
    compile_seconds: float
    fingerprint: str
    xla_flops: int | None
    no_xla_flops: str


def compile_programs(config: RunConfig, mesh: Mesh, platform: str) -> Programs:
    """Compile the step as the compile worker does: the same builder, platform and options."""
    built = build_step(config, mesh)
    requested = requested_options(platform, mesh.size, config.deterministic)
    options: Any = accepted_options(requested, jax.jit(lambda x: x).lower(0.0)).options or None
    started = time.monotonic()
    lowered = built.step.trace(built.state, built.batch).lower(lowering_platforms=(platform,))  # type: ignore[attr-defined]
    step = lowered.compile(compiler_options=options)
    seconds = time.monotonic() - started
    text = step.as_text()
    flops, why_not = _xla_flops(step, text, mesh.size)
    seed = jax.ShapeDtypeStruct((), np.uint32)
    judged = (built.state["parameters"], built.state["model_state"], built.batch)
    return Programs(
        built=built,
        step=step,
        init=built.init.lower(seed).compile(),  # type: ignore[attr-defined]
        evaluate=built.evaluate.lower(*judged).compile(),  # type: ignore[attr-defined]
        compile_seconds=seconds,
        fingerprint=fingerprint_of(text),
        xla_flops=flops,
        no_xla_flops=why_not,
    )


def _xla_flops(executable: Any, text: str, num_devices: int) -> tuple[int | None, str]:
    """XLA's own count for all devices, which all run this program; it counts a loop's body once."""
    if " while(" in text:
        return None, "XLA's cost analysis counts a loop's body once, and this program has loops"
    analysis = executable.cost_analysis() or {}
    if "flops" not in analysis:
        return None, "this backend's cost analysis gives no FLOPs"
    return int(analysis["flops"]) * num_devices, ""
