"""Exchange messages and heartbeats among the processes of a run.

Who of a run's processes is still there: each answers every second; the first looks, and tells all.

jax's own heartbeat ends the others too, after longer, with a number in place of a host and a reason.

What the processes of a run tell each other through jax's coordination service, beside the devices.

It serves threads that may not use the devices (two programs of collectives in flight could wait for each
other), and texts. Everything here is for what is rare: no step waits for it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import EXIT_BROKE_OFF, CompileError, InputError, MeshwrightError

BEAT_SECONDS = LOOK_SECONDS = 1.0  # between answers; between looks at the first process
SILENT_SECONDS = 8.0
# Silence is counted in looks, which are a beat apart, and not by the clock: a process that was stopped itself
# would find all others silent as soon as it goes on.
SILENT_LOOKS = int(SILENT_SECONDS / BEAT_SECONDS)
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
    """A thread that answers for this process; in the first it also looks who does not, in the others a second
    one looks whether the first takes their answers.

    A process that has not answered for `SILENT_SECONDS` is named on the first one's stderr, with the words it
    has left, if any; and every process ends with status 4 at once: none can do another step, and one that
    waits in a collective can be stopped in no other way. A first process that is silent for twice as long is
    named by each of the others.

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
        self._is_left_to_jax = False
        self._looks = 0
        self._seen: dict[str, tuple[str, int, float]] = {}  # the last answer of each; at which look, and when
        self._threads = [threading.Thread(target=self._call, name="meshwright-roll", daemon=True)]
        if index:
            watch = threading.Thread(target=self._watch_first, name="meshwright-roll-first", daemon=True)
            self._threads.append(watch)

    def start(self) -> None:
        """Answer, now and from now on: one that never has is missed by nobody."""
        self._answer("")
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The run is over, and all know it."""
        self._over.set()
        for thread in self._threads:
            thread.join()

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
                self._is_left_to_jax = True
                return

    def _watch_first(self) -> None:
        """End this process where an answer of its own is not taken for long: the first one is stopped."""
        looks, beats = 0, -1
        while not self._is_left_to_jax and not self._over.wait(LOOK_SECONDS):
            looks, beats = (looks + 1, beats) if self._beats == beats else (0, self._beats)
            if looks > 2 * SILENT_LOOKS:
                sys.stderr.write(
                    f"error: the first process has taken no answer of {self._name} for "
                    f"{looks * LOOK_SECONDS:.0f} s: it was stopped, or its host or the network to it is "
                    "gone; this one is ended\nhint: go on with it: --resume\n"
                )
                sys.stderr.flush()
                self._over.set()
                self._end(EXIT_BROKE_OFF)

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
        self._looks += 1
        for key, answer in sorted(self._board.key_value_dir_get(f"{ANSWERS}/")):
            last, look, since = self._seen.get(key, ("", 0, now))
            if answer != last:
                self._seen[key] = answer, self._looks, now
            if answer != last or self._looks - look <= SILENT_LOOKS:
                continue  # also where it left words: what all find wrong the first tells, in its own time
            told = json.loads(answer)
            if told["words"]:
                return f"{told['name']} ended: {told['words']}"
            silent = f"{told['name']} has given no sign of life for {now - since:.0f} s"
            return f"{silent}: it was killed or stopped, or its host or the network to it is gone"
        return ""


SLICE_SECONDS = 1.0  # of a wait: a signal is seen between two
KINDS: dict[str, type[MeshwrightError]] = {
    each.__name__: each for each in (MeshwrightError, InputError, CompileError)
}


class Client(Protocol):
    """What is used of jax's client of the coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Keep a text for all processes."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a text."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forget it."""
        ...


class Alone:
    """The one process of a run."""

    count = 1
    index = 0
    is_first = True
    name = "process 0"

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` gives."""
        return make()

    def gathered(self, what: str, value: Any) -> list[Any]:
        """`value`, of the one there is."""
        return [value]

    def in_turns(self, make: Callable[[], Any]) -> Any:
        """What `make` gives."""
        return make()


class Peers(Alone):
    """Process `index` of the `count` of a run; every one calls the same methods in the same order.

    `what`: names a conversation; each thread has its own.
    """

    def __init__(self, client: Client, index: int, count: int, host: str | None = None) -> None:
        self._client, self.index, self.count = client, index, count
        self.is_first = index == 0
        self._host = host or socket.gethostname()
        self.name = f"process {index} of {count} on {self._host}"
        self._turns: Counter[str] = Counter()

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """JSON data that the first process makes, in every process.

        Raises:
            MeshwrightError: what `make` raised there, in every process.
        """
        key = self._next(what)
        if not self.is_first:
            return _opened(json.loads(self._wait_for(key)))
        try:
            made = make()
        except MeshwrightError as error:
            told = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
            self._client.key_value_set(key, json.dumps({"error": told}))
            raise
        self._client.key_value_set(key, json.dumps({"value": made}))
        return made

    def gathered(self, what: str, value: Any) -> list[Any]:
        """Every process's `value` (JSON data), in order, in every process."""
        key = self._next(f"{what}/of")
        self._client.key_value_set(f"{key}/{self.index}", json.dumps(value))
        return self.from_first(what, lambda: [self._taken(f"{key}/{index}") for index in range(self.count)])

    def in_turns(self, make: Callable[[], Any]) -> Any:
        """What `make` gives here, after the first process and then the first of each host have made theirs:
        what it leaves in a cache need not be made again.

        Raises:
            MeshwrightError: what `make` raised in the first process, in every process.
        """
        hosts = self.gathered("hosts", self._host)
        made: list[Any] = []
        self.from_first("turn", lambda: made.append(make()))
        if not self.is_first and hosts.index(self._host) == self.index:
            made.append(make())
        self.gathered("turns", None)
        return made[0] if made else make()

    def _next(self, what: str) -> str:
        self._turns[what] += 1
        return f"meshwright/{what}/{self._turns[what]}"

    def _taken(self, key: str) -> Any:
        value = json.loads(self._wait_for(key))
        self._client.key_value_delete(key)
        return value

    def _wait_for(self, key: str) -> str:
        """No time limit: the watchdog has one, and jax ends this process when another is gone."""
        while True:
            try:
                return self._client.blocking_key_value_get(key, int(SLICE_SECONDS * 1000))
            except RuntimeError as waited:
                if "DEADLINE_EXCEEDED" not in str(waited):
                    raise


def _opened(told: dict[str, Any]) -> Any:
    if "error" not in told:
        return told["value"]
    error = told["error"]
    raise KINDS[error["kind"]](error["message"], hint=error["hint"])
