import jax.numpy as jnp
import pytest

from meshwright.config import CheckpointConfig
from meshwright.errors import InputError
from meshwright.training import CheckpointSaved, RunFolder
from meshwright.training._interface import PhaseClock
from meshwright.training._loop import Saving

pytestmark = pytest.mark.quick

STATE = {"parameters": {"w": jnp.arange(4.0)}}


def saving(folder, **fields) -> Saving:
    about = {"config": {}, "layout": "data=1"}
    return Saving(RunFolder(folder), CheckpointConfig(**fields), about, PhaseClock())


def test_a_step_is_saved_once_with_what_stands_beside_the_state(tmp_path):
    each = saving(tmp_path, every_steps=5)
    assert [step for step in range(1, 12) if each.due(step)] == [5, 10]
    each.save(5, STATE, 3)
    each.save(5, STATE, 3)
    assert not each.due(5)
    each.wait()
    (saved,) = each.finished()
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, each.finished()) == (5, [])
    found = each.newest()
    assert found is not None
    assert found.about == {"config": {}, "layout": "data=1", "data_offset": 3}
    each.close()


def test_without_an_interval_nothing_is_made(tmp_path):
    each = saving(tmp_path, every_steps=None)
    each.save(5, STATE, 0)
    each.wait()
    each.close()
    assert (each.due(5), each.finished(), each.newest(), list(tmp_path.iterdir())) == (False, [], None, [])


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(InputError, match="cannot write checkpoints to"):
        saving(tmp_path, every_steps=5)
