"""Read the events of a trace's file, and tell the class of work of a kernel from its name.

Two forms are read. An XPlane file is what `jax.profiler` writes; its events name instructions of the compiled
program. A Kineto file is what `torch.profiler` writes as Chrome's trace events, perhaps packed by gzip.

A trace may come from anywhere, so each field that is used is checked, and an event that cannot be true is
refused with its place. `_traces` makes a step of the events.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import read_bytes, reason

from ._chrome_events import AGAIN, HINT, ChromeEvent, ChromeTrace, possible_seconds

NANOSECOND = 1e-9
XPLANE = ".xplane.pb"
MOST_XPLANE_BYTES = 2**31 - 1  # protobuf's own limit
GPU_PLANE = "/device:GPU:"
PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")  # the last until PyTorch 1.12
NCCL = "nccl"
# By class, what the names of its kernels hold in small letters; the first that is found counts. Without
# repeats, so that a search takes time in proportion to the name.
MESSAGE_NAMES = {  # behind the first "nccl"
    "all-gather": r"allgather",
    "reduce-scatter": r"reducescatter",
    "all-reduce": r"allreduce",
    "all-to-all": r"alltoall|sendrecv",
}
KERNEL_NAMES = {
    "attention": r"flash|fmha|attention|attn_[fb]wd|sdpa|cudnn::fusion::(compute_dot_do_o|convert_dq)",
    "convolution": r"conv(?!ert)|wgrad2d|dgrad2d|winograd",
    "matmul": r"gemm|cutlass|nvjet|cublas|splitk|s16816|s1688|xmma|cijk_|matmul|^bmm_",
    "memory-bound": r"memcpy|memset",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One kernel or message of a trace.

    `name`: of the instruction or of the CUDA graph; in a trace of torch.profiler, of the kernel. `run`: which
    repeat. `kernel`: of a GPU, its own name. `launch`: the launch of a GPU's kernel or of its graph.
    """

    name: str
    module: str
    device: str
    run: str
    begin_seconds: float
    seconds: float
    kernel: str = ""
    launch: str = ""


@functools.lru_cache(maxsize=2**16)  # a trace has thousands of events of one name
def class_of_kernel(name: str) -> str | None:
    """Return the class of work of a kernel by its name; None if the name tells none.

    >>> class_of_kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)")
    'all-reduce'
    """
    small = name.lower()
    _, nccl, behind = small.partition(NCCL)
    for kind, pattern in MESSAGE_NAMES.items() if nccl else ():
        if re.search(pattern, behind):
            return kind
    return next((kind for kind, pattern in KERNEL_NAMES.items() if re.search(pattern, small)), None)


def xplane_files(path: Path) -> tuple[Path, ...]:
    """Return the newest XPlane files below a folder, one for each host, or the file itself.

    Raises:
        InputError: there are none.
    """
    if not path.is_dir():
        return (path,)
    found = sorted(path.rglob(f"*{XPLANE}"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise InputError(f"{path} holds no file that ends in {XPLANE}", hint=HINT)
    return tuple(file for file in found if file.parent == found[-1].parent)


def is_xplane(path: Path) -> bool:
    """Return whether a path is an XPlane file or a folder; otherwise it is read as Kineto's JSON.

    Raises:
        InputError: nothing is there, or a file of another kind.
    """
    if not path.exists():
        raise InputError(f"no trace at {path}", hint=HINT)
    if path.is_dir() or path.name.endswith(XPLANE):
        return True
    if not path.name.endswith((".json", ".json.gz")):
        raise InputError(f"{path} is no trace by its name", hint=HINT)
    return False


def xplane_planes(path: Path) -> Iterator[tuple[int, Path, Any]]:
    """Yield the number of a host, its file, and each plane of it as jax's `ProfileData` has it.

    Raises:
        InputError: a file cannot be read.
    """
    from jax.profiler import ProfileData  # lazily: reading a record needs no jax

    for number, file in enumerate(xplane_files(path)):
        try:
            planes = ProfileData.from_serialized_xspace(read_bytes(file, MOST_XPLANE_BYTES)).planes
            yield from ((number, file, plane) for plane in planes)
        except InputError:
            raise
        except Exception as broken:  # the parser's own kinds differ by release
            raise InputError(f"{file} cannot be read as a trace: {reason(broken)}", hint=HINT) from broken


def xplane_events(path: Path) -> Iterator[TraceEvent]:
    """Yield the events of XPlane files that name an instruction of a compiled program.

    Raises:
        InputError: a file cannot be read, or an event takes a time that cannot be.
    """
    for number, file, plane in xplane_planes(path):
        yield from _events_of(plane, number, file)


def _events_of(plane: Any, number: int, file: Path) -> Iterator[TraceEvent]:
    for line in plane.lines:
        for event in line.events:
            stats = stats_of(event)
            if "hlo_op" in stats:
                yield event_of(event, stats, plane, number, file)


def event_of(event: Any, stats: Mapping[str, Any], plane: Any, number: int, file: Path) -> TraceEvent:
    """Return an event of an XPlane that names an instruction, with its statistics `stats`.

    Raises:
        InputError: it takes a time that cannot be.
    """
    name = str(stats["hlo_op"])
    return TraceEvent(
        name=name,
        module=f"{stats.get('hlo_module', '')} {stats.get('program_id', '')}",
        device=f"{number} {stats.get('device_ordinal', plane.name)}",
        run=str(stats.get("run_id", "")),
        begin_seconds=event.start_ns * NANOSECOND,
        seconds=possible_seconds(event.duration_ns * NANOSECOND, f"{file}: the event {name[:100]!r}"),
        kernel=event.name if plane.name.startswith(GPU_PLANE) else "",
        launch=str(stats.get("correlation_id", "")),
    )


def stats_of(event: Any) -> dict[str, Any]:
    """Return the statistics of an event of an XPlane, by name."""
    with warnings.catch_warnings():
        # Python 3.13 warns when jaxlib makes the type of these pairs; as an error that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {name: value for name, value in event.stats if name is not None}


def kineto_events(path: Path) -> tuple[list[TraceEvent], int]:
    """Return the kernels of a trace of torch.profiler, and how many steps it says that it holds.

    `ProfilerStep#` events delimit the steps; without them there is one.

    Raises:
        InputError: the file is no such trace, a field of it is of another kind, or it has no kernels.
    """
    kernels: list[TraceEvent] = []
    steps: set[str] = set()
    for event in ChromeTrace(path):
        name = event.text("name")
        if PROFILER_STEP.fullmatch(name):
            steps.add(name)
        if event.text("ph") == "X" and event.text("cat") in OF_GPU:
            kernels.append(_kernel_of(event))
    if not kernels:
        hint = "trace with ProfilerActivity.CUDA, and export_chrome_trace"
        raise InputError(f"{path} has no GPU kernels", hint=hint)
    if not any(kernel.seconds for kernel in kernels):
        raise InputError(f"{path}: each of its {len(kernels)} GPU kernels takes no time", hint=AGAIN)
    return kernels, max(1, len(steps))


def _kernel_of(event: ChromeEvent) -> TraceEvent:
    return TraceEvent(
        name=event.name,
        module="",
        device=event.device,
        run="",
        begin_seconds=event.begin_seconds,
        seconds=event.seconds,
    )
