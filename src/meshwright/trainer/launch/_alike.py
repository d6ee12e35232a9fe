"""Compare what the processes of a run are about to do, and name each difference with its values.

Processes that differ would train on with replicas that drift apart, or wait for each other without end: each
runs a program of its own. So they compare their facts when they meet, before the first step, and with each
checkpoint. A room outside the core does it where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from meshwright.registry import room

from ._single_process import SingleProcess

T = TypeVar("T")
Facts = Mapping[str, Mapping[str, Any]]
"""JSON values by name, in three sections: "settings", "files", "software"."""


def agreed(
    peers: SingleProcess, what: str, make: Callable[[], T], facts_of: Callable[[T], Facts]
) -> tuple[T, str]:
    """Return what `make` returns, and a digest of its facts, which all processes have in common.

    All processes call it in the same order, as the methods of `ProcessGroup`. A single process compares
    nothing, and its digest is empty.

    Args:
        what: the name of the comparison.
        make: may raise; the error of one process is then raised in all, with the name of that process.
        facts_of: returns what must be the same in all processes.

    Raises:
        InputError: the processes differ; the message names each difference, the processes and their values.
        MeshwrightError: `make` or `facts_of` raised it, in one process or in all.
    """
    if peers.count == 1:
        return make(), ""
    among: Any = room("clusters").agreed_among
    return among(peers, what, make, facts_of)
