"""Record the steps of a run in its files and for a listener, and detect bad steps and loss spikes.

A step is bad if its update was not applied, because its loss or gradient was not finite. `first_bad_tensor`
finds where the first such value appears. `RunWriter` writes metrics.jsonl, notices.jsonl and TensorBoard's
event file, each entry at once. `Recorder` reports each step and keeps what the measurement needs.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.config import FaultConfig
from meshwright.errors import InputError
from meshwright.extras import not_installed
from meshwright.measure import WARM_UP_STEPS, StepClock
from meshwright.trainer.launch import processes_of_this_run

from ._interface import (
    EpochDone,
    Evaluated,
    Event,
    FinishEstimated,
    FirstStepsDone,
    Noticed,
    NoticeKind,
    PhaseClock,
    RunRequest,
    StepDone,
)
from ._run_folder import METRICS, PendingWrites, RunFolder, write_whole

try:
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c
except ModuleNotFoundError as missing:
    raise not_installed("train", ["tensorboardX"], "training") from missing

Tree = Any
BOARD: Any = event_pb2  # TensorBoard's messages, which protobuf defines where no type checker sees them
NOTICES, PHASES = "notices.jsonl", "phases.json"
PHASES_SECONDS = 10.0  # between two writes of it
WINDOW_STEPS = 100
LEAST_STEPS = 20  # needed to estimate a deviation
PARTS = ("batch", "parameters", "loss", "gradients")  # in order: a bad value in one spreads to the next
BASIC = ("loss", "gradient_norm", "learning_rate", "applied", "loss_scale")  # every model has these metrics
RECENT_STEPS = 30  # by which the time that is left is told
FIRST_STEPS = 5  # timed steps before the comparison with the prediction


def what_is_bad(values: Mapping[str, float]) -> str:
    """Describe a step whose update was not applied, as in "loss is nan"; return "" for a good step.

    A float16 step that overflows at a loss scale above 1 is not bad: the right scale is still being found.
    """
    if values["applied"] or values.get("loss_scale", 1.0) > 1.0:
        return ""
    name = next((n for n in ("loss", "gradient_norm") if not math.isfinite(values[n])), "loss")
    return f"{name.replace('_', ' ')} is {values[name]}"


class BadSteps:
    """The number of bad steps in a row.

    After a rollback, good steps reset the number only once the run is beyond the last bad step.
    """

    def __init__(self, faults: FaultConfig) -> None:
        self._faults = faults
        self._last = 0
        self.in_row = 0

    def good(self, step: int) -> None:
        if step > self._last:
            self.in_row = 0

    def bad(self, step: int) -> str:
        """Count a bad step, and return "stop", "skip" or "rollback"."""
        self._last = max(self._last, step)
        self.in_row += 1
        return "stop" if self.in_row >= self._faults.most_bad_steps else self._faults.bad_step


class Spikes:
    """Detect a loss that is far above the last hundred."""

    def __init__(self, sigmas: float) -> None:
        self._sigmas = sigmas
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def add(self, loss: float) -> str:
        """Add a finite loss, and describe why it is a spike; return "" if it is not."""
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
    """Describe the first array that holds values that are not finite.

    The step is repeated without its update, with the current parameters. The state has made `steps_ago` steps
    since it read `batch`, that step included.
    """
    try:
        counts = jax.block_until_ready(inspect({**state, "step": state["step"] - steps_ago}, batch))
    except RuntimeError as failed:  # raised by jax, mostly for lack of memory
        return f"the first bad tensor could not be determined: {str(failed).splitlines()[0]}"
    for part in PARTS:
        leaves = jax.tree_util.tree_leaves_with_path({part: counts[part]})
        bad = [(path, int(count)) for path, count in leaves if int(count)]
        if bad:
            path, count = bad[0]
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            numbers = f", {count:,} of its numbers" if count > 1 else ""
            others = f"; and {len(bad) - 1} other arrays of the {part}" if len(bad) > 1 else ""
            return f"first not finite: {name}{numbers}{others}"
    return "a repeat of the step gives only finite values: check the machine's memory"


class AppendLog:
    """A file open for appending; data that the disk refuses waits in memory, and goes first next time."""

    def __init__(self, path: Path, writes: PendingWrites) -> None:
        self._name, self._writes = path.name, writes
        self._waiting = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def add(self, data: bytes) -> None:
        """Append `data`, after the waiting data."""
        self._waiting += data
        self._writes.attempt(self._name, self._flush)

    def close(self) -> None:
        """Try for the last time to write the waiting data, and close the file.

        Data that cannot be written is lost, and the file remains listed in `PendingWrites.refused`.
        """
        if self._writes.attempt(self._name, self._flush):
            self._writes.attempt(self._name, lambda: os.close(self._file))
            return
        self._writes.refused[self._name] += f" ({len(self._waiting):,} bytes are lost)"
        os.close(self._file)

    def _flush(self) -> None:
        while self._waiting:
            del self._waiting[: os.write(self._file, self._waiting)]


class RunWriter:
    """The open files of a run, of which every process but the first writes none.

    A full disk does not end the run. Data that the disk refuses waits in memory until there is room. Data
    that cannot be written when the run ends is lost, and its file remains listed in `PendingWrites.refused`.

    Args:
        keep_to: the step from which an existing run is resumed; lines of later steps are removed. -1 keeps
            none.
    """

    def __init__(self, folder: RunFolder, *, keep_to: int = -1) -> None:
        self.writes = folder.writes
        self._open: dict[str, AppendLog] = {}
        self._phases_written = float("-inf")
        if not folder.peers.is_first:
            return
        path = folder.path
        try:
            is_resumed = any([_cut(path / name, keep_to) for name in (METRICS, NOTICES)])
            paths = {METRICS: path / METRICS, NOTICES: path / NOTICES, "events": _events_file(path)}
            self._open = {name: AppendLog(path, self.writes) for name, path in paths.items()}
        except OSError as refused:
            raise InputError(
                f"cannot write a run to {path}: {refused.strerror}",
                hint="make room there, or choose a folder that can be written",
            ) from refused
        first = [BOARD.Event(wall_time=time.time(), file_version="brain.Event:2")]
        if is_resumed:  # TensorBoard then drops the later steps of the earlier files
            start = BOARD.SessionLog(status=BOARD.SessionLog.START)
            first.append(BOARD.Event(wall_time=time.time(), step=keep_to + 1, session_log=start))
        self._add("events", b"".join(map(_record, first)))

    def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Append `step` and `values` as one line to metrics.jsonl, and the values to TensorBoard's events.

        TensorBoard's names are "group/name". A value that is not finite is null in the line, because JSON has
        no NaN, and TensorBoard does not get it.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._add(METRICS, _line({"step": step, **finite}))
        now = time.time()
        scalars = (
            BOARD.Event(wall_time=now, step=step, summary=summary.scalar(f"{group}/{name}", value))
            for name, value in finite.items()
            if value is not None
        )
        self._add("events", b"".join(map(_record, scalars)))

    def notice(self, event: Noticed) -> None:
        """Append one line to notices.jsonl."""
        line = {"step": event.step, "kind": event.kind, "message": event.message, "hint": event.hint}
        self._add(NOTICES, _line(line))

    def phases(self, seconds: Mapping[str, float]) -> None:
        """Write how long each phase of the session has taken so far to phases.json, every few seconds."""
        now = time.monotonic()
        if self._open and now - self._phases_written >= PHASES_SECONDS:
            self._phases_written = now
            self.writes.documents({PHASES: json.dumps(seconds)})

    def close(self) -> None:
        """Write pending lines, as far as the disk allows, and close the files."""
        for file in self._open.values():
            file.close()

    def _add(self, name: str, data: bytes) -> None:
        if name in self._open:
            self._open[name].add(data)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl, parsed; an empty list if the file does not exist."""
    path = folder / METRICS
    return _complete_lines(path.read_bytes()) if path.is_file() else []


