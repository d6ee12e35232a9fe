from contextlib import closing

import jax.numpy as jnp
import pytest

from meshwright.config import CheckpointConfig
from meshwright.contrib.clusters import ProcessGroup
from meshwright.errors import InputError
from meshwright.trainer.loop import CheckpointSaved, PhaseClock, RunFolder, Saving
from tests.contrib.clusters.test_peers import each as each_of

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


@pytest.mark.parametrize(
    ("agreements", "steps", "left_out", "words"),
    [
        (("a", "a"), (5, 6), (0, 0), "step is 5 in process 0 on a, and 6 in process 1 on b"),
        (("a", "a"), (5, 5), (0, 2), "batches left out is 0 in process 0 on a, and 2 in process 1 on b"),
        (("a", "b"), (5, 5), (0, 0), "agreement is a in process 0 on a, and b in process 1 on b"),
    ],
)
def test_processes_that_have_come_apart_save_nothing_and_say_so(tmp_path, agreements, steps, left_out, words):
    def save(peers: ProcessGroup) -> None:
        about = {"config": {}, "layout": "data=2", "agreement": agreements[peers.index]}
        folder, config = RunFolder(tmp_path, peers=peers), CheckpointConfig(every_steps=1)
        with closing(Saving(folder, config, about, PhaseClock())) as each:
            each.save(steps[peers.index], STATE, left_out[peers.index])

    for error in each_of(2, save, hosts="ab"):
        assert isinstance(error, InputError)
        assert error.message == f"the processes of this run differ: {words}"
    assert not any(path.name.isdigit() for path in (tmp_path / "checkpoints").iterdir())
