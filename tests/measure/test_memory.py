import gc
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.measure import ResidentGrowth, bytes_on


def test_two_new_arrays_of_32_by_32_are_8192_bytes_more():
    gc.collect()
    with mw.memory() as used:
        kept = [jnp.zeros((32, 32)), jnp.ones((32, 32))]
        jax.block_until_ready(kept)
    assert used.grown_bytes["cpu:0"] == 2 * (32 * 32 * 4)
    assert all(grown == 0 for device, grown in used.grown_bytes.items() if device != "cpu:0")


def test_what_is_given_up_makes_it_less():
    array = jnp.zeros((32, 32)) + 1
    with mw.memory() as used:
        array.delete()
    assert used.grown_bytes["cpu:0"] == -4096


def test_an_array_over_eight_devices_grows_each_by_its_part(mesh):
    split = NamedSharding(mesh(data=8), PartitionSpec("data"))
    make = jax.jit(lambda: jnp.ones((16, 4)), out_shardings=split)
    jax.block_until_ready(make())
    gc.collect()
    with mw.memory() as used:
        kept = jax.block_until_ready(make())
    assert kept.nbytes == 256
    assert set(used.grown_bytes.values()) == {32}


def test_a_cpu_keeps_no_peak_and_says_by_what_its_bytes_are_known():
    first = mw.memory().devices[0]
    assert (first.device, first.peak_bytes, first.limit_bytes) == ("cpu:0", None, None)
    assert first.source.startswith("live jax arrays")
    assert first.why_no_peak == "this device's runtime keeps no peak"


class Device:
    platform, id = "gpu", 3

    def memory_stats(self):
        return {"bytes_in_use": 100, "peak_bytes_in_use": 400, "bytes_limit": 1000}


def test_where_a_runtime_keeps_statistics_they_are_given(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    (found,) = mw.memory().devices
    assert (found.device, found.allocated_bytes, found.peak_bytes, found.limit_bytes) == (
        "gpu:3",
        100,
        400,
        1000,
    )
    assert found.source == "the runtime's allocator"


def test_cudas_memory_of_torch_is_told_where_torch_has_started_it(monkeypatch):
    class Cuda:
        is_available = is_initialized = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        memory_allocated = staticmethod(lambda number: 10)
        max_memory_allocated = staticmethod(lambda number: 20)
        get_device_properties = staticmethod(lambda number: type("P", (), {"total_memory": 30}))

    monkeypatch.setitem(sys.modules, "torch", type("Torch", (), {"cuda": Cuda}))
    found = mw.memory().devices[-1]
    assert (found.device, found.allocated_bytes, found.peak_bytes, found.limit_bytes) == (
        "torch cuda:0",
        10,
        20,
        30,
    )


@pytest.mark.parametrize("name", ["before", "after", "grown_bytes"])
def test_without_a_block_there_is_no_before_and_after(name):
    with pytest.raises(mw.InputError, match="no block of code has ended"):
        getattr(mw.memory(), name)


def test_it_reads_as_a_table():
    text = str(mw.memory())
    assert text.splitlines()[0].split() == ["device", "allocated", "peak", "limit", "source"]
    assert text.splitlines()[1].startswith("cpu:0 ")
    assert text.splitlines()[1].endswith(
        "unknown  unknown  live jax arrays: this device's runtime keeps no statistics"
    )
    assert max(len(line) for line in text.splitlines()) <= 110


def test_after_a_block_it_reads_as_a_table_with_what_it_grew(monkeypatch):
    held = iter([100, 100, 4196])  # when it is made, before and after the block
    monkeypatch.setattr(Device, "memory_stats", lambda self: {"bytes_in_use": next(held)})
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    monkeypatch.setitem(sys.modules, "torch", None)
    with mw.memory() as used:
        pass
    assert str(used).splitlines() == [
        "device  allocated     grown     peak    limit  source",
        "gpu:3    4.10 KiB  4.00 KiB  unknown  unknown  the runtime's allocator",
    ]
    assert used.after[0].why_no_peak == "this device's runtime keeps no peak"


def test_eight_threads_ask_at_once(at_once):
    assert all(len(found.devices) == 8 for found in at_once(mw.memory))


MEGABYTE = 2**20


def test_bytes_on_a_device_are_the_shards_that_lie_there():
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    split = jax.device_put(np.zeros((8, 6), np.float32), NamedSharding(mesh, PartitionSpec("a")))
    whole = jax.device_put(np.zeros(5, np.int32), NamedSharding(mesh, PartitionSpec()))
    elsewhere = jax.device_put(jnp.zeros(100), jax.devices()[7])
    assert bytes_on(jax.devices()[3], [split, whole, elsewhere]) == 8 * 6 * 4 // 2 + 5 * 4


def test_growth_is_to_the_peak_even_where_it_is_gone_again():
    held = np.ones(64 * MEGABYTE, np.uint8)
    growth = ResidentGrowth()
    more = np.ones(100 * MEGABYTE, np.uint8)
    del more
    grown = growth.bytes()
    assert growth.why_not == ""
    assert grown is not None
    # The kernel counts to about a megabyte; what was held before is not in it.
    assert 98 * MEGABYTE < grown < 120 * MEGABYTE
    assert held.all()


def test_what_came_before_is_forgotten():
    more = np.ones(100 * MEGABYTE, np.uint8)
    del more
    grown = ResidentGrowth().bytes()
    assert grown is not None
    assert grown < 20 * MEGABYTE


def test_a_system_without_a_peak_to_reset_gives_no_figure_but_a_reason(tmp_path):
    growth = ResidentGrowth(tmp_path / "none")
    assert growth.bytes() is None
    assert "cannot reset a process's peak" in growth.why_not


def test_a_system_that_refuses_the_reset_gives_no_figure_but_a_reason():
    growth = ResidentGrowth(Path("/dev/full"))
    assert growth.bytes() is None
    assert "No space left on device" in growth.why_not
