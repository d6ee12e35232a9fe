"""`run_training`: one run from its config to its measurement."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..checkpoint import Found
from ..config import Layout, RunConfig
from ..data import Dataset, ImageFiles, TokenWindows, open_data
from ..errors import InputError
from ..hardware import Fleet
from ..measure import ResidentGrowth
from ..processes import processes_of_this_run
from ..reconcile import Measurement
from ..sharding import mesh_of
from ._devices import devices_of
from ._events import Compiled, Event, Finished, Sampled, Started
from ._files import NoFiles, RunFiles, metrics_of, prepare_folder, write_document
from ._loop import Loop
from ._measured import measurement_of, memory_in_use
from ._phases import Phases
from ._programs import compile_programs
from ._recorder import Recorder, StepFlops
from ._resume import about_of, changes_since
from ._sample import sample_tokens
from ._saving import Saving
from ._watchdog import Watchdog

Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `run_training` was asked for; its arguments say what each is."""

    config: RunConfig
    fleet: Fleet
    layout: Layout
    folder: Path
    steps: int
    resume: bool = False
    work: StepFlops | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)
    tell: Listener = lambda event: None


def run_training(
    config: RunConfig,
    fleet: Fleet,
    layout: Layout,
    folder: Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    work: StepFlops | None = None,
    about: Mapping[str, Any] = types.MappingProxyType({}),
    documents: Mapping[str, str] = types.MappingProxyType({}),
    on_event: Listener = lambda event: None,
) -> Measurement:
    """Train `config` on the fleet's devices, which must be attached or simulated, and measure it.

    Writes metrics.jsonl, notices.jsonl, TensorBoard's events and checkpoints to `folder`. Ctrl-C and SIGTERM
    end it after the step that runs, with a checkpoint and what was measured until then.

    Args:
        layout: resolved for the fleet, and checked against the config.
        steps: of the whole run; the config's own unless told. The learning rate follows the config's.
        resume: go on from the folder's newest good checkpoint; begin anew where there is none.
        work: FLOPs of a step and the fleet's peak, for MFU and HFU.
        about: JSON data that the checkpoints carry beside the config.
        documents: texts to write into the folder by name, once it is known that nobody else writes there.
        on_event: told what happens, in this thread.

    Raises:
        InputError: the fleet is not attached, the folder or the data cannot be used, or the checkpoint is of
            another config.
        MeshwrightError: a step's loss is not finite and the config says to stop, all checkpoints are
            damaged, the run's files could not be written to the end, or jax was used before with other
            devices.
    """
    steps = config.steps if steps is None else steps
    if steps < 1:
        raise InputError(f"a run of {steps} steps", hint="use at least 1 step")
    asked = Asked(
        config=config,
        fleet=fleet,
        layout=layout,
        folder=folder,
        steps=steps,
        resume=resume,
        work=work,
        about=about,
        documents=documents,
        tell=on_event,
    )
    return train(asked)[0]


def train(asked: Asked) -> tuple[Measurement, Any]:
    """As `run_training`; also the final state."""
    config, folder, phases = asked.config, asked.folder, Phases()
    peers = processes_of_this_run()
    peers.from_first("folder", lambda: prepare_folder(folder, resume=asked.resume))
    about = {**asked.about, **about_of(config, asked.layout)}
    # A bad folder is known before what takes long.
    saving = Saving(folder, config.checkpoint, about, phases, peers)
    try:
        for name, text in asked.documents.items() if peers.is_first else ():
            write_document(folder, name, text)
        with Watchdog(folder, config.faults, phases, peers=peers).watching() as watchdog:
            found = saving.newest() if asked.resume else None
            changes = [] if found is None else changes_since(found, config, asked.layout)
            keep_to = (-1 if found is None else found.step) if asked.resume else None
            with RunFiles(folder, keep_to=keep_to) if peers.is_first else nullcontext(NoFiles()) as files:
                return _trained(asked, files, saving, phases, watchdog, found, changes)
    finally:
        saving.close()


def _trained(
    asked: Asked,
    files: RunFiles | NoFiles,
    saving: Saving,
    phases: Phases,
    watchdog: Watchdog,
    found: Found | None,
    changes: list[str],
) -> tuple[Measurement, Any]:
    config = asked.config
    devices = devices_of(asked.fleet, asked.layout)
    random.seed(config.seed)
    np.random.seed(config.seed)
    dataset = open_data(config)
    recorder = _recorder(asked, files, dataset, devices)
    recorder.tell(
        Started(
            name=config.name,
            num_parameters=config.model.num_parameters,
            device_kind=devices[0].device_kind,
            num_devices=len(devices),
            steps=asked.steps,
        )
    )
    mesh = mesh_of(asked.layout.axes, devices)
    platform = asked.fleet.chip.platform
    with phases.of("compile"):
        programs = compile_programs(config, mesh, platform)
    recorder.tell(Compiled(seconds=programs.compile_seconds, fingerprint=programs.fingerprint))
    growth = ResidentGrowth()
    peers, waits = processes_of_this_run(), platform == "cpu"
    loop = Loop(
        config, programs, dataset, recorder, saving, phases, watchdog,
        steps=asked.steps, waits=waits, peers=peers,
    )  # fmt: skip
    peers.gathered("compiled", None)  # without a time limit, which a collective of the devices has
    _begin(loop, found, changes, asked.steps)
    loop.run()
    grown = growth.bytes() if peers.count == 1 else None
    no_growth = growth.why_not if peers.count == 1 else "several processes hold the devices, and one looked"
    phases.enter("end")
    sample = _sample(config, mesh, loop, dataset)
    if sample is not None:
        recorder.tell(sample)
    measurement = measurement_of(
        config, loop, dataset, devices, platform, phases.seconds(), grown, no_growth, found, sample
    )
    recorder.tell(Finished(steps=measurement.steps, interrupted=measurement.interrupted))
    return measurement, loop.state


def _recorder(asked: Asked, files: RunFiles | NoFiles, dataset: Dataset, devices: Sequence[Any]) -> Recorder:
    """It knows the steps of the run that is resumed, where this is the process that writes them."""
    recorder = Recorder(
        asked.config,
        files,
        asked.tell,
        asked.steps,
        work=asked.work,
        steps_per_epoch=dataset.steps_per_epoch("train") if isinstance(dataset, ImageFiles) else None,
        memory_in_use=lambda: memory_in_use(devices),
    )
    if isinstance(files, RunFiles):
        recorder.remember(metrics_of(asked.folder))
    return recorder


def _begin(loop: Loop, found: Found | None, changes: list[str], steps: int) -> None:
    """The state of the checkpoint, or that of the seed."""
    if found is None:
        loop.begin()
        return
    loop.go_to(found)
    changed = f", with {'; '.join(changes)}" if changes else ""
    done = "nothing is left to do" if found.step >= steps else f"goes on to step {steps}"
    loop.recorder.notice(found.step, "resumed", f"from the checkpoint of step {found.step}, {done}{changed}")


def _sample(config: RunConfig, mesh: Mesh, loop: Loop, data: Dataset) -> Sampled | None:
    """What the model writes; None where it knows no text, is spread over devices, or was stopped."""
    if not isinstance(data, TokenWindows) or not data.is_bytes or mesh.size > 1 or loop.signal is not None:
        return None
    held_out = data.batch(0, "held-out")["tokens"][0]
    parts = sample_tokens(config, mesh, loop.state["parameters"], held_out)
    prompt, text = (data.decode(part) for part in parts)
    return Sampled(prompt=prompt, text=text)
