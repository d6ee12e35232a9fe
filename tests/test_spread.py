from meshwright.reconciliation import Spread


def test_a_spread_keeps_its_seconds_and_how_many_they_are_of():
    spread = Spread(median=2.0, low=1.0, high=3.0, num_steps=7)
    assert (spread.low, spread.median, spread.high, spread.num_steps) == (1.0, 2.0, 3.0, 7)
