import subprocess
import sys

import numpy as np
import pytest

from meshwright.config import load_config, preset_names
from meshwright.data import open_data


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_has_data(preset: str):
    config = load_config(preset, ["batch.microbatch_sequences=none", "batch.sequences=2"])
    data = open_data(config)
    for split in ("train", "held-out"):
        batch = data.batch(0, split)
        assert all(len(array) == 2 for array in batch.values())
        if "tokens" in batch:
            assert batch["tokens"].shape == (2, config.batch.sequence_length + 1)
            assert batch["tokens"].dtype == np.int32
            assert 0 <= batch["tokens"].min() <= batch["tokens"].max() < config.model.vocab_size  # pyright: ignore


def test_reading_data_imports_no_jax():
    code = "import sys; from meshwright.config import load_config; from meshwright.data import open_data; "
    code += "open_data(load_config('linear')).batch(0, 'train'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
