from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.trainer.checkpoint import Checkpoints, Found, export_parameters


@pytest.fixture
def found(checkpoints: Checkpoints, small_state: Callable[..., Any]) -> Found:
    checkpoints.save(3, small_state(3, fsdp=4, tensor=2), {})
    made = checkpoints.newest()
    assert made is not None
    return made


def test_another_library_reads_the_same_parameters(
    found: Found, small_state: Callable[..., Any], same_bits: Callable[[Any, Any], bool], tmp_path: Path
):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "model.safetensors"
    export_parameters(found, path)
    expected = small_state(3)["parameters"]
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert read.keys() == expected.keys()
    formats = {"matrix": "F32", "low": "BF16", "tiny": "F8_E4M3"}
    for name, array in expected.items():
        assert read[name]["dtype"] == formats[name]
        assert tuple(read[name]["shape"]) == array.shape
        assert bytes(read[name]["data"]) == np.asarray(array).tobytes()


def test_pytorch_reads_the_same_numbers(found: Found, small_state: Callable[..., Any], tmp_path: Path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    load = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
    export_parameters(found, tmp_path / "model.safetensors")
    read = load(tmp_path / "model.safetensors")
    expected = small_state(3)["parameters"]
    for name, array in expected.items():
        assert torch.equal(read[name].float(), torch.tensor(np.asarray(array.astype(jnp.float32))))


def test_names_are_paths_with_dots_and_the_step_is_told(checkpoints: Checkpoints, tmp_path: Path):
    state = {"parameters": {"blocks": {"mlp": {"up": jnp.ones((2, 3))}}, "head": jnp.ones(1)}, "step": 0}
    checkpoints.save(9, jax.device_put(state), {})
    made = checkpoints.newest()
    assert made is not None
    held = export_parameters(made, tmp_path / "x.safetensors")
    assert {name: array.shape for name, array in held.items()} == {"blocks.mlp.up": (2, 3), "head": (1,)}
    written = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(written[:8], "little")
    header = json.loads(written[8 : 8 + length])
    assert header["__metadata__"] == {"producer": "meshwright", "step": "9"}
    assert header["blocks.mlp.up"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert (8 + length) % 8 == 0
    assert len(written) == 8 + length + 28


def test_a_file_that_cannot_be_written_is_told_and_leaves_nothing(found: Found, tmp_path: Path):
    with pytest.raises(InputError, match=r"cannot write .*: No such file or directory") as told:
        export_parameters(found, tmp_path / "absent" / "x.safetensors")
    assert told.value.hint == "name a file in a folder that exists and has room"
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="Is a directory"):
        export_parameters(found, tmp_path / "folder")
    assert not list(tmp_path.glob(".*partial"))
