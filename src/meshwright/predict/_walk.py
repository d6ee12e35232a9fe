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

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.hlo import COLLECTIVES, Computation, Executions, Instruction, module_of
from meshwright.ledger import message_of, split_channels

from ._collectives import Order, Transfer, transfer_of
from ._kernels import FREE, Kernel, kernel_of
from ._machine import Machine

LAUNCH = "launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A span of time on one stream, by the clock of the computation in which it was walked."""

    name: str
    stream: str  # compute | inside | between: the links of those classes
    begin_seconds: float
    seconds: float
    module: str  # the model's own scopes, "" without any
    operation: str  # the instruction's name


@dataclass(slots=True)
class Walked:
    """The times of one run of a computation on one device.

    `total` and `exposed`: seconds by slice. For compute they are equal. For a collective, `exposed` is the
    time that the compute clock waited for it. The exposed seconds of all slices sum to `seconds`.
    `events`: for a loop, those of the first round, then one event for all further rounds.
    `transfers`: the axes of each slice that is a collective.
    """

    seconds: float = 0.0
    total: dict[str, float] = field(default_factory=dict[str, float])
    exposed: dict[str, float] = field(default_factory=dict[str, float])
    flops: Counter[str] = field(default_factory=Counter[str])
    unpriced: Counter[str] = field(default_factory=Counter[str])
    links: set[str] = field(default_factory=set[str])
    transfers: dict[str, str] = field(default_factory=dict[str, str])
    events: list[Event] = field(default_factory=list[Event])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Busy:
    """A transfer that occupies its link from `begin` to `end`."""

    name: str
    begin: float
    end: float


Prices = dict[tuple[str, str], Kernel]
"""What kernels cost, by computation and instruction: walks over one program on one machine share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference between the program that is walked and the program as it is.

    `hidden`: axes whose collectives take no time. `order`: another order of the mesh axes on the fleet, from
    which the link of every collective is derived again. `skips`: returns True for instructions to leave out.
    """

    hidden: str | None = None
    order: Order | None = None
    skips: Callable[[Computation, Instruction], bool] | None = None


AS_IT_IS = Change()


def walk(
    machine: Machine,
    executions: Executions,
    mesh_axes: tuple[tuple[str, int], ...],
    change: Change = AS_IT_IS,
    prices: Prices | None = None,
) -> Walked:
    """Return the times of one step, with the difference that `change` describes.

    `executions` supplies the trip counts and the branches taken.

    Raises:
        ValueError: replica groups of an unknown form.
        InputError: a collective crosses a link without a known rate.
    """
    walker = _Walker(machine, executions, mesh_axes, change, {} if prices is None else prices)
    return walker.computation(executions.program.entry)


class _Walker:
    def __init__(
        self,
        machine: Machine,
        executions: Executions,
        mesh_axes: tuple[tuple[str, int], ...],
        change: Change,
        prices: Prices,
    ) -> None:
        self.machine = machine
        self.change = change
        self._prices = prices
        self.executions = executions
        self.program = executions.program
        self.split_channels = split_channels(self.program)
        self.mesh_axes = mesh_axes
        self.num_devices = 1
        for _, size in mesh_axes:
            self.num_devices *= size
        self._known: dict[str, Walked] = {}
        self._carried: dict[tuple[str, str], Mapping[str, Transfer]] = {}

    def computation(self, computation: Computation) -> Walked:
        """Return the times of one run. Each computation is priced once, however often it is called."""
        if computation.name not in self._known:
            stream = _Stream(self, computation)
            for instruction in computation.instructions:
                stream.run(instruction)
            self._known[computation.name] = stream.finish()
        return self._known[computation.name]

    def transfer(self, computation: Computation, instruction: Instruction) -> Transfer | None:
        """Return the collective that an instruction is, starts, or wraps in an async computation, or None."""
        if instruction.opcode == "async-start":
            for name in instruction.all_called:
                inner = self.program.computations[name]
                found = [self.transfer(inner, each) for each in inner.instructions]
                if any(found):
                    return next(each for each in found if each)
            return None
        message = message_of(computation, instruction, self.mesh_axes)
        if message is None:
            return None
        found = transfer_of(self.machine, message, self.num_devices, self.change.order)
        return None if found.axes == self.change.hidden else found

    def carried(self, computation: Computation, instruction: Instruction) -> Mapping[str, Transfer]:
        """Return the collectives inside a fusion of `computation`, by channel."""
        key = (computation.name, instruction.name)
        if key not in self._carried:
            found: dict[str, Transfer] = {}
            if instruction.opcode == "fusion":
                inner = self.program.computations[instruction.all_called[0]]
                for each in inner.instructions:
                    if transfer := self.transfer(inner, each):
                        channel = each.attributes.get("channel_id", "")
                        found[channel if channel in self.split_channels else each.name] = transfer
            self._carried[key] = found
        return self._carried[key]

    def num_carriers(self, computation: Computation, channel: str) -> int:
        """Return how many fusions of `computation` carry a channel."""
        return sum(channel in self.carried(computation, each) for each in computation.instructions)

    def kernel(self, computation: Computation, instruction: Instruction) -> Kernel:
        """Return the price of an instruction of the compute stream, computed once."""
        key = (computation.name, instruction.name)
        if key not in self._prices:
            self._prices[key] = kernel_of(self.machine, self.program, computation, instruction)
        return self._prices[key]


