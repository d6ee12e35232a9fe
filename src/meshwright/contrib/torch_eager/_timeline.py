"""Make the memory ledger of a step from the history of its storages.

The step is one after the first: what the optimizer keeps is there from its beginning, gradients are not.
This module is imported only while accounting, since `_watch` imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.config import Layout
from meshwright.hardware import Fleet
from meshwright.ledger import Buffer, MemoryLedger, Timeline, allowance, usable_bytes
from meshwright.units import format_bytes

from ._allocator import CachingAllocator, segments_expand
from ._watch import OPTIMIZER, RECOMPUTED, SAVED, TEMPORARY, WORKSPACES, StorageChange, WatchedStorage

NUM_INSTANTS = 200
CUBLAS = "cuBLAS workspace"  # of the allowance
# Names of the ledger, which a JAX step has too, for ours.
CATEGORIES = {"buffers": "model_state", "inputs": "batch"}
PHASES = {RECOMPUTED: "recompute"}
TEMPORARIES = {RECOMPUTED: "recomputed_activations", OPTIMIZER: "optimizer_temporaries"}
LASTING = ("parameters", "buffers", WORKSPACES)
HELD = ("parameters", "model_state", "optimizer_state", "batch")
RULES = {
    "temporaries": ("nothing keeps it", "fallback"),
    "recomputed_activations": ("made while the forward pass is repeated", "structural"),
    "optimizer_temporaries": ("made by the optimizer, and not kept", "structural"),
    "saved_activations": ("autograd keeps it", "structural"),
    WORKSPACES: ("cuBLAS takes it for the products of one thread, and keeps it", "structural"),
}


def ledger_name(category: str) -> str:
    """Return the name that the ledger has for a category of storages."""
    return CATEGORIES.get(category, category.replace(" ", "_"))


@dataclass(slots=True)
class _Alive:
    """A storage at one moment: its bytes, and how often it is saved for the backward pass."""

    storage: WatchedStorage
    num_bytes: int = 0
    saved: int = 0
    since: int = 0

    @property
    def category(self) -> str:
        kind = self.storage.category
        if kind == TEMPORARY:
            kind = SAVED if self.saved else TEMPORARIES.get(self.storage.born.phase, TEMPORARY)
        return ledger_name(kind)


def history_of(changes: Iterable[StorageChange]) -> list[StorageChange]:
    """Return the changes of a step after the first, in order.

    What was made outside the counted phases, such as the optimizer's state, and outlives them is put first.
    So are parameters and buffers that the first step made in place of others, and workspaces of libraries.
    """
    early: set[int] = set()  # numbers of storages that were made outside the counted phases
    at_start: dict[int, StorageChange] = {}
    counted: list[StorageChange] = []
    for change in changes:
        number = change.storage.number
        if not change.phase and change.storage.born.phase == "":
            early.add(number)
        if change.storage.category not in LASTING and (change.phase or number not in early):
            counted.append(change)
            continue
        before = at_start[number].num_bytes if number in at_start else 0
        at_start[number] = StorageChange(0, "", change.storage, num_bytes=before + change.num_bytes)
    return [*(change for change in at_start.values() if change.num_bytes), *counted]


def reserved_bytes(changes: Iterable[StorageChange]) -> int:
    """Return what the caching allocator has taken after two steps; the second has the optimizer's state."""
    allocator = CachingAllocator(expandable=segments_expand())
    log = list(changes)
    _replay(allocator, log, lambda change: change.storage.number)
    lasting = {c.storage.number for c in log if not c.storage.born.phase or c.storage.category in LASTING}
    for number in {change.storage.number for change in log} - lasting:
        if allocator.holds(number):  # gradients and outputs, which the next step makes again
            allocator.free(number)
    again = [change for change in log if change.phase and change.storage.number not in lasting]
    _replay(allocator, again, lambda change: -change.storage.number)
    return allocator.reserved_bytes


def _replay(
    allocator: CachingAllocator, log: Iterable[StorageChange], name: Callable[[StorageChange], int]
) -> None:
    sizes = Counter[int]()
    for change in log:
        number = name(change)
        if not change.num_bytes:
            continue
        sizes[number] += change.num_bytes
        if allocator.holds(number):
            allocator.free(number)
        if sizes[number] > 0:
            allocator.allocate(number, sizes[number], change.stream)


def workspace_bytes(fleet: Fleet, layout: Layout) -> int:
    """Return the bytes that cuBLAS takes for the products of one thread; 0 where it does not run."""
    return allowance(fleet, layout.axes).get(CUBLAS, 0)


