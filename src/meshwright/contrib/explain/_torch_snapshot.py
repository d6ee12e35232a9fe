"""Read a memory snapshot of PyTorch: which blocks a device held, by the frame of the user's source.

A snapshot (`torch.cuda.memory._dump_snapshot`) has the allocator's segments with their blocks as they were
when it was written, and with `_record_memory_history` the events before. Where an event says that memory ran
out, what lived at that event is explained, because tensors are gone by the time an exception is caught.
Otherwise it is what lived at the highest point of the events, or in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.units import format_bytes

from ._explanation import MOST_BYTES, Explanation, Held, Setting, summed
from ._log_window import is_own, place_words
from ._plain_pickle import NotPlain, plain_pickle

MOST_FILE_BYTES = 2**29
KIND = "memory snapshot of PyTorch"
HINT = "give the file of torch.cuda.memory._dump_snapshot(FILE), with at most max_entries=100000 events"
ACTIVE, PENDING = "active_allocated", ("active_awaiting_free", "active_pending_free")
_Frames = Any  # a list of dicts, as far as a stranger's file keeps to it


@dataclass(frozen=True, slots=True)
class _Block:
    num_bytes: int
    frames: _Frames


class _Odd(ValueError):
    """A snapshot that is not what PyTorch writes, in words that follow a colon."""


def torch_snapshot(path: Path, content: bytes) -> Explanation:
    """Return what a snapshot says of the device that ran out of memory, else of the fullest one.

    Raises:
        InputError: it is no pickle of plain data, or no such snapshot.
    """
    try:
        return _Snapshot(str(path), plain_pickle(content)).explanation()
    except (NotPlain, _Odd) as wrong:
        what = f"{path} cannot be read as a snapshot of PyTorch: {wrong}"
        raise InputError(what, hint=HINT) from None


class _Snapshot:
    def __init__(self, path: str, value: Any) -> None:
        self._path = path
        if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
            found = (
                f"a table of {', '.join(map(str, list(value)[:5]))}"
                if isinstance(value, dict)
                else "no table"
            )
            raise _Odd(f"it has no segments; it is {found[:200]}")
        self._segments = [_table(each) for each in _distinct(value["segments"])]
        blocks = (_list(segment.get("blocks") or []) for segment in self._segments)
        _distinct([each for held in _distinct(list(blocks)) for each in held])
        traces = _distinct(value.get("device_traces") or [])
        self._traces = [[_table(event) for event in _list(trace)] for trace in traces]

    def explanation(self) -> Explanation:
        """Return the explanation of one device."""
        reserved = Counter[int]()
        for segment in self._segments:
            reserved[_number(segment, "device")] += _number(segment, "total_size")
        failed = [
            n for n, trace in enumerate(self._traces) if any(_action(event) == "oom" for event in trace)
        ]
        fullest = max(reserved, key=lambda n: reserved[n], default=0)
        device = failed[0] if failed else fullest
        events = self._traces[device] if device < len(self._traces) else []
        others = [n for n in sorted(set(reserved) | set(failed)) if n != device]
        now = self._blocks(device)
        pending = self._bytes_of(device, PENDING)
        if failed:
            return self._at_failure(device, events, now, reserved[device], others)
        live, when = _at_peak(events, now)
        total = sum(each.num_bytes for each in live)
        pieces = reserved[device] - self._bytes_of(device, (ACTIVE, *PENDING))
        parts = {"in tensors": total}
        if when == "now":
            parts |= {"waiting for another stream": pending, "free in PyTorch's cache, in pieces": pieces}
        lead = f"PyTorch held {format_bytes(total)} in tensors on device {device} {_WHEN[when]}"
        return self._made(lead, parts, live, pieces if when == "now" else None, None, others, total)

    def _at_failure(
        self,
        device: int,
        events: list[dict[str, Any]],
        now: dict[int, _Block],
        reserved: int,
        others: list[int],
    ) -> Explanation:
        at = max(place for place, event in enumerate(events) if _action(event) == "oom")
        event = events[at]
        asked, free = _number(event, "size"), _number(event, "device_free", missing=0)
        live = _live(events, now, at)
        total = sum(each.num_bytes for each in live)
        for later in events[at:]:
            change = _SEGMENTS.get(_action(later), 0)
            reserved -= change * _number(later, "size", missing=0)
        pieces = max(0, reserved - total)
        place, function = _place(event.get("frames"))
        asker = f"{place} ({function})" if place else "PyTorch"
        lead = (
            f"{asker} asked for {format_bytes(asked)} more where {format_bytes(free)} were free on "
            f"device {device}"
        )
        parts = {
            "in tensors": total,
            "free in PyTorch's cache, in pieces": pieces,
            "free on the device": free,
            "asked for": asked,
        }
        return self._made(lead, parts, live, pieces, asked - free, others, total + asked)

    def _made(
        self,
        lead: str,
        parts: dict[str, int],
        live: list[_Block],
        pieces: int | None,
        missing: int | None,
        others: list[int],
        needed: int,
    ) -> Explanation:
        held = _held(live)
        notes = []
        if live and not any(each.frames for each in live):
            notes.append(
                "the blocks have no frames: call torch.cuda.memory._record_memory_history() before the run"
            )
        if others:
            notes.append(f"it has device{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} too")
        return Explanation(
            path=self._path,
            kind=KIND,
            lead=lead,
            needed_bytes=needed,
            missing_bytes=missing,
            parts={name: size for name, size in parts.items() if size or name == "free on the device"},
            held=held,
            held_of="what lived then, by the line that made it",
            settings=tuple(_settings(held, pieces)),
            notes=tuple(notes),
        )

    def _blocks(self, device: int) -> dict[int, _Block]:
        """Return the blocks in use when the snapshot was written, by address."""
        made: dict[int, _Block] = {}
        for segment in self._of(device):
            address = _number(segment, "address", missing=0)
            for each in _list(segment.get("blocks") or []):
                block = _table(each)
                size = _number(block, "size")
                if block.get("state") == ACTIVE:
                    asked = _number(block, "requested_size", missing=0) or size
                    at = _number(block, "address", missing=address)
                    made[at] = _Block(asked, block.get("frames") or _oldest(block.get("history")))
                address += size
        return made

    def _bytes_of(self, device: int, states: tuple[str, ...]) -> int:
        blocks = (block for segment in self._of(device) for block in segment.get("blocks") or [])
        return sum(_number(block, "size") for block in blocks if block.get("state") in states)

    def _of(self, device: int) -> list[dict[str, Any]]:
        return [each for each in self._segments if each.get("device", 0) == device]


def _distinct(values: Any) -> list[Any]:
    """Return a list of which no item is named twice: a small file could name one a million times.

    Empty lists do not count.
    """
    items = _list(values)
    known = [id(each) for each in items if each != []]
    if len(set(known)) < len(known):
        raise _Odd("it names one segment, block or list of events twice")
    return items


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Odd(f"it has {type(value).__name__} where a block, an event or a frame should be")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Odd(f"it has {type(value).__name__} where a list should be")
    return value


def _at_peak(events: list[dict[str, Any]], now: dict[int, _Block]) -> tuple[list[_Block], str]:
    """Return what lived when most did, and whether that was before the snapshot was written."""
    live = dict(_before(events, now))
    total = peak = sum(each.num_bytes for each in live.values())
    at = 0
    for place, event in enumerate(events, start=1):
        total += _step(live, event)
        if total > peak:
            peak, at = total, place
    if peak <= sum(each.num_bytes for each in now.values()):
        return list(now.values()), "now"
    return _live(events, now, at), "peak"


def _live(events: list[dict[str, Any]], now: dict[int, _Block], until: int) -> list[_Block]:
    """Return the blocks that lived after the first `until` events."""
    live = dict(_before(events, now))
    for event in events[:until]:
        _step(live, event)
    return list(live.values())


def _before(events: list[dict[str, Any]], now: dict[int, _Block]) -> dict[int, _Block]:
    """Return what lived before the first event: what events free that none made, and what is left."""
    made: set[int] = set()
    found: dict[int, _Block] = {}
    for event in events:
        address, action = event.get("addr"), _action(event)
        if not isinstance(address, int) or address in made:
            continue
        if action == "alloc":
            made.add(address)
        elif action == "free_completed":
            made.add(address)
            found[address] = _Block(_number(event, "size"), [])
    return found | {address: block for address, block in now.items() if address not in made}


def _step(live: dict[int, _Block], event: dict[str, Any]) -> int:
    """Apply one event to the live blocks; return how many bytes more they have."""
    address, action = event.get("addr"), _action(event)
    if action not in ("alloc", "free_completed") or not isinstance(address, int):
        return 0
    gone = live.pop(address, None)
    change = -gone.num_bytes if gone else 0
    if action == "alloc":
        live[address] = _Block(_number(event, "size"), event.get("frames"))
        change += live[address].num_bytes
    return change


def _held(live: list[_Block]) -> tuple[Held, ...]:
    sums: dict[tuple[str, str, str], list[int]] = {}
    known: dict[int, tuple[str, str, str]] = {}  # blocks made by the same call share their frames
    for block in live:
        key = id(block.frames)
        if key not in known:
            known[key] = *_place(block.frames), _category(block.frames)
        entry = sums.setdefault(known[key], [0, 0])
        entry[0] += block.num_bytes
        entry[1] += 1
    return summed(
        Held(
            num_bytes=size,
            what=f"{count:,} block{'s' if count > 1 else ''}",
            place=place,
            category=category,
            module=function,
        )
        for (place, function, category), (size, count) in sums.items()
    )


def _place(frames: _Frames) -> tuple[str, str]:
    """Return the place and function of the innermost frame in the user's source, else in any in Python."""
    known = [frame for frame in _frames(frames) if frame[0].endswith(".py") or "<" in frame[0][:1]]
    for file, line, function in [each for each in known if is_own(each[0])] or known:
        return place_words(file, line), function
    return "", ""


