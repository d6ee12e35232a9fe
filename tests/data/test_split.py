from meshwright.data._order import generator


def test_randomness_depends_on_seed_step_and_split_and_on_nothing_else():
    draws = {
        key: generator(*key).integers(2**60)
        for key in [(0, 0, "train"), (1, 0, "train"), (0, 1, "train"), (0, 0, "held-out"), (1, 0, "held-out")]
    }
    assert len(set(draws.values())) == len(draws)
    assert all(generator(*key).integers(2**60) == draw for key, draw in draws.items())
