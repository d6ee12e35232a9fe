"""Run a training from its config to its `Measurement`.

Everything that can be refused is checked before the run writes to its folder.
"""

from __future__ import annotations

import random
import signal
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..checkpoint import Found, check_match, unread_newest
from ..compiler import installed_versions
from ..config import Layout, RunConfig, trainable
from ..data import Dataset, ImageFiles, RandomTokens, TokenWindows, open_data
from ..errors import InputError
from ..hardware import Fleet
from ..launch import Alone, processes_of_this_run
from ..measure import ResidentGrowth, describe_host
from ..reconciliation import Measurement
from ..sharding import mesh_of
from ..step import build_step
from ._devices import devices_of
from ._events import Compiled, Event, Finished, Phases, Sampled, Started
from ._files import NoFiles, RunFiles, metrics_of
from ._loop import Loop, Programs, compile_programs
from ._recorder import Recorder, StepFlops
from ._resume import about_complaint, about_of, changes_since, may_change_state
from ._run_folder import RunFolder, last_recorded_step
from ._sample import sample_tokens
from ._saving import Saving
from ._watchdog import Watchdog


def measurement_of(
    config: RunConfig,
    loop: Loop,
    dataset: Dataset,
    devices: Sequence[Any],
    platform: str,
    seconds_by_phase: dict[str, float],
    grown: int | None,
    no_growth: str,
    found: Found | None,
    sample: Sampled | None,
) -> Measurement:
    """Return the measurement of a run that is over, with a reason for each value that is not known."""
    programs, recorder = loop.programs, loop.recorder
    spread, peak = recorder.clock.spread(), _most(devices, "peak_bytes_in_use")
    reasons = {
        "step_seconds": "" if spread else "the first two steps are left out, and there were no others",
        "peak_bytes": "" if peak is not None else f"a {platform} device keeps no such figure",
        "process_rss_growth_bytes": no_growth,
        "xla_flops": programs.no_xla_flops,
        "argument_bytes_per_device": "" if recorder.argument_bytes else "no step was run",
    }
    return Measurement(
        steps=loop.step,
        signal="" if loop.signal is None else signal.Signals(loop.signal).name,
        resumed_from=None if found is None else found.step,
        tokens_per_step=config.batch.tokens_per_step,
        step_seconds=spread,
        compile_seconds=programs.compile_seconds,
        losses=recorder.losses,
        held_out_losses=recorder.held_out_losses,
        held_out_metrics=recorder.held_out_metrics,
        num_bad_steps=recorder.num_bad_steps,
        seconds_by_phase=seconds_by_phase,
        unigram_entropy_nats=_unigram_entropy(dataset),
        argument_bytes_per_device=recorder.argument_bytes or None,
        peak_bytes=peak,
        process_rss_growth_bytes=grown,
        xla_flops=programs.xla_flops,
        not_measured={name: why for name, why in reasons.items() if why},
        fingerprint=programs.fingerprint,
        platform=platform,
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        host=describe_host(),
        versions=installed_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        sample_prompt=sample.prompt if sample else "",
        sample=sample.text if sample else "",
    )


def memory_in_use(devices: Sequence[Any]) -> int | None:
    """Return the bytes in use on the fullest device; None if the runtime does not report them."""
    return _most(devices, "bytes_in_use")


def _most(devices: Sequence[Any], name: str) -> int | None:
    """Return the largest value of an allocator statistic over this process's devices.

    Returns None if a device does not report it.
    """
    here = processes_of_this_run().index
    own = [device for device in devices if device.process_index == here]
    found = [(device.memory_stats() or {}).get(name) for device in own]
    known = [int(figure) for figure in found if figure is not None]
    return max(known) if len(known) == len(found) else None