def memory_of(
    history: list[StorageChange],
    num_instants: int,
    fleet: Fleet,
    layout: Layout,
    reserved_bytes: int | None = None,
) -> MemoryLedger:
    """Return the memory of one rank through a step.

    Args:
        history: from `history_of`.
        num_instants: operations of the step.
        reserved_bytes: what the allocator has taken at the end; the peak of what is alive if None.
    """
    peak_place, peak_bytes = _peak(history)
    alive = _alive_after(history[: peak_place + 1])
    at_peak = Counter[str]()
    for entry in alive:
        at_peak[entry.category] += entry.num_bytes
    beside, usable = allowance(fleet, layout.axes), usable_bytes(fleet)
    beside.pop(CUBLAS, None)  # the history has a workspace for each thread with products
    reserved, notes = peak_bytes if reserved_bytes is None else reserved_bytes, list[str]()
    room = reserved if usable is None else usable - sum(beside.values())
    if peak_bytes <= room < reserved:
        notes.append(
            f"the allocator would reserve {format_bytes(reserved)}; when the device is full it gives back "
            "segments that nothing uses, and asks again, which takes time"
        )
        reserved = room
    by_category = dict(at_peak.most_common())
    if idle := reserved - peak_bytes:
        by_category["fragmentation"] = idle
    peak_instant = history[peak_place].instant if history else 0
    ends = _ends(history)
    return MemoryLedger(
        reserved_bytes=reserved,
        argument_bytes=sum(size for name, size in by_category.items() if name in HELD),
        peak_bytes=peak_bytes,
        allowance=beside,
        usable_bytes=usable,
        by_category=by_category,
        optimizer_state_by_moment={},
        buffers=tuple(_buffer(entry, ends, num_instants) for entry in alive),
        timeline=_timeline(history, num_instants, peak_instant),
        notes=tuple(notes),
    )


def _peak(history: list[StorageChange]) -> tuple[int, int]:
    """Return the place of the change after which most is alive, and those bytes."""
    live = most = place = 0
    for number, change in enumerate(history):
        live += change.num_bytes
        if live > most:
            most, place = live, number
    return place, most


def _walk(history: Iterable[StorageChange]) -> Iterator[tuple[StorageChange, _Alive, str, int]]:
    """Yield each change with its storage after it, and the category and bytes that it had before."""
    alive: dict[int, _Alive] = {}
    for change in history:
        entry = alive.get(change.storage.number)
        if entry is None:
            entry = alive[change.storage.number] = _Alive(change.storage)
        category, before = entry.category, entry.num_bytes
        if not before and change.num_bytes:
            entry.since = change.instant
        entry.num_bytes += change.num_bytes
        entry.saved += change.saved
        yield change, entry, category, before


def _alive_after(history: Iterable[StorageChange]) -> list[_Alive]:
    """Return what is alive after the last change, largest first."""
    entries = {entry.storage.number: entry for _, entry, _, _ in _walk(history)}
    return sorted((e for e in entries.values() if e.num_bytes), key=lambda e: -e.num_bytes)


def _timeline(history: list[StorageChange], num_instants: int, peak_instant: int) -> Timeline:
    count = min(NUM_INSTANTS, num_instants)
    wanted = sorted({round(place * num_instants / max(count, 1)) for place in range(count)} | {peak_instant})
    live = Counter[str]()
    samples: list[dict[str, int]] = []
    most = Counter[str]()
    # At the instant of the peak the most counts, at any other what is left when its operation has ended.
    for change, entry, category, before in _walk(history):
        while len(samples) < len(wanted) and change.instant > wanted[len(samples)]:
            samples.append(dict(most if wanted[len(samples)] == peak_instant else live))
        live[category] -= before
        live[entry.category] += entry.num_bytes
        if change.instant == peak_instant and live.total() > most.total():
            most = live.copy()
    while len(samples) < len(wanted):
        samples.append(dict(most if wanted[len(samples)] == peak_instant else live))
    names = sorted({name for sample in samples for name, size in sample.items() if size})
    return Timeline(
        instants=tuple(wanted),
        last_instant=num_instants,
        peak_instant=peak_instant,
        by_category={name: tuple(sample.get(name, 0) for sample in samples) for name in names},
    )


def _ends(history: Iterable[StorageChange]) -> Mapping[int, int]:
    """Return the instant at which each storage lost its last byte."""
    ends: dict[int, int] = {}
    for change, entry, _, _ in _walk(history):
        ends.pop(change.storage.number, None)
        if not entry.num_bytes:
            ends[change.storage.number] = change.instant
    return ends


def _buffer(entry: _Alive, ends: Mapping[int, int], num_instants: int) -> Buffer:
    storage, born = entry.storage, entry.storage.born
    rule, certainty = RULES.get(entry.category, ("PyTorch says so", "structural"))
    return Buffer(
        name=f"{born.operation or 'held'}.{storage.number}",
        num_bytes=entry.num_bytes,
        shape=f"{storage.format}[{','.join(map(str, storage.shape))}]",
        format=storage.format,
        category=entry.category,
        moment="",
        rule=rule,
        certainty=certainty,
        phase=PHASES.get(born.phase, born.phase or "other"),
        module=(born.module or "").replace(".", "/"),
        operation=born.operation,
        source_line=born.line,
        first_instant=entry.since,
        last_instant=ends.get(storage.number, num_instants),
    )
