"""Say how busy a device is from the beginning of a recorded step to its end, as a prediction says it.

The step is the one of median length, the device the first of the trace. Counted: kernels by class, messages
while nothing hides them, and all messages. Not counted: what the host does meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from meshwright.predict import NUM_SPANS, Busy

from ._recorded import MESSAGE_KINDS, Recorded
from ._step_parts import moments

MESSAGES = "messages"  # the stream of all of them: a trace does not tell the links apart


def busy_of(recorded: Recorded, step_seconds: Sequence[float]) -> Busy | None:
    """Return the shares of a typical step; None where the trace has no work in it.

    Args:
        step_seconds: of the steps that are compared.
    """
    if not recorded.work or not step_seconds:
        return None
    device = recorded.devices[0]
    works = [work for work in recorded.work if work.device == device]
    steps = recorded.steps_of(works[0].rank)[: len(step_seconds)]
    step = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    begin, end = step.begin_seconds, step.end_seconds
    if not end > begin:
        return None
    works = [work for work in works if work.end_seconds > begin and work.begin_seconds < end]
    shares: dict[str, defaultdict[str, list[float]]] = {
        stream: defaultdict(lambda: [0.0] * NUM_SPANS) for stream in ("compute", "wait", MESSAGES)
    }
    scale = NUM_SPANS / (end - begin)

    def add(stream: str, name: str, left: float, right: float, share: float) -> None:
        """Add a share of a stretch of time to the spans in which it lies."""
        first, last = max(left - begin, 0.0) * scale, min(right - begin, end - begin) * scale
        for place in range(int(first), min(int(last) + 1, NUM_SPANS)):
            inside = min(last, place + 1) - max(first, place)
            shares[stream][name][place] += max(0.0, inside) * share

    for _, left, right, running in moments(works, [step]):
        for work in running:
            add("wait" if work.kind in MESSAGE_KINDS else "compute", work.kind, left, right, 1 / len(running))
    messages = [work for work in works if work.kind in MESSAGE_KINDS]
    for _, left, right, running in moments(messages, [step]):
        for work in running:
            add(MESSAGES, work.kind, left, right, 1 / len(running))
    found = {
        stream: {name: tuple(spans) for name, spans in named.items()} for stream, named in shares.items()
    }
    return Busy(seconds=step.seconds, shares={stream: named for stream, named in found.items() if named})
