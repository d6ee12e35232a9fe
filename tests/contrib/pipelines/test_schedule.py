"""The tables of a pipeline: what a stage needs is there in time, and no slot is written before it is read."""

import itertools

import pytest

from meshwright.config import Ticks
from meshwright.contrib.pipelines import Schedule

CASES = [
    (schedule, stages, chunks, groups, reads_first)
    for schedule in ("1f1b", "gpipe")
    for stages, chunks, groups in itertools.product((2, 3, 8), (1, 2, 4), (1, 3))
    for reads_first in (True, False)
]


def played(schedule):
    """Play the passes tick by tick; return how many forward and how many backward passes were made."""
    ticks = schedule.ticks
    last = ticks.num_stages - 1
    part = lambda stage, chunk: chunk * ticks.num_stages + stage  # noqa: E731
    forward, backward = {}, {}  # the tick in which a part of the model had a microbatch
    slots = {}  # what lies in each stage's slots
    for tick in range(ticks.num_alone + ticks.num_passes):
        for stage in range(ticks.num_stages):
            here, there = tick, tick - ticks.num_alone
            order = ["backward", "forward"] if schedule.reads_first else ["forward", "backward"]
            for way in order:
                table, at = (schedule.forward, here) if way == "forward" else (schedule.backward, there)
                if not 0 <= at < len(table.exists):
                    continue
                chunk, microbatch = int(table.chunk[at, stage]), int(table.microbatch[at, stage])
                its, slot = (part(stage, chunk), microbatch), (stage, int(table.slot[at, stage]))
                if way == "forward":
                    assert slots.get(slot) is None, f"{slot} still holds {slots[slot]}"
                    if table.exists[at, stage]:
                        before = (its[0] - 1, microbatch)
                        assert its[0] == 0 or forward[before] == tick - 1, "it came in the tick before"
                        forward[its], slots[slot] = tick, its
                elif table.exists[at, stage]:
                    after = (its[0] + 1, microbatch)
                    is_last = its[0] == ticks.num_chunks * ticks.num_stages - 1
                    assert forward[its] < tick
                    assert is_last or backward[after] == tick - 1, "its gradient came in the tick before"
                    assert slots[slot] == its
                    backward[its], slots[slot] = tick, None
    assert last < ticks.num_stages
    return len(forward), len(backward)


@pytest.mark.parametrize(("schedule", "stages", "chunks", "groups", "reads_first"), CASES)
def test_every_pass_finds_its_input_and_its_slot(schedule, stages, chunks, groups, reads_first):
    ticks = Ticks(schedule=schedule, num_stages=stages, num_microbatches=stages * groups, num_chunks=chunks)
    made = Schedule(ticks, reads_first=reads_first)
    assert played(made) == (stages * chunks * stages * groups,) * 2
    # By hand: a pass that waits longest waits for V S ticks, and S more wait for the next group.
    most = (chunks + 1) * stages - reads_first if schedule == "1f1b" else chunks * stages * groups + 1
    assert made.num_slots <= most
    runs = [segment.repeats * count for segment in made.segments for count in segment.num_passes]
    assert (sum(runs[::2]), sum(runs[1::2])) == (made.num_forward, ticks.num_passes)


def test_eight_chunks_on_sixteen_stages_keep_as_much_as_eighteen_stages_do():
    ticks = Ticks(schedule="1f1b", num_stages=16, num_microbatches=48, num_chunks=8)
    assert Schedule(ticks, reads_first=True).num_slots == 143  # of an eighth of a stage
    alone = Ticks(schedule="1f1b", num_stages=16, num_microbatches=48)
    assert Schedule(alone, reads_first=True).num_slots == 31
