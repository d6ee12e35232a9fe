"""Compute a pipeline's schedule before it is traced: the pass of each stage in each tick, and its slot.

A forward pass saves values in a slot until the backward pass of the same chunk and microbatch has read them.
`Table.slot` says which: going through the ticks in order, each pass takes the first slot that is free on its
stage. Under `1f1b` with V chunks and S stages this takes (V + 1) S slots of one chunk, that is (1 + 1 / V) S
of a stage, or one less (`reads_first`). A ring of slots would take 2 V S. A pass that is dropped writes to a
slot that is free then.

What the first and the last stage do besides, embedding and loss, falls into ticks that are the same for all
groups of microbatches: the first S of each V S. `segments` lists the ticks by what they do, so that each kind
of tick has a loop of its own and no tick has a branch. With several chunks there is one forward tick more,
dropped on every stage, so that no tick stands alone: XLA would write it outside of any loop, and keep copies
of weights for it, in another order of their dims, beside those of the loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.config import Ticks

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The passes in one direction, each [ticks, stages].

    `exists`: whether the stage has a pass then. `chunk` and `microbatch` of the pass, and the `slot` of the
    values that it saves or reads; of a pass that does not exist, valid numbers whose slot nobody reads.
    """

    exists: NDArray[np.bool_]
    chunk: Numbers
    microbatch: Numbers
    slot: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Describes the work of all stages in a tick.

    `embeds`: the first stage embeds a microbatch. `judges`: all stages compute the loss of the last stage's
    output of the tick before. `embeds_back`: the embedding's gradient is added, from the first stage's
    backward pass of the tick before.
    """

    forward: bool = False
    backward: bool = False
    embeds: bool = False
    judges: bool = False
    embeds_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Ticks in a row: `repeats` times, each kind of work in `parts` for its number of ticks."""

    repeats: int
    parts: tuple[tuple[Work, int], ...]

    @property
    def num_passes(self) -> tuple[int, int]:
        """Numbers of ticks of one repeat with a forward pass, and with a backward pass."""
        forward = sum(count for work, count in self.parts if work.forward)
        return forward, sum(count for work, count in self.parts if work.backward)


