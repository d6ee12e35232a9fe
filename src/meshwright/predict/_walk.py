"""Walk a program's schedule with one clock per stream, and write the walk as a trace.

The streams are compute, the links inside domains and the links between domains. An asynchronous collective
occupies its link from its start, or from when the link is free. The instruction that awaits it holds
the compute clock until it ends; a synchronous collective holds both clocks. A loop's body is walked once and
multiplied by the trip count. A fusion that computes while collectives run, as XLA's TPU backend writes them,
overlaps them here too.
Not modelled: compute slows down while collectives run. This was measured, but made no visible difference over
the published runs.

The trace has a track for each stream and a slice for each kernel and message, in the form of Chrome's trace
events, which ui.perfetto.dev opens. It draws the first round of a loop, and one slice for all further rounds.
The trace of a step of 405B parameters is thus a file of 70 kB.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshwright.hlo import FREE, Axes, Computation, Executions, Instruction, ProgramPhases, module_of
from meshwright.ledger import message_of, split_channels

from ._prices import KernelTime, Order, Transfer, kernel_of, transfer_of
from ._rates import Machine

LAUNCH = "launch"
WAIT = "wait"  # the stream of what the compute stream waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A span of time on one stream, by the clock of the computation in which it was walked.

    The links are those inside and those between domains. A wait is the part of a collective for which the
    compute stream waits.
    `further_rounds`: of a loop, how many the event stands for; the `num_events` events before it are the
    first round.
    """

    name: str
    stream: str  # compute | inside | between | wait
    begin_seconds: float
    seconds: float
    module: str = ""  # the model's own scopes, "" without any
    operation: str = ""  # the instruction's name
    further_rounds: int = 0
    num_events: int = 0

    @property
    def end_seconds(self) -> float:
        """When the span ends, by the same clock."""
        return self.begin_seconds + self.seconds


@dataclass(slots=True)
class Walked:
    """The times of one run of a computation on one device.

    `total` and `exposed`: seconds by slice. For compute they are equal. For a collective, `exposed` is the
    time that the compute clock waited for it. The exposed seconds of all slices sum to `seconds`.
    `recomputed`: of them, the seconds of kernels that the backward pass runs again.
    `events`: for a loop, those of the first round, then one event for all further rounds.
    `transfers`: the axes of each slice that is a collective.
    """

    seconds: float = 0.0
    total: dict[str, float] = field(default_factory=dict[str, float])
    exposed: dict[str, float] = field(default_factory=dict[str, float])
    recomputed: dict[str, float] = field(default_factory=dict[str, float])
    flops: Counter[str] = field(default_factory=Counter[str])
    unpriced: Counter[str] = field(default_factory=Counter[str])
    links: set[str] = field(default_factory=set[str])
    transfers: dict[str, str] = field(default_factory=dict[str, str])
    events: list[Event] = field(default_factory=list[Event])


Prices = dict[tuple[str, str], KernelTime]
"""The costs of kernels by computation and instruction: walks over one program on one machine share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A difference between the program that is walked and the program as it is.

    `hidden`: axes whose collectives take no time. `order`: another order of the mesh axes on the fleet, from
    which the link of every collective is derived again. `skips`: returns True for instructions to leave out.
    `lengthened`: how many times as long collectives take, by the name of their slice.
    """

    hidden: str | None = None
    order: Order | None = None
    lengthened: Mapping[str, float] = field(default_factory=dict[str, float])
    skips: Callable[[Computation, Instruction], bool] | None = None


AS_IT_IS = Variation()


def walk(
    machine: Machine,
    executions: Executions,
    mesh_axes: Axes,
    variation: Variation = AS_IT_IS,
    prices: Prices | None = None,
) -> Walked:
    """Return the times of one step, with the difference that `variation` describes.

    `executions` supplies the trip counts and the branches taken.

    Raises:
        ValueError: replica groups of an unknown form.
        InputError: a collective crosses a link without a known rate.
    """
    walker = _Walker(machine, executions, mesh_axes, variation, {} if prices is None else prices)
    return walker.computation(executions.program.entry)


