"""Replay the allocations of a step on PyTorch's caching allocator for CUDA, to learn what it reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings. A block has a multiple of
512 bytes. Blocks of at most 1 MiB come from segments of 2 MiB, others below 10 MiB from segments of 20 MiB,
and larger ones from segments of their own, in steps of 2 MiB. The smallest free block that is large enough is
taken, and split if enough is left. Neighbours that are free are merged. Each stream has blocks of its own.
Nothing goes back to the device: that happens only when a device is full.
Not replayed: `expandable_segments` and other settings; tensors that a kernel takes and frees by itself.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

KIB, MIB = 1024, 1024 * 1024
STEP_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
LARGE_BYTES, LARGE_SEGMENT_BYTES, LARGE_STEP_BYTES = 10 * MIB, 20 * MIB, 2 * MIB


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

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._held: dict[int, _Block] = {}
        self._free: dict[tuple[int, bool], list[tuple[tuple[int, int], _Block]]] = {}

    def allocate(self, number: int, num_bytes: int, stream: int) -> None:
        """Give a storage a block of at least `num_bytes`, on a stream."""
        size = max(STEP_BYTES, -(-num_bytes // STEP_BYTES) * STEP_BYTES)
        pool = (stream, size <= SMALL_BYTES)
        block = self._taken(pool, size) or self._segment(pool, size)
        rest = block.num_bytes - size
        if rest >= STEP_BYTES if pool[1] else rest > SMALL_BYTES:
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
        return blocks.pop(place)[1] if place < len(blocks) else None

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if pool[1]:
            num_bytes = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            num_bytes = LARGE_SEGMENT_BYTES
        else:
            num_bytes = -(-size // LARGE_STEP_BYTES) * LARGE_STEP_BYTES
        block = _Block(self.reserved_bytes, num_bytes, pool)
        self.reserved_bytes += num_bytes
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