class Schedule:
    """The passes, slots and loops of a pipeline.

    `num_slots`: slots of a chunk's values on each stage. `forward` and `backward`: the passes. `num_forward`:
    ticks with a forward pass.

    Args:
        reads_first: in a tick with both passes, the backward pass has read its whole slot before the forward
            pass writes, so that both may have the same one. Otherwise one slot more is needed.

    >>> ticks = Ticks(schedule="1f1b", num_stages=16, num_microbatches=32, num_chunks=8)
    >>> Schedule(ticks, reads_first=True).num_slots
    143
    """

    def __init__(self, ticks: Ticks, reads_first: bool) -> None:
        self.ticks, self.reads_first = ticks, reads_first
        self.num_forward = ticks.num_passes + int(ticks.num_chunks > 1 and ticks.schedule == "1f1b")
        stages = np.arange(ticks.num_stages)[None, :]
        forward = np.arange(self.num_forward)[:, None] - stages
        backward = np.arange(ticks.num_passes)[:, None] - (ticks.num_stages - 1 - stages)
        forward_slots, backward_slots, self.num_slots = self._slots()
        self.forward = self._table(forward, forward_slots, is_backward=False)
        self.backward = self._table(backward, backward_slots, is_backward=True)

    def _table(self, numbers: Numbers, slots: Numbers, *, is_backward: bool) -> Table:
        """Return the table of passes whose number on their stage is `numbers` [ticks, stages]."""
        stages, chunks = self.ticks.num_stages, self.ticks.num_chunks
        exists = (numbers >= 0) & (numbers < self.ticks.num_needed)
        valid = np.where(exists, numbers, 0)
        chunk = valid % (chunks * stages) // stages if chunks > 1 else np.zeros_like(valid)
        microbatch = valid // (chunks * stages) * stages + valid % stages if chunks > 1 else valid
        return Table(
            exists=exists,
            chunk=(chunks - 1 - chunk if is_backward else chunk),
            microbatch=microbatch,
            slot=slots,
        )

    def _slots(self) -> tuple[Numbers, Numbers, int]:
        """Return the slots of forward and backward passes [ticks, stages], and how many there are."""
        columns = [self._slots_of_stage(stage) for stage in range(self.ticks.num_stages)]
        forward, backward = (np.stack([column[place] for column in columns], axis=1) for place in (0, 1))
        return forward, backward, 1 + int(forward.max())

    def _slots_of_stage(self, stage: int) -> tuple[list[int], list[int]]:
        """Give each pass of one stage the first slot that is free, in the order of the ticks."""
        ticks = self.ticks
        chunks, stages, behind = ticks.num_chunks, ticks.num_stages, ticks.num_stages - 1
        forward, backward = [0] * self.num_forward, [0] * ticks.num_passes
        held: dict[int, int] = {}  # by the number of a forward pass
        free: list[int] = []
        num_slots = 0

        def done(tick: int) -> None:
            """Free the slot that the backward pass of a tick has read."""
            number = tick - ticks.num_alone - (behind - stage)
            if 0 <= number < ticks.num_needed:
                group, place = divmod(number, chunks * stages) if chunks > 1 else (0, number)
                if chunks > 1:
                    place = (chunks - 1 - place // stages) * stages + place % stages
                slot = held.pop(group * chunks * stages + place)
                backward[tick - ticks.num_alone] = slot
                free.append(slot)

        for tick in range(ticks.num_passes + ticks.num_alone):
            if self.reads_first:
                done(tick)
            if tick < self.num_forward:
                if not free:
                    free.append(num_slots)
                    num_slots += 1
                forward[tick] = min(free)
                if 0 <= tick - stage < ticks.num_needed:
                    free.remove(forward[tick])
                    held[tick - stage] = forward[tick]
            if not self.reads_first:
                done(tick)
        assert not held, f"slots that no backward pass reads: {held}"
        return forward, backward

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The ticks in order. Forward ticks and backward ticks are each numbered from 0."""
        stages, chunks = self.ticks.num_stages, self.ticks.num_chunks
        first, last = Work(forward=True, embeds=True), Work(backward=True, judges=True, embeds_back=True)
        # One chunk: all ticks are alike, and a group is one tick.
        group, rest = (stages, (chunks - 1) * stages) if chunks > 1 else (1, 0)
        groups = self.ticks.num_microbatches // group
        ahead, back = Work(forward=True), Work(backward=True)
        end = Work(backward=True, embeds_back=True)
        if self.ticks.schedule == "gpipe":
            segments = [
                _segment(groups, (first, group), (ahead, rest)),
                _segment(1, (ahead, stages - 1)),
                _segment(groups, (last, group), (back, rest)),
                _segment(1, (end, stages - 1)),
            ]
        else:
            both = Work(forward=True, backward=True)
            all_three = Work(forward=True, backward=True, embeds=True, judges=True, embeds_back=True)
            most = Work(forward=True, backward=True, judges=True, embeds_back=True)
            segments = [
                _segment(1, (first, stages)),
                _segment(1, (ahead, rest)),
                _segment(groups - 1, (all_three, group), (both, rest)),
                _segment(1, (most, stages)) if chunks > 1 else _segment(1, (last, 1)),
                _segment(1, (back, rest)),
                _segment(1, (end, stages - 1)),
            ]
        return tuple(segment for segment in segments if segment.repeats * max(segment.num_passes))


def _segment(repeats: int, *parts: tuple[Work, int]) -> Segment:
    kept = tuple(part for part in parts if part[1])
    if len(kept) == 1 and repeats > 0:  # one loop, not a loop in a loop
        ((work, count),) = kept
        return Segment(repeats=1, parts=((work, repeats * count),))
    return Segment(repeats=repeats, parts=kept)
