"""Read one step from a trace's events: its seconds, and the seconds of each class of work, on one device.

The events of an XPlane file name instructions of the compiled program, so the program tells the class of
each. On a GPU XLA launches most kernels in CUDA graphs. Their events name the graph and the kernel: a kernel
that XLA wrote has the name of a fusion, and that of a library tells its class. The class of a kernel in a
Kineto file follows from its name. `_trace_files` reads both.

The seconds of a class are the sum over its events, divided by devices and steps. So they are what one device
takes: simulated devices of a CPU run side by side on shared cores, and each event lasts as long as sharing
makes it last, as in a prediction. The exposed seconds of classes add up: what several kernels of one device
run at once is shared among them, and a message counts only while no kernel runs. A step lasts from the begin
of its first event on any device to the end of its last; gaps are those in which a device runs no event. The
host's time between steps is in none of them.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.hardware import COLLECTIVE_KINDS, LONGEST_STEP_SECONDS

from ._chrome_events import AGAIN
from ._trace_files import TraceEvent, class_of_kernel, kineto_events

LEAST_MATCHED = 0.8
"""The share of a trace's kernel time that must be matched with the program, or the trace is refused."""
GAPS = "launch"
MOST_NAMED = 3
LONGEST_NAME = 200  # of a kernel, as it is shown
MESSAGES = (*COLLECTIVE_KINDS, "collective-permute")
GRAPH = re.compile(r"command_buffer(_\d+)?")  # XLA's word for a CUDA graph

_Classed = tuple[TraceEvent, str]  # an event with its class of work, "" if none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step of a trace on one device: its seconds, and the seconds of each class of work.

    `seconds_by_class`: whole events. `exposed_by_class`: without what other classes hide; with gaps they sum
    to the step.
    `matched`: the share of the kernels' seconds that has a class. `unmatched`: the seconds of the largest
    events without one, by name. `num_steps`: the steps of the trace. The step of median length is taken
    where the trace tells its steps apart, else their mean.
    """

    seconds: float
    seconds_by_class: dict[str, float]
    exposed_by_class: dict[str, float]
    matched: float
    unmatched: dict[str, float]
    num_steps: int
    num_devices: int


def traced_step(
    events: Iterable[TraceEvent], classes: Mapping[str, str], others: Collection[str], once: Collection[str]
) -> TracedStep:
    """Return a step of the program whose instructions `classes` names, with the seconds of each class.

    Of several programs in a trace, the one counts of which most seconds are matched.

    Args:
        classes: the class of work of each kernel and message, by instruction.
        others: instructions whose events only hold those of others, or take no time: loops, calls, waits.
        once: instructions that run once in a step, by which steps are counted if no event names its run.

    Raises:
        InputError: there is no event, or less than `LEAST_MATCHED` of the seconds is matched.
    """
    kernels = {re.sub(r"\W", "_", name): kind for name, kind in classes.items()}
    by_module: defaultdict[str, list[_Classed]] = defaultdict(list)
    for event in events:
        if event.name not in others:
            by_module[event.module].append((event, _class_of(event, classes, kernels)))

    if not by_module:
        raise InputError(
            "the trace names no kernel of a compiled program",
            hint="on a GPU the profiler needs CUPTI, and permission to read counters: see what it printed "
            "while the steps ran; or give the seconds of a step: --measured",
        )

    def known_seconds(module: str) -> float:
        return sum(event.seconds for event, kind in by_module[module] if kind)

    chosen = by_module[max(by_module, key=known_seconds)]
    matched = _checked_share(chosen)
    usual, span, num_steps, num_inside = _usual_step([(e, kind) for e, kind in chosen if kind], once)
    return _step_of(
        usual,
        span,
        num_inside,
        matched=matched,
        unmatched=_largest(chosen),
        num_steps=num_steps,
    )


def _class_of(event: TraceEvent, classes: Mapping[str, str], kernels: Mapping[str, str]) -> str:
    """Return the class of an event, or "" if neither its instruction nor its kernel tells it.

    XLA names a kernel by its fusion, with an underscore for each other sign, and uses one kernel for all
    fusions that are alike.
    """
    if event.name in classes or not event.kernel:
        return classes.get(event.name, "")
    return kernels.get(event.kernel) or class_of_kernel(event.kernel) or ""


def _step_of(events: Collection[_Classed], span: float, num_inside: int, **facts: Any) -> TracedStep:
    """Return the step of events with their classes, of which `num_inside` steps of `span` seconds consist."""
    num_devices = len({event.device for event, _ in events})
    share = 1 / num_devices / num_inside
    whole: defaultdict[str, float] = defaultdict(float)
    for event, kind in events:
        whole[kind] += event.seconds * share
    exposed = {kind: seconds * share for kind, seconds in _exposed(events).items()}
    gaps = span - sum(exposed.values())
    between = {GAPS: gaps} if gaps > 0 else {}
    return TracedStep(
        seconds=span,
        seconds_by_class={**whole, **between},
        exposed_by_class={**exposed, **between},
        num_devices=num_devices,
        **facts,
    )


def _exposed(events: Iterable[_Classed]) -> dict[str, float]:
    """Return the seconds in which each class runs, summed over devices.

    What kernels of one device run at once is shared among them; messages count while no kernel runs.
    """
    by_device: defaultdict[str, list[tuple[float, int, str]]] = defaultdict(list)
    for event, kind in events:
        begin = event.begin_seconds
        by_device[event.device] += [(begin, 1, kind), (begin + event.seconds, -1, kind)]
    seconds: defaultdict[str, float] = defaultdict(float)
    for marks in by_device.values():
        running: Counter[str] = Counter()
        before = 0.0
        for now, change, kind in sorted(marks):
            counted = {name: n for name, n in running.items() if n > 0 and name not in MESSAGES}
            counted = counted or {name: n for name, n in running.items() if n > 0}
            for name, number in counted.items():
                seconds[name] += (now - before) * number / sum(counted.values())
            running[kind] += change
            before = now
    return dict(seconds)


def _checked_share(events: Collection[_Classed]) -> float:
    total = sum(event.seconds for event, _ in events)
    matched = sum(event.seconds for event, kind in events if kind)
    if total == 0 or matched / total < LEAST_MATCHED:
        share = 100 * matched / total if total else 0
        named = ", ".join(_largest(events)) or "none"
        raise InputError(
            f"{share:.0f} % of the trace's kernel time is matched with the program, less than "
            f"{100 * LEAST_MATCHED:.0f} %; the largest events without a match: {named}",
            hint="give the config, the layout and the fleet with which the traced run was made",
        )
    return matched / total


def _largest(events: Iterable[_Classed]) -> dict[str, float]:
    """Return the seconds of the largest events without a class, by name."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for event, kind in events:
        if not kind:
            seconds[(event.kernel or event.name)[:LONGEST_NAME]] += event.seconds
    largest = sorted(seconds, key=lambda name: -seconds[name])[:MOST_NAMED]
    return {name: seconds[name] for name in largest}