def _category(frames: _Frames) -> str:
    """Return which part of a step made a block, by the frames of PyTorch itself; "" where none tells."""
    every = list(_frames(frames))
    for mark, category in _BY_FRAME.items():
        if any(mark in f"{file}:{function}" for file, _, function in every):
            return category
    return ""


def _frames(frames: _Frames) -> Iterator[tuple[str, int, str]]:
    for each in frames if isinstance(frames, list) else ():
        frame = _table(each)
        line = frame.get("line", 0)
        yield str(frame.get("filename", "")), line if isinstance(line, int) else 0, str(frame.get("name", ""))


def _number(table: dict[str, Any], name: str, missing: int | None = None) -> int:
    value = table.get(name, 0 if name == "device" else missing)
    if name in ("address", "addr") and isinstance(value, int):
        return value
    if not isinstance(value, int) or not 0 <= value <= MOST_BYTES:
        raise _Odd(f"{name} is {str(value)[:60]!r}")
    return value


_WHEN = {"now": "when it was written", "peak": "at the highest point of its history"}
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_BY_FRAME = {
    "torch/optim/": "optimizer",
    "_engine_run_backward": "backward pass",
    "torch::autograd::": "backward pass",
    "module.py:_apply": "parameters",
    "module.py:_call_impl": "forward pass",
}
"""By a part of "FILE:FUNCTION" of a frame of PyTorch: what runs there."""


