"""The image presets learn real handwritten digits, on one device and on four with batch and rate scaled."""

import importlib
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
from meshwright.api import _train
from meshwright.config import load_config
from meshwright.trainer.data import open_data
from meshwright.trainer.loop import Evaluated

pytestmark = [pytest.mark.optimised, pytest.mark.once]

pytest.importorskip("sklearn", reason="scikit-learn, which ships the digits, is not installed")
example = importlib.import_module("examples.digits")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """A folder of the digits as IDX files, and how many are there to train and held out."""
    folder = tmp_path_factory.mktemp("digits") / "images"
    return folder, example.write_digits(folder)


def overrides(digits, devices: int) -> list[str]:
    images, rows = digits
    return [f"{name}={value}" for name, value in example.settings(rows, devices, images).items()]


def test_the_digits_are_read_back_as_they_were_written_at_the_side_that_the_model_takes(digits):
    from sklearn.datasets import load_digits

    folder, rows = digits
    assert rows == {"train": 1437, "held-out": 360}
    batch = open_data(load_config("lenet-fashion", [f"data.folder={folder}"])).batch(0, "held-out")
    whole = load_digits()
    assert batch["images"].shape == (256, 1, 28, 28)
    assert batch["labels"].tolist() == whole.target[::5][:256].tolist()
    # Bilinear: the mean of an image, but for its border, is that of the 8 x 8 pixels.
    ink = whole.images[::5][:256].mean(axis=(1, 2)) / 16
    assert np.abs(batch["images"].mean(axis=(1, 2, 3)) - ink).max() < 0.02


@pytest.mark.once
@pytest.mark.parametrize(
    ("devices", "batch", "rate"),
    [
        pytest.param(1, 32, 0.003, marks=pytest.mark.wide),
        pytest.param(4, 128, 0.006, marks=pytest.mark.long),
    ],
)
def test_lenet_recognises_digits_it_has_not_seen_and_is_drawn_as_it_trains(
    digits, tmp_path, monkeypatch, devices: int, batch: int, rate: float
):
    monkeypatch.setattr(_train, "REPORT_SECONDS", 0.5)
    drawn: list[int] = []

    def look(event: object) -> None:
        page = tmp_path / "run/report.html"
        if isinstance(event, Evaluated) and page.exists():
            drawn.append(page.read_text().count("accuracy"))

    run = mw.train(
        "lenet-fashion",
        on=f"{devices}xCPU",
        overrides=[*overrides(digits, devices), f"layout=data={devices}"],
        folder=tmp_path / "run",
        on_event=look,
    )
    config = run.weighing.config
    assert config is not None
    assert (config.batch.sequences, config.peak_learning_rate) == (batch, pytest.approx(rate))
    held_out = run.measurement.held_out_metrics
    assert len(held_out) == example.EPOCHS[devices] + 1
    assert held_out[0]["accuracy"] < 0.2  # ten classes
    assert held_out[max(held_out)]["accuracy"] > 0.95
    assert drawn[-1] > 0  # before the run was over


@pytest.mark.long
def test_resnet_recognises_digits_it_has_not_seen(digits, tmp_path):
    small = ["model.image_size=32", "steps=96", "evaluation.every_steps=48", "evaluation.batches=12"]
    run = mw.train(
        "resnet18-fashion", on="1xCPU", overrides=[*overrides(digits, 1), *small], folder=tmp_path / "run"
    )
    held_out = run.measurement.held_out_metrics
    assert held_out[max(held_out)]["accuracy"] > 0.95