def _events_file(folder: Path) -> Path:
    """Return the path of a new event file, named as TensorBoard requires; a number tells several apart."""
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
    num_existing = len(list(folder.glob(f"{stem}*")))
    return folder / (f"{stem}.{num_existing}" if num_existing else stem)


def _record(event: Any) -> bytes:
    """Encode an event as a TFRecord: its length, the length's checksum, the event and its checksum."""
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))
    )


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _complete_lines(data: bytes) -> list[dict[str, Any]]:
    """Parse a JSON Lines file, without the last line that a killed process has cut short."""
    entries: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def _cut(path: Path, keep_to: int) -> bool:
    """Keep only the complete lines up to `keep_to`, atomically; return whether the file held anything."""
    if not path.is_file():  # missing, or a device
        return False
    data = path.read_bytes()
    kept = (line for line in _complete_lines(data) if line["step"] <= keep_to)
    text = "".join(json.dumps(line) + "\n" for line in kept)
    if text.encode() != data:
        write_whole(path, text)
    return bool(data)


class Recorder:
    """Record losses, step times and epochs, in the run's files and for the request's listener.

    Args:
        steps_per_epoch: None if the data has no epochs.
    """

    def __init__(self, request: RunRequest, files: RunWriter, *, steps_per_epoch: int | None = None) -> None:
        self.clock = StepClock()
        self._recent = deque[float](maxlen=RECENT_STEPS)
        self.losses: dict[int, float] = {}
        self.held_out_losses: dict[int, float] = {}
        self.held_out_metrics: dict[int, dict[str, float]] = {}
        self.argument_bytes = 0
        self.num_bad_steps = 0
        self._request, self._files = request, files
        self._spikes = Spikes(request.config.faults.spike_sigmas)
        self._per_epoch = steps_per_epoch
        self._epoch: list[dict[str, float]] = []  # metrics of each step of the current epoch
        self._epoch_seconds, self._epoch_step = 0.0, 0
        self._is_searching = False  # for a loss scale that is small enough

    def phases(self, clock: PhaseClock) -> None:
        """Record how long each phase has taken so far."""
        self._files.phases(clock.seconds())

    def remember(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take over losses and held-out metrics from the lines of a resumed run's metrics.jsonl."""
        for line in lines:
            step = int(line["step"])
            if isinstance(line.get("loss"), float):
                self.losses[step] = line["loss"]
            if isinstance(line.get("held_out_loss"), float):
                names = [name for name in line if name.startswith("held_out_") and name != "held_out_loss"]
                self._keep_held_out(step, line["held_out_loss"], {n[9:]: line[n] for n in names})

    def step(self, step: int, batch_index: int, values: dict[str, float], waited_seconds: float) -> None:
        """Record a good or bad step: its metrics, and how long the devices waited for its batch."""
        seconds = self.clock.tick()
        rate = self._request.config.batch.tokens_per_step / seconds
        mfu, hfu = self._utilization(seconds)
        more = {name: value for name, value in values.items() if name not in BASIC}
        line = {**values, "seconds": seconds, "tokens_per_second": rate, "input_wait_seconds": waited_seconds}
        optional = {"mfu": mfu, "hfu": hfu, "memory_in_use_bytes": memory_in_use(self._request.devices)}
        line |= {name: float(value) for name, value in optional.items() if value is not None}
        self._files.write(step, "train", line)
        if what_is_bad(values):
            self.num_bad_steps += 1
        elif math.isfinite(values["loss"]):
            self.losses[step] = values["loss"]
            if spike := self._spikes.add(values["loss"]):
                self.notice(step, "spike", f"step {step}: {spike}")
        self._follow_scale(step, values)
        self.emit(
            StepDone(
                step=step,
                steps=self._request.steps,
                loss=values["loss"],
                gradient_norm=values["gradient_norm"],
                learning_rate=values["learning_rate"],
                tokens_per_second=rate,
                seconds_left=self._usual_seconds(seconds + waited_seconds) * (self._request.steps - step),
                mfu=mfu,
                hfu=hfu,
                metrics=more,
                batch_unit=self._request.config.batch_unit,
            )
        )
        spread = self.clock.spread()
        if spread is not None and spread.num_steps == FIRST_STEPS:
            self.emit(FirstStepsDone(step_seconds=spread, argument_bytes_per_device=self.argument_bytes))
        self._count_epoch(step, batch_index + 1, seconds + waited_seconds, {"loss": values["loss"], **more})

    def _usual_seconds(self, seconds: float) -> float:
        """Return the mean of the recent steps, the last one among them, with their waits for a batch.

        The first steps of a run count only while there are no others.
        """
        if len(self.clock.seconds) == WARM_UP_STEPS + 1:
            self._recent.clear()
        self._recent.append(seconds)
        return statistics.fmean(self._recent)

    def _follow_scale(self, step: int, values: Mapping[str, float]) -> None:
        """Report the first of the steps in a row that are skipped because the loss scale is too large."""
        was_searching = self._is_searching
        self._is_searching = not values["applied"] and not what_is_bad(values)
        if self._is_searching and not was_searching:
            scale = values["loss_scale"]
            words = f"step {step}: gradients are not finite in fp16 at the loss scale {scale:g}; the step is "
            words += "skipped and the scale halved until they are, as is usual, mostly in a run's first steps"
            self.notice(step, "loss scale", words)

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Record the held-out metrics of the parameters after `step` updates."""
        self._files.write(step, "held-out", {f"held_out_{name}": value for name, value in values.items()})
        if not math.isfinite(values["loss"]):
            hint = "the parameters may have outgrown the format: look at the training loss, lower the rate"
            self.notice(step, "held-out", f"step {step}: the held-out loss is {values['loss']}", hint)
        more = {name: value for name, value in values.items() if name != "loss"}
        self._keep_held_out(step, values["loss"], more)
        self._files.writes.retry()
        self.emit(Evaluated(step=step, held_out_loss=values["loss"], metrics=more))

    def notice(self, step: int, kind: NoticeKind, message: str, hint: str = "") -> None:
        """Report something that a person should know."""
        self.emit(Noticed(step=step, kind=kind, message=message, hint=hint))

    def emit(self, event: Event) -> None:
        """Pass an event to the listener, what no other call writes to the files first.

        Files that cannot be written are reported.
        """
        if isinstance(event, Noticed):
            self._files.notice(event)
        elif isinstance(event, FinishEstimated):
            self._files.write(event.step, "finish", event.figures)
        self._request.on_event(event)
        for why, names in self._files.writes.unreported().items():
            notice = not_written(max(self.losses, default=0), why, names)
            self._files.notice(notice)
            self._request.on_event(notice)

    def _keep_held_out(self, step: int, loss: float, more: dict[str, float]) -> None:
        if math.isfinite(loss):
            self.held_out_losses[step] = loss
            if more:
                self.held_out_metrics[step] = more

    def _utilization(self, seconds: float) -> tuple[float | None, float | None]:
        """Return the MFU and HFU of a step; None for both if the fleet's peak is unknown."""
        flops = self._request.flops
        if flops is None:
            return None, None
        possible = seconds * flops.peak_flops_per_second
        return flops.model_flops / possible, flops.executed_flops / possible

    def _count_epoch(self, step: int, num_batches: int, seconds: float, values: dict[str, float]) -> None:
        """Add a step to its epoch, and report the epoch when it is complete.

        One that began in another process, or that contains a rollback, was not timed as a whole: it is left
        out.
        """
        if self._per_epoch is None:
            return
        if step <= self._epoch_step:  # a rollback, after which the batches go on
            self._epoch, self._epoch_seconds = [], 0.0
        self._epoch_step = step
        self._epoch.append(values)
        self._epoch_seconds += seconds
        if num_batches % self._per_epoch:
            return
        steps, seconds = self._epoch, self._epoch_seconds
        self._epoch, self._epoch_seconds = [], 0.0
        if len(steps) != self._per_epoch:
            return
        means = {name: statistics.fmean(values[name] for values in steps) for name in steps[0]}
        epoch = num_batches // self._per_epoch
        line = {"epoch": float(epoch), "epoch_seconds": seconds}
        line |= {f"epoch_{name}": value for name, value in means.items()}
        self._files.write(step, "epoch", line)
        self.emit(EpochDone(epoch=epoch, step=step, seconds=seconds, metrics=means))


def memory_in_use(devices: Sequence[Any], statistic: str = "bytes_in_use") -> int | None:
    """Return the largest allocator statistic over this process's devices; None if one does not report it."""
    here = processes_of_this_run().index
    own = [device for device in devices if device.process_index == here]
    figures = [(device.memory_stats() or {}).get(statistic) for device in own]
    known = [int(figure) for figure in figures if figure is not None]
    return max(known) if len(known) == len(figures) else None


def not_written(step: int, why: str, names: Sequence[str]) -> Noticed:
    """Return the notice that files of the run's folder cannot be written."""
    words = f"{', '.join(names)} cannot be written: {why}"
    hint = "make room on that disk: the run continues, and writes what it holds in memory when there is room"
    return Noticed(step=step, kind="disk", message=words, hint=hint)
