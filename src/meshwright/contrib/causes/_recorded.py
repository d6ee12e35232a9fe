"""Hold what a trace of a run says, whichever profiler wrote it.

A reader of each format makes a `Recorded`; the comparison with a prediction takes any. Times are seconds on
the clock of the trace, and only differences of times of one rank are used unless `Recorded.one_clock` is
true. What a format does not say is None or absent: a reader never fills it in. Pure: no jax, no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.hardware import COLLECTIVE_KINDS

COMPUTE_KINDS = ("matmul", "attention", "convolution", "memory-bound")
"""Classes of kernels, as a prediction has them."""
MESSAGE_KINDS = (*COLLECTIVE_KINDS, "collective-permute", "broadcast", "message")
"""What devices send; `message`: the trace does not tell which."""
COPY_KINDS = ("copy-to-host", "copy-to-device", "copy")
"""Copies over the bus, and within a device or between devices (`copy`)."""
OUTSIDE = "outside"
"""The phase of work in no forward pass that is recorded for gradients, no backward pass and no update."""
UNKNOWN = "unknown"
"""Work whose name tells no class; it counts as work, never as a gap."""
LEAST_BUSY = 0.1  # of the devices' time, that the program of the step takes
WORK_KINDS = (*COMPUTE_KINDS, *MESSAGE_KINDS, *COPY_KINDS, "callback", UNKNOWN)
"""What a device does. `callback`: it waits for a function of the host inside of its program."""

HOST_KINDS = (
    "data",  # the next batch is read or made: a data loader's `next`, an iterator
    "compile",  # a program is compiled or captured: XLA, Inductor, Triton, a CUDA graph
    "trace",  # Python is traced to a program: jit's or Dynamo's
    "transfer",  # an array goes to the host or comes from it, as the host sees it
    "wait",  # the host waits for the device: synchronize, block_until_ready, item()
    "launch",  # the host hands a kernel, a graph or a program to the device
    "save",  # a checkpoint, a log or an evaluation writes
    "callback",  # a function of the host that the device's program calls
    "collect",  # Python's garbage collector
    "python",  # any other function of Python or operation of the framework
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of one rank, as the host's annotations or the runs of its program delimit it.

    `begin_seconds` to `end_seconds`: from the begin of this step to the begin of the next, so that what the
    host does between two steps belongs to the first. The last step ends with its last event.
    `name`: of the annotation ("train", "ProfilerStep#7"); "" where runs of the program delimit the steps.
    """

    rank: int
    index: int  # from 0 in the order of the trace, within the rank
    begin_seconds: float
    end_seconds: float
    name: str = ""

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the step to the begin of the next."""
        return self.end_seconds - self.begin_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One event of a device: a kernel, a message, a copy, or the wait for a callback.

    Events that only contain others (loops, calls) are no work. Of a CPU that has no device of its own, the
    innermost operations are its work.

    Args:
        name: as the trace shows it.
        kind: one of `WORK_KINDS`.
        rank: of the process, from 0; `device`: unique in the whole trace, "0/1" for device 1 of rank 0.
        stream: of the device, or the thread; events of one stream do not overlap.
        instruction: the HLO instruction of the compiled program; None where there is no such program.
        program: the compiled module, as the trace names it, with its identity if there is one.
        run: which run of the program; "" if the trace does not say.
        source: "file.py:214", the innermost line of the user's code; None if unknown.
        scope: the path of modules or of named scopes, "model/layers.3/mlp/up_proj"; None if unknown.
        phase: forward | backward | optimizer | `OUTSIDE`, in none of them; None if unknown.
        recomputed: the backward pass runs it again (checkpoint, remat).
        format_name: number format of the operands, as `meshwright formats` names it ("bf16", "fp32").
        shape: the shapes of operands or result as text, only to be shown and compared for equality.
        flops, num_bytes: where the trace has them; of a message, the bytes of the full array on a device.
        group: the devices of a message as text, where the trace tells: "[0,1],[2,3]" or a process group.
        launch: identity that joins it with the host's launch; "" if there is none.
    """

    name: str
    kind: str
    rank: int
    device: str
    stream: str
    begin_seconds: float
    seconds: float
    instruction: str | None = None
    program: str = ""
    run: str = ""
    source: str | None = None
    scope: str | None = None
    phase: str | None = None
    recomputed: bool = False
    format_name: str | None = None
    shape: str | None = None
    flops: float | None = None
    num_bytes: float | None = None
    group: str | None = None
    launch: str = ""

    @property
    def end_seconds(self) -> float:
        """When the event ended."""
        return self.begin_seconds + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """One event of the host that may hold a device up. Spans of one thread may contain others.

    `kind`: one of `HOST_KINDS`. `source`: "file.py:214" of the user's code; None if unknown. `launch`: as of
    `Work`.
    """

    name: str
    kind: str
    rank: int
    thread: str
    begin_seconds: float
    seconds: float
    source: str | None = None
    launch: str = ""

    @property
    def end_seconds(self) -> float:
        """When the event ended."""
        return self.begin_seconds + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Hold what a trace says: the steps of each rank, the work of each device, and what the host did.

    Args:
        profiler: "jax" or "torch", as it is named in words.
        files: what was read.
        steps: of all ranks, in order of rank and index. At least one.
        work, host: in order of begin; what lies before the first step or behind the last is left out.
        num_ranks: how many processes the files are of.
        one_clock: begins of different ranks may be compared.
        programs: by `Work.program`, the text of the optimised HLO that the trace holds; empty without one.
        unread: why events were left out, in words, and how many: shown and counted, never silent.
        notes: what the trace lacks that an answer may need, in words ("no Python stacks").
    """

    profiler: str
    files: tuple[str, ...]
    steps: tuple[RecordedStep, ...]
    work: tuple[Work, ...]
    host: tuple[HostSpan, ...] = ()
    num_ranks: int = 1
    one_clock: bool = False
    programs: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that did any work, in order."""
        return tuple(sorted({each.device for each in self.work}))

    def steps_of(self, rank: int) -> tuple[RecordedStep, ...]:
        """Return the steps of one rank."""
        return tuple(step for step in self.steps if step.rank == rank)


def stem(program: str) -> str:
    """Return the name of a program without the number by which the trace tells its compilations apart.

    >>> stem("jit_step(4)")
    'jit_step'
    """
    return program.partition("(")[0]


def main_program(works: Iterable[Work]) -> str:
    """Return the `stem` of the program that is the step: of the busy ones, the one of most instructions.

    A loop of small programs may keep the devices busier than the step does. "" where no work names a run.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    instructions: defaultdict[str, set[str]] = defaultdict(set)
    for work in works:
        if work.run and work.program:
            seconds[stem(work.program)] += work.seconds
            instructions[stem(work.program)].add(work.instruction or work.name)
    busy = [name for name, each in seconds.items() if each >= LEAST_BUSY * sum(seconds.values())]
    return max(busy, key=lambda name: (len(instructions[name]), seconds[name]), default="")
