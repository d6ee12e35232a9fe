import gc
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.measure import _live

SHAPE = (7, 13)  # no other test's
held_by_the_module = None


class Holder:
    pass


def owner_of(shape=SHAPE):
    gc.collect()
    return next(group.owner for group in mw.live().arrays if group.shape == shape)


def test_a_local_variable_of_a_running_function_owns():
    mine = jnp.ones(SHAPE) + 1
    assert owner_of() == "local mine of test_a_local_variable_of_a_running_function_owns (test_live.py)"
    del mine


def test_a_global_of_a_module_owns(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "held_by_the_module", jnp.ones(SHAPE) + 1)
    assert owner_of() == f"{__name__}.held_by_the_module"


def test_an_attribute_owns_also_through_containers(monkeypatch):
    holder = Holder()
    holder.state = {"layers": [jnp.ones(SHAPE) + 1]}
    kept = {"holder": holder}
    assert owner_of() in (
        "Holder.state",
        "local holder of test_an_attribute_owns_also_through_containers (test_live.py)",
    )
    del kept


def test_arrays_alike_are_one_row_and_the_largest_come_first():
    kept = [jnp.ones(SHAPE) + n for n in range(3)]
    gc.collect()
    found = mw.live()
    group = next(g for g in found.arrays if g.shape == SHAPE)
    assert (group.count, group.num_bytes, group.format) == (3, 3 * 7 * 13 * 4, "fp32")
    assert [g.num_bytes for g in found.arrays] == sorted((g.num_bytes for g in found.arrays), reverse=True)
    assert found.total_bytes == sum(g.num_bytes for g in found.arrays)
    del kept


def test_at_most_so_many_rows_and_all_in_the_total():
    kept = [jnp.ones((n, 11)) + 1 for n in (3, 4)]
    gc.collect()
    all_of_them, one = mw.live(), mw.live(top=1)
    assert len(one.arrays) == 1
    assert one.total_bytes == all_of_them.total_bytes
    del kept


def test_a_sharded_array_is_one_and_its_shards_are_left_out(mesh):
    split = NamedSharding(mesh(data=8), PartitionSpec("data"))
    array = jax.jit(lambda: jnp.ones((24, 5)), out_shardings=split)()
    shards = [shard.data for shard in array.addressable_shards]
    gc.collect()
    found = [g for g in mw.live().arrays if g.shape in ((24, 5), (3, 5))]
    assert [(g.shape, g.count, g.num_bytes) for g in found] == [((24, 5), 1, 480)]
    assert found[0].sharding == "PartitionSpec('data',) on 8 devices" or "on 8 devices" in found[0].sharding
    del shards


def test_a_deleted_array_is_not_alive():
    gone = jnp.ones((5, 17)) + 1
    gone.delete()
    assert not [g for g in mw.live().arrays if g.shape == (5, 17)]


def test_of_many_arrays_only_the_largest_are_asked_for_their_owner(monkeypatch):
    asked = []
    monkeypatch.setattr(_live, "MOST_OWNED", 2)
    monkeypatch.setattr(_live, "_owners", lambda arrays: asked.extend(arrays) or ["somebody"] * len(arrays))
    kept = [jnp.ones((2, n)) + 1 for n in range(1, 6)]
    mw.live()
    assert len(asked) == 2
    del kept


def test_another_threads_locals_own():
    ready, done, found = threading.Event(), threading.Event(), []

    def keeper():
        theirs = jnp.ones((9, 19)) + 1
        ready.set()
        done.wait()
        del theirs

    thread = threading.Thread(target=keeper)
    thread.start()
    ready.wait()
    found.append(owner_of((9, 19)))
    done.set()
    thread.join()
    assert found == ["local theirs of keeper (test_live.py)"]


def test_it_reads_as_a_table():
    kept = jnp.ones(SHAPE) + 1
    text = str(mw.live())
    assert "of jax arrays are alive" in text.splitlines()[0]
    assert "fp32[7, 13]" in text
    del kept


@pytest.mark.filterwarnings("ignore")
def test_eight_threads_ask_at_once(at_once):
    kept = jnp.ones(SHAPE) + 1
    assert all(any(g.shape == SHAPE for g in found.arrays) for found in at_once(mw.live))
    del kept
