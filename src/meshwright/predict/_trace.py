"""The predicted step as a trace: each stream a track, each kernel and message a slice.

The form is Chrome's trace events, which ui.perfetto.dev opens. Of a loop the first round is drawn, and one
slice stands for the further ones, so that a step of 405B parameters is a file of 70 kB.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._walk import Event

TRACKS = {
    "compute": "computing",
    "inside": "links inside the fast domain",
    "between": "links between domains",
}
MICROSECONDS = 1e6


def trace_of(events: Iterable[Event], name: str) -> dict[str, Any]:
    """The trace as JSON's types; times are microseconds from the beginning of the step on one device."""
    tracks = list(TRACKS)
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"{name}, predicted"}}
    ]
    found += [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": place, "args": {"name": TRACKS[stream]}}
        for place, stream in enumerate(tracks, start=1)
    ]
    found += [
        {
            "ph": "X",
            "name": f"{event.module}: {event.name}" if event.module else event.name,
            "cat": event.name,
            "pid": 1,
            "tid": tracks.index(event.stream) + 1,
            "ts": event.begin_seconds * MICROSECONDS,
            "dur": event.seconds * MICROSECONDS,
            "args": {"operation": event.operation, "module": event.module},
        }
        for event in events
        if event.seconds > 0
    ]
    return {"displayTimeUnit": "ms", "traceEvents": found}
