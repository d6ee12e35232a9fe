"""Replay the allocations of a step on PyTorch's caching allocator for CUDA, to learn what it reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings. A block has a multiple of
512 bytes. Blocks of at most 1 MiB come from segments of 2 MiB, others below 10 MiB from segments of 20 MiB,
and larger ones from segments of their own, in steps of 2 MiB. The smallest free block that is large enough is
taken, and split if enough is left. Neighbours that are free are merged. Each stream has blocks of its own.
Nothing goes back to the device: that happens only when a device is full.
With `expandable_segments` each pool has one segment, which grows at its end by pages of 2 or 20 MiB.
Not replayed: other settings; tensors that a kernel takes and frees by itself.
"""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass

KIB, MIB = 1024, 1024 * 1024
STEP_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
LARGE_BYTES, LARGE_SEGMENT_BYTES, LARGE_STEP_BYTES = 10 * MIB, 20 * MIB, 2 * MIB
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables of PyTorch's; the first is newer


def segments_expand() -> bool:
    """Return whether the environment sets `expandable_segments:True` for PyTorch's allocator."""
    text = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
    return "expandable_segments:true" in text.lower().replace(" ", "")


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, with its neighbours in it."""

    address: int
    num_bytes: int
    pool: tuple[int, bool]  # the stream, and whether it is of small blocks
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = True

    @property
    def key(self) -> tuple[int, int]:
        return self.num_bytes, self.address


class CachingAllocator:
    """Blocks by the number of the storage that holds them; `reserved_bytes` are those of all segments."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.reserved_bytes = 0
        self._expandable = expandable
        self._held: dict[int, _Block] = {}
        self._free: dict[tuple[int, bool], list[tuple[tuple[int, int], _Block]]] = {}

    def allocate(self, number: int, num_bytes: int, stream: int) -> None:
        """Give a storage a block of at least `num_bytes`, on a stream."""
        size = max(STEP_BYTES, -(-num_bytes // STEP_BYTES) * STEP_BYTES)
        pool = (stream, size <= SMALL_BYTES)
        block = self._taken(pool, size) or self._segment(pool, size)
        rest = block.num_bytes - size
        if rest >= STEP_BYTES if pool[1] or self._expandable else rest > SMALL_BYTES:
            left = _Block(block.address + size, rest, pool, before=block, after=block.after)
            if left.after is not None:
                left.after.before = left
            block.after, block.num_bytes = left, size
            self._keep(left)
        block.is_free = False
        self._held[number] = block

    def free(self, number: int) -> None:
        """Take a storage's block back, and merge it with free neighbours."""
        block = self._held.pop(number)
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._drop(other)
                block = _merged(block, other)
        block.is_free = True
        self._keep(block)

    def holds(self, number: int) -> bool:
        """Return whether a storage has a block."""
        return number in self._held

    def _taken(self, pool: tuple[int, bool], size: int) -> _Block | None:
        """Return the smallest free block that is large enough, no longer free."""
        blocks = self._free.setdefault(pool, [])
        place = bisect.bisect_left(blocks, (size, 0), key=lambda entry: entry[0])
        if self._expandable and place + 1 < len(blocks) and blocks[place][1].after is None:
            place += 1  # the last block counts as large as it can grow
        return blocks.pop(place)[1] if place < len(blocks) else None

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if self._expandable:
            return self._grown(pool, size)
        if pool[1]:
            num_bytes = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            num_bytes = LARGE_SEGMENT_BYTES
        else:
            num_bytes = -(-size // LARGE_STEP_BYTES) * LARGE_STEP_BYTES
        block = _Block(self.reserved_bytes, num_bytes, pool)
        self.reserved_bytes += num_bytes
        return block

    def _grown(self, pool: tuple[int, bool], size: int) -> _Block:
        """Return a block at the end of a pool's only segment, which grows as far as it must."""
        held = (block for block in self._held.values() if block.pool == pool)
        last = next((b for b in (*(b for _, b in self._free[pool]), *held) if b.after is None), None)
        page = SMALL_SEGMENT_BYTES if pool[1] else LARGE_SEGMENT_BYTES
        there = last.num_bytes if last is not None and last.is_free else 0
        num_bytes = -(-(size - there) // page) * page
        self.reserved_bytes += num_bytes
        if last is not None and last.is_free:
            self._drop(last)
            last.num_bytes += num_bytes
            return last
        block = _Block(last.address + last.num_bytes if last is not None else 0, num_bytes, pool, before=last)
        if last is not None:
            last.after = block
        return block

    def _keep(self, block: _Block) -> None:
        bisect.insort(self._free[block.pool], (block.key, block), key=lambda entry: entry[0])

    def _drop(self, block: _Block) -> None:
        blocks = self._free[block.pool]
        place = bisect.bisect_left(blocks, block.key, key=lambda entry: entry[0])
        assert blocks[place][1] is block, "a free block is in its pool"
        blocks.pop(place)


def _merged(one: _Block, other: _Block) -> _Block:
    """Return the block that two neighbours make."""
    first, second = (one, other) if one.address < other.address else (other, one)
    first.num_bytes += second.num_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
