"""What the processes of a run tell each other through jax's coordination service, beside the devices.

It serves threads that may not use the devices (two programs of collectives in flight could wait for each
other), and texts. Everything here is for what is rare: no step waits for it.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import CompileError, InputError, MeshwrightError

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
