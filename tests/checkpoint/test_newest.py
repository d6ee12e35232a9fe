from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from meshwright.errors import InputError, MeshwrightError
from meshwright.trainer.checkpoint import Checkpoints, checkpoint_of, newest_checkpoint

FILE = "state/manifest.ocdbt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10, 20 and 30."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        checkpoints.save(step, {"parameters": {"x": jnp.int32(step)}}, {"at": step})
    checkpoints.close()
    return tmp_path


def test_the_newest_whole_one_is_found_and_newer_ones_are_named(run: Path):
    folder = run / "checkpoints"
    (folder / "30" / FILE).unlink()
    (folder / "20" / "stray").write_text("")
    found = newest_checkpoint(folder)
    assert found is not None
    assert (found.step, found.about, found.folder) == (10, {"at": 10}, folder / "10")
    told = [(each.step, each.why) for each in found.rejected]
    assert told == [(30, f"{FILE} is missing"), (20, "stray is not in manifest.json")]


def test_none_is_found_where_there_is_none(tmp_path: Path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    assert newest_checkpoint(tmp_path) is None


def test_nothing_but_damaged_ones_is_an_error_that_names_each(run: Path):
    for step in (10, 20, 30):
        (run / "checkpoints" / str(step) / "manifest.json").unlink()
    with pytest.raises(MeshwrightError, match=r"none of the 3 checkpoints in .* step 10: manifest") as told:
        newest_checkpoint(run / "checkpoints")
    assert told.value.hint.startswith("restore a copy of one of them; or remove ")


def test_a_runs_checkpoint_is_the_newest_or_that_of_the_step_asked_for(run: Path):
    assert checkpoint_of(run).step == 30
    assert checkpoint_of(run, 20).step == 20


def test_a_step_without_a_checkpoint_is_told_with_the_nearest(run: Path):
    with pytest.raises(InputError, match="has no checkpoint of step 24") as told:
        checkpoint_of(run, 24)
    assert told.value.hint == "the nearest is of step 20"


def test_a_run_without_checkpoints_is_told(tmp_path: Path):
    with pytest.raises(InputError, match=r"has no checkpoints\n.*checkpoint\.every_steps"):
        checkpoint_of(tmp_path / "nowhere")


def test_a_damaged_one_that_was_asked_for_is_an_error(run: Path):
    (run / "checkpoints" / "20" / FILE).unlink()
    with pytest.raises(MeshwrightError, match=f"step 20 is damaged: {FILE} is missing") as told:
        checkpoint_of(run, 20)
    assert told.value.hint == "leave --step out to take the newest that is whole"


def test_one_whose_companions_its_reader_cannot_use_is_passed_over(run: Path):
    found = newest_checkpoint(run / "checkpoints", lambda about: "it says 30" if about["at"] == 30 else "")
    assert found is not None
    assert found.step == 20
    assert [(each.step, each.why) for each in found.rejected] == [(30, "it says 30")]