class _Walker:
    """Walk each computation once, however often it is called."""

    def __init__(
        self, machine: Machine, executions: Executions, mesh_axes: Axes, variation: Variation, prices: Prices
    ) -> None:
        self.machine, self.variation = machine, variation
        self.executions, self.program = executions, executions.program
        self._prices, self._mesh_axes = prices, mesh_axes
        self._split_channels = split_channels(self.program)
        self._num_devices = math.prod(size for _, size in mesh_axes)
        self._known: dict[str, Walked] = {}
        self._carried: dict[tuple[str, str], dict[str, Transfer]] = {}

    def computation(self, computation: Computation) -> Walked:
        """Return the times of one run."""
        if computation.name not in self._known:
            stream = _Stream(self, computation)
            for instruction in computation.instructions:
                stream.run(instruction)
            self._known[computation.name] = stream.finish()
        return self._known[computation.name]

    def is_collective(self, instruction: Instruction) -> bool:
        """Return whether an instruction is or starts a collective, or wraps one in an async computation."""
        if instruction.opcode == "async-start":
            return any(inner.collective for _, inner in self.program.inside(instruction))
        return bool(instruction.collective)

    def transfer(self, computation: Computation, instruction: Instruction) -> Transfer | None:
        """Return the collective that an instruction is, starts or wraps; None where it takes no time."""
        if instruction.opcode == "async-start":
            transfers = (self.transfer(home, inner) for home, inner in self.program.inside(instruction))
            return next(filter(None, transfers), None)
        message = message_of(computation, instruction, self._mesh_axes)
        if message is None:  # a group of one sends nothing
            return None
        transfer = transfer_of(self.machine, message, self._num_devices, self.variation.order)
        factor = self.machine.factors.of(transfer.name) * self.variation.lengthened.get(transfer.name, 1.0)
        transfer = replace(transfer, seconds=transfer.seconds * factor)
        return None if transfer.axes == self.variation.hidden else transfer

    def carried(self, computation: Computation, instruction: Instruction) -> Mapping[str, Transfer]:
        """Return the collectives inside a fusion of `computation`, by channel."""
        key = (computation.name, instruction.name)
        if key not in self._carried:
            carried = self._carried[key] = {}
            for home, inner in self.program.inside(instruction) if instruction.opcode == "fusion" else ():
                if transfer := self.transfer(home, inner):
                    channel = inner.attributes.get("channel_id", "")
                    carried[channel if channel in self._split_channels else inner.name] = transfer
        return self._carried[key]

    def kernel(self, computation: Computation, instruction: Instruction) -> KernelTime:
        """Return the price of an instruction of the compute stream, computed once."""
        key = (computation.name, instruction.name)
        if key not in self._prices:
            kernel = kernel_of(self.machine, self.program, computation, instruction)
            is_again = self._phases.of(computation, instruction) == "recompute"
            factor = self.machine.factors.of(kernel.kind, is_recomputed=is_again)
            self._prices[key] = replace(kernel, seconds=kernel.seconds * factor, is_recomputed=is_again)
        return self._prices[key]

    @cached_property
    def _phases(self) -> ProgramPhases:
        return ProgramPhases(self.program)