def _usual_step(
    events: Collection[_Classed], once: Collection[str]
) -> tuple[Collection[_Classed], float, int, int]:
    """Return the events of the step of median length, its seconds, and the number of steps.

    Where no event names its run, all events are returned, with the mean step. The last number is how many
    steps the returned events are of.
    """
    by_run: defaultdict[str, list[_Classed]] = defaultdict(list)
    for event, kind in events:
        by_run[event.run].append((event, kind))
    if "" not in by_run:
        ranked = sorted(by_run.values(), key=_span)
        usual = ranked[(len(ranked) - 1) // 2]
        return usual, _span(usual), len(ranked), 1
    num_steps = _count_steps([event for event, _ in events], once)
    return events, _span(events) / num_steps, num_steps, num_steps


def _count_steps(events: Collection[TraceEvent], once: Collection[str]) -> int:
    """Return how many steps a trace holds, by what runs once in a step: an instruction, or a CUDA graph.

    A graph inside a loop is launched several times in a step, so the one with the fewest launches counts.

    Raises:
        InputError: nothing is known to run once.
    """
    counts = Counter((event.device, event.name) for event in events if event.name in once)
    if counts:
        return int(statistics.median(counts.values()))
    launches: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for event in events:
        if GRAPH.fullmatch(event.name):
            launches[event.device, event.name].add(event.launch)
    if not launches:
        raise InputError(
            "the trace does not tell its steps apart: no event names its run, and none runs once in a step",
            hint="trace whole steps; or give the seconds of a step: --measured",
        )
    return min(len(each) for each in launches.values())


def _span(events: Iterable[_Classed]) -> float:
    """Return the seconds from the first event's begin to the last one's end.

    Raises:
        InputError: they are farther apart than any trace is long, so that one of them has a wrong clock.
    """
    times = [(event.begin_seconds, event.begin_seconds + event.seconds) for event, _ in events]
    span = max(end for _, end in times) - min(begin for begin, _ in times)
    if span > LONGEST_STEP_SECONDS:
        raise InputError(f"the trace's events lie {span:.3g} s apart, which cannot be", hint=AGAIN)
    return span


def kineto_step(path: Path) -> TracedStep:
    """Return a step of a trace of torch.profiler, with the seconds of each class of kernel by its name.

    Kernels that no name tells are memory-bound, as most of what remains is; `unmatched` names the largest.
    `ProfilerStep#` events delimit the steps; without them the whole trace is one step. Kernels belong to the
    steps together: the device runs behind the host.

    Raises:
        InputError: the file is no such trace, a field of it cannot be, or it has no kernels.
    """
    kernels, num_steps = kineto_events(path)
    named = [(kernel, class_of_kernel(kernel.name) or "") for kernel in kernels]
    known = sum(kernel.seconds for kernel, kind in named if kind)
    classed = [(kernel, kind or "memory-bound") for kernel, kind in named]
    return _step_of(
        classed,
        _span(classed) / num_steps,
        num_steps,
        matched=known / sum(kernel.seconds for kernel in kernels),
        unmatched=_largest(named),
        num_steps=num_steps,
    )
