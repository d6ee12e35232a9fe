"""Run a training from its `RunRequest` to its `Measurement`.

Everything that can be refused is checked before the run writes to its folder.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from meshwright.compiler import installed_versions
from meshwright.config import Layout, RunConfig, num_stacked_layers, resolve_dispatch
from meshwright.measure import Measurement, ResidentGrowth, describe_host
from meshwright.registry import room
from meshwright.sharding import mesh_of
from meshwright.trainer.checkpoint import Found, check_match, unread_newest
from meshwright.trainer.data import Dataset, RandomTokens, TokenReader
from meshwright.trainer.launch import agreed
from meshwright.trainer.step import build_step, whole_parameters

from ._common_facts import facts_of_programs
from ._interface import Finished, PhaseClock, RunRequest, Started, StepCompiled
from ._interruptions import Watchdog
from ._loop import Loop, Saving
from ._programs import compile_programs
from ._recording import Recorder, RunWriter, memory_in_use, metrics_of
from ._run_folder import about_complaint, about_of, changes_since, last_recorded_step, may_change_state

OTHERS_GROW = "several processes hold the devices, and one looked"


def run_training(request: RunRequest) -> tuple[Measurement, Any]:
    """Train a config on a fleet's devices, and return the measurement and the final state.

    Writes metrics.jsonl, notices.jsonl, TensorBoard's events and checkpoints to the run's folder, once
    everything is ready for the first step. A run that is refused leaves the folder as it was. A folder with
    `resume` is continued from its newest good checkpoint; the run begins at step 0 if none exists. Ctrl-C and
    SIGTERM end the run after the current step, with a checkpoint and the measurements up to that step.

    Raises:
        InputError: the data cannot be used, or the checkpoint belongs to another config.
        MeshwrightError: a step's loss or gradient is not finite and the config says to stop, or all
            checkpoints are damaged.
    """
    config, folder, phases = request.config, request.folder, PhaseClock()
    peers, platform = folder.peers, request.fleet.chip.platform
    with ExitStack() as stack:
        about = {**request.about, **about_of(config, request.layout)}
        saving = stack.enter_context(
            closing(Saving(folder, config.checkpoint, about, phases, num_stacked_layers(config)))
        )
        watchdog = stack.enter_context(Watchdog(folder, config.faults, phases).watching())
        checkpoint = saving.newest() if folder.resume else None
        changes = [] if checkpoint is None else changes_since(checkpoint, config, request.layout)
        random.seed(config.seed)
        np.random.seed(config.seed)
        dataset = request.dataset
        request.on_event(_started(request, dataset))
        mesh = mesh_of(request.layout.axes, request.devices)
        with phases.of("compile"):
            begins, samples = checkpoint is None, _is_sampled(mesh, dataset)
            programs = compile_programs(
                resolve_dispatch(config, request.layout, request.fleet),
                mesh,
                platform,
                begins=begins,
                samples=samples,
                times_kernels=request.times_kernels,
            )
        event = StepCompiled(seconds=programs.compile_seconds, fingerprint=programs.fingerprint)
        request.on_event(event)
        growth = ResidentGrowth()
        # This waits without a time limit, unlike a collective on the devices.
        facts = facts_of_programs(
            programs, str(request.layout), checkpoint, is_same=not request.times_kernels
        )
        agreed(peers, "compiled", lambda: facts, lambda facts: facts)
        state = None if checkpoint is None else saving.restore(checkpoint, programs.built.state)
        recorded = last_recorded_step(folder.path)
        # The run writes to its folder from here on.
        keep_to = -1 if checkpoint is None else checkpoint.step
        files = stack.enter_context(closing(RunWriter(folder, keep_to=keep_to)))
        per_epoch = getattr(dataset, "steps_per_epoch", lambda split: None)("train")
        recorder = Recorder(request, files, steps_per_epoch=per_epoch)
        if peers.is_first:
            folder.writes.documents(request.documents)
            recorder.remember(metrics_of(folder.path))
        if programs.results is not None:
            _tell_of_results(recorder, programs.results)
        waits = platform == "cpu"
        loop = Loop(request, programs, dataset, recorder, saving, phases, watchdog, waits=waits)
        if checkpoint is None:
            _begin(loop, recorded)
        else:
            _go_on(loop, checkpoint, state, changes, request.steps)
        loop.run()
        return _ended(request, loop, dataset, growth, phases, checkpoint), loop.state


def _is_sampled(mesh: Mesh, data: Dataset) -> bool:
    """Return whether a run ends with a sample: its tokens are bytes, and the mesh has one device."""
    return isinstance(data, TokenReader) and data.is_bytes and mesh.size == 1


def check_resumed_state(folder: Path, config: RunConfig, layout: Layout, devices: Sequence[Any]) -> None:
    """Raise if the newest checkpoint of a run has other arrays than the state of `config`.

    `run_training` raises as well, but only after compiling. Nothing is traced unless a setting has changed on
    which the arrays may depend.

    Raises:
        InputError: an array is missing on either side, or its shape or format differs.
    """
    newest = unread_newest(folder / "checkpoints", about_complaint)
    if newest is not None and may_change_state(newest.about, config):
        state = build_step(config, mesh_of(layout.axes, devices)).state
        check_match(newest, state, num_stacked_layers(config))


def _started(request: RunRequest, dataset: Dataset) -> Started:
    return Started(
        name=request.config.name,
        num_parameters=request.config.model.num_parameters,
        device_kind=request.devices[0].device_kind,
        num_devices=len(request.devices),
        steps=request.steps,
        folder=request.folder.path,
        sources=dataset.epochs(request.steps) if isinstance(dataset, TokenReader) else (),
    )


def _tell_of_results(recorder: Recorder, results: Path) -> None:
    """Report that kernels were timed, so that another step runs than the one that was weighed."""
    words = "this GPU's kernels were timed, and the step was weighed before, with products by cuBLAS"
    if results.exists():
        recorder.notice(0, "autotuning", words, f"weigh again: {results} has the kernels now")
    else:
        recorder.notice(0, "autotuning", f"{words}; XLA wrote no {results}", "is its folder there?")


def _begin(loop: Loop, recorded: int) -> None:
    """Start from the state of the seed, although an earlier run may have recorded steps."""
    loop.begin()
    if recorded:
        words = f"there is no checkpoint; steps 1 to {recorded} are trained again"
        loop.recorder.notice(0, "resumed", words)


def _go_on(loop: Loop, checkpoint: Found, state: Any, changes: Sequence[str], steps: int) -> None:
    """Start from the state of a checkpoint."""
    loop.go_on(checkpoint, state)
    changed = f", with {'; '.join(changes)}" if changes else ""
    rest = "nothing is left to do" if checkpoint.step >= steps else f"continues to step {steps}"
    words = f"from the checkpoint of step {checkpoint.step}, {rest}{changed}"
    loop.recorder.notice(checkpoint.step, "resumed", words)


def _ended(
    request: RunRequest,
    loop: Loop,
    dataset: Dataset,
    growth: ResidentGrowth,
    phases: PhaseClock,
    checkpoint: Found | None,
) -> Measurement:
    """Sample from the trained model, and return the measurement, with a reason for each unknown value."""
    config, programs, recorder = request.config, loop.programs, loop.recorder
    is_alone, platform = request.folder.peers.count == 1, request.fleet.chip.platform
    growth_bytes = growth.bytes() if is_alone else None
    phases.enter("end")
    sample = None
    if programs.sample is not None and not loop.signal:
        sample_of = room("trained").sample_of  # a room outside the core
        sample = sample_of(config, programs.sample, whole_parameters(loop.state), dataset)
        recorder.emit(sample)
    spread, peak = recorder.clock.spread(), memory_in_use(request.devices, "peak_bytes_in_use")
    reasons = {
        "step_seconds": "" if spread else "the first two steps are left out, and there were no others",
        "peak_bytes": "" if peak is not None else f"a {platform} device keeps no such figure",
        "process_rss_growth_bytes": growth.why_not if is_alone else OTHERS_GROW,
        "xla_flops": programs.no_xla_flops,
        "argument_bytes_per_device": "" if recorder.argument_bytes else "no step was run",
    }
    has_tokens = isinstance(dataset, RandomTokens | TokenReader)
    measurement = Measurement(
        steps=loop.step,
        signal="" if loop.signal is None else signal.Signals(loop.signal).name,
        resumed_from=None if checkpoint is None else checkpoint.step,
        tokens_per_step=config.batch.tokens_per_step,
        batch_unit=config.batch_unit,
        step_seconds=spread,
        compile_seconds=programs.compile_seconds,
        losses=recorder.losses,
        held_out_losses=recorder.held_out_losses,
        held_out_metrics=recorder.held_out_metrics,
        num_bad_steps=recorder.num_bad_steps,
        seconds_by_phase=phases.seconds(),
        unigram_entropy_nats=dataset.unigram_entropy_nats("held-out") if has_tokens else None,
        argument_bytes_per_device=recorder.argument_bytes or None,
        peak_bytes=peak,
        process_rss_growth_bytes=growth_bytes,
        xla_flops=programs.xla_flops,
        not_measured={name: why for name, why in reasons.items() if why},
        fingerprint=programs.fingerprint,
        platform=platform,
        device_kind=request.devices[0].device_kind,
        num_devices=len(request.devices),
        host=describe_host(),
        versions=installed_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        sample_prompt=sample.prompt if sample else "",
        sample=sample.text if sample else "",
    )
    recorder.emit(Finished(steps=measurement.steps, interrupted=measurement.interrupted))
    return measurement
