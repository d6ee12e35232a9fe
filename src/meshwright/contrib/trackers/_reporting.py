"""Report a run to trackers, each in a thread of its own, so that none stops the run or slows it.

A tracker is found by its name among the entry points `meshwright.trackers`, and gets what happens from a
queue. A queue that is full loses figures; a call that raises, or never returns, is left alone. Each is said
once.
Names of figures are those of Hugging Face's Trainer where it has one: train/loss, train/grad_norm, eval/loss.
Imports: `registry`, `results`; `trainer.loop` late. Used by: `api`, by its entry point.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.errors import MeshwrightError
from meshwright.registry import load_registered

if TYPE_CHECKING:
    from meshwright.results import Weighing

TRACKERS = "meshwright.trackers"  # the group in which rooms outside the core register trackers
MOST_WAITING = 1000  # steps in the queue of one tracker
END_SECONDS = 30.0  # for which the end of a run waits for all trackers together
MOST_FAILURES = 10  # calls of a tracker that raise, one after the other, after which it gets no more


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Describe a run to a tracker, before its first step.

    `number`: the same in all sessions of a run, by which a tracker continues it. `config`: its configuration
    and what was predicted. `files`: to keep with it. `resumed_at`: the step after which this session begins;
    0 for a new run.
    """

    number: str
    name: str
    folder: Path
    config: Mapping[str, Any]
    tags: tuple[str, ...]
    files: tuple[Path, ...]
    resumed_at: int


class Tracker(Protocol):
    """A program that keeps the figures of runs. All methods are called in one thread, and may raise."""

    def begin(self, run: TrackedRun) -> None:
        """Begin a run, or continue the one of this number."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep figures of a step."""
        ...

    def end(self, state: str) -> None:
        """End the session: finished | stopped | failed."""
        ...


def tracked_run(weighing: Weighing, folder: Path, number: str, resumed_at: int) -> TrackedRun:
    """Return the description of a run that trackers get."""
    config = weighing.config
    seconds = None if weighing.prediction is None else weighing.prediction.step_seconds
    predicted = {
        "step_seconds": None if seconds is None else [seconds.low, seconds.expected, seconds.high],
        "tokens_per_second": weighing.tokens_per_second,
        "mfu": weighing.mfu,
    }
    settings = {} if config is None else config.model_dump(mode="json")
    return TrackedRun(
        number=number,
        name=folder.name,
        folder=folder,
        config={
            **settings,
            "fleet": weighing.fleet.name,
            "layout": str(weighing.layout),
            "predicted": predicted,
        },
        tags=(weighing.name, weighing.fleet.name, str(weighing.layout)),
        files=(folder / "weighing.json", folder / "config.json"),
        resumed_at=resumed_at,
    )


