"""Real handwritten digits through `lenet-fashion`: alone, then on four devices with batch and rate scaled.

Run: python examples/digits.py. scikit-learn ships 1,797 digits of 8 x 8 pixels, so nothing is downloaded
(https://scikit-learn.org/stable/datasets/toy_dataset.html). Every fifth is held out. While it trains,
runs/digits/report.html draws loss and accuracy; open it and load it again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from meshwright.contrib.images import write_images

RUNS = Path("runs")
IMAGES = RUNS / "digits-images"
WHITE = 16  # of the digits' pixels; ours go to 255
ONE_IN = 5  # is held out
PER_REPLICA = 32
EPOCHS = {1: 4, 4: 7}  # a larger batch takes more passes over the data, and fewer steps
CONFIG = {
    # The rate was chosen for a batch of 32. Four devices take 128 images a step and, by the square-root rule,
    # twice the rate (docs/explanation/optimizers.md, "When devices are added").
    "batch.sequences_per_replica": PER_REPLICA,
    "batch.base_sequences": PER_REPLICA,
    "schedule.scale": "sqrt",
    "schedule.kind": "cosine",
    "schedule.warmup_steps": 8,
    "optimizer.kind": "adamw",
    "optimizer.learning_rate": 0.003,
}


def write_digits(folder: Path) -> dict[str, int]:
    """Write the digits as the four files of MNIST, 8 x 8 pixels each; rows by part.

    Whoever reads them resizes them to the side that the model takes.
    """
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / WHITE)).astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    held_out = np.arange(len(labels)) % ONE_IN == 0
    return write_images(
        folder,
        train=(pixels[~held_out], labels[~held_out]),
        held_out=(pixels[held_out], labels[held_out]),
    )


def settings(rows: dict[str, int], devices: int, images: Path = IMAGES) -> dict[str, object]:
    """What is set beside the preset: the files, the scaled batch, an evaluation at the end of each epoch."""
    batch = PER_REPLICA * devices
    steps_of_an_epoch = -(-rows["train"] // batch)
    return CONFIG | {
        "data.folder": images,
        "steps": EPOCHS[devices] * steps_of_an_epoch,
        "evaluation.every_steps": steps_of_an_epoch,
        "evaluation.batches": -(-rows["held-out"] // batch),  # all of them
        "checkpoint.every_steps": "none",
    }


def main() -> None:
    """Train on one and on four devices, and print what each makes of the digits it has not seen."""
    shutil.rmtree(IMAGES, ignore_errors=True)
    rows = write_digits(IMAGES)
    for devices, folder in ((1, RUNS / "digits"), (4, RUNS / "digits-4-devices")):
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            "meshwright",
            "train",
            "lenet-fashion",
            "--on",
            f"{devices}xCPU",
            "--layout",
            f"data={devices}",
        ]
        command += ["--folder", str(folder)]
        for name, value in settings(rows, devices).items():
            command += ["--set", f"{name}={value}"]
        print(f"\n$ {' '.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", *command], check=True)
        held_out = json.loads((folder / "measurement.json").read_text())["held_out_metrics"]
        accuracy = held_out[max(held_out, key=int)]["accuracy"]
        print(f"{devices} devices: accuracy {accuracy:.1%} on {rows['held-out']} unseen digits")


if __name__ == "__main__":
    main()
