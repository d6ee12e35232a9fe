import pytest

from meshwright.measure import StepClock


def clock_reading(*times: float) -> StepClock:
    readings = iter(times)
    return StepClock(lambda: next(readings))


def test_a_tick_is_the_time_since_the_one_before_and_start_leaves_a_gap_out():
    clock = clock_reading(0, 10, 11, 13, 100, 104)
    clock.start()
    assert [clock.tick(), clock.tick()] == [1, 2]
    clock.start()  # evaluation took from 13 to 100
    assert clock.tick() == 4
    assert clock.seconds == [1, 2, 4]


def test_the_spread_leaves_the_first_two_steps_out():
    clock = clock_reading(0, 50, 90, *(90 + t for t in (1, 2, 3, 4, 5)))
    for _ in range(7):
        clock.tick()
    spread = clock.spread()
    assert spread is not None
    assert (spread.median, spread.num_steps) == (1, 5)


def test_nine_in_ten_steps_lie_between_low_and_high():
    clock, now = clock_reading(0, 1, 2, *(2 + n * (n + 1) / 2 for n in range(1, 102))), 103
    for _ in range(now):
        clock.tick()  # two warm-up steps, then 1, 2, ... 101 seconds
    spread = clock.spread()
    assert spread is not None
    assert (spread.low, spread.median, spread.high) == pytest.approx((6, 51, 96))


def test_two_steps_give_no_spread_but_a_guess():
    clock = clock_reading(0, 3, 5)
    clock.tick()
    clock.tick()
    assert clock.spread() is None
    assert clock.usual_seconds() == 2.5
