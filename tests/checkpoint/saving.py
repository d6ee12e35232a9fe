"""A process that saves without end, to be killed: python saving.py FOLDER SEED. Each array of step n is made
from n alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.trainer.checkpoint import Checkpoints

NUM_ARRAYS, ARRAY_ELEMENTS = 24, 1 << 19  # 2 MiB each


def state_of(step: int) -> dict[str, np.ndarray]:
    """48 MiB that differ in every element from those of other steps."""
    numbers = np.arange(ARRAY_ELEMENTS, dtype=np.uint32)
    return {f"array{index:02d}": numbers * np.uint32(2 * step + 1) + index for index in range(NUM_ARRAYS)}


def main(folder: Path) -> None:
    checkpoints: Any = Checkpoints(folder, keep_last=2)
    found = checkpoints.newest()
    step = 0 if found is None else found.step
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        step += 1
        checkpoints.save(step, jax.device_put(state_of(step)), {"step": step})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
