import numpy as np

from meshwright.config import load_config
from meshwright.data import open_data


def test_linear_targets_are_a_known_function_of_the_inputs():
    batch = open_data(load_config("linear")).batch(3, "train")
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "inputs": ((64, 16), np.float32),
        "targets": ((64,), np.float32),
    }
    solution = np.linalg.lstsq(batch["inputs"], batch["targets"])[0]
    np.testing.assert_allclose(solution, np.arange(16), atol=1e-4)


def test_points_about_a_line_have_its_slope_intercept_and_noise():
    batch = open_data(load_config("line", ["batch.sequences=4096"])).batch(0, "train")
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "inputs": ((4096, 1), np.float32),
        "targets": ((4096,), np.float32),
    }
    off = batch["targets"] - (2 * batch["inputs"][:, 0] - 1)
    # Estimates from n numbers err by about 1/sqrt(n): 0.5/64 here, and four times that is rare.
    np.testing.assert_allclose([off.mean(), off.std()], [0, 0.5], atol=4 * 0.5 / 64)
    exact = open_data(load_config("line", ["data.noise=0"])).batch(0, "train")
    np.testing.assert_allclose(exact["targets"], 2 * exact["inputs"][:, 0] - 1, rtol=1e-6, atol=1e-6)


def test_cruncher_targets_are_random():
    batch = open_data(load_config("cruncher")).batch(0, "train")
    assert batch["inputs"].shape == (64, 64)
    assert batch["targets"].shape == (64,)
    assert abs(np.corrcoef(batch["inputs"].sum(axis=1), batch["targets"])[0, 1]) < 0.5


def test_rows_are_a_function_of_seed_and_step():
    first, again = open_data(load_config("linear")), open_data(load_config("linear"))
    other = open_data(load_config("linear", ["seed=1"]))
    again.batch(0, "train")  # what was asked before does not matter
    assert np.array_equal(first.batch(5, "train")["inputs"], again.batch(5, "train")["inputs"])
    for unlike in (first.batch(6, "train"), first.batch(5, "held-out"), other.batch(5, "train")):
        assert not np.array_equal(first.batch(5, "train")["inputs"], unlike["inputs"])