class _Stream:
    """The clocks while one computation runs."""

    def __init__(self, walker: _Walker, computation: Computation) -> None:
        self._walker, self._computation = walker, computation
        self._now = 0.0
        self._busy: dict[str, list[Event]] = {"inside": [], "between": []}
        self._free = {"inside": 0.0, "between": 0.0}  # the time from which a link is free
        self._started: dict[str, tuple[str, float]] = {}  # by instruction: link and end
        self._carriers: dict[str, int] = {}  # by channel: fusions still to come that carry it
        self._carried_until: dict[str, float] = {}
        self._walked = Walked()

    def run(self, instruction: Instruction) -> None:
        """Advance the clocks by one scheduled instruction."""
        opcode, walker = instruction.opcode, self._walker
        skips = walker.variation.skips
        if opcode in FREE or (skips and skips(self._computation, instruction)):
            return
        if opcode.endswith(("-done", "-update")):
            self._await(instruction)
        elif opcode == "while":
            self._loop(instruction)
        elif opcode == "conditional":
            chosen = walker.executions.branches(instruction)[walker.executions.branch(instruction)]
            self._add(walker.computation(chosen))
        elif walker.is_collective(instruction):
            if transfer := walker.transfer(self._computation, instruction):
                self._transfer(instruction, transfer)
        elif opcode in ("call", "async-start"):
            for called in walker.program.called_by(instruction):
                self._add(walker.computation(called))
        elif carried := walker.carried(self._computation, instruction):
            self._carry(instruction, carried)
        else:
            self._kernel(instruction)

    def finish(self) -> Walked:
        """Wait for the transfers that no instruction here awaits, and return the times."""
        for link, end in self._started.values():
            self._wait(link, end)
        self._walked.seconds = self._now
        return self._walked

    def _await(self, instruction: Instruction) -> None:
        """Wait for an asynchronous transfer. Any other asynchronous work was priced at its start."""
        awaited = self._started.pop(instruction.operands[0].name, None)
        if awaited and instruction.opcode.endswith("-update"):
            self._started[instruction.name] = awaited
        elif awaited:
            self._wait(*awaited)

    def _carry(self, instruction: Instruction, carried: Mapping[str, Transfer]) -> None:
        """Run a fusion that computes while collectives run, as XLA's TPU backend writes them.

        Where several fusions carry one channel, its transfer begins with the first and the last awaits it.
        """
        ending: list[tuple[str, float]] = []
        for channel, transfer in carried.items():
            if channel not in self._carriers:
                fusions = self._computation.instructions
                carriers = [channel in self._walker.carried(self._computation, i) for i in fusions]
                self._carriers[channel] = sum(carriers)
                self._carried_until[channel] = self._begin(instruction, transfer)
            self._carriers[channel] -= 1
            if not self._carriers[channel]:
                ending.append((transfer.link, self._carried_until[channel]))
                del self._carriers[channel]
        self._kernel(instruction)
        for link, end in ending:
            self._wait(link, end)

    def _kernel(self, instruction: Instruction) -> None:
        kernel = self._walker.kernel(self._computation, instruction)
        self._note(kernel.kind, "compute", self._now, kernel.seconds, instruction)
        for name, seconds in ((kernel.kind, kernel.seconds), (LAUNCH, self._walker.machine.launch_seconds)):
            self._now += seconds
            _add_to(self._walked.total, {name: seconds})
            _add_to(self._walked.exposed, {name: seconds})
        if kernel.is_recomputed:
            _add_to(self._walked.recomputed, {kernel.kind: kernel.seconds})
        self._walked.flops.update(kernel.flops)
        self._walked.unpriced.update(kernel.unpriced)

    def _note(self, name: str, stream: str, begin: float, seconds: float, instruction: Instruction) -> Event:
        event = Event(
            name=name,
            stream=stream,
            begin_seconds=begin,
            seconds=seconds,
            module=module_of(instruction.op_name),
            operation=instruction.name,
        )
        self._walked.events.append(event)
        return event

    def _transfer(self, instruction: Instruction, transfer: Transfer) -> None:
        end = self._begin(instruction, transfer)
        if instruction.opcode.endswith("-start"):
            self._started[instruction.name] = (transfer.link, end)
            if not instruction.is_synchronous:
                return
        self._wait(transfer.link, end)

    def _begin(self, instruction: Instruction, transfer: Transfer) -> float:
        """Put a transfer on its link as soon as the link is free; return when it ends."""
        link = transfer.link
        event = self._note(
            transfer.name, link, max(self._now, self._free[link]), transfer.seconds, instruction
        )
        self._free[link] = event.end_seconds
        self._busy[link].append(event)
        self._walked.links.add(link)
        self._walked.transfers[transfer.name] = transfer.axes
        _add_to(self._walked.total, {transfer.name: transfer.seconds})
        return event.end_seconds

    def _wait(self, link: str, end: float) -> None:
        """Hold the compute clock until `end`. The transfers on the link during the wait are exposed."""
        exposed: dict[str, float] = {}
        for busy in reversed(self._busy[link]):
            if busy.end_seconds <= self._now:
                break
            begin = max(busy.begin_seconds, self._now)
            overlap = min(busy.end_seconds, end) - begin
            if overlap > 0:
                _add_to(exposed, {busy.name: overlap})
                wait = Event(name=busy.name, stream=WAIT, begin_seconds=begin, seconds=overlap)
                self._walked.events.append(wait)
        _add_to(self._walked.exposed, exposed)
        self._now = max(self._now, end)

    def _loop(self, instruction: Instruction) -> None:
        """Add a loop. One of unknown trip count runs once, and the ledger lists it as unpriced."""
        known = self._walker.executions.trips(self._computation, instruction)
        trips = 1 if known is None else known
        for role, times in (("body", trips), ("condition", trips + 1)):
            called = self._walker.program.computations[instruction.called[role][0]]
            self._add(self._walker.computation(called), times)

    def _add(self, inner: Walked, times: int = 1) -> None:
        """Add `times` runs of another computation. The links that it uses are free only after it ends."""
        walked = self._walked
        walked.events += [replace(e, begin_seconds=self._now + e.begin_seconds) for e in inner.events]
        if times > 1 and inner.events:
            further = Event(
                name=f"{times - 1} further rounds like this one",
                stream="compute",
                begin_seconds=self._now + inner.seconds,
                seconds=(times - 1) * inner.seconds,
                further_rounds=times - 1,
                num_events=len(inner.events),
            )
            walked.events.append(further)
        self._now += times * inner.seconds
        _add_to(walked.total, inner.total, times)
        _add_to(walked.exposed, inner.exposed, times)
        _add_to(walked.recomputed, inner.recomputed, times)
        walked.flops.update({name: times * flops for name, flops in inner.flops.items()})
        walked.unpriced.update({name: times * count for name, count in inner.unpriced.items()})
        walked.links |= inner.links
        walked.transfers |= inner.transfers
        for link in inner.links:
            self._free[link] = max(self._free[link], self._now)


def _add_to(sums: dict[str, float], more: Mapping[str, float], times: int = 1) -> None:
    for name, seconds in more.items():
        sums[name] = sums.get(name, 0.0) + times * seconds


TRACKS = {
    "compute": "computing",
    "inside": "links inside the fast domain",
    "between": "links between domains",
}
MICROSECONDS = 1e6


def trace_of(events: Iterable[Event], name: str) -> dict[str, Any]:
    """Return the trace as JSON types. Times are microseconds from the beginning of the step on one device.

    Waits are not drawn: they are the gaps of the track that computes.
    """
    tracks = list(TRACKS)
    slices: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"{name}, predicted"}}
    ]
    slices += [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": place, "args": {"name": TRACKS[stream]}}
        for place, stream in enumerate(tracks, start=1)
    ]
    slices += [
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
        if event.seconds > 0 and event.stream in TRACKS
    ]
    return {"displayTimeUnit": "ms", "traceEvents": slices}
