from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from meshwright.trainer.checkpoint import Checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    for step in (10, 20):
        parameters = {"head": jnp.full((3, 5), step), "blocks": {"norm": jnp.ones(4, jnp.bfloat16)}}
        checkpoints.save(step, {"parameters": parameters, "step": jnp.int32(step)}, {})
    checkpoints.close()
    return tmp_path / "run"


def test_the_file_is_told_with_what_is_in_it(meshwright, run: Path, tmp_path: Path):
    done = meshwright("export", str(run), "--to", str(tmp_path / "m.safetensors"))
    assert (done.status, done.talk) == (0, "")
    assert " ".join(done.output.split()).endswith("m.safetensors: 19 parameters in 2 arrays, step 20")
    assert (tmp_path / "m.safetensors").stat().st_size > 3 * 5 * 4 + 4 * 2


def test_as_json_each_array_is_named_and_a_damaged_checkpoint_is_warned_of(
    meshwright, run: Path, tmp_path: Path
):
    (run / "checkpoints/20/stray").write_text("")
    done = meshwright("export", str(run), "--to", str(tmp_path / "m"), "--json")
    assert done.talk == "warning: the checkpoint of step 20 is damaged: stray is not in manifest.json\n"
    assert done.json == {
        "schema": 1,
        "file": str(tmp_path / "m"),
        "step": 10,
        "arrays": {
            "blocks.norm": {"shape": [4], "dtype": "bfloat16"},
            "head": {"shape": [3, 5], "dtype": "int32"},
        },
        "rejected": [{"step": 20, "why": "stray is not in manifest.json"}],
    }


def test_a_step_that_is_not_there_exits_with_2_and_a_damaged_one_with_1(
    meshwright, run: Path, tmp_path: Path
):
    (run / "checkpoints/20/stray").write_text("")
    for step, status in (("15", 2), ("20", 1)):
        done = meshwright("export", str(run), "--to", str(tmp_path / "m"), "--step", step)
        assert done.status == status
        assert f"step {step}" in done.talk
    assert not (tmp_path / "m").exists()
