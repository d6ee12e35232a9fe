import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from meshwright.hardware import COLLECTIVE_KINDS
from meshwright.measure import _probe_kernels as _best
from meshwright.measure import _probe_kernels as _probe_collectives


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_best, "REPEATS", 1)
    for name, value in {"LARGE_BYTES": 2**13, "SMALL_BYTES": 2**10, "LONG_CHAIN": 3}.items():
        monkeypatch.setattr(_probe_collectives, name, value)


def test_every_kind_and_group_of_eight_devices_is_measured():
    found = _probe_collectives.collective_rates()
    assert [(each.kind, each.group_size) for each in found] == [
        (kind, size) for kind in COLLECTIVE_KINDS for size in (2, 4, 8)
    ]
    assert all(each.bytes_per_second > 0 and each.latency_seconds > 0 for each in found)


def test_one_device_sends_nothing(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    assert _probe_collectives.collective_rates() == ()


def test_rates_are_what_a_large_message_and_a_longer_chain_take_more(monkeypatch):
    taken = {(2**13, 0): 3.0, (2**10, 0): 1.0, (2**10, 2): 5.0, (2**10, 3): 9.0}
    monkeypatch.setattr(_probe_collectives, "_seconds", lambda kind, size, *at: taken[at])
    found = _probe_collectives._measured("all-reduce", 4, 8)
    assert found.bytes_per_second == 8 * 2 * (2**13 - 2**10) * 3 / 4 / 2.0
    assert found.latency_seconds == 4.0


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_each_program_is_one_collective_of_its_kind_among_groups_of_that_size(monkeypatch, kind):
    made = []

    def compile_only(function, arguments):
        made.append(jax.jit(function).lower(*arguments).compile().as_text())
        return 1.0

    monkeypatch.setattr(_probe_collectives, "best_seconds", compile_only)
    _probe_collectives._seconds(kind, 4, 2**10, 0)
    _probe_collectives._seconds(kind, 4, 2**10, 3)
    single, chain = (text.count(f" {kind}(") for text in made)
    assert (single, chain) == (1, 3)
    groups = (
        "{{0,1,2,3},{4,5,6,7}}",
        "[2,4]<=[8]",
        "mesh['groups'=2,'members'=4] {'members'}",
    )  # jax 0.10 to 0.12
    assert any(f"replica_groups={form}" in made[0] for form in groups)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_link_of_the_chain_keeps_shape_and_mean(kind):
    collective, back, _ = _probe_collectives.KINDS[kind]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("groups", "members"))
    spread = jax.shard_map(
        lambda x: back(collective(x), 4),
        mesh=mesh,
        in_specs=_probe_collectives.SPLIT,
        out_specs=_probe_collectives.SPLIT,
    )
    ones = np.ones(512, np.float32)
    np.testing.assert_allclose(spread(ones), ones)
