"""From a run that is over to its `Measurement`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..checkpoint import Found
from ..compiler import installed_versions
from ..config import RunConfig
from ..data import Dataset, RandomTokens, TokenWindows
from ..measure import describe_host
from ..processes import processes_of_this_run
from ..reconcile import Measurement
from ._events import Sampled
from ._loop import Loop


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
    """What the loop's recorder and programs know, with the reason for what is not known."""
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
    """Bytes on the fullest device now; None where the runtime keeps no such figure."""
    return _most(devices, "bytes_in_use")


def _most(devices: Sequence[Any], name: str) -> int | None:
    """The largest of a figure of the allocators of this process's devices."""
    here = processes_of_this_run().index
    own = [device for device in devices if device.process_index == here]
    found = [(device.memory_stats() or {}).get(name) for device in own]
    known = [int(figure) for figure in found if figure is not None]
    return max(known) if len(known) == len(found) else None


def _unigram_entropy(dataset: Dataset) -> float | None:
    if isinstance(dataset, RandomTokens | TokenWindows):
        return dataset.unigram_entropy_nats("held-out")
    return None  # rows and images have no tokens
