"""The documents' small problems, trained end to end."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.config import Layout, load_config
from meshwright.hardware import Fleet
from meshwright.training._run import train


def run(folder: Path, preset: str, *overrides: str, steps: int):
    config = load_config(preset, overrides)
    return train(config, Fleet.parse("1xCPU"), Layout.parse("data=1"), folder, steps=steps)


def test_a_line_through_noisy_points_is_found(tmp_path):
    """y = 2 x - 1 with noise of 0.5: no line does better than a squared error of 0.25."""
    measured, state = run(tmp_path, "line", "evaluation.batches=32", steps=100)
    parameters = state["parameters"]
    assert float(np.squeeze(parameters["weight"])) == pytest.approx(2.0, abs=0.1)
    assert float(np.squeeze(parameters["bias"])) == pytest.approx(-1.0, abs=0.1)
    assert measured.held_out_losses[100] == pytest.approx(0.25, rel=0.1)


def test_ten_steps_with_a_learning_rate_of_a_tenth_come_further_than_with_a_hundredth(tmp_path):
    losses = {}
    for rate in ("0.01", "0.1"):
        overrides = (f"optimizer.learning_rate={rate}", "batch.sequences=4")
        measured, _ = run(tmp_path / rate, "linear", *overrides, steps=10)
        losses[rate] = measured.losses
    assert losses["0.01"][1] == losses["0.1"][1]  # the same start
    assert losses["0.1"][10] < losses["0.01"][10]


def test_lenet_learns_its_ten_patterns(tmp_path):
    measured, _ = run(tmp_path, "lenet", "evaluation.batches=1", steps=40)
    assert measured.losses[1] == pytest.approx(np.log(10), rel=0.35)
    assert measured.losses[40] < 0.6 * measured.losses[1]
