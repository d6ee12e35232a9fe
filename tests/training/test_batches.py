"""Batches as the step takes them: on the devices of all processes, and made ahead by one thread."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.config import load_config
from meshwright.trainer.data import open_data
from meshwright.trainer.loop import batches_ahead
from meshwright.trainer.loop._interruptions import put
from meshwright.trainer.loop._loop import BatchLoader, _can_pin, rows_held


def test_batches_come_in_order():
    assert list(batches_ahead(lambda step: step * step, range(5))) == [0, 1, 4, 9, 16]


def test_a_run_shorter_than_the_queue_ends():
    assert list(batches_ahead(lambda step: step, range(1))) == [0]


def test_two_batches_at_most_are_made_ahead_and_none_after_closing():
    made: list[int] = []
    batches = batches_ahead(lambda step: made.append(step) or step, range(100))
    assert next(batches) == 0
    batches.close()
    assert made == list(range(len(made)))
    assert len(made) <= 3


def test_batches_are_made_by_another_thread():
    names = list(batches_ahead(lambda step: threading.current_thread().name, range(3)))
    assert all(name.startswith("meshwright-batches") for name in names)


def test_what_the_thread_meets_is_raised_where_the_batch_is_taken():
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("no such step")
        return step

    batches = batches_ahead(make, range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="no such step"):
        next(batches)


def abstract(mesh, *shape: int) -> jax.ShapeDtypeStruct:
    rows = PartitionSpec(None, ("data", "fsdp"))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, rows))


def test_rows_held_may_lie_apart(mesh, monkeypatch):
    batch = abstract(mesh(fsdp=2, data=2), 1, 8)  # `data` is the outer part of the rows, and not of the mesh
    assert rows_held(batch).tolist() == list(range(8))

    def of_two(self: NamedSharding, shape: tuple[int, ...]) -> dict:
        return dict(list(self.devices_indices_map(shape).items())[:2])

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", of_two)
    assert rows_held(batch).tolist() == [0, 1, 4, 5]


def test_one_process_takes_the_whole_batch_as_the_step_does(mesh):
    data = open_data(load_config("linear", ["batch.sequences=16"]))
    shapes = mesh(data=2, fsdp=2)
    batch = {name: abstract(shapes, 2, 8, *rows.shape[1:]) for name, rows in data.batch(0, "train").items()}
    fed = BatchLoader(data, batch).batch(3, "held-out")
    for name, rows in data.batch(3, "held-out").items():
        np.testing.assert_array_equal(fed[name], rows.reshape(fed[name].shape))
        assert fed[name].sharding == batch[name].sharding


def test_an_array_is_put_where_it_belongs(mesh):
    values = np.arange(8, dtype=np.int32).reshape(2, 4)
    there = put(values, NamedSharding(mesh(data=2, tensor=2), PartitionSpec("data", "tensor")))
    assert isinstance(there, jax.Array)
    np.testing.assert_array_equal(there, values)
    assert there.dtype == jnp.int32


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2}, {"data": 2, "fsdp": 1, "tensor": 2}])
def test_batches_reach_their_devices_through_pinned_memory_unchanged(mesh, monkeypatch, axes):
    data = open_data(load_config("linear", ["batch.sequences=16"]))
    shapes = mesh(**axes)
    batch = {name: abstract(shapes, 2, 8, *rows.shape[1:]) for name, rows in data.batch(0, "train").items()}
    kinds: list[str | None] = []
    put_there = jax.device_put

    def noted(value, sharding):
        kinds.append(sharding.memory_kind)
        return put_there(value, sharding)

    plain = BatchLoader(data, batch).batch(3)
    monkeypatch.setattr(jax, "device_put", noted)
    pinned = BatchLoader(data, batch, pins=True).batch(3)
    assert set(kinds[::2]) == {"pinned_host"}
    assert set(kinds[1::2]) == {"device"}
    for name, array in plain.items():
        np.testing.assert_array_equal(pinned[name], array)
        assert pinned[name].sharding == array.sharding
        assert {shard.data.sharding.memory_kind for shard in pinned[name].addressable_shards} == {"device"}


def test_memory_is_pinned_for_accelerators_that_have_it_alone(mesh):
    class Memory:
        def __init__(self, kind):
            self.kind = kind

    class Device:
        def __init__(self, platform, *kinds):
            self.platform, self._kinds = platform, kinds

        def addressable_memories(self):
            return [Memory(kind) for kind in self._kinds]

    assert _can_pin([Device("gpu", "device", "pinned_host")])
    assert not _can_pin([Device("cpu", "device", "pinned_host")])
    assert not _can_pin([Device("gpu", "device")])
