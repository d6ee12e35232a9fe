"""Run the training loop: compile the programs, feed batches, record metrics, save the state, obey signals.

Each process makes only the rows of a batch that its own devices hold. A thread makes batches ahead of their
use. Ctrl-C and SIGTERM are noted while steps run and obeyed between two steps. A signal that one process
receives is shared with all of them through the devices.

On an accelerator the host runs one step ahead of the metrics that it reads, so that the device never waits
for the host. On a CPU the host waits for each step: the collectives of several programs in flight would share
one thread pool, and could then wait for each other forever.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..checkpoint import Found
from ..compiler import accepted_options, fingerprint_of, requested_options
from ..config import RunConfig
from ..data import ALL, Dataset, Rows, Split
from ..errors import MeshwrightError
from ..launch import Alone
from ..measure import bytes_on
from ..step import TrainStep, build_step
from ._events import Phases
from ._recorder import BadSteps, Recorder, first_bad_tensor, what_is_bad
from ._saving import Saving
from ._watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The compiled programs of a run: the train step, the initial state and the held-out evaluation.

    `compile_seconds`: of the train step alone. `xla_flops`: None if XLA has no usable count; `no_xla_flops`
    then states the reason.
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
    """Compile the programs of a run.

    The step is compiled as in the compile worker: with the same builder, platform and options.
    """
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
    """Return XLA's own FLOP count for all devices, or None and the reason.

    All devices run this program. XLA counts the body of a loop once, whatever its trip count.
    """
    if " while(" in text:
        return None, "XLA's cost analysis counts a loop's body once, and this program has loops"
    analysis = executable.cost_analysis() or {}
    if "flops" not in analysis:
        return None, "this backend's cost analysis gives no FLOPs"
    return int(analysis["flops"]) * num_devices, ""


Tree = Any


class Feed:
    """Batches of `dataset` as the step takes them: arrays that span all processes.

    Args:
        abstract: the step's batch, with shapes [microbatches, rows, ...] and shardings.
    """

    def __init__(self, dataset: Dataset, abstract: Tree) -> None:
        self._dataset, self._abstract = dataset, abstract
        held = [rows_held(each) for each in jax.tree.leaves(abstract)]
        self._held = np.unique(np.concatenate(held))
        num_microbatches, num_rows = jax.tree.leaves(abstract)[0].shape[:2]
        self._has_all = len(self._held) == num_rows
        numbers = np.arange(num_microbatches)[:, None] * num_rows + self._held
        self._rows: Rows = ALL if self._has_all else numbers.reshape(-1)

    def batch(self, index: int, split: Split = "train") -> Tree:
        """Return batch `index`, placed on its devices."""
        return jax.tree.map(self._put, self._dataset.batch(index, split, self._rows), self._abstract)

    def _put(self, rows: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        num_microbatches, num_rows, *rest = abstract.shape
        own = rows.reshape(num_microbatches, len(self._held), *rest)
        if self._has_all:
            return put(own, abstract.sharding)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index, "a step's batch has a shape"
            microbatches, wanted, *others = index
            here = np.searchsorted(self._held, np.arange(num_rows)[wanted])
            return own[microbatches, here[0] : here[-1] + 1, *others]

        return jax.make_array_from_callback(abstract.shape, abstract.sharding, part)


def rows_held(abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the rows of a microbatch that this process's devices hold.

    Args:
        abstract: an array of shape [microbatches, rows, ...], with its sharding.
    """
    indices = abstract.sharding.addressable_devices_indices_map(abstract.shape).values()
    rows = np.arange(abstract.shape[1])
    return np.unique(np.concatenate([rows[index[1]] for index in indices if index]))


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Place an array, which every process holds whole, on the devices of all processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or ...])


DEPTH = 2


