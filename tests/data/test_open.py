import subprocess
import sys

import numpy as np
import pytest

from meshwright.config import IdxData, load_config, overridden, preset_names
from meshwright.data import ImageFiles, open_data, write_sample_images
from meshwright.errors import InputError


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
    code = "import sys; from meshwright.config import load_config; from meshwright.data import open_data; "
    code += "open_data(load_config('linear')).batch(0, 'train'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
