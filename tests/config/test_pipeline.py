"""Ticks against a simulation by hand: who has which microbatch when."""

from fractions import Fraction

import pytest

from meshwright.config import Layout, Ticks, load_config, ticks_of

STAGES = [(2, 1), (2, 8), (4, 2), (4, 8), (8, 3)]


def oldest(schedule, num_stages, num_microbatches):
    """The most forward passes that a stage holds at once, when each stage waits for its neighbours alone."""
    forward = {(m, s): m + s for m in range(num_microbatches) for s in range(num_stages)}
    last = num_stages - 1
    begin = last if schedule == "1f1b" else max(forward.values()) + 1
    backward = {(m, s): begin + m + last - s for m in range(num_microbatches) for s in range(num_stages)}
    return max(
        sum(forward[m, s] <= tick <= backward[m, s] for m in range(num_microbatches))
        for s in range(num_stages)
        for tick in range(max(backward.values()) + 1)
    )


@pytest.mark.parametrize(("num_stages", "num_microbatches"), STAGES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_slots_are_enough_for_the_passes_held_and_few_under_1f1b(schedule, num_stages, num_microbatches):
    ticks = Ticks(schedule=schedule, num_stages=num_stages, num_microbatches=num_microbatches)
    assert ticks.num_kept >= oldest(schedule, num_stages, num_microbatches)
    if schedule == "1f1b":
        assert ticks.num_kept <= 2 * num_stages - 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_the_share_of_passes_without_a_microbatch(schedule):
    ticks = Ticks(schedule=schedule, num_stages=4, num_microbatches=8)
    passes = [tick - stage for stage in range(4) for tick in range(ticks.num_passes)]
    assert ticks.bubble == Fraction(sum(m not in range(8) for m in passes), len(passes)) == Fraction(3, 11)


def test_a_run_on_one_stage_has_no_ticks_and_on_several_those_of_its_microbatches():
    config = load_config("llama3-8b", ["pipeline=gpipe"])  # 512 sequences, one at a time
    assert ticks_of(config, Layout.parse("data=8")) is None
    ticks = ticks_of(config, Layout.parse("stage=4,data=2,fsdp=8"))
    assert ticks == Ticks(schedule="gpipe", num_stages=4, num_microbatches=32)
    assert ticks.to_dict() == {
        "schedule": "gpipe", "num_stages": 4, "num_microbatches": 32, "bubble": pytest.approx(3 / 35),
    }  # fmt: skip
    whole = load_config("bytes-nano")
    assert ticks_of(whole, Layout.parse("stage=2,data=2")).num_microbatches == 1
