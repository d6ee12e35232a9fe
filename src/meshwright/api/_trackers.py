"""Find the trackers that a run is reported to, which rooms outside the core bring.

Each is registered by its name in the group `meshwright.trackers`; what hands a run's events on to them is
`trackers` in the group `meshwright.listeners`.
Imports: `registry`. Used by: `_train`, `cli`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, nearest_name
from meshwright.registry import registered_names, room

if TYPE_CHECKING:
    from meshwright.results import Weighing
    from meshwright.trainer.loop import RunFolder

TRACKERS = "meshwright.trackers"


def check_trackers(names: Iterable[str]) -> None:
    """Check the names of trackers before a run.

    Raises:
        InputError: there is no tracker of that name.
    """
    known = registered_names(TRACKERS)
    for name in names:
        if name not in known:
            raise InputError(f"--report-to {name!r} is not known", hint=nearest_name(name, known))


def reported(
    names: Sequence[str], weighing: Weighing, number: str, held: RunFolder, on_event: Callable[[Any], None]
) -> AbstractContextManager[Callable[[Any], None]]:
    """Return a listener that reports a run to trackers too, in whose block the run trains.

    Args:
        number: of the run, the same in all its sessions.
        held: its folder. Of several processes the first reports.
    """
    if not names or not held.peers.is_first:
        return nullcontext(on_event)
    return room("trackers").reporting(names, weighing, number, held.path, on_event)
