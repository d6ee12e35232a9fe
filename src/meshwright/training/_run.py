"""`run_training`: one run from its config to its measurement."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..compiler import installed_versions
from ..config import Layout, RunConfig
from ..data import Dataset, RandomTokens, TokenWindows, open_data
from ..errors import InputError
from ..hardware import Fleet
from ..measure import ResidentGrowth, describe_host
from ..reconcile import Measurement
from ..sharding import mesh_of
from ._devices import devices_of
from ._events import Compiled, Event, Finished, Sampled, Started
from ._files import RunFiles
from ._loop import Loop
from ._programs import compile_programs
from ._sample import sample_tokens


def run_training(
    config: RunConfig,
    fleet: Fleet,
    layout: Layout,
    folder: Path,
    *,
    steps: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Measurement:
    """Train `config` on the fleet's devices, which must be attached or simulated, and measure it.

    Writes metrics.jsonl and TensorBoard's events to `folder`. Ctrl-C ends it after the step that runs,
    with what was measured until then.

    Args:
        layout: resolved for the fleet, and checked against the config.
        steps: of this run; the config's own unless told. The learning rate follows the config's.
        on_event: told what happens, in this thread.

    Raises:
        InputError: the fleet is not attached, or the folder or the data cannot be used.
        MeshwrightError: the loss is no longer a number, the disk is full, or jax was used before with
            other devices.
    """
    return train(config, fleet, layout, folder, steps=steps, on_event=on_event)[0]


def train(
    config: RunConfig,
    fleet: Fleet,
    layout: Layout,
    folder: Path,
    *,
    steps: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> tuple[Measurement, Any]:
    """As `run_training`; also the final state."""
    steps = config.steps if steps is None else steps
    if steps < 1:
        raise InputError(f"a run of {steps} steps", hint="use at least 1 step")
    with RunFiles(folder) as files:  # before anything that takes long
        devices = devices_of(fleet, layout)
        random.seed(config.seed)
        np.random.seed(config.seed)
        dataset = open_data(config)
        on_event(
            Started(
                name=config.name,
                num_parameters=config.model.num_parameters,
                device_kind=devices[0].device_kind,
                num_devices=len(devices),
                steps=steps,
            )
        )
        mesh = mesh_of(layout.axes, devices)
        programs = compile_programs(config, mesh, fleet.chip.platform)
        on_event(Compiled(seconds=programs.compile_seconds, fingerprint=programs.fingerprint))
        growth = ResidentGrowth()
        loop = Loop(config, programs, dataset, files, on_event, steps)
        loop.run(waits=fleet.chip.platform == "cpu")
        grown = growth.bytes()
        sample = _sample(config, mesh, loop)
        if sample is not None:
            on_event(sample)
    measurement = _measurement(config, fleet, loop, devices, grown, growth.why_not, sample)
    on_event(Finished(steps=measurement.steps, interrupted=measurement.interrupted))
    return measurement, loop.state


def _sample(config: RunConfig, mesh: Mesh, loop: Loop) -> Sampled | None:
    """What the model writes; None where it knows no text, is spread over devices, or was stopped."""
    data = loop.dataset
    if not isinstance(data, TokenWindows) or not data.is_bytes or mesh.size > 1 or loop.interrupted:
        return None
    held_out = data.batch(0, "held-out")["tokens"][0]
    parts = sample_tokens(config, mesh, loop.state["parameters"], held_out)
    prompt, text = (data.decode(part) for part in parts)
    return Sampled(prompt=prompt, text=text)


def _measurement(
    config: RunConfig,
    fleet: Fleet,
    loop: Loop,
    devices: list[Any],
    grown: int | None,
    no_growth: str,
    sample: Sampled | None,
) -> Measurement:
    programs, spread, peak = loop.programs, loop.clock.spread(), _peak_bytes(devices)
    reasons = {
        "step_seconds": "" if spread else "the first two steps are left out, and there were no others",
        "peak_bytes": "" if peak is not None else f"a {fleet.chip.platform} device keeps no such figure",
        "process_rss_growth_bytes": no_growth,
        "xla_flops": programs.no_xla_flops,
    }
    return Measurement(
        steps=len(loop.losses),
        interrupted=loop.interrupted,
        tokens_per_step=config.batch.tokens_per_step,
        step_seconds=spread,
        compile_seconds=programs.compile_seconds,
        losses=loop.losses,
        held_out_losses=loop.held_out_losses,
        unigram_entropy_nats=_unigram_entropy(loop.dataset),
        argument_bytes_per_device=loop.argument_bytes,
        peak_bytes=peak,
        process_rss_growth_bytes=grown,
        xla_flops=programs.xla_flops,
        not_measured={name: why for name, why in reasons.items() if why},
        fingerprint=programs.fingerprint,
        platform=fleet.chip.platform,
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        host=describe_host(),
        versions=installed_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        sample_prompt=sample.prompt if sample else "",
        sample=sample.text if sample else "",
    )


def _peak_bytes(devices: list[Any]) -> int | None:
    """The most that any device's allocator has held; None where the runtime keeps no such figure."""
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [int(peak) for peak in found if peak is not None]
    return max(known) if len(known) == len(found) else None


def _unigram_entropy(dataset: Dataset) -> float | None:
    if isinstance(dataset, RandomTokens | TokenWindows):
        return dataset.unigram_entropy_nats("held-out")
    return None  # rows and images have no tokens
