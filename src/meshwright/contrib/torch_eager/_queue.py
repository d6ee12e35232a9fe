"""Time a step whose kernels a host launches one by one, on streams that wait for each other by events.

The host's clock advances with each launch. A kernel begins when it has been launched, its stream is free, and
what its stream waits for is done. A message also waits for its link. The main stream's time, from the first
launch to the end of all streams, is the step: each part of it is a kernel, a wait for a message, or a gap in
which the host had launched nothing.
Not modelled: kernels and messages that slow each other down, a host that reads numbers from the device, and
one that is ahead of the device when the step begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.ledger import Message
from meshwright.predict import LAUNCH, WAIT, Event, Machine, Transfer, Walked, names_of, runs, transfer_of

MAIN = 0  # the stream of the step


def unaligned_share(chip_name: str, elements: int) -> float | None:
    """Return the share of the peak that products in 16 bits reach at an alignment; None where not known.

    Args:
        elements: the largest power of 2, up to 8, that divides the first element's place in each row of the
            operands and the result. cuBLAS's fast kernels need 8, that is 16 bytes.
    """
    measured = runs()["unaligned"]
    if not any(chip_name in names_of(system) for system in measured["systems"]):
        return None
    share: float | None = measured["shares"].get(str(elements))
    return share


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a stream: its time, and what ran there last."""

    seconds: float
    name: str


class Queue:
    """The streams of one device while a host launches a step; `walked` holds the times so far.

    Streams are numbers, of which `MAIN` is the one of the step.
    """

    def __init__(self, machine: Machine, num_devices: int) -> None:
        self.machine = machine
        self.walked = Walked()
        self._num_devices = num_devices
        self._host = 0.0
        self._ends: dict[int, Mark] = {MAIN: Mark(0.0, LAUNCH)}
        self._free: dict[str, float] = {}  # by link: when it has carried all messages so far
        self._transfers: dict[Message, Transfer] = {}

    def host(self, seconds: float) -> None:
        """Let the host work for some seconds, as it does to launch a kernel."""
        self._host += seconds

    def kernel(self, stream: int, kind: str, seconds: float, flops: dict[str, int] | None = None) -> None:
        """Run a kernel of a class of work; `flops` by the format in which they run."""
        self.walked.flops.update(flops or {})
        self._run(stream, kind, seconds, link=None)
        gap = self.machine.launch_seconds
        if stream == MAIN:
            self._add(LAUNCH, gap, is_exposed=True)
        self._ends[stream] = Mark(self._ends[stream].seconds + gap, kind)

    def message(self, stream: int, message: Message) -> None:
        """Send a message.

        Raises:
            InputError: it crosses a link for which the catalog has no figure.
        """
        if message not in self._transfers:
            self._transfers[message] = transfer_of(self.machine, message, self._num_devices)
        transfer = self._transfers[message]
        self.walked.transfers[transfer.name] = transfer.axes
        self.walked.links.add(transfer.link)
        self._run(stream, transfer.name, transfer.seconds, link=transfer.link)

    def mark(self, stream: int) -> Mark:
        """Return a mark at the end of a stream's work so far."""
        return self._ends.get(stream, Mark(0.0, LAUNCH))

    def wait(self, stream: int, mark: Mark) -> None:
        """Let a stream wait for a mark."""
        end = self.mark(stream)
        if mark.seconds <= end.seconds:
            return
        if stream == MAIN:
            self._wait_until(mark.seconds, mark.name)
        self._ends[stream] = mark

    def join(self) -> None:
        """Let the main stream wait for all others."""
        for stream in sorted(self._ends, key=lambda stream: self._ends[stream].seconds):
            self.wait(MAIN, self._ends[stream])

    def finish(self) -> Walked:
        """Return the times of the step, at its end."""
        self.join()
        self.walked.seconds = self._ends[MAIN].seconds
        return self.walked

    def _run(self, stream: int, name: str, seconds: float, link: str | None) -> None:
        end = self.mark(stream)
        begin = max(end.seconds, self._host, 0.0 if link is None else self._free.get(link, 0.0))
        if stream == MAIN and begin > end.seconds:
            self._wait_until(begin, LAUNCH if self._host >= begin else name)
        if link is not None:
            self._free[link] = begin + seconds
        self._add(name, seconds, is_exposed=stream == MAIN)
        where = link or ("compute" if stream == MAIN else f"stream {stream}")
        self.walked.events.append(Event(name=name, stream=where, begin_seconds=begin, seconds=seconds))
        self._ends[stream] = Mark(begin + seconds, name)

    def _wait_until(self, seconds: float, name: str) -> None:
        """Let the main stream wait for a message, for another stream's kernel, or for the host."""
        begin = self._ends[MAIN].seconds
        for_host = name == LAUNCH
        self._add(name, seconds - begin, is_exposed=True, is_wait=not for_host)
        if not for_host:
            event = Event(name=name, stream=WAIT, begin_seconds=begin, seconds=seconds - begin)
            self.walked.events.append(event)

    def _add(self, name: str, seconds: float, *, is_exposed: bool, is_wait: bool = False) -> None:
        """Add seconds of a class of work: to its total, but for waits, and to the step if it is exposed."""
        walked = self.walked
        walked.total[name] = walked.total.get(name, 0.0) + (0.0 if is_wait else seconds)
        if is_exposed:
            walked.exposed[name] = walked.exposed.get(name, 0.0) + seconds