def _unigram_entropy(dataset: Dataset) -> float | None:
    if isinstance(dataset, RandomTokens | TokenWindows):
        return dataset.unigram_entropy_nats("held-out")
    return None  # rows and images have no tokens


Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of `run_training`, which documents each of them."""

    config: RunConfig
    fleet: Fleet
    layout: Layout
    folder: Path | RunFolder
    steps: int
    resume: bool = False
    work: StepFlops | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)
    tell: Listener = lambda event: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """Everything that a run needs before it may write; nothing can be refused after this point.

    `found`, `state`: the checkpoint and its state, None if the run begins at step 0. `changes`: the
    differences from the run that saved it. `recorded`: the last step in metrics.jsonl.
    """

    devices: Sequence[Any]
    mesh: Mesh
    dataset: Dataset
    programs: Programs
    growth: ResidentGrowth
    found: Found | None
    state: Any
    changes: Sequence[str]
    recorded: int


def run_training(
    config: RunConfig,
    fleet: Fleet,
    layout: Layout,
    folder: Path | RunFolder,
    *,
    steps: int | None = None,
    resume: bool = False,
    work: StepFlops | None = None,
    about: Mapping[str, Any] = types.MappingProxyType({}),
    documents: Mapping[str, str] = types.MappingProxyType({}),
    on_event: Listener = lambda event: None,
) -> Measurement:
    """Train `config` on the fleet's devices, which must be attached or simulated, and measure the run.

    Writes metrics.jsonl, notices.jsonl, TensorBoard's events and checkpoints to `folder`, once everything is
    ready for the first step. A run that is refused leaves the folder as it was. Ctrl-C and SIGTERM end the
    run after the current step, with a checkpoint and the measurements up to that step.

    Args:
        layout: resolved for the fleet, and checked against the config.
        folder: a path, or a `RunFolder` on which `make` was called; its own `resume` then replaces the
            argument.
        steps: of the whole run; by default the config's. The learning rate follows the config's number of
            steps.
        resume: continue from the folder's newest good checkpoint; begin at step 0 if none exists.
        work: FLOPs of a step and the fleet's peak, for MFU and HFU.
        about: JSON data that the checkpoints carry in addition to the config.
        documents: texts to write into the folder, by name.
        on_event: called with each event, in this thread.

    Raises:
        InputError: the fleet is not attached, the folder or the data cannot be used, or the checkpoint
            belongs to another config.
        MeshwrightError: a step's loss or gradient is not finite and the config says to stop, all checkpoints
            are damaged, or jax was already used with other devices.
    """
    config = trainable(config, steps)
    assert config.steps is not None, "a trainable run has steps"
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
    """Run as `run_training` does; return the measurement and the final state."""
    config, phases, peers = asked.config, Phases(), processes_of_this_run()
    with ExitStack() as stack:
        folder = asked.folder
        if isinstance(folder, Path):
            folder = stack.enter_context(closing(RunFolder(folder, resume=asked.resume, peers=peers)))
            folder.look(config)
            folder.make()
        about = {**asked.about, **about_of(config, asked.layout)}
        saving = stack.enter_context(closing(Saving(folder.path, config.checkpoint, about, phases, peers)))
        watchdog = Watchdog(folder.path, config.faults, phases, peers=peers)
        stack.enter_context(watchdog.watching())
        ready = _ready(asked, folder, saving, phases, peers)
        files: RunFiles | NoFiles = NoFiles()
        if peers.is_first:
            keep_to = -1 if ready.found is None else ready.found.step
            files = stack.enter_context(RunFiles(folder.path, folder.writes, keep_to=keep_to))
            folder.writes.documents(asked.documents)
        return _trained(asked, folder, files, saving, phases, watchdog, ready)


def check_resumed_state(folder: Path, config: RunConfig, fleet: Fleet, layout: Layout) -> None:
    """Raise if the newest checkpoint of a run has other arrays than the state of `config`.

    `run_training` raises as well, but only after compiling. Nothing is traced unless a setting has changed on
    which the arrays may depend.

    Raises:
        InputError: an array is missing on either side, or its shape or format differs.
    """
    found = unread_newest(folder / "checkpoints", about_complaint)
    if found is not None and may_change_state(found.about, config):
        check_match(found, build_step(config, mesh_of(layout.axes, devices_of(fleet, layout))).state)


def _ready(asked: Asked, folder: RunFolder, saving: Saving, phases: Phases, peers: Alone) -> _Ready:
    """Do everything that may be refused or fail before the first step; write nothing."""
    config = asked.config
    found = saving.newest() if folder.resume else None
    changes = [] if found is None else changes_since(found, config, asked.layout)
    devices = devices_of(asked.fleet, asked.layout)
    random.seed(config.seed)
    np.random.seed(config.seed)
    dataset = open_data(config)
    asked.tell(
        Started(
            name=config.name,
            num_parameters=config.model.num_parameters,
            device_kind=devices[0].device_kind,
            num_devices=len(devices),
            steps=asked.steps,
            folder=folder.path,
        )
    )
    mesh = mesh_of(asked.layout.axes, devices)
    with phases.of("compile"):
        programs = compile_programs(config, mesh, asked.fleet.chip.platform)
    asked.tell(Compiled(seconds=programs.compile_seconds, fingerprint=programs.fingerprint))
    growth = ResidentGrowth()
    peers.gathered("compiled", None)  # waits without a time limit, unlike a collective on the devices
    return _Ready(
        devices=devices,
        mesh=mesh,
        dataset=dataset,
        programs=programs,
        growth=growth,
        found=found,
        state=None if found is None else saving.restore(found, programs.built.state),
        changes=changes,
        recorded=last_recorded_step(folder.path),
    )


def _trained(
    asked: Asked,
    folder: RunFolder,
    files: RunFiles | NoFiles,
    saving: Saving,
    phases: Phases,
    watchdog: Watchdog,
    ready: _Ready,
) -> tuple[Measurement, Any]:
    config, dataset, devices = asked.config, ready.dataset, ready.devices
    recorder = _recorder(asked, folder.path, files, dataset, devices)
    platform = asked.fleet.chip.platform
    peers = processes_of_this_run()
    loop = Loop(
        config, ready.programs, dataset, recorder, saving, phases, watchdog,
        steps=asked.steps, waits=platform == "cpu", peers=peers,
    )  # fmt: skip
    _begin(loop, ready, asked.steps)
    loop.run()
    grown = ready.growth.bytes() if peers.count == 1 else None
    no_growth = (
        ready.growth.why_not if peers.count == 1 else "several processes hold the devices, and one looked"
    )
    phases.enter("end")
    sample = _sample(config, ready.mesh, loop, dataset)
    if sample is not None:
        recorder.tell(sample)
    measurement = measurement_of(
        config, loop, dataset, devices, platform, phases.seconds(), grown, no_growth, ready.found, sample
    )
    recorder.tell(Finished(steps=measurement.steps, interrupted=measurement.interrupted))
    return measurement, loop.state


def _recorder(
    asked: Asked, folder: Path, files: RunFiles | NoFiles, dataset: Dataset, devices: Sequence[Any]
) -> Recorder:
    """Return the run's recorder.

    In the process that writes the files, it starts with the recorded steps of a resumed run.
    """
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
        recorder.remember(metrics_of(folder))
    return recorder


def _begin(loop: Loop, ready: _Ready, steps: int) -> None:
    """Start from the state of the checkpoint, or from that of the seed."""
    found, recorded = ready.found, ready.recorded
    if found is None:
        loop.begin()
        if recorded:
            again = f"no checkpoint is there; steps 1 to {recorded} are trained again"
            loop.recorder.notice(0, "resumed", again)
        return
    loop.go_on(found, ready.state)
    changed = f", with {'; '.join(ready.changes)}" if ready.changes else ""
    done = "nothing is left to do" if found.step >= steps else f"goes on to step {steps}"
    loop.recorder.notice(found.step, "resumed", f"from the checkpoint of step {found.step}, {done}{changed}")


def _sample(config: RunConfig, mesh: Mesh, loop: Loop, data: Dataset) -> Sampled | None:
    """Return text that the model generates, or None.

    None if the model's tokens are not bytes, the mesh has several devices, or a signal stopped the run.
    """
    if not isinstance(data, TokenWindows) or not data.is_bytes or mesh.size > 1 or loop.signal is not None:
        return None
    held_out = data.batch(0, "held-out")["tokens"][0]
    parts = sample_tokens(config, mesh, loop.state["parameters"], held_out)
    prompt, text = (data.decode(part) for part in parts)
    return Sampled(prompt=prompt, text=text)
