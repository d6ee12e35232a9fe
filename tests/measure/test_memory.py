from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.measure import ResidentGrowth, _memory, bytes_on

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


def test_a_system_without_a_peak_to_reset_gives_no_figure_but_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(_memory, "_CLEAR_PEAK", tmp_path / "none")
    growth = ResidentGrowth()
    assert growth.bytes() is None
    assert "cannot reset a process's peak" in growth.why_not


def test_a_system_that_refuses_the_reset_gives_no_figure_but_a_reason(monkeypatch):
    monkeypatch.setattr(_memory, "_CLEAR_PEAK", Path("/dev/full"))
    growth = ResidentGrowth()
    assert growth.bytes() is None
    assert "No space left on device" in growth.why_not
