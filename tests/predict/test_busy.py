"""How busy a step is: every second of the walk lies in some span, also those of rounds it did not repeat."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict import Event, busy_of

GATHER, COPY = "all-gather[data]", "memory-bound"


def event(name, begin, seconds, stream="compute", **more):
    return Event(name=name, stream=stream, begin_seconds=begin, seconds=seconds, **more)


def repeated(events, seconds, rounds, begin=0.0):
    """What a walk notes of a loop: the first round, and one event for the further ones."""
    first = [event(e.name, begin + e.begin_seconds, e.seconds, e.stream) for e in events]
    further = event(
        "further",
        begin + seconds,
        (rounds - 1) * seconds,
        further_rounds=rounds - 1,
        num_events=len(events),
    )
    return [*first, further]


def sums(busy, num_spans):
    """Seconds by stream and class."""
    return {
        (stream, name): math.fsum(shares) * busy.seconds / num_spans
        for stream, rows in busy.shares.items()
        for name, shares in rows.items()
    }


def test_an_event_fills_the_spans_it_covers():
    busy = busy_of([event("matmul", 1.0, 1.5)], 4.0, 4)
    assert busy.shares == {"compute": {"matmul": (0.0, 1.0, 0.5, 0.0)}}


def test_a_round_of_many_spans_is_seen_in_each_place_where_it_runs():
    round_ = [event("matmul", 0.0, 2.0), event("attention", 2.0, 2.0), event(GATHER, 1.0, 3.0, "inside")]
    busy = busy_of(repeated(round_, 4.0, 3, begin=1.0), 13.0, 13 * 2)
    assert busy.shares["compute"]["matmul"] == (0,) * 2 + ((1,) * 4 + (0,) * 4) * 3
    assert busy.shares["compute"]["attention"] == (0,) * 2 + ((0,) * 4 + (1,) * 4) * 3
    assert busy.shares["inside"][GATHER] == (0,) * 2 + ((0,) * 2 + (1,) * 6) * 3


def test_of_rounds_shorter_than_a_few_spans_each_span_has_the_mean():
    round_ = [event("matmul", 0.0, 0.03), event("attention", 0.03, 0.01)]
    busy = busy_of(repeated(round_, 0.04, 100), 4.0, 8)
    assert busy.shares["compute"]["matmul"] == pytest.approx((0.75,) * 8)
    assert busy.shares["compute"]["attention"] == pytest.approx((0.25,) * 8)


@given(
    rounds=st.integers(2, 40),
    outer=st.integers(2, 5),
    lengths=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=4),
    gap=st.floats(0.0, 2.0),
    num_spans=st.integers(1, 60),
)
def test_no_second_is_lost_or_counted_twice(rounds, outer, lengths, gap, num_spans):
    clock, body = gap, []
    for place, length in enumerate(lengths):
        body.append(event(("matmul", "attention")[place % 2], clock, length))
        clock += length
    inner = repeated(body, clock, rounds, begin=0.5)
    middle = 0.5 + rounds * clock
    round_ = [event(COPY, 0.0, 0.5), *inner]
    # The outer loop repeats what the inner one noted, its further rounds too.
    shifted = [
        Event(
            name=e.name,
            stream=e.stream,
            begin_seconds=1.0 + e.begin_seconds,
            seconds=e.seconds,
            further_rounds=e.further_rounds,
            num_events=e.num_events,
        )
        for e in round_
    ]
    further = event(
        "further",
        1.0 + middle,
        (outer - 1) * middle,
        further_rounds=outer - 1,
        num_events=len(shifted),
    )
    seconds = 1.0 + outer * middle
    busy = busy_of([event(COPY, 0.0, 1.0), *shifted, further], seconds, num_spans)
    found = sums(busy, num_spans)
    assert found["compute", COPY] == pytest.approx(1.0 + outer * 0.5)
    assert found["compute", "matmul"] == pytest.approx(outer * rounds * sum(lengths[::2]))
    assert found.get(("compute", "attention"), 0) == pytest.approx(outer * rounds * sum(lengths[1::2]))
    for span in zip(*busy.shares["compute"].values(), strict=True):
        assert -1e-9 <= sum(span) <= 1 + 1e-9


def test_a_step_without_work_has_no_spans():
    assert busy_of([], 0.0, 8).shares == {}


LOOP = """
%body (t: (s32[], f32[1000000], f32[250000])) -> (s32[], f32[1000000], f32[250000]) {
  %t = (s32[], f32[1000000], f32[250000]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[1000000] get-tuple-element(%t), index=1
  %s = f32[250000] get-tuple-element(%t), index=2
  %g = (f32[250000], f32[2000000]) all-gather-start(%s), replica_groups={}, dimensions={0}
  %c = f32[1000000] copy(%x)
  %g-done = f32[2000000] all-gather-done(%g)
  ROOT %next = (s32[], f32[1000000], f32[250000]) tuple(%i, %c, %s)
}
%condition (t: (s32[], f32[1000000], f32[250000])) -> pred[] {
  %t = (s32[], f32[1000000], f32[250000]) parameter(0)
  ROOT %go = pred[] constant(true)
}
%main (x: f32[1000000], s: f32[250000]) -> () {
  %x = f32[1000000] parameter(0)
  %s = f32[250000] parameter(1)
  %zero = s32[] constant(0)
  %before = f32[1000000] copy(%x)
  %init = (s32[], f32[1000000], f32[250000]) tuple(%zero, %x, %s)
  %w = (s32[], f32[1000000], f32[250000]) while(%init), condition=%condition, body=%body, TRIPS
  ROOT %root = () tuple()
}"""
TRIPS = 'backend_config={"known_trip_count":{"n":"7"}}'


@pytest.mark.parametrize("num_spans", [1, 3, 240])
def test_the_spans_of_a_walked_program_add_up_to_its_slices(walked_on, round_machine, num_spans):
    walked = walked_on(LOOP.replace("TRIPS", TRIPS), machine=round_machine)
    found = sums(busy_of(walked.events, walked.seconds, num_spans), num_spans)
    assert found["compute", COPY] == pytest.approx(walked.total[COPY])
    assert found["inside", GATHER] == pytest.approx(walked.total[GATHER])
    assert found["wait", GATHER] == pytest.approx(walked.exposed[GATHER])
    assert 0 < walked.exposed[GATHER] < walked.total[GATHER]
