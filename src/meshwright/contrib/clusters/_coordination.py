"""Exchange messages and heartbeats among the processes of a run, without using the devices.

`Heartbeat` detects lost processes: each process answers every second, and the first one checks the answers
and informs all. jax's own heartbeat would end the others too, but later, and with a number instead of a host
and a reason.

`ProcessGroup` exchanges JSON data through jax's coordination service. It is for texts, and for threads that
may not use the devices: two programs with collectives in flight could wait for each other. Such messages
are rare: no step waits for them.
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
from typing import Any

from meshwright.errors import EXIT_BROKE_OFF, CompileError, InputError, MeshwrightError
from meshwright.trainer.launch import SingleProcess

BEAT_SECONDS = LOOK_SECONDS = 1.0  # between answers; between checks of the first process
SILENT_SECONDS = 8.0
# Silence is counted in looks, one per beat, and not by the clock. Otherwise a process that was itself stopped
# would find all others silent as soon as it resumes.
SILENT_LOOKS = int(SILENT_SECONDS / BEAT_SECONDS)
LEFT_LOOKS = 2  # for the first process to meet the error with which another one left, and to report it itself
ANSWERS, LOST = "meshwright/roll", "meshwright/lost"
WAIT_SLICE_SECONDS = 1.0  # a wait is cut into slices, between which signals are handled
ERROR_KINDS = {kind.__name__: kind for kind in (MeshwrightError, InputError, CompileError)}
Client = Any  # jax's client of the coordination service, a class of its C++ part


class Heartbeat:
    """Answer for this process, and detect processes that have ended or stopped.

    One thread answers. In the first process it also checks which processes do not answer. In the others a
    second thread checks whether the first process accepts their answers.

    If a process has not answered for `SILENT_SECONDS`, the first process names it on stderr, with the message
    that it left, if any. Then every process ends with status 4 at once: none can do another step, and one
    that waits in a collective can be stopped in no other way. If the first process is silent for twice as
    long, each of the others names it and ends.

    Args:
        name: of this process, "process 2 of 4 on node7".
    """

    def __init__(
        self,
        client: Client,
        index: int,
        name: str,
        end: Callable[[int], object] = os._exit,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._index, self._name, self._end, self._now = client, index, name, end, now
        self._over = threading.Event()
        self._num_beats = self._num_looks = 0
        self._is_left_to_jax = False
        self._answers: dict[str, tuple[str, int, float]] = {}  # by key: the last answer, its look, its time
        self._threads = [threading.Thread(target=self._answer_regularly, name="meshwright-roll", daemon=True)]
        if index:
            watch = threading.Thread(target=self._watch_first, name="meshwright-roll-first", daemon=True)
            self._threads.append(watch)

    def start(self) -> None:
        """Answer now, and every second from now on; a process that never answered is not missed."""
        self._answer("")
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop answering and checking: the run is over, and all processes know it."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def await_verdict(self) -> None:
        """Wait while another process's end may be reported as the cause of an error; that ends this process.

        If the first process is gone, nobody else reports it: this process does so at once.
        """
        try:
            self._answer("")
        except RuntimeError:
            if self._index and not self._over.is_set():
                _print_error(f"{self._name} has lost the first process: it was killed, or its host is gone")
                self._over.set()
                self._end(EXIT_BROKE_OFF)
                return
        if self._over.wait(SILENT_SECONDS + 4 * BEAT_SECONDS):
            time.sleep(4 * BEAT_SECONDS)  # meanwhile `beat` ends this process

    def leave(self, words: str, status: int) -> None:
        """Report to the others why this process ends, in words, and end it."""
        self.stop()
        if self._index:
            self._answer(words)
        else:
            self._client.key_value_set(LOST, f"{self._name} ended: {words}", allow_overwrite=True)
            time.sleep(2 * BEAT_SECONDS)
        self._end(status)

    def beat(self) -> None:
        """Answer, and end this process if another one is lost."""
        self._answer("")
        words = self._lost() if self._index else self._missing()
        if not words:
            return
        if not self._index:
            self._client.key_value_set(LOST, words, allow_overwrite=True)
            _print_error(f"{words}; the others are ended")
            time.sleep(2 * BEAT_SECONDS)  # the service ends with this process: the others read it first
        self._over.set()
        self._end(EXIT_BROKE_OFF)

    def _answer_regularly(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self.beat()
            except RuntimeError:  # the service is gone, and with it the first process: jax ends this one
                self._is_left_to_jax = True
                return

    def _watch_first(self) -> None:
        """End this process if the first one, stopped or unreachable, accepts no answer for a long time."""
        looks, beats = 0, -1
        while not self._is_left_to_jax and not self._over.wait(LOOK_SECONDS):
            looks, beats = (looks + 1, beats) if self._num_beats == beats else (0, self._num_beats)
            if looks > 2 * SILENT_LOOKS:
                _print_error(
                    f"the first process has accepted no answer from {self._name} for "
                    f"{looks * LOOK_SECONDS:.0f} s: it was stopped, or its host or the network to it is "
                    "gone; this one is ended"
                )
                self._over.set()
                self._end(EXIT_BROKE_OFF)

    def _answer(self, words: str) -> None:
        self._num_beats += 1
        answer = {"name": self._name, "beat": self._num_beats, "words": words}
        self._client.key_value_set(f"{ANSWERS}/{self._index}", json.dumps(answer), allow_overwrite=True)

    def _lost(self) -> str:
        """Return what the first process wrote about a lost process; "" if it wrote nothing."""
        try:
            return self._client.key_value_try_get(LOST)
        except RuntimeError as absent:
            if "NOT_FOUND" not in str(absent):
                raise
            return ""

    def _missing(self) -> str:
        """Describe the first process that has left or is silent; return "" if all answer."""
        now = self._now()
        self._num_looks += 1
        for key, answer in sorted(self._client.key_value_dir_get(f"{ANSWERS}/")):
            last, look, since = self._answers.get(key, ("", 0, now))
            if answer != last:
                self._answers[key] = answer, self._num_looks, now
            left = json.loads(answer)
            if answer != last or self._num_looks - look <= (LEFT_LOOKS if left["words"] else SILENT_LOOKS):
                continue
            if left["words"]:
                return f"{left['name']} ended: {left['words']}"
            silent = f"{left['name']} has given no sign of life for {now - since:.0f} s"
            return f"{silent}: it was killed or stopped, or its host or the network to it is gone"
        return ""


def _print_error(words: str) -> None:
    sys.stderr.write(f"error: {words}\nhint: resume the run with --resume\n")
    sys.stderr.flush()


class ProcessGroup(SingleProcess):
    """Process `index` of the `count` processes of a run; all call the same methods in the same order.

    `what`: the name of a conversation; each thread uses its own names.
    """

    def __init__(self, client: Client, index: int, count: int, host: str | None = None) -> None:
        self._client, self.index, self.count = client, index, count
        self.is_first = index == 0
        self._host = host or socket.gethostname()
        self.name = f"process {index} of {count} on {self._host}"
        self._turns: Counter[str] = Counter()

    def broadcast(self, what: str, make: Callable[[], Any]) -> Any:
        """Return, in every process, the JSON data that `make` returns in the first one.

        Raises:
            MeshwrightError: in every process, the error that `make` raised in the first one.
        """
        key = self._next(what)
        if not self.is_first:
            received = json.loads(self._wait_for(key))
            if (error := received.get("error")) is not None:
                raise ERROR_KINDS[error["kind"]](error["message"], hint=error["hint"])
            return received["value"]
        try:
            made = make()
        except MeshwrightError as error:
            parts = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
            self._client.key_value_set(key, json.dumps({"error": parts}))
            raise
        self._client.key_value_set(key, json.dumps({"value": made}))
        return made

    def combined(self, what: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return, in every process, what `combine` makes in the first one of the `value` of each, in order.

        Values and the result are JSON data.
        """
        key = self._next(f"{what}/of")
        self._client.key_value_set(f"{key}/{self.index}", json.dumps(value))
        every = range(self.count)
        return self.broadcast(what, lambda: combine([self._take(f"{key}/{index}") for index in every]))

    def run_sequentially(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make` in this process, called in turns.

        `make` is called in the first process, then in the first of each host, then in the rest. Later calls
        can use what earlier ones left in a cache.

        Raises:
            MeshwrightError: in every process, the error that `make` raised in the first one.
        """
        hosts = self.gathered("hosts", self._host)
        made: list[Any] = []
        self.broadcast("turn", lambda: made.append(make()))
        if not self.is_first and hosts.index(self._host) == self.index:
            made.append(make())
        self.gathered("turns", None)
        return made[0] if made else make()

    def _next(self, what: str) -> str:
        self._turns[what] += 1
        return f"meshwright/{what}/{self._turns[what]}"

    def _take(self, key: str) -> Any:
        value = json.loads(self._wait_for(key))
        self._client.key_value_delete(key)
        return value

    def _wait_for(self, key: str) -> str:
        """Wait for a text without a limit: the watchdog has one, and jax ends processes that lost another."""
        while True:
            try:
                return self._client.blocking_key_value_get(key, int(WAIT_SLICE_SECONDS * 1000))
            except RuntimeError as waited:
                if "DEADLINE_EXCEEDED" not in str(waited):
                    raise
