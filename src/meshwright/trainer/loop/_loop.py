"""Run the training loop: feed batches, record metrics, save the state, obey signals.

Each process makes only the rows of a batch that its own devices hold. A thread makes batches ahead of their
use. Ctrl-C and SIGTERM are noted while steps run and obeyed between two steps. A signal that one process
receives is shared with all of them through the devices.

On an accelerator the host runs one step ahead of the metrics that it reads, so that the device never waits
for the host. On a CPU the host waits for each step: the collectives of several programs in flight would share
one thread pool, and could then wait for each other forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshwright.config import CheckpointConfig
from meshwright.errors import MeshwrightError
from meshwright.measure import bytes_on
from meshwright.trainer.checkpoint import Checkpoints, Found, Saved, SaveFailed, restore, steps_in
from meshwright.trainer.data import ALL, Dataset, Rows, Split
from meshwright.trainer.launch import agreed, noting_signals
from meshwright.trainer.step import whole_parameters

from ._interface import CheckpointSaved, Event, Noticed, PhaseClock, RunRequest
from ._interruptions import Agreement, Watchdog, put, stop_at_once
from ._profile import StepTrace
from ._programs import Programs
from ._recording import BadSteps, Recorder, first_bad_tensor, what_is_bad
from ._run_folder import RunFolder, about_complaint

Tree = Any
BATCHES_AHEAD = 2


PINNED = "pinned_host"


class BatchLoader:
    """Batches of a dataset as the step takes them: arrays that span all processes.

    On the way to an accelerator, rows pass through memory of the host that is pinned: the accelerator fetches
    them from there by itself while it computes. A copy from pageable memory goes through a buffer of the
    driver's instead, and the thread that asked for it waits. Not measured: what this gains.

    Args:
        abstract: the step's batch, with shapes [microbatches, rows, ...] and shardings.
        pins: whether rows pass through pinned memory; None where the devices are accelerators that have it.
    """

    def __init__(self, dataset: Dataset, abstract: Tree, *, pins: bool | None = None) -> None:
        self._dataset, self._abstract = dataset, abstract
        arrays = jax.tree.leaves(abstract)
        held = [rows_held(array) for array in arrays]
        self._held = np.unique(np.concatenate(held))
        num_microbatches, num_rows = arrays[0].shape[:2]
        self._has_all = len(self._held) == num_rows
        numbers = np.arange(num_microbatches)[:, None] * num_rows + self._held
        self._rows: Rows = ALL if self._has_all else numbers.reshape(-1)
        self._pins = _can_pin(arrays[0].sharding.addressable_devices) if pins is None else pins

    def batch(self, index: int, split: Split = "train") -> Tree:
        """Return batch `index`, placed on its devices."""
        return jax.tree.map(self._put, self._dataset.batch(index, split, self._rows), self._abstract)

    def _put(self, rows: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        num_microbatches, num_rows, *rest = abstract.shape
        own = rows.reshape(num_microbatches, len(self._held), *rest)
        if self._has_all and not self._pins:
            return put(own, abstract.sharding)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index, "a step's batch has a shape"
            microbatches, wanted, *others = index
            here = np.searchsorted(self._held, np.arange(num_rows)[wanted])
            return own[microbatches, here[0] : here[-1] + 1, *others]

        if self._pins:
            return put_pinned(part, abstract)
        return jax.make_array_from_callback(abstract.shape, abstract.sharding, part)


def put_pinned(part: Callable[[Any], np.ndarray], abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array that spans all processes, whose parts reach their devices through pinned memory.

    Args:
        part: returns the numbers at an index of the whole array.
    """
    sharding = abstract.sharding
    assert sharding is not None, "a step's batch has a sharding"
    parts: list[jax.Array] = []
    for device, index in sharding.addressable_devices_indices_map(abstract.shape).items():
        pinned = jax.device_put(part(index), SingleDeviceSharding(device, memory_kind=PINNED))
        parts.append(jax.device_put(pinned, SingleDeviceSharding(device)))
    return jax.make_array_from_single_device_arrays(abstract.shape, sharding, parts)


def _can_pin(devices: Iterable[Any]) -> bool:
    """Return whether devices are accelerators that read memory of the host which is pinned for them."""
    return all(
        device.platform != "cpu" and any(memory.kind == PINNED for memory in device.addressable_memories())
        for device in devices
    )


