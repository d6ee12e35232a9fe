"""Show how far the search of a plan is, and let a signal end it with the answer so far."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from meshwright.units import format_seconds

from ._console import SIGNAL_BASE
from ._progress import bars
from ._weigh_command import EXIT_DOES_NOT_FIT

if TYPE_CHECKING:
    from types import FrameType

    from meshwright.planned import PlanProgress

EVERY_SECONDS = 15.0  # between lines that say the same


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """Let SIGTERM end a search as Ctrl-C does, with the answer so far; yield the signals that came."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # handlers are set in it alone
        yield noted
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    except KeyboardInterrupt:
        print("stopped before anything was compiled", file=sys.stderr)
        raise typer.Exit(SIGNAL_BASE + (noted or [signal.SIGINT])[-1]) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def end_search(interrupted: bool, signals: list[int], *, nothing_fits: bool) -> None:
    """End with the status of a signal that ended the search, or of `--check`."""
    if interrupted:
        raise typer.Exit(SIGNAL_BASE + (signals or [signal.SIGINT])[-1])
    if nothing_fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


@contextmanager
def plan_progress(what: str) -> Iterator[Callable[[PlanProgress], None]]:
    """Yield a function that shows the search: a bar on a terminal, and lines in a file or a pipe."""
    if not sys.stderr.isatty():
        yield PlanLog(what).event
        return
    with bars() as progress:
        task = progress.add_task(what, total=None)

        def on_event(event: PlanProgress) -> None:
            shown = min(event.seconds, event.budget_seconds)
            progress.update(
                task, description=progress_words(event), completed=shown, total=event.budget_seconds
            )

        yield on_event


def progress_words(event: PlanProgress) -> str:
    """Return how far a search is: "3 of 92,438 compiled, best fsdp=64 6.49 s"."""
    words = f"{event.of}: " if event.of else ""
    words += f"{event.num_compiled} of {event.num_considered:,} compiled"
    if event.num_failed:
        words += f", {event.num_failed} failed"
    if event.best is not None and event.best.step_seconds is not None:
        words += f", best {event.best.words} {format_seconds(event.best.step_seconds.expected)}"
    return words


class PlanLog:
    """Print a search as lines on stderr, each with the time of day in UTC.

    There is one when it begins, one for each candidate that was compiled, and one every `EVERY_SECONDS`.
    """

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._said, self._at = now, "", -math.inf
        self._say(what)

    def event(self, event: PlanProgress) -> None:
        """Print how far the search is, if that has changed or was not said for a while."""
        words = progress_words(event)
        if words == self._said and self._now() - self._at < EVERY_SECONDS:
            return
        compiling = f"; compiling {'; '.join(event.running)}" if event.running else ""
        self._said, self._at = words, self._now()
        self._say(f"{words}, {event.seconds:.0f} s of {event.budget_seconds:g}{compiling}")

    def _say(self, words: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} {words}", file=sys.stderr, flush=True)