class _TrackerThread:
    """One tracker, and the thread that calls it. `failed` is said by the thread of the run."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.failed, self.hint = name, "", ""
        self._run, self._waiting = run, queue.Queue[tuple[int, Mapping[str, float]] | str](MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"meshwright-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand on figures of a step, unless the tracker is behind by too many."""
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self.failed = self.failed or f"it is behind by {MOST_WAITING} steps, and loses some"

    def end(self, state: str, deadline: float) -> None:
        """Have it end, and wait for that until a deadline of `time.monotonic`."""
        with suppress(queue.Full):
            self._waiting.put(state, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.failed = self.failed or "it has not ended: it may lack the last figures"

    def _work(self) -> None:
        failures = 0
        try:
            tracker: Tracker = load_registered(TRACKERS, self.name)()
            tracker.begin(self._run)
            while not isinstance(item := self._waiting.get(), str):
                try:
                    tracker.log(*item)
                    failures = 0
                except Exception as failed:
                    failures += 1
                    self._note(failed)
                    if failures >= MOST_FAILURES:
                        break
            tracker.end(item if isinstance(item, str) else "failed")
        except BaseException as failed:  # a library that calls sys.exit too: the run goes on
            self._note(failed)

    def _note(self, failed: BaseException) -> None:
        is_ours = isinstance(failed, MeshwrightError)
        words = failed.message if is_ours else f"{type(failed).__name__}: {failed}"
        self.hint = self.hint or (failed.hint if is_ours else "")
        self.failed = self.failed or words.strip().partition("\n")[0][:300]


class Reporter:
    """A listener that reports a run to trackers, and passes each event on.

    The trackers begin with the first figures: by then the run's files are written.
    """

    def __init__(
        self,
        names: Iterable[str],
        weighing: Weighing,
        number: str,
        folder: Path,
        on_event: Callable[[Any], None],
    ) -> None:
        self._names, self._weighing, self._number, self._folder = names, weighing, number, folder
        self._on_event, self._predicted = on_event, _predicted(weighing)
        self._trackers: list[_TrackerThread] = []
        self._said: set[str] = set()
        self._resumed_at, self._is_stopped = 0, False

    def __call__(self, event: Any) -> None:
        """Report an event, and pass it on; say of each tracker once that it failed."""
        from meshwright.trainer.loop import Finished, Noticed

        if isinstance(event, Noticed) and event.kind == "resumed":
            self._resumed_at = event.step
        elif isinstance(event, Finished):
            self._is_stopped = event.interrupted
        step, values = figures_of(event, self._weighing.tokens_per_step or 0)
        if values:
            values |= self._predicted if "train/loss" in values else {}
            for tracker in self._begun():
                tracker.log(step, values)
        self._on_event(event)
        self._say(step)

    def end(self, state: str | None = None) -> None:
        """End all trackers; wait for them no longer than half a minute.

        Args:
            state: how the run ended; as its last event says if not given.
        """
        deadline = time.monotonic() + END_SECONDS
        for tracker in self._trackers:
            tracker.end(state or ("stopped" if self._is_stopped else "finished"), deadline)
        self._say(0)

    def _begun(self) -> list[_TrackerThread]:
        if not self._trackers:
            run = tracked_run(self._weighing, self._folder, self._number, self._resumed_at)
            self._trackers = [_TrackerThread(name, run) for name in dict.fromkeys(self._names)]
        return self._trackers

    def _say(self, step: int) -> None:
        from meshwright.trainer.loop import Noticed

        for tracker in self._trackers:
            if tracker.failed and tracker.name not in self._said:
                self._said.add(tracker.name)
                words = f"{tracker.name} does not get all of the run: {tracker.failed}"
                hint = tracker.hint or "the run goes on, and its own folder has everything"
                self._on_event(Noticed(step=step, kind="tracker", message=words, hint=hint))


@contextmanager
def reporting(
    names: Sequence[str], weighing: Weighing, number: str, folder: Path, on_event: Callable[[Any], None]
) -> Iterator[Callable[[Any], None]]:
    """Yield a listener that reports a run to trackers too, and end them with the block.

    Args:
        number: of the run, the same in all its sessions.
    """
    reporter = Reporter(names, weighing, number, folder, on_event)
    try:
        yield reporter
    except BaseException as ended:
        reporter.end("stopped" if isinstance(ended, KeyboardInterrupt) else "failed")
        raise
    reporter.end()


def _predicted(weighing: Weighing) -> dict[str, float]:
    """Return the predicted series, which stand beside the measured ones."""
    prediction = weighing.prediction
    if prediction is None:
        return {}
    seconds = prediction.step_seconds
    ends = {"_low": seconds.low, "": seconds.expected, "_high": seconds.high}
    found = {f"predicted/step_seconds{end}": value for end, value in ends.items()}
    found |= {"predicted/mfu": prediction.mfu, "predicted/tokens_per_second": weighing.tokens_per_second}
    return {name: value for name, value in found.items() if value is not None}


def figures_of(event: Any, tokens_per_step: int) -> tuple[int, dict[str, float]]:
    """Return the step and the figures of an event by their names in trackers; none for other events."""
    from meshwright.trainer.loop import CheckpointSaved, EpochDone, Evaluated, FinishEstimated, StepDone

    match event:
        case StepDone():
            values = {
                "train/loss": event.loss,
                "train/grad_norm": event.gradient_norm,
                "train/learning_rate": event.learning_rate,
                "train/global_step": event.step,
                "train/tokens_per_second": event.tokens_per_second,
                "train/step_seconds": tokens_per_step / event.tokens_per_second,
                "train/mfu": event.mfu,
                "train/hfu": event.hfu,
                **{f"train/{name}": value for name, value in event.metrics.items()},
            }
        case Evaluated():
            values = {"eval/loss": event.held_out_loss}
            values |= {f"eval/{name}": value for name, value in event.metrics.items()}
        case EpochDone():
            values = {"train/epoch": float(event.epoch), "train/epoch_seconds": event.seconds}
        case FinishEstimated():
            values = {name.replace("_", "/", 1): value for name, value in event.figures.items()}
        case CheckpointSaved():
            values = {
                "checkpoint/blocked_seconds": event.blocked_seconds,
                "checkpoint/write_seconds": event.write_seconds,
                "checkpoint/bytes": float(event.num_bytes),
            }
        case _:
            return 0, {}
    return event.step, {name: float(value) for name, value in values.items() if value is not None}
