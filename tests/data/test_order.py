"""The data set of a config, the order of rows, and rows for regression."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config import IdxData, load_config, overridden, preset_names
from meshwright.contrib.images import ImageFiles, write_sample_images
from meshwright.errors import InputError
from meshwright.trainer.data import generator, open_data, windows_at


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_has_data(preset: str, tmp_path):
    config = load_config(preset, ["batch.microbatch_sequences=none", "batch.sequences=2"])
    if isinstance(config.data, IdxData):
        write_sample_images(tmp_path / "images")
        config = overridden(config, [f"data.folder={tmp_path / 'images'}"])
    data = open_data(config)
    for split in ("train", "held-out"):
        batch = data.batch(0, split)
        assert all(len(array) == 2 for array in batch.values())
        if "tokens" in batch:
            assert batch["tokens"].shape == (2, config.batch.sequence_length + 1)
            assert batch["tokens"].dtype == np.int32
            assert 0 <= batch["tokens"].min() <= batch["tokens"].max() < config.model.vocab_size  # pyright: ignore
        for name, array in data.batch(0, split, np.array([1])).items():  # as a process that holds no other
            assert np.array_equal(array, batch[name][1:])


def test_images_are_those_of_the_folder_in_the_models_size(tmp_path):
    write_sample_images(tmp_path)
    folder = f"data.folder={tmp_path}"
    for preset, side in (("lenet-fashion", 28), ("resnet18-fashion", 96)):
        data = open_data(load_config(preset, [folder, "batch.sequences=16"]))
        assert isinstance(data, ImageFiles)
        assert data.batch(0, "held-out")["images"].shape == (16, 1, side, side)
    with pytest.raises(InputError, match=r"data\.folder: .* has no train-images-idx3-ubyte"):
        open_data(load_config("lenet-fashion", [f"{folder}/none"]))


def test_reading_data_imports_no_jax():
    code = "import sys; from meshwright.config import load_config; "
    code += "from meshwright.trainer.data import open_data; "
    code += "open_data(load_config('linear')).batch(0, 'train'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def epoch(number: int, size: int, seed: int = 0, split="train") -> np.ndarray:
    return windows_at(number * size, size, size=size, seed=seed, split=split)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 9000), seed=st.integers(0, 2**32 - 1), number=st.integers(0, 10**9))
def test_an_epoch_holds_each_window_once(size: int, seed: int, number: int):
    assert np.array_equal(np.sort(epoch(number, size, seed)), np.arange(size))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 5000), first=st.integers(0, 10**9), count=st.integers(1, 300))
def test_any_place_can_be_asked_for_alone(size: int, first: int, count: int):
    one_by_one = [
        windows_at(place, 1, size=size, seed=3, split="train")[0] for place in range(first, first + count)
    ]
    assert windows_at(first, count, size=size, seed=3, split="train").tolist() == one_by_one


def test_epochs_seeds_and_parts_have_orders_of_their_own():
    orders = [epoch(0, 1000), epoch(1, 1000), epoch(0, 1000, seed=1), epoch(0, 1000, split="held-out")]
    for place, order in enumerate([*orders, np.arange(1000)]):
        for other in orders[:place]:
            # Two random permutations agree in one place on average (Poisson): 8 or more is one in 100,000.
            assert (order == other).sum() < 8
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.15


def test_every_window_comes_first_about_equally_often():
    firsts = np.concatenate([windows_at(64 * n, 1, size=64, seed=5, split="train") for n in range(6400)])
    counts = np.bincount(firsts, minlength=64)
    chi_squared = ((counts - 100) ** 2 / 100).sum()
    assert chi_squared < 113  # 63 degrees of freedom: one in 10,000


def test_the_order_never_changes():
    # A resumed run of any later release must go on where it stopped; found once, kept for good.
    assert epoch(0, 10).tolist() == GOLDEN[0]
    assert epoch(1, 10, seed=2**32 - 1).tolist() == GOLDEN[1]


GOLDEN = ([7, 6, 1, 2, 5, 9, 8, 3, 0, 4], [3, 0, 2, 6, 8, 9, 1, 7, 5, 4])


@pytest.mark.parametrize("place", [0, 10**6, 10**15])
def test_the_arithmetic_holds_far_out(place: int):
    found = windows_at(place, 5, size=2**40, seed=0, split="train")
    assert len(set(found.tolist())) == 5
    assert found.min() >= 0
    assert found.max() < 2**40


def test_randomness_depends_on_seed_step_and_split_and_on_nothing_else():
    draws = {
        key: generator(*key).integers(2**60)
        for key in [(0, 0, "train"), (1, 0, "train"), (0, 1, "train"), (0, 0, "held-out"), (1, 0, "held-out")]
    }
    assert len(set(draws.values())) == len(draws)
    assert all(generator(*key).integers(2**60) == draw for key, draw in draws.items())


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
