import gc
import sys
import threading
import weakref
from collections import deque

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


class Slotted:
    __slots__ = ("params",)
    kept = None


def closing_over(array):
    return lambda: array


def hold_in_an_attribute(array):
    holder = Holder()
    holder.__dict__["params"] = {"w": array}  # the attributes' dict is made, not only possible
    return holder


def hold_in_a_slot(array):
    holder = Slotted()
    holder.params = [array]
    return holder


@pytest.mark.parametrize(
    ("hold", "owner"),
    [
        (hold_in_an_attribute, "Holder.params"),
        (hold_in_a_slot, "Slotted.params"),
        (closing_over, "closure of closing_over.<locals>.<lambda>"),
        (lambda array: {"a": [({"b": deque([array])},)]}, f"{__name__}.held_by_the_module"),
    ],
)
def test_the_nearest_of_them_that_has_a_name_owns(monkeypatch, hold, owner):
    monkeypatch.setattr(sys.modules[__name__], "held_by_the_module", hold(jnp.ones(SHAPE) + 1))
    assert owner_of() == owner


def test_an_attribute_of_a_class_owns(monkeypatch):
    monkeypatch.setattr(Slotted, "kept", jnp.ones(SHAPE) + 1)
    assert owner_of() == "Slotted.kept"


def test_two_arrays_of_one_module_at_different_depths_are_both_found(monkeypatch):
    near, deep = jnp.ones((8, 23)) + 1, [[[jnp.ones((9, 23)) + 1]]]
    monkeypatch.setattr(sys.modules[__name__], "held_by_the_module", {"near": near, "deep": deep})
    del near, deep
    owners = {owner_of((8, 23)), owner_of((9, 23))}
    assert owners == {f"{__name__}.held_by_the_module"}


def test_what_nobody_in_python_is_known_to_hold_is_unknown():
    gc.collect()
    kept = [jnp.ones((6, 29)) + 1]
    kept.append(kept)
    del kept  # it holds itself, and no name leads to it
    assert [group.owner for group in mw.live().arrays if group.shape == (6, 29)] == ["unknown"]


def test_asking_keeps_nothing_alive():
    array = jnp.ones(SHAPE) + 1
    watch = weakref.ref(array)
    mine = locals()
    mw.live()
    assert "watch" in mine  # what somebody else reads too is left alone
    del mine["array"], mine
    del array
    assert watch() is None


def test_asking_keeps_no_local_of_a_caller_alive():
    array = jnp.ones(SHAPE) + 1
    watch = weakref.ref(array)
    mw.live()
    del array
    assert watch() is None


def test_of_5000_arrays_python_is_searched_a_few_times_for_a_few(monkeypatch):
    kept = [jax.device_put(float(n)) for n in range(5000)]
    asked, search = [], gc.get_referrers
    monkeypatch.setattr(_live.gc, "get_referrers", lambda *level: asked.append(len(level)) or search(*level))
    found = mw.live()
    assert len(asked) <= _live.DEPTH
    assert max(asked) <= _live.MOST_OWNED
    alike = [group for group in found.arrays if group.shape == ()]
    assert sum(group.count for group in alike) >= 5000
    assert "not sought" in {group.owner for group in alike}
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
    assert found[0].sharding.startswith("P")  # the spec, as this version of jax writes it
    assert found[0].sharding.endswith("on 8 devices")
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
    group = _live.LiveArray(
        shape=(2,), format="bf16", sharding="cpu:0", count=3, num_bytes=12, owner="model.weights"
    )
    assert str(_live.Live(total_bytes=20, arrays=(group,))).splitlines() == [
        "20 B of jax arrays are alive",
        "  size  arrays  shape    sharding  owner",
        "  12 B       3  bf16[2]  cpu:0     model.weights",
    ]


@pytest.mark.filterwarnings("ignore")
def test_eight_threads_ask_at_once(at_once):
    kept = jnp.ones(SHAPE) + 1
    assert all(any(g.shape == SHAPE for g in found.arrays) for found in at_once(mw.live))
    del kept