def _action(event: dict[str, Any]) -> str:
    action = event.get("action")
    return action if isinstance(action, str) else ""


def _oldest(history: Any) -> _Frames:
    """Return the frames of a block in a snapshot of PyTorch 2.0, which keeps them in the block's history."""
    first = history[0] if isinstance(history, list) and history else None
    return first.get("frames") if isinstance(first, dict) else []


def _settings(held: tuple[Held, ...], pieces: int | None) -> Iterator[Setting]:
    if pieces:
        yield Setting(
            change="PYTORCH_ALLOC_CONF=expandable_segments:True",
            saved_bytes=pieces,
            why="free in the cache, in pieces between tensors. Before PyTorch 2.9: PYTORCH_CUDA_ALLOC_CONF",
        )
    kept: Counter[str] = Counter()
    for each in held:
        if each.category == "forward pass":
            kept[f"{each.place} ({each.module})"] += each.num_bytes
    for place, size in kept.most_common(2):
        yield Setting(
            change=f"torch.utils.checkpoint around {place}",
            saved_bytes=size,
            why="made in the forward pass and held then: computed again instead of kept",
        )
    yield Setting(
        change="meshwright weigh module.py:make_step --on FLEET",
        saved_bytes=None,
        why="weighs the step without a GPU: weigh it again after each change",
    )
