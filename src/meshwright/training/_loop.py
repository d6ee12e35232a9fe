"""The loop: batches in, state and metrics out.

On an accelerator the host runs one step ahead of what it reads, so that the device never waits for
it. On a CPU each step is waited for: the collectives of several programs in flight would share one
pool of threads, and can then wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..checkpoint import Found
from ..config import RunConfig
from ..data import Dataset
from ..errors import MeshwrightError
from ..measure import bytes_on
from ..processes import Alone
from ._agreement import Agreement
from ._ahead import batches_ahead
from ._faults import BadSteps, first_bad_tensor, what_is_bad
from ._feed import Feed
from ._interrupt import noting_signals
from ._phases import Phases
from ._programs import Programs
from ._recorder import Recorder
from ._saving import Saving
from ._watchdog import Watchdog

Tree = Any
ALONE = Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A step that was dispatched and not read yet."""

    step: int
    metrics: Any
    waited_seconds: float


class Loop:
    """One run's steps, evaluations and checkpoints, and what they left.

    `step`: how many updates the state has seen. `data_offset`: how many batches a rollback has left out, so
    that step n reads batch n + data_offset. `signal`: which one stopped the run.

    In several processes all do the same steps, evaluations and saves; a signal stops all after one step.

    Args:
        waits: whether each step is waited for before the next is started.
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
        """The state that the seed gives."""
        self.state, self.step = self.programs.init(np.uint32(self._config.seed)), 0

    def go_to(self, found: Found) -> None:
        """Restore a checkpoint. The devices first free the state before: two would not fit."""
        for array in jax.tree.leaves(self.state):
            array.delete()
        self.go_on(found, self._saving.restore(found, self.programs.built.state))

    def go_on(self, found: Found, state: Tree) -> None:
        """Take over the state that a checkpoint gave, and report the newer ones that are damaged."""
        for bad in found.rejected:
            words = f"the checkpoint of step {bad.step} is damaged and passed over: {bad.why}"
            hint = "look at the disk; what it held is trained again"
            self.recorder.notice(found.step, "checkpoint", words, hint)
        self.state, self.step = state, found.step
        self.data_offset = max(self.data_offset, int(found.about["data_offset"]))

    def run(self) -> None:
        """All steps that are left, with an evaluation before the first, after the last, and every so often
        between.

        Raises:
            MeshwrightError: a step went wrong, and the config says to stop.
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
            self._saving.wait()  # here SIGTERM that comes once more does no harm
        self._tell_saves()

    def _stretch(self, batches: Generator[Tree, None, None], asked: Callable[[], int | None]) -> None:
        """Steps until the last, a signal, or a rollback."""
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
        """The next batch, and the seconds for which the devices, with nothing else to do, waited for it."""
        if before is not None and not before.metrics["loss"].is_ready():
            return next(batches), 0.0
        already = self._phases.seconds().get("input wait", 0.0)
        with self._phases.of("input wait"):
            batch = next(batches)
        waited = self._phases.seconds()["input wait"] - already
        self.recorder.clock.leave_out(waited)
        return batch, waited

    def _finish(self, running: _Running) -> bool:
        """Read a step's metrics, which waits for that step; whether it made the run go back."""
        values = {name: float(value) for name, value in running.metrics.items()}
        self._watchdog.step_done(running.step)
        self.recorder.step(running.step, running.step - 1 + self.data_offset, values, running.waited_seconds)
        what = what_is_bad(values)
        if not what:
            self._bad_steps.good(running.step)
            return False
        return self._bad(running.step, what)

    def _bad(self, step: int, what: str) -> bool:
        """Skip, go back (then True), or stop."""
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
        """Whether the held-out data is judged after this many steps."""
        return self.step % self._config.evaluation.every_steps == 0 or self.step == self._steps

    def _count_arguments(self, batch: Tree) -> None:
        """What the first step is given, before its state is given up."""
        if not self.recorder.argument_bytes:
            arrays = jax.tree.leaves((self.state, batch))
            first = arrays[0].addressable_shards[0].device
            self.recorder.argument_bytes = bytes_on(first, arrays)

    def _evaluate(self) -> None:
        """Held-out metrics of the state's parameters: means over the first held-out batches."""
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
