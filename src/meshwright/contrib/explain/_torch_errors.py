"""Read the sentence of PyTorch about memory that was too small, in its wordings from 1.0 to 2.13.

PyTorch keeps what tensors gave back in a cache of its own. "Reserved but unallocated" is the free memory in
that cache, in pieces between tensors; a request for which no piece is large enough fails although
their sum is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.units import format_bytes

from ._explanation import SIZE, Explanation, Setting, size_of
from ._log_window import Window, failed_at

LONGEST = 4000  # characters of the sentences after "Tried to allocate"
_TRIED = re.compile(rf"Tried to allocate {SIZE}")
_NAMED = {
    "capacity": (rf"total capac?ity of {SIZE}", rf"{SIZE} total capacity", rf"max allowed: {SIZE}"),
    "free": (rf"of which {SIZE} is free", rf"{SIZE} free"),
    "in use": (rf"this process has {SIZE} memory in use",),
    "allowed": (rf"{SIZE} allowed;",),
    "tensors": (
        rf"Of the allocated memory {SIZE} is allocated by PyTorch",
        rf"{SIZE} already allocated",
        rf"MPS allocated: {SIZE}",
    ),
    "pieces": (rf"{SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
    "cached": (rf"{SIZE} cached",),
    "private pools": (rf"with {SIZE} allocated in private pools",),
    "other": (rf"other allocations: {SIZE}",),
}
_FIGURES = {
    name: tuple(re.compile(pattern.replace("capac?ity", "capaci?ty")) for pattern in patterns)
    for name, patterns in _NAMED.items()
}
_OTHERS = re.compile(rf"Process (\d{{1,10}}) has {SIZE} memory in use")
_DEVICE = re.compile(r"\bGPU (\d{1,4})\b|\(NPU (\d{1,4});")
WHOLE = "PyTorch's out-of-memory error"


def torch_error(path: str, window: Window) -> Explanation | None:
    """Return what PyTorch's sentence says; None if the window has none."""
    tried = _TRIED.search(window.text, max(0, window.at - 20))
    size = None if tried is None else size_of(tried[1], tried[2])
    if tried is None or size is None:
        return None
    start = max(window.text.rfind("\n", 0, tried.start()), tried.start() - 500, 0)
    words = " ".join(window.text[start : tried.start() + LONGEST].split())
    figures = _figures(words)
    others = sum(size_of(found[2], found[3]) or 0 for found in _OTHERS.finditer(words))
    unused = figures.get("reserved", 0) - figures["tensors"] if "tensors" in figures else 0
    pieces = figures.get("pieces", max(0, unused) or figures.get("cached"))
    free, capacity = figures.get("free"), figures.get("capacity")
    if "allowed" in figures and free is not None and "in use" in figures:
        free = max(0, min(free, figures["allowed"] - figures["in use"]))
    elif (
        free is None and capacity is not None and "other" in figures
    ):  # MPS: what is allowed, less what is held
        free = max(0, capacity - figures["other"] - figures.get("tensors", 0))
    place, function = failed_at(window)
    missing = None if free is None else size - free
    parts = _parts(figures, size, pieces, others)
    return Explanation(
        path=path,
        kind=WHOLE,
        lead=_lead(words, size, free, capacity, place, function),
        needed_bytes=None if "tensors" not in figures else figures["tensors"] + size,
        usable_bytes=capacity,
        missing_bytes=missing,
        parts=parts,
        settings=tuple(_settings(size, free, pieces, others, figures)),
        notes=tuple(_notes(size, free, pieces, capacity)),
    )


def _figures(words: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, patterns in _FIGURES.items():
        for pattern in patterns:
            if (match := pattern.search(words)) and (size := size_of(match[1], match[2])) is not None:
                found[name] = size
                break
    return found


def _lead(words: str, size: int, free: int | None, capacity: int | None, place: str, function: str) -> str:
    device = _DEVICE.search(words)
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    name = f" on device {device[1] or device[2]}" if device else ""
    asked = f"{place} ({function})" if place else "PyTorch"
    there = "" if free is None else f" where {format_bytes(free)}{of} were free{name}"
    return f"{asked} asked for {format_bytes(size)} more{there}"


def _parts(figures: dict[str, int], size: int, pieces: int | None, others: int) -> dict[str, int]:
    """Return what held the device's memory, in the order in which one reads it."""
    made = {"in tensors": figures.get("tensors"), "free in PyTorch's cache, in pieces": pieces}
    if "in use" in figures and "tensors" in figures and pieces is not None:
        rest = figures["in use"] - figures["tensors"] - pieces
        made["of this process outside PyTorch: CUDA's context, NCCL, libraries"] = max(0, rest)
    made["of other processes"] = others or figures.get("other")
    made["free"] = figures.get("free")
    made["asked for"] = size
    return {name: amount for name, amount in made.items() if amount is not None}


def _settings(
    size: int, free: int | None, pieces: int | None, others: int, figures: dict[str, int]
) -> Iterator[Setting]:
    if pieces:
        together = "" if free is None else f"; with what was free it is {format_bytes(pieces + free)}"
        yield Setting(
            change="PYTORCH_ALLOC_CONF=expandable_segments:True",
            saved_bytes=pieces,
            why=f"{format_bytes(pieces)} lay free in pieces of the cache{together}. Before PyTorch 2.9 the "
            "variable is PYTORCH_CUDA_ALLOC_CONF",
        )
    if others:
        yield Setting(
            change="end the other processes on the device",
            saved_bytes=others,
            why="they hold it; `nvidia-smi` names them",
        )
    if "allowed" in figures and figures["allowed"] < figures.get("capacity", 0):
        yield Setting(
            change="torch.cuda.set_per_process_memory_fraction",
            saved_bytes=figures["capacity"] - figures["allowed"],
            why=f"this process may take {format_bytes(figures['allowed'])} of the device",
        )
    if pools := figures.get("private pools"):
        yield Setting(
            change="fewer CUDA graphs",
            saved_bytes=pools,
            why="their private pools hold it from one replay on",
        )
    yield Setting(
        change="meshwright weigh module.py:make_step --on FLEET",
        saved_bytes=None,
        why="the sentence does not say what the tensors are: weighing the step does, without a GPU",
    )


def _notes(size: int, free: int | None, pieces: int | None, capacity: int | None) -> Iterator[str]:
    if free is not None and free >= size:
        yield (
            f"{format_bytes(free)} were free and {format_bytes(size)} were asked for: the device had no "
            "piece of "
            "that size, or another process took it in between"
        )
    elif pieces is not None and free is not None and capacity and pieces + free < size:
        yield (
            "fragmentation alone is not the cause: all free pieces together are less than what was asked for"
        )
    yield (
        "which tensors held it: torch.cuda.memory._record_memory_history() before the run, and "
        "torch.cuda.memory._dump_snapshot(FILE) where it fails; `meshwright explain FILE` reads the file"
    )
