"""List the causes that are planted in steps and what `reconcile` should call each; reconcile traces of them.

`_planted_jax`, `_planted_torch` and `_planted_gloo` plant and trace them. This module imports none of them:
the list can be read where PyTorch is not installed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshwright as mw

HERE = Path(__file__).parent
NAP = 0.02  # seconds
RANKS = 2  # processes of a step over gloo


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A cause that is planted in a step.

    Args:
        name: what is planted, as a trace of it is called.
        kind: what `reconcile` should call it.
        where: how the place begins that it should name.
        label: how the cause's own name should begin.
        seconds: of a mean step, where the plant itself says how many.
        is_clocked: it is planted between the work of the steps, where a clock can count its seconds.
    """

    name: str
    kind: str
    where: str = ""
    label: str = ""
    seconds: float | None = None
    is_clocked: bool = False
    num_devices: int = 1


_JAX, _TORCH = "_planted_jax.py", "_planted_torch.py"
JAX = (
    Plant(name="a sleep", kind="host", where=_JAX, seconds=NAP),
    Plant(name="a function of the host", kind="callback", where=_JAX, seconds=NAP),
    Plant(name="copies to the host", kind="copy", where=_JAX, is_clocked=True),
    Plant(name="other shapes", kind="compilation", where=_JAX),
    Plant(name="fp64", kind="wide product", where=_JAX),
    Plant(name="recomputation", kind="recomputation", where=_JAX),
    Plant(name="a slow loader", kind="input", where=_JAX, seconds=NAP),
    Plant(name="a pause of some steps", kind="differing steps", where=_JAX, seconds=2 * NAP / 4),
    Plant(name="small programs", kind="small programs", where=_JAX, is_clocked=True),
    Plant(name="a sort in each layer", kind="extra work", where=_JAX),
    Plant(name="a gather in each layer", kind="extra message", where=_JAX, num_devices=4),
    Plant(name="a slow device", kind="straggler", num_devices=4),
)
TORCH = (
    Plant(name="a slow data loader", kind="input", seconds=NAP),
    Plant(name="numbers one by one", kind="synchronization", is_clocked=True),
    Plant(name="a sleep", kind="host", seconds=NAP),
    Plant(name="garbage", kind="collect", is_clocked=True),
    Plant(name="a checkpoint", kind="differing steps", is_clocked=True),
    Plant(name="an evaluation", kind="extra work", is_clocked=True),
    Plant(name="recomputation", kind="recomputation"),
    Plant(name="norms of gradients", kind="extra work", is_clocked=True),
    Plant(name="fp64", kind="wide product"),
    Plant(name="other shapes", kind="compilation"),
    Plant(name="twice", kind="extra work"),
)
GLOO = (
    Plant(name="broadcasts", kind="extra message", label="broadcast", is_clocked=True, num_devices=RANKS),
    Plant(name="a second sum", kind="extra message", label="all-reduce", is_clocked=True, num_devices=RANKS),
    Plant(name="a late rank", kind="straggler", label="rank 1", is_clocked=True, num_devices=RANKS),
)
UNPLANTED_JAX = {"nothing": 1, "nothing, not awaited": 1, "nothing, on four devices": 4}  # devices
UNPLANTED_TORCH = ("nothing", "nothing, three steps", "nothing, a quick data loader")
UNPLANTED_GLOO = ("nothing",)


class Clock:
    """Add up the seconds of what is planted between the work of the steps, and write them beside the trace.

    What runs inside of a compiled program has no clock of its own.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def start(self) -> None:
        """Forget what was counted so far."""
        self.seconds = 0.0

    def write(self, trace: Path, steps: float) -> None:
        """Write the seconds of one of the steps."""
        _clocked_file(trace).write_text(repr(self.seconds / steps))

    def __call__(self, planted: Callable[..., Any] | None, *arguments: Any) -> Any:
        """Call what is planted, if anything is."""
        if planted is None:
            return None
        begin = time.perf_counter()
        found = planted(*arguments)
        self.seconds += time.perf_counter() - begin
        return found


def _clocked_file(trace: Path) -> Path:
    return trace.with_name(f"{trace.name}.seconds")


def seconds_of(plant: Plant, trace: Path) -> float | None:
    """Return the planted seconds of a step; None where nothing tells them."""
    return float(_clocked_file(trace).read_text()) if plant.is_clocked else plant.seconds


def trace_processes(program: str, folder: Path, names: Iterable[str]) -> None:
    """Trace steps of `torch` or `gloo` in processes of their own: the profiler of stacks ends busy ones."""
    command = [sys.executable, str(HERE / f"_planted_{program}.py"), str(folder), *names]
    subprocess.run(command, check=True, capture_output=True, timeout=900)


def torch_gap(trace: Path) -> mw.Gap:
    """Return the gap of a traced step of PyTorch."""
    return mw.reconcile(f"{HERE / '_planted_torch.py'}:program", on="1xCPU", trace=trace)


def gloo_gap(traces: Iterable[Path]) -> mw.Gap:
    """Return the gap of a step that processes over gloo traced, a file each."""
    program = f"{HERE / '_planted_gloo.py'}:program"
    return mw.reconcile(program, on=f"{RANKS}xCPU", layout=f"data={RANKS}", trace=sorted(traces))


def rank_of(plant: Plant, gap: mw.Gap) -> int | None:
    """Return the place of a planted cause among those that are named, from 1; None if it is not named."""
    for place, cause in enumerate(gap.causes, 1):
        named = cause.kind == plant.kind and cause.name.startswith(plant.label)
        if named and cause.where.startswith(plant.where):
            return place
    return None


def parts_sum_to_the_gap(gap: mw.Gap) -> bool:
    """Return whether the seconds of the causes and of the rest are those of the gap."""
    named = sum(cause.seconds for cause in gap.causes)
    return abs(named + gap.unexplained_seconds - gap.gap_seconds) <= 1e-9 * abs(gap.measured_seconds)