class _Stream:
    """The clocks while one computation runs."""

    def __init__(self, walker: _Walker, computation: Computation) -> None:
        self._walker = walker
        self._computation = computation
        self._now = 0.0
        self._busy: dict[str, list[_Busy]] = {"inside": [], "between": []}
        self._free = {"inside": 0.0, "between": 0.0}  # the time from which a link is free
        self._started: dict[str, tuple[str, float]] = {}  # by instruction: link and end
        self._carriers: dict[str, int] = {}  # by channel: fusions still to come that carry it
        self._carried_until: dict[str, float] = {}
        self._walked = Walked()

    def run(self, instruction: Instruction) -> None:
        """Advance the clocks by one scheduled instruction."""
        opcode = instruction.opcode
        skips = self._walker.change.skips
        if opcode in FREE or (skips and skips(self._computation, instruction)):
            return
        if opcode.endswith(("-done", "-update")):
            self._await(instruction)
        elif opcode == "while":
            self._loop(instruction)
        elif opcode == "conditional":
            executions = self._walker.executions
            chosen = executions.branches(instruction)[executions.branch(instruction)]
            self._add(self._walker.computation(chosen))
        elif self._is_collective(instruction):
            transfer = self._walker.transfer(self._computation, instruction)
            if transfer:  # a group of one sends nothing
                self._transfer(instruction, transfer)
        elif opcode in ("call", "async-start"):
            for called in self._called(instruction):
                self._add(self._walker.computation(called))
        elif carried := self._walker.carried(self._computation, instruction):
            self._carry(instruction, carried)
        else:
            self._kernel(instruction)

    def finish(self) -> Walked:
        """Wait for the transfers that no instruction here awaits, and return the times."""
        for link, end in list(self._started.values()):
            self._wait(link, end)
        self._walked.seconds = self._now
        return self._walked

    def _called(self, instruction: Instruction) -> list[Computation]:
        return [self._walker.program.computations[name] for name in instruction.all_called]

    def _is_collective(self, instruction: Instruction) -> bool:
        if instruction.opcode == "async-start":
            inner = self._called(instruction)
            return any(_is_collective_opcode(each.opcode) for c in inner for each in c.instructions)
        return _is_collective_opcode(instruction.opcode)

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
            left = self._carriers.get(channel)
            if left is None:
                left = self._walker.num_carriers(self._computation, channel)
                self._carried_until[channel] = self._begin(instruction, transfer)
            self._carriers[channel] = left - 1
            if left == 1:
                ending.append((transfer.link, self._carried_until[channel]))
                del self._carriers[channel]
        self._kernel(instruction)
        for link, end in ending:
            self._wait(link, end)

    def _kernel(self, instruction: Instruction) -> None:
        kernel = self._walker.kernel(self._computation, instruction)
        self._note(kernel.kind, "compute", self._now, kernel.seconds, instruction)
        self._compute(kernel.kind, kernel.seconds)
        self._compute(LAUNCH, self._walker.machine.launch_seconds)
        self._walked.flops.update(kernel.flops)
        self._walked.unpriced.update(kernel.unpriced)

    def _note(self, name: str, stream: str, begin: float, seconds: float, instruction: Instruction) -> None:
        self._walked.events.append(
            Event(
                name=name,
                stream=stream,
                begin_seconds=begin,
                seconds=seconds,
                module=module_of(instruction.op_name),
                operation=instruction.name,
            )
        )

    def _compute(self, name: str, seconds: float) -> None:
        self._now += seconds
        _add_to(self._walked.total, {name: seconds})
        _add_to(self._walked.exposed, {name: seconds})

    def _transfer(self, instruction: Instruction, transfer: Transfer) -> None:
        end = self._begin(instruction, transfer)
        if instruction.opcode.endswith("-start"):
            self._started[instruction.name] = (transfer.link, end)
            if not _is_sync(instruction):
                return
        self._wait(transfer.link, end)

    def _begin(self, instruction: Instruction, transfer: Transfer) -> float:
        """Put a transfer on its link as soon as the link is free; return when it ends."""
        begin = max(self._now, self._free[transfer.link])
        end = begin + transfer.seconds
        self._free[transfer.link] = end
        self._note(transfer.name, transfer.link, begin, transfer.seconds, instruction)
        self._busy[transfer.link].append(_Busy(name=transfer.name, begin=begin, end=end))
        self._walked.links.add(transfer.link)
        self._walked.transfers[transfer.name] = transfer.axes
        _add_to(self._walked.total, {transfer.name: transfer.seconds})
        return end

    def _wait(self, link: str, end: float) -> None:
        """Hold the compute clock until `end`. The transfers on the link during the wait are exposed."""
        if end <= self._now:
            return
        exposed: dict[str, float] = {}
        for busy in reversed(self._busy[link]):
            if busy.end <= self._now:
                break
            overlap = min(busy.end, end) - max(busy.begin, self._now)
            if overlap > 0:
                _add_to(exposed, {busy.name: overlap})
        _add_to(self._walked.exposed, exposed)
        self._now = end

    def _loop(self, instruction: Instruction) -> None:
        """Add a loop. One of unknown trip count runs once, and the ledger lists it as unpriced."""
        known = self._walker.executions.trips(self._computation, instruction)
        trips = 1 if known is None else known
        body, condition = (
            self._walker.computation(self._walker.program.computations[instruction.called[role][0]])
            for role in ("body", "condition")
        )
        self._add(body, trips)
        self._add(condition, trips + 1)

    def _add(self, inner: Walked, times: int = 1) -> None:
        """Add `times` runs of another computation. The links that it uses are free only after it ends."""
        self._walked.events += [replace(e, begin_seconds=self._now + e.begin_seconds) for e in inner.events]
        if times > 1 and inner.events:
            further = Event(
                name=f"{times - 1} further rounds like this one",
                stream="compute",
                begin_seconds=self._now + inner.seconds,
                seconds=(times - 1) * inner.seconds,
                module="",
                operation="",
            )
            self._walked.events.append(further)
        self._now += times * inner.seconds
        _add_to(self._walked.total, inner.total, times)
        _add_to(self._walked.exposed, inner.exposed, times)
        for name, flops in inner.flops.items():
            self._walked.flops[name] += times * flops
        for name, count in inner.unpriced.items():
            self._walked.unpriced[name] += times * count
        self._walked.links |= inner.links
        self._walked.transfers |= inner.transfers
        for link in inner.links:
            self._free[link] = max(self._free[link], self._now)


def _add_to(sums: dict[str, float], more: Mapping[str, float], times: int = 1) -> None:
    for name, seconds in more.items():
        sums[name] = sums.get(name, 0.0) + times * seconds


def _is_collective_opcode(opcode: str) -> bool:
    return opcode.removesuffix("-start") in COLLECTIVES


def _is_sync(instruction: Instruction) -> bool:
    config = instruction.backend_config.get("collective_backend_config", {})
    return bool(config.get("is_sync", False))


TRACKS = {
    "compute": "computing",
    "inside": "links inside the fast domain",
    "between": "links between domains",
}
MICROSECONDS = 1e6


def trace_of(events: Iterable[Event], name: str) -> dict[str, Any]:
    """Return the trace as JSON types. Times are microseconds from the beginning of the step on one device."""
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
