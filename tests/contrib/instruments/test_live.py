import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.contrib.instruments import Live, LiveArray
from meshwright.contrib.instruments import _device_memory as _memory

SHAPE = (7, 13)  # no other test's


@pytest.fixture(scope="module", autouse=True)
def searched() -> Iterator[ModuleType]:
    """A module that may own an array: this one was made before searches began to be kept short."""
    module = ModuleType("holding")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        yield module


@pytest.fixture(autouse=True)
def as_where_other_tests_keep_no_arrays(monkeypatch):
    """Begin the search at some arrays of the test, however many larger ones other tests have kept."""
    monkeypatch.setattr(_memory, "MOST_OWNED", len(jax.live_arrays()) + _memory.MOST_OWNED)


class Holder:
    pass


def owner_of(shape=SHAPE):
    gc.collect()
    return next(group.owner for group in mw.live().arrays if group.shape == shape)


def test_a_local_variable_of_a_running_function_owns():
    mine = jnp.ones(SHAPE) + 1
    assert owner_of() == "local mine of test_a_local_variable_of_a_running_function_owns (test_live.py)"
    del mine


def test_a_global_of_a_module_owns(monkeypatch, searched):
    monkeypatch.setattr(searched, "mine", jnp.ones(SHAPE) + 1, raising=False)
    assert owner_of() == "holding.mine"


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
        (lambda array: {"a": [({"b": deque([array])},)]}, "holding.mine"),
    ],
)
def test_the_nearest_of_them_that_has_a_name_owns(monkeypatch, searched, hold, owner):
    monkeypatch.setattr(searched, "mine", hold(jnp.ones(SHAPE) + 1), raising=False)
    assert owner_of() == owner


def test_an_attribute_of_a_class_owns(monkeypatch, searched):
    made = type("Made", (), {"kept": jnp.ones(SHAPE) + 1})
    monkeypatch.setattr(searched, "Made", made, raising=False)
    del made
    assert owner_of() == "Made.kept"


def test_two_arrays_of_one_module_at_different_depths_are_both_found(monkeypatch, searched):
    near, deep = jnp.ones((8, 23)) + 1, [[[jnp.ones((9, 23)) + 1]]]
    monkeypatch.setattr(searched, "mine", {"near": near, "deep": deep}, raising=False)
    del near, deep
    owners = {owner_of((8, 23)), owner_of((9, 23))}
    assert owners == {"holding.mine"}


HELD_BY_ITSELF = """
import gc
import jax.numpy as jnp
import meshwright as mw

def hold():
    kept = [jnp.ones((6, 29)) + 1]
    kept.append(kept)  # it holds itself, and no name leads to it

mw.live()
gc.disable()
hold()
print([group.owner for group in mw.live().arrays if group.shape == (6, 29)])
"""


def test_what_nobody_in_python_is_known_to_hold_is_unknown():
    # In a process of its own: here the type checker's own frames may hold what is asked about.
    done = subprocess.run([sys.executable, "-c", HELD_BY_ITSELF], capture_output=True, text=True, check=True)
    assert done.stdout == "['unknown']\n"


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
    monkeypatch.setattr(
        _memory.gc, "get_referrers", lambda *level: asked.append(len(level)) or search(*level)
    )
    found = mw.live()
    assert len(asked) <= _memory.DEPTH
    assert max(asked) <= _memory.MOST_OWNED
    here = test_of_5000_arrays_python_is_searched_a_few_times_for_a_few.__name__
    alike = [group for group in found.arrays if group.owner == f"local kept of {here} (test_live.py)"]
    assert [(group.shape, group.count) for group in alike] == [((), 5000)]  # those beyond the first too
    del kept


@pytest.mark.parametrize("container", [list, lambda arrays: dict(enumerate(arrays))])
def test_what_lies_in_a_large_container_is_looked_up_once(monkeypatch, container):
    kept = container([jax.device_put(float(n)) for n in range(2000)])
    listed, entries = [], _memory._entries
    monkeypatch.setattr(_memory, "_entries", lambda holder: listed.append(holder is kept) or entries(holder))
    mw.live()
    assert sum(listed) == 1  # once for each array took 80 s where 20,000 were alive
    del kept


def test_a_function_under_a_debugger_keeps_its_variables():
    """Up to Python 3.12 a trace function's end writes the frame's copy of the variables back."""

    def watched(number):
        array = jnp.ones(SHAPE)
        return number, array.shape

    def trace(frame, event, argument):
        if frame.f_code is watched.__code__:
            mw.live()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert watched(5) == (5, SHAPE)
    finally:
        sys.settrace(before)


def change_until(stop, number, names):
    """Make, keep, delete and drop arrays, in a dict and among the globals, as fast as it goes."""
    for turn in itertools.count():
        if stop.is_set():
            break
        array = jnp.full((3, 5), turn)
        names[number, turn % 50] = globals()[f"_made_{number}_{turn % 50}"] = array
        if turn % 3 == 0:
            array.delete()
        names.pop((number, turn * 3 % 50), None)
        globals().pop(f"_made_{number}_{turn * 3 % 50}", None)


def test_other_threads_may_change_everything_meanwhile():
    stop, names, interval = threading.Event(), {}, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(2) as pool:
        changing = [pool.submit(change_until, stop, number, names) for number in range(2)]
        try:
            for _ in range(3):
                mw.live()
                mw.memory()
        finally:
            stop.set()
            sys.setswitchinterval(interval)
    assert [change.result() for change in changing] == [None, None]
    for name in [name for name in globals() if name.startswith("_made_")]:
        del globals()[name]


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


def test_the_search_starts_from_the_largest_and_says_of_which_it_did_not(monkeypatch):
    monkeypatch.setattr(_memory, "MOST_OWNED", 2)
    gc.disable()
    try:
        for n in range(1, 5):
            held = [jnp.ones((2_000_000, n)) + 1]  # larger than all that other tests still hold
            held.append(held)  # each in a container of its own, which no name leads to
        del held
        found = {group.shape: group.owner for group in mw.live().arrays}
    finally:
        gc.enable()
    assert [found[2_000_000, n] for n in (4, 3, 2, 1)] == ["unknown", "unknown", "not sought", "not sought"]


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
    group = LiveArray(
        shape=(2,), format="bf16", sharding="cpu:0", count=3, num_bytes=12, owner="model.weights"
    )
    assert str(Live(total_bytes=20, arrays=(group,))).splitlines() == [
        "20 B of jax arrays are alive",
        "  size  arrays  shape    sharding  owner",
        "  12 B       3  bf16[2]  cpu:0     model.weights",
    ]


@pytest.mark.filterwarnings("ignore")
def test_eight_threads_ask_at_once(at_once):
    kept = jnp.ones(SHAPE) + 1
    assert all(any(g.shape == SHAPE for g in found.arrays) for found in at_once(mw.live))
    del kept
