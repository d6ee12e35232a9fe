"""Walk a program's schedule with one clock per stream, and write the walk as a trace.

The streams are compute, the links inside domains and the links between domains. An asynchronous collective
occupies its link from its start, or from when the link is free. The instruction that awaits it holds
the compute clock until it ends; a synchronous collective holds both clocks. A loop's body is walked once and
multiplied by the trip count. A fusion that computes while collectives run, as XLA's TPU backend writes them,
overlaps them here too. On a TPU, copies between the main memory and the vector memory run beside
computation, one after another, in the time in which no kernel uses the main memory; what the device waits for
them counts as bound by memory.
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

from meshwright.compiler import Routing
from meshwright.hlo import FREE, Axes, Computation, Executions, Instruction, ProgramPhases, module_of
from meshwright.ledger import Message, channels_through_loops, is_of_experts, message_of, split_channels

from ._kernel_prices import (
    HOST_SPACE,
    KernelTime,
    KernelWork,
    Order,
    Transfer,
    kernel_of,
    kernel_work,
    transfer_of,
)
from ._rates import Machine

LAUNCH = "launch"
MEMORY = "memory-bound"
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


Key = tuple[str, str]  # computation and instruction
Prices = dict[Key, KernelTime]
"""The costs of kernels by computation and instruction: walks over one program on one machine share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A change to the program that is walked.

    `hidden`: axes whose collectives take no time. `order`: another order of the mesh axes on the fleet, from
    which the link of every collective is derived again. `skips`: returns True for instructions to leave out.
    `lengthened`: how many times as long collectives take, by the name of their slice. `sends_once`: experts'
    tokens cross once to each domain and device that needs them, where the routing is known and the program
    sends a row for each choice.
    """

    hidden: str | None = None
    order: Order | None = None
    lengthened: Mapping[str, float] = field(default_factory=dict[str, float])
    skips: Callable[[Computation, Instruction], bool] | None = None
    sends_once: bool = False


AS_IT_IS = Variation()
COPYING = ("copy-start", "copy", "slice", "dynamic-slice", "dynamic-update-slice")


class Schedule:
    """Hold the steps of one program, and the exchange and work of each step, for all walks over it.

    Args:
        executions: the trip counts and the branches taken.
        mesh_axes: of the program.
        routing: of its experts, where it has any and they are ours.
    """

    def __init__(self, executions: Executions, mesh_axes: Axes, routing: Routing | None = None) -> None:
        self.executions, self.program, self.mesh_axes = executions, executions.program, mesh_axes
        self.routing = routing
        self.num_devices = math.prod(size for _, size in mesh_axes)
        self._split_channels = split_channels(self.program)
        self._through_loops = channels_through_loops(self.program)
        self._steps: dict[str, tuple[tuple[str, Instruction], ...]] = {}
        self._messages: dict[Key, tuple[Message, ...]] = {}
        self._work: dict[Key, KernelWork] = {}
        self._phase: dict[Key, str] = {}

    @cached_property
    def _phases(self) -> ProgramPhases:
        return ProgramPhases(self.program)

    def phase(self, computation: Computation, instruction: Instruction) -> str:
        """Return the training phase of an instruction."""
        key = (computation.name, instruction.name)
        if key not in self._phase:
            self._phase[key] = self._phases.of(computation, instruction)
        return self._phase[key]

    def steps(self, computation: Computation) -> tuple[tuple[str, Instruction], ...]:
        """Return the instructions that take time or wait, in schedule order, each with its kind.

        One of: await | loop | branch | exchange | copy (asynchronous, inside the device) | call | kernel |
        carry (a kernel, while collectives run).
        """
        if computation.name not in self._steps:
            timed = (i for i in computation.instructions if i.opcode not in FREE)
            self._steps[computation.name] = tuple((self._kind(computation, i), i) for i in timed)
        return self._steps[computation.name]

    def _kind(self, computation: Computation, instruction: Instruction) -> str:
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            return "await"
        if opcode in ("while", "conditional"):
            return "loop" if opcode == "while" else "branch"
        wraps = opcode == "async-start"
        if instruction.collective or (
            wraps and any(i.collective for _, i in self.program.inside(instruction))
        ):
            return "exchange"
        if self._is_copy(computation, instruction):
            return "copy"
        if opcode in ("call", "async-start"):
            return "call"
        return "carry" if opcode == "fusion" and self.carried(computation, instruction) else "kernel"

    def _is_copy(self, computation: Computation, instruction: Instruction) -> bool:
        """Return whether an instruction starts a copy, or the copy of a slice, that leaves no device."""
        moved = [instruction] if instruction.opcode == "copy-start" else []
        if instruction.opcode == "async-start":
            moved = [i for _, i in self.program.inside(instruction) if i.opcode not in FREE]
        arrays = (*instruction.arrays, *computation.operand_arrays(instruction))
        copies = all(i.opcode in COPYING for i in moved)
        return bool(moved) and copies and all(array.memory_space != HOST_SPACE for array in arrays)

    def messages(self, computation: Computation, instruction: Instruction) -> tuple[Message, ...]:
        """Return the collective that an instruction is or starts, or those that it wraps."""
        key = (computation.name, instruction.name)
        if key not in self._messages:
            if instruction.opcode == "async-start":
                inside = self.program.inside(instruction)
                found = tuple(message for home, inner in inside for message in self.messages(home, inner))
            else:
                message = message_of(computation, instruction, self.mesh_axes)
                found = () if message is None else (message,)  # a group of one sends nothing
            self._messages[key] = found
        return self._messages[key]

    def carried(self, computation: Computation, fusion: Instruction) -> list[tuple[str, tuple[Message, ...]]]:
        """Return the collectives inside a fusion, each by its channel, or by its name if it has none."""
        found: list[tuple[str, tuple[Message, ...]]] = []
        for home, inner in self.program.inside(fusion):
            if messages := self.messages(home, inner):
                channel = inner.attributes.get("channel_id", "")
                if (computation.name, channel) in self._through_loops:
                    continue  # the computation around the loop begins and ends it
                found.append((channel if channel in self._split_channels else inner.name, messages))
        return found

    def multiplies_in(self, key: Key, format_name: str) -> bool:
        """Return whether a kernel has a product of operands in a format, or was not looked at before."""
        known = self._work.get(key)
        return known is None or any(work.format == format_name for _, _, work in known.products)

    def work(self, computation: Computation, instruction: Instruction) -> KernelWork:
        """Return the work of an instruction on the compute stream."""
        key = (computation.name, instruction.name)
        if key not in self._work:
            continued = [c for home, c in self._through_loops if home == computation.name]
            self._work[key] = kernel_work(self.program, computation, instruction, continued)
        return self._work[key]


def walk(
    machine: Machine,
    executions: Executions,
    mesh_axes: Axes,
    variation: Variation = AS_IT_IS,
    prices: Prices | None = None,
    *,
    schedule: Schedule | None = None,
    routing: Routing | None = None,
    draws: bool = True,
) -> Walked:
    """Return the times of one step, with the difference that `variation` describes.

    Args:
        executions: the trip counts and the branches taken.
        schedule: that of these executions and axes, if the caller walks it several times.
        routing: of experts, for a schedule that is made here.
        draws: whether to note the events, which take as long as the walk.

    Raises:
        ValueError: replica groups of an unknown form.
        InputError: a collective crosses a link without a known rate.
    """
    shared = Schedule(executions, mesh_axes, routing) if schedule is None else schedule
    walker = _Walker(machine, shared, variation, {} if prices is None else prices, draws)
    return walker.computation(executions.program.entry)


class _Walker:
    """Walk each computation once, however often it is called."""

    def __init__(
        self, machine: Machine, schedule: Schedule, variation: Variation, prices: Prices, draws: bool
    ) -> None:
        self.machine, self.variation, self.schedule, self.draws = machine, variation, schedule, draws
        self._prices = prices
        self._known: dict[str, Walked] = {}
        self._transfers: dict[Message, Transfer | None] = {}

    def computation(self, computation: Computation) -> Walked:
        """Return the times of one run."""
        if computation.name not in self._known:
            stream = _Stream(self, computation)
            for kind, instruction in self.schedule.steps(computation):
                stream.run(kind, instruction)
            self._known[computation.name] = stream.finish()
        return self._known[computation.name]

    def transfer(self, messages: Iterable[Message]) -> Transfer | None:
        """Return the first of several collectives that takes time; None where none does."""
        return next(filter(None, map(self._transfer, messages)), None)

    def _transfer(self, message: Message) -> Transfer | None:
        if message not in self._transfers:
            known = self.schedule.routing
            by_choice = known is not None and known.domains == 1
            once = known if self.variation.sends_once and by_choice else None
            found = transfer_of(self.machine, message, self.schedule.num_devices, self.variation.order, once)
            load = known.load if known is not None and message.moves_tokens else 1.0
            factor = (
                load * self.machine.factors.of(found.name) * self.variation.lengthened.get(found.name, 1.0)
            )
            is_hidden = found.axes == self.variation.hidden
            self._transfers[message] = None if is_hidden else replace(found, seconds=found.seconds * factor)
        return self._transfers[message]

    def carried(self, computation: Computation, fusion: Instruction) -> Mapping[str, Transfer]:
        """Return the collectives inside a fusion of `computation`, by channel."""
        found = (
            (channel, self.transfer(each)) for channel, each in self.schedule.carried(computation, fusion)
        )
        return {channel: transfer for channel, transfer in found if transfer is not None}

    def kernel(self, computation: Computation, instruction: Instruction) -> KernelTime:
        """Return the price of an instruction of the compute stream, computed once."""
        key = (computation.name, instruction.name)
        if key not in self._prices:
            known = self.schedule.work(computation, instruction)
            kernel = kernel_of(self.machine, self.schedule.program, computation, instruction, known)
            is_again = self.schedule.phase(computation, instruction) == "recompute"
            factor = self.machine.factors.of(kernel.kind, is_recomputed=is_again)
            if self.schedule.routing is not None and is_of_experts(instruction.op_name):
                factor *= self.schedule.routing.load
            seconds, in_memory = kernel.seconds * factor, kernel.memory_seconds * factor
            self._prices[key] = replace(
                kernel, seconds=seconds, memory_seconds=in_memory, is_recomputed=is_again
            )
        return self._prices[key]


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
        # Seconds that each copy still needs, in the order of their starts.
        self._copies: dict[str, float] = {}
        self._walked = Walked()

    def run(self, kind: str, instruction: Instruction) -> None:
        """Advance the clocks by one step of the schedule."""
        walker, home = self._walker, self._computation
        if (skips := walker.variation.skips) and skips(home, instruction):
            return
        steps = {"kernel": self._kernel, "await": self._await, "copy": self._copy, "loop": self._loop}
        if kind in steps:
            steps[kind](instruction)
        elif kind == "exchange":
            if transfer := walker.transfer(walker.schedule.messages(home, instruction)):
                self._transfer(instruction, transfer)
        elif kind == "carry":
            self._carry(instruction, walker.carried(home, instruction))
        elif kind == "branch":
            executions = walker.schedule.executions
            self._add(walker.computation(executions.branches(instruction)[executions.branch(instruction)]))
        else:
            self._call(instruction)

    def finish(self) -> Walked:
        """Wait for the transfers that no instruction here awaits, and return the times."""
        for link, end in self._started.values():
            self._wait(link, end)
        if self._copies:
            self._wait_for_copy([*self._copies][-1])
        self._walked.seconds = self._now
        return self._walked

    def _await(self, instruction: Instruction) -> None:
        """Wait for an asynchronous transfer or copy. Any other asynchronous work was priced at its start."""
        if instruction.operands[0].name in self._copies:
            self._wait_for_copy(instruction.operands[0].name)
            return
        awaited = self._started.pop(instruction.operands[0].name, None)
        if awaited and instruction.opcode.endswith("-update"):
            self._started[instruction.name] = awaited
        elif awaited:
            self._wait(*awaited)

    def _call(self, instruction: Instruction) -> None:
        for called in self._walker.schedule.program.called_by(instruction):
            self._add(self._walker.computation(called))

    def _copy(self, instruction: Instruction) -> None:
        """Start an asynchronous copy on a TPU; elsewhere it holds the compute clock."""
        is_call = instruction.opcode == "async-start"
        if not self._walker.machine.is_tpu:
            (self._call if is_call else self._kernel)(instruction)
            return
        walker = self._walker
        inside = (
            walker.schedule.program.inside(instruction) if is_call else ((self._computation, instruction),)
        )
        kernels = (walker.kernel(home, i) for home, i in inside if i.opcode not in FREE)
        self._copies[instruction.name] = sum(kernel.memory_seconds for kernel in kernels)

    def _wait_for_copy(self, start: str) -> None:
        """Hold the compute clock until a copy and those before it are done."""
        names = [*self._copies]
        begin, walked = self._now, self._walked
        for name in names[: names.index(start) + 1]:
            self._now += self._copies.pop(name)
        waited = self._now - begin
        if not waited:
            return
        _add_to(walked.total, {MEMORY: waited})
        _add_to(walked.exposed, {MEMORY: waited})
        if self._walker.draws:
            walked.events.append(
                Event(name=MEMORY, stream="compute", begin_seconds=begin, seconds=waited, operation=start)
            )

    def _go_on(self, now: float, memory_seconds: float = 0.0) -> None:
        """Set the compute clock forward; copies run when the kernel beside them leaves the memory to them."""
        free, self._now = max(0.0, now - self._now - memory_seconds), now
        for name, left in self._copies.items():
            spent = min(free, left)
            self._copies[name], free = left - spent, free - spent

    def _carry(self, instruction: Instruction, carried: Mapping[str, Transfer]) -> None:
        """Run a fusion that computes while collectives run, as XLA's TPU backend writes them.

        Where several fusions carry one channel, its transfer begins with the first and the last awaits it.
        """
        ending: list[tuple[str, float]] = []
        for channel, transfer in carried.items():
            if channel not in self._carriers:
                steps = self._walker.schedule.steps(self._computation)
                fusions = [fusion for kind, fusion in steps if kind == "carry"]
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
        walked, name, seconds = self._walked, kernel.kind, kernel.seconds
        if self._walker.draws:
            walked.events.append(self._event(name, "compute", self._now, seconds, instruction))
        gap = self._walker.machine.launch_seconds
        self._go_on(self._now + seconds + gap, kernel.memory_seconds)
        for sums in (walked.total, walked.exposed):
            sums[name] = sums.get(name, 0.0) + seconds
            sums[LAUNCH] = sums.get(LAUNCH, 0.0) + gap
        if kernel.is_recomputed:
            walked.recomputed[name] = walked.recomputed.get(name, 0.0) + seconds
        for format_name, flops in kernel.flops.items():
            walked.flops[format_name] += flops
        for what in kernel.unpriced:
            walked.unpriced[what] += 1

    def _event(self, name: str, stream: str, begin: float, seconds: float, instruction: Instruction) -> Event:
        return Event(
            name=name,
            stream=stream,
            begin_seconds=begin,
            seconds=seconds,
            module=module_of(instruction.op_name) if self._walker.draws else "",
            operation=instruction.name,
        )

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
        begin = max(self._now, self._free[link])
        event = self._event(transfer.name, link, begin, transfer.seconds, instruction)
        if self._walker.draws:
            self._walked.events.append(event)
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
                if self._walker.draws:
                    wait = Event(name=busy.name, stream=WAIT, begin_seconds=begin, seconds=overlap)
                    self._walked.events.append(wait)
        _add_to(self._walked.exposed, exposed)
        self._go_on(max(self._now, end))

    def _loop(self, instruction: Instruction) -> None:
        """Add a loop. One of unknown trip count runs once, and the ledger lists it as unpriced."""
        known = self._walker.schedule.executions.trips(self._computation, instruction)
        trips = 1 if known is None else known
        for role, times in (("body", trips), ("condition", trips + 1)):
            called = self._walker.schedule.program.computations[instruction.called[role][0]]
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
        self._go_on(self._now + times * inner.seconds)
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
