from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.checkpoint import Checkpoints
from meshwright.trainer.step import build_step

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("run"), load_config("bytes-nano")
    (folder / "config.json").write_text(config.model_dump_json())
    checkpoints = Checkpoints(folder / "checkpoints")
    state = build_step(config, mesh_of((("data", 1),), jax.devices()[:1])).init(np.uint32(0))
    for step in (10, 20):
        checkpoints.save(step, state, {})
    checkpoints.close()
    (folder / "checkpoints/20/stray").write_text("")
    return folder


def test_the_prompt_and_what_follows_it_are_printed_and_nothing_else(meshwright, run: Path):
    told = ("--prompt", "import ", "--tokens", "5", "--step", "10", "--temperature", "0.5", "--seed", "3")
    done = meshwright("sample", str(run), *told)
    assert (done.status, done.talk) == (0, "")
    assert done.output.startswith("import ")
    assert done.output == meshwright("sample", str(run), *told).output


def test_as_json_the_tokens_are_there_too_and_a_damaged_checkpoint_is_warned_of(meshwright, run: Path):
    done = meshwright("sample", str(run), "--tokens", "5", "--json", "--tokenizer", "bytes")
    assert done.talk == "warning: the checkpoint of step 20 is damaged: stray is not in manifest.json\n"
    answer = done.json
    assert (answer["schema"], answer["step"], answer["prompt"]) == (1, 10, "\n")
    assert len(answer["tokens"]) == 5
    assert answer["text"] == bytes(answer["tokens"]).decode(errors="replace")
    assert answer["rejected"] == [{"step": 20, "why": "stray is not in manifest.json"}]


def test_a_folder_that_is_no_run_exits_with_2(meshwright, tmp_path: Path):
    done = meshwright("sample", str(tmp_path))
    assert done.status == 2
    assert "is not a run" in done.talk
