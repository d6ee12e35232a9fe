"""Define what a run asks of its processes, as the only one answers; several are a room outside the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SingleProcess:
    """The only process of a run."""

    count = 1
    index = 0
    is_first = True
    name = "process 0"

    def broadcast(self, what: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`."""
        return make()

    def combined(self, what: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return what `combine` makes of a list that holds only `value`."""
        return combine([value])

    def gathered(self, what: str, value: Any) -> list[Any]:
        """Return a list that holds only `value`."""
        return self.combined(what, value, list)

    def run_sequentially(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make`."""
        return make()


SINGLE_PROCESS = SingleProcess()