def batches_ahead(make: Callable[[int], Any], steps: range) -> Generator[Any, None, None]:
    """Yield `make(step)` for each step in order, made at most two steps ahead by one thread.

    If `make` raises, the exception is raised where its batch is taken. Close the iterator to stop the thread.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="meshwright-batches")
    try:
        waiting: deque[Future[Any]] = deque(pool.submit(make, step) for step in steps[:DEPTH])
        for step in steps[DEPTH:]:
            batch = waiting.popleft().result()
            waiting.append(pool.submit(make, step))
            yield batch
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Agreement:
    """Share the first signal of any process with all processes, after the same step.

    The signal is sent through the devices, in the order of the steps. A message on another channel could
    reach one process before a step begins and another process after it. A single process runs nothing.

    Args:
        waits: whether `on` returns the answer of the current step. Otherwise it returns that of the previous
            step, so that the host can run one step ahead of the devices.
    """

    def __init__(self, mesh: Mesh, peers: Alone, *, waits: bool) -> None:
        self._alone = peers.count == 1
        if self._alone:
            return
        self._before: jax.Array | None = None
        self._waits = waits
        self._each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._num_devices = mesh.size
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def on(self, signal: int | None) -> int | None:
        """Return the signal that this or another process received; None if none did."""
        if self._alone:
            return signal

        numbers = np.full(self._num_devices, signal or 0, np.int32)
        now = self._largest(put(numbers, self._each))
        asked, self._before = (now if self._waits else self._before), now
        return int(asked) or None if asked is not None else None


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def noting_signals() -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the first signal that asked the run to stop, or None.

    A second Ctrl-C stops the run at once. SIGTERM may come repeatedly, as some schedulers send it.

    Only the main thread can handle signals. In any other thread nothing is noted, and the owner of the main
    thread decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {each: signal.signal(each, note) for each in SIGNALS}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


ALONE = Alone()


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
        peers: the processes of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        programs: Programs,
        dataset: Dataset,
        recorder: Recorder,
        saving: Saving,
        phases: Phases,
        watchdog: Watchdog,
        *,
        steps: int,
        waits: bool,
        peers: Alone = ALONE,
    ) -> None:
        self.programs, self.recorder = programs, recorder
        self.step, self.data_offset = 0, 0
        self.signal: int | None = None
        self.state: Tree = None
        self._config, self._saving = config, saving
        self._phases, self._watchdog = phases, watchdog
        self._steps, self._waits = steps, waits
        self._bad_steps = BadSteps(config.faults)
        self._peers = peers
        self._feed = Feed(dataset, programs.built.batch)
        mesh = jax.tree.leaves(programs.built.batch)[0].sharding.mesh
        self._agreement = Agreement(mesh, peers, waits=waits)

    def begin(self) -> None:
        """Initialise the state from the seed."""
        self.state, self.step = self.programs.init(np.uint32(self._config.seed)), 0

    def go_to(self, found: Found) -> None:
        """Restore a checkpoint.

        The current state is freed first, because the devices cannot hold two states.
        """
        for array in jax.tree.leaves(self.state):
            array.delete()
        self.go_on(found, self._saving.restore(found, self.programs.built.state))

    def go_on(self, found: Found, state: Tree) -> None:
        """Take over the state that a checkpoint held, and report newer checkpoints that are damaged."""
        for bad in found.rejected:
            words = f"the checkpoint of step {bad.step} is damaged and passed over: {bad.why}"
            hint = "look at the disk; what it held is trained again"
            self.recorder.notice(found.step, "checkpoint", words, hint)
        self.state, self.step = state, found.step
        self.data_offset = max(self.data_offset, int(found.about["data_offset"]))

    def run(self) -> None:
        """Run the remaining steps and save the final state.

        The held-out data is evaluated before the first step, at intervals, and after the last step.

        Raises:
            MeshwrightError: a step was bad, and the config says to stop.
        """
        if self._evaluates():
            known = self._peers.from_first("evaluated", lambda: self.step in self.recorder.held_out_losses)
            if not known:
                self._evaluate()
        with noting_signals() as asked, self._phases.of("step"):
            while self.step < self._steps and self.signal is None:
                first = self.step + self.data_offset
                batches = batches_ahead(self._feed.batch, range(first, self._steps + self.data_offset))
                with closing(batches):
                    self._stretch(batches, asked)
            self._saving.save(self.step, self.state, self.data_offset)
            self._saving.wait()  # signals are still caught here, so a repeated SIGTERM does no harm
        self._tell_saves()

    def _stretch(self, batches: Generator[Tree, None, None], asked: Callable[[], int | None]) -> None:
        """Run steps until the last one, a signal, or a rollback."""
        self.recorder.clock.start()
        before: _Running | None = None
        while self.step < self._steps and self.signal is None:
            batch, waited = self._next(batches, before)
            self._count_arguments(batch)
            self.state, metrics = self.programs.step(self.state, batch)
            self.step += 1
            running = _Running(step=self.step, metrics=metrics, waited_seconds=waited)
            if before is not None and self._finish(before):
                return
            if self._waits:
                jax.block_until_ready(self.state)
            self.signal = self._agreement.on(asked())
            evaluates, saves = self._evaluates(), self._saving.due(self.step)
            before = running
            if self._waits or evaluates or saves or self.signal is not None:
                jax.block_until_ready(self.state)
                before = None
                if self._finish(running):
                    return
            if evaluates and self.signal is None:
                self._evaluate()
            if saves:
                self._saving.save(self.step, self.state, self.data_offset)
            self._tell_saves()
            if evaluates or saves:
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
            self._saving.save(self.step, self.state, self.data_offset)
            self._saving.wait()
            self._tell_saves()
            self.recorder.notice(step, "bad step", f"{words}; training stopped; {where}")
            raise MeshwrightError(f"{words}; training stopped; {where}", hint=self._stop_hint())
        if action == "skip":
            self.recorder.notice(step, "bad step", f"{words}; its batch is skipped; {where}")
            return False
        found = self._saving.newest()
        self._tell_saves()
        if found is None:
            self.begin()
        else:
            self.go_to(found)
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
        return f"{hint}; or go on without that batch: --resume"

    def _tell_saves(self) -> None:
        for event in self._saving.finished():
            self.recorder.tell(event)

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
                metrics = self.programs.evaluate(self.state["parameters"], self.state["model_state"], batch)
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
            self._watchdog.step_done(self.step)
            means = {name: total / num_batches for name, total in totals.items()}
            self.recorder.evaluated(self.step, means)
