import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.config import load_config
from meshwright.data import open_data
from meshwright.training._loop import Feed, put, rows_held


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
    fed = Feed(data, batch).batch(3, "held-out")
    for name, rows in data.batch(3, "held-out").items():
        np.testing.assert_array_equal(fed[name], rows.reshape(fed[name].shape))
        assert fed[name].sharding == batch[name].sharding


def test_an_array_is_put_where_it_belongs(mesh):
    values = np.arange(8, dtype=np.int32).reshape(2, 4)
    there = put(values, NamedSharding(mesh(data=2, tensor=2), PartitionSpec("data", "tensor")))
    assert isinstance(there, jax.Array)
    np.testing.assert_array_equal(there, values)
    assert there.dtype == jnp.int32
