"""Who of a run's processes is still there: each answers every second; the first looks, and tells all.

jax's own heartbeat ends the others too, after longer, with a number in place of a host and a reason.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..errors import EXIT_BROKE_OFF

BEAT_SECONDS = 1.0
SILENT_SECONDS = 8.0
ANSWERS, LOST = "meshwright/roll", "meshwright/lost"


class Board(Protocol):
    """What is used of jax's client of the coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Keep a text for all processes."""
        ...

    def key_value_try_get(self, key: str) -> str:
        """A text; an error where there is none."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All texts below a key."""
        ...


class Roll:
    """A thread that answers for this process; in the first it also looks who does not.

    A process that has not answered for `SILENT_SECONDS` is named on the first one's stderr, with the words it
    has left, if any; and every process ends with status 4 at once: none can do another step, and one that
    waits in a collective can be stopped in no other way.

    Args:
        name: of this process, "process 2 of 4 on node7".
        end: ends the process with a status.
        now: the clock in seconds.
    """

    def __init__(
        self,
        board: Board,
        index: int,
        name: str,
        end: Callable[[int], object] = os._exit,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._index, self._name, self._end, self._now = board, index, name, end, now
        self._over = threading.Event()
        self._beats = 0
        self._seen: dict[str, tuple[str, float]] = {}  # the last answer of each, and when it came
        self._thread = threading.Thread(target=self._call, name="meshwright-roll", daemon=True)

    def start(self) -> None:
        """Answer, now and from now on: one that never has is missed by nobody."""
        self._answer("")
        self._thread.start()

    def stop(self) -> None:
        """The run is over, and all know it."""
        self._over.set()
        self._thread.join()

    def leave(self, words: str, status: int, wait: bool) -> None:
        """Tell the others that this process ends, and of what; and end it.

        Args:
            wait: whether its end may come of another's, which is then to be named first.
        """
        if wait and self._over.wait(SILENT_SECONDS + 4 * BEAT_SECONDS):
            time.sleep(4 * BEAT_SECONDS)  # the roll ends this process
        self.stop()
        if self._index:
            self._answer(words)
        else:
            self._board.key_value_set(LOST, f"{self._name} ended: {words}", allow_overwrite=True)
            time.sleep(2 * BEAT_SECONDS)
        self._end(status)

    def beat(self) -> None:
        """Answer, and look."""
        self._answer("")
        words = self._lost() if self._index else self._missing()
        if not words:
            return
        if not self._index:
            self._board.key_value_set(LOST, words, allow_overwrite=True)
            sys.stderr.write(f"error: {words}; the others are ended\nhint: go on with it: --resume\n")
            sys.stderr.flush()
            time.sleep(2 * BEAT_SECONDS)  # the service goes with this process: the others read it first
        self._over.set()
        self._end(EXIT_BROKE_OFF)

    def _call(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self.beat()
            except RuntimeError:  # the service is gone, and with it the first process: jax ends this one
                return

    def _answer(self, words: str) -> None:
        self._beats += 1
        answer = {"name": self._name, "beat": self._beats, "words": words}
        self._board.key_value_set(f"{ANSWERS}/{self._index}", json.dumps(answer), allow_overwrite=True)

    def _lost(self) -> str:
        try:
            return self._board.key_value_try_get(LOST)
        except RuntimeError as absent:
            if "NOT_FOUND" not in str(absent):
                raise
            return ""

    def _missing(self) -> str:
        """Who has left or is silent, in words; empty where all are there."""
        now = self._now()
        for key, answer in sorted(self._board.key_value_dir_get(f"{ANSWERS}/")):
            last, since = self._seen.get(key, ("", now))
            if answer != last:
                self._seen[key] = answer, now
            if answer != last or now - since <= SILENT_SECONDS:
                continue  # also where it left words: what all find wrong the first tells, in its own time
            told = json.loads(answer)
            if told["words"]:
                return f"{told['name']} ended: {told['words']}"
            silent = f"{told['name']} has given no sign of life for {now - since:.0f} s"
            return f"{silent}: it was killed, or its host or the network to it is gone"
        return ""