def rows_held(abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the rows of a microbatch [microbatches, rows, ...] that this process's devices hold."""
    indices = abstract.sharding.addressable_devices_indices_map(abstract.shape).values()
    rows = np.arange(abstract.shape[1])
    return np.unique(np.concatenate([rows[index[1]] for index in indices if index]))


def batches_ahead(make: Callable[[int], Any], steps: range) -> Generator[Any, None, None]:
    """Yield `make(step)` for each step in order, made at most two steps ahead by one thread.

    If `make` raises, the exception is raised where its batch is taken. Close the iterator to stop the thread.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="meshwright-batches")
    try:
        waiting: deque[Future[Any]] = deque(pool.submit(make, step) for step in steps[:BATCHES_AHEAD])
        for step in steps[BATCHES_AHEAD:]:
            batch = waiting.popleft().result()
            waiting.append(pool.submit(make, step))
            yield batch
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Saving:
    """Save and find a run's checkpoints: when one is due, and how each save ended.

    Without `every_steps` nothing is saved, but existing checkpoints are still found and restored. `about` is
    JSON data that every checkpoint carries; it includes at least what `changes_since` reads. `num_layers`: of
    the model, if they are stacked.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: CheckpointConfig,
        about: Mapping[str, Any],
        phases: PhaseClock,
        num_layers: int | None = None,
    ) -> None:
        self._every = config.every_steps
        self._about, self._phases, self._peers = about, phases, folder.peers
        self._num_layers = num_layers
        self._newest: int | None = None  # the step of the last save that began and has not failed
        self._checkpoints = None
        path = folder.path / "checkpoints"
        exist = self._peers.broadcast("checkpoints there", lambda: path.is_dir() and bool(steps_in(path)))
        if self._every is not None or exist:
            keep_last, keep_every = config.keep_last, config.keep_every
            self._checkpoints = Checkpoints(
                path,
                keep_last=keep_last,
                keep_every=keep_every,
                peers=self._peers,
                num_layers=num_layers,
                complaint=about_complaint,
            )

    def newest(self) -> Found | None:
        """Return the newest good checkpoint; None if none exist, and an error if all are damaged."""
        newest = None if self._checkpoints is None else self._checkpoints.newest()
        if newest is not None:
            self._newest = newest.step
        return newest

    def restore(self, checkpoint: Found, state: Tree) -> Tree:
        """Restore the checkpoint's state, laid out as `state` (of `jax.ShapeDtypeStruct`) specifies."""
        with self._phases.of("restore"):
            return restore(checkpoint, state, num_layers=self._num_layers)

    def due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every_steps` and not saved yet."""
        return self._every is not None and step % self._every == 0 and step != self._newest

    def save(self, step: int, state: Tree, data_offset: int) -> None:
        """Begin to save the state, unless a save of this step has begun."""
        if self._checkpoints is None or self._every is None:
            return
        facts = {"step": step, "batches left out": data_offset, "agreement": self._about.get("agreement")}
        agreed(self._peers, "saving", lambda: {"settings": facts}, lambda facts: facts)
        # Processes may learn at different steps that a save has failed, so the first one decides for all.
        if self._peers.broadcast("saved", lambda: step == self._newest):
            return
        with self._phases.of("checkpoint"):
            self._checkpoints.save(step, state, {**self._about, "data_offset": data_offset})
        self._newest = step

    def finished(self) -> list[Event]:
        """Return the events of the saves that have ended since the last call; never wait."""
        ended = () if self._checkpoints is None else self._checkpoints.finished()
        return [event for save in ended for event in self._events(save)]

    def wait(self) -> None:
        """Wait for the save in flight."""
        if self._checkpoints is not None:
            with self._phases.of("checkpoint"):
                self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the save in flight, and unlock the folder for other processes."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _events(self, ended: Saved | SaveFailed) -> list[Event]:
        step = ended.step
        if isinstance(ended, SaveFailed):
            if self._newest == step:
                self._newest = None
            return [Noticed(step=step, kind="checkpoint", message=ended.reason, hint=ended.hint)]
        saved = CheckpointSaved(
            step=step,
            num_bytes=ended.num_bytes,
            blocked_seconds=ended.blocked_seconds,
            write_seconds=ended.write_seconds,
        )
        if not ended.not_removed:
            return [saved]
        hint = "remove it by hand, or the disk will fill"
        return [saved, Noticed(step=step, kind="checkpoint", message=ended.not_removed, hint=hint)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A step that was dispatched and whose metrics are not read yet."""

    step: int
    metrics: Any
    waited_seconds: float


class Loop:
    """Run the steps, evaluations and checkpoints of one run, and hold their results.

    `step`: the number of steps that the state has made. `data_offset`: the number of batches that rollbacks
    have left out; after n steps the next batch is n + data_offset. `signal`: the signal that stopped the run.

    All processes make the same steps, evaluations and saves. A signal stops all of them after the same step.

    Args:
        waits: whether to wait for each step before the next is started.
    """

    def __init__(
        self,
        request: RunRequest,
        programs: Programs,
        dataset: Dataset,
        recorder: Recorder,
        saving: Saving,
        phases: PhaseClock,
        watchdog: Watchdog,
        *,
        waits: bool,
    ) -> None:
        self.programs, self.recorder = programs, recorder
        self.step, self.data_offset = 0, 0
        self.signal: int | None = None
        self.state: Tree = None
        self._config, self._steps, self._peers = request.config, request.steps, request.folder.peers
        self._saving, self._phases, self._watchdog, self._waits = saving, phases, watchdog, waits
        self._first_weights, self._page = request.first_weights, request.page
        self._trace = StepTrace(request.profile if self._peers.is_first else None)
        self._bad_steps = BadSteps(self._config.faults)
        self._feed = BatchLoader(dataset, programs.built.batch)
        mesh = jax.tree.leaves(programs.built.batch)[0].sharding.mesh
        self._agreement = Agreement(mesh, self._peers, waits=waits)

    def begin(self) -> None:
        """Initialise the state from the seed, and the parameters from the run's first weights, if any."""
        self.state, self.step = self.programs.init(np.uint32(self._config.seed)), 0
        if self._first_weights is not None:
            held = "frozen" if "frozen" in self.state else "parameters"
            for array in jax.tree.leaves(self.state[held]):
                array.delete()  # the devices need not hold both
            names = [held, *(["master"] if held == "parameters" and "master" in self.state else [])]
            abstract = self.programs.built.state
            self.state |= {name: self._first_weights.parameters(abstract[name]) for name in names}

    def go_to(self, checkpoint: Found) -> None:
        """Restore a checkpoint, after freeing the current state: the devices cannot hold two."""
        for array in jax.tree.leaves(self.state):
            array.delete()
        self.go_on(checkpoint, self._saving.restore(checkpoint, self.programs.built.state))

    def go_on(self, checkpoint: Found, state: Tree) -> None:
        """Take over the state that a checkpoint held, and report newer checkpoints that are damaged."""
        for bad in checkpoint.rejected:
            words = f"the checkpoint of step {bad.step} is damaged and skipped: {bad.why}"
            hint = "check the disk; the steps since then are trained again"
            self.recorder.notice(checkpoint.step, "checkpoint", words, hint)
        self.state, self.step = state, checkpoint.step
        self.data_offset = max(self.data_offset, int(checkpoint.about["data_offset"]))

    def run(self) -> None:
        """Run the remaining steps and save the final state.

        The held-out data is evaluated before the first step, at intervals, and after the last step.
        """
        if self._evaluates():
            known = self._peers.broadcast("evaluated", lambda: self.step in self.recorder.held_out_losses)
            if not known:
                self._evaluate()
        stopping = noting_signals(stop_at_once)
        with closing(self._trace), stopping as signals, self._phases.of("step"):
            while self.step < self._steps and self.signal is None:
                first = self.step + self.data_offset
                batches = batches_ahead(self._feed.batch, range(first, self._steps + self.data_offset))
                with closing(batches):
                    self._run_steps(batches, signals)
            self._save()
            self._saving.wait()  # signals are still caught here, so a repeated SIGTERM does no harm
        self._report_saves()

    def _run_steps(self, batches: Generator[Tree, None, None], signals: list[int]) -> None:
        """Run steps until the last one, a signal, or a rollback."""
        self.recorder.clock.start()
        before: _Running | None = None
        while self.step < self._steps and self.signal is None:
            batch, waited = self._next(batches, before)
            self._count_arguments(batch)
            self.recorder.clock.leave_out(self._trace.before_step(self.state))
            self.state, metrics = self.programs.step(self.state, batch)
            self.step += 1
            running = _Running(step=self.step, metrics=metrics, waited_seconds=waited)
            if before is not None and self._finish(before):
                return
            if self._waits:
                jax.block_until_ready(self.state)
            self.signal = self._agreement.on(signals[0] if signals else None)
            self.recorder.clock.leave_out(self._trace.after_step(self.state))
            evaluates, saves = self._evaluates(), self._saving.due(self.step)
            draws = self._page is not None and self._page.is_due()
            before = running
            if self._waits or evaluates or saves or draws or self.signal is not None:
                jax.block_until_ready(self.state)
                before = None
                if self._finish(running):
                    return
            if evaluates and self.signal is None:
                self._evaluate()
            if saves:
                self._save()
            if draws and self._page is not None:
                with self._phases.of("page"):
                    self._page.draw(self.recorder.emit)
            self._report_saves()
            self.recorder.phases(self._phases)
            if evaluates or saves or draws:
                self.recorder.clock.start()

    def _next(self, batches: Generator[Tree, None, None], before: _Running | None) -> tuple[Tree, float]:
        """Return the next batch, and the seconds for which idle devices waited for it."""
        if before is not None and not before.metrics["loss"].is_ready():
            return next(batches), 0.0
        already = self._phases.seconds().get("input wait", 0.0)
        with self._phases.of("input wait"):
            batch = next(batches)
        waited = self._phases.seconds()["input wait"] - already
        self.recorder.clock.leave_out(waited)
        return batch, waited

    def _finish(self, running: _Running) -> bool:
        """Read a step's metrics, which waits for that step; return whether the run rolled back."""
        values = {name: float(value) for name, value in running.metrics.items()}
        self._watchdog.step_done(running.step)
        self.recorder.step(running.step, running.step - 1 + self.data_offset, values, running.waited_seconds)
        what = what_is_bad(values)
        if not what:
            self._bad_steps.good(running.step)
            return False
        return self._bad(running.step, what)

    def _bad(self, step: int, what: str) -> bool:
        """Skip a bad step, roll back, or stop; return whether the run rolled back."""
        action = self._bad_steps.bad(step)
        batch = self._feed.batch(step - 1 + self.data_offset)
        with self._phases.of("evaluation"):
            where = first_bad_tensor(self.programs.built.inspect, self.state, batch, self.step - step + 1)
        words = f"step {step}: the {what}"
        if action == "stop":
            self._save()
            self._saving.wait()
            self._report_saves()
            self.recorder.notice(step, "bad step", f"{words}; training stopped; {where}")
            raise MeshwrightError(f"{words}; training stopped; {where}", hint=self._stop_hint())
        if action == "skip":
            self.recorder.notice(step, "bad step", f"{words}; its batch is skipped; {where}")
            return False
        newest = self._saving.newest()
        self._report_saves()
        if newest is None:
            self.begin()
        else:
            self.go_to(newest)
        self.data_offset += step - self.step
        back = f"back to step {self.step}; the batches since then are left out"
        self.recorder.notice(step, "bad step", f"{words}; {back}; {where}")
        return True

    def _stop_hint(self) -> str:
        optimizer, faults = self._config.optimizer, self._config.faults
        rate, clips = optimizer.learning_rate, optimizer.clip_norm is not None
        hint = f"lower optimizer.learning_rate, which is {rate:g}, to {rate / 10:g}"
        hint += "" if clips else ", or begin a new run with optimizer.clip_norm = 1.0"
        if faults.bad_step != "stop":
            return f"{self._bad_steps.in_row} steps in a row were bad; {hint}"
        return f"{hint}; or resume without that batch: --resume"

    def _save(self) -> None:
        self._saving.save(self.step, self.state, self.data_offset)

    def _report_saves(self) -> None:
        for event in self._saving.finished():
            self.recorder.emit(event)

    def _evaluates(self) -> bool:
        """Return whether the held-out data is evaluated after this number of steps."""
        return self.step % self._config.evaluation.every_steps == 0 or self.step == self._steps

    def _count_arguments(self, batch: Tree) -> None:
        """Count the bytes of the first step's arguments, before the step donates its state."""
        if not self.recorder.argument_bytes:
            arrays = jax.tree.leaves((self.state, batch))
            first = arrays[0].addressable_shards[0].device
            self.recorder.argument_bytes = bytes_on(first, arrays)

    def _evaluate(self) -> None:
        """Record the held-out metrics of the current parameters: means over the first held-out batches."""
        num_batches = self._config.evaluation.batches
        totals: dict[str, float] = {}
        with self._phases.of("evaluation"):
            for index in range(num_batches):
                batch = self._feed.batch(index, "held-out")
                parameters = whole_parameters(self.state)
                metrics = self.programs.evaluate(parameters, self.state["model_state"], batch)
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
            self._watchdog.step_done(self.step)
            means = {name: total / num_batches for name, total in totals.items()}
            self.recorder.evaluated(self.step, means)
