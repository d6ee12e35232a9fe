"""Arguments of a step are described without making them: `mw.abstract` and `mw.place`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import meshwright as mw

MESH = AbstractMesh((4, 2), ("data", "model"))


def test_what_a_function_returns_is_described_and_never_made():
    huge = mw.abstract(lambda key, name: {"w": jax.random.normal(key, (2**20, 2**20)), "name": name},
                       jax.random.key(0), "mine")  # fmt: skip
    assert huge["w"].shape == (2**20, 2**20)
    assert huge["name"] == "mine"
    same = jax.eval_shape(optax.adam(1e-3).init, {"w": jnp.ones(3)})
    assert mw.abstract(optax.adam(1e-3).init, {"w": jnp.ones(3)}) == same


def test_a_module_of_flax_is_described():
    made = mw.abstract(lambda: nnx.Linear(2**14, 2**14, rngs=nnx.Rngs(0)))
    assert {leaf.shape for leaf in jax.tree.leaves(made)} == {(2**14, 2**14), (2**14,)}


def test_arrays_are_placed_by_one_spec_a_prefix_or_a_function():
    tree = {"layers": [{"w": np.zeros((8, 6), np.float32)}] * 2, "count": np.int32(3), "name": "mine"}
    rows = PartitionSpec("data")
    by_one = mw.place(MESH, tree, rows)
    assert by_one["layers"][1]["w"].sharding.shard_shape((8, 6)) == (2, 6)
    assert by_one["count"].sharding.spec == PartitionSpec()
    assert by_one["name"] == "mine"
    by_prefix = mw.place(MESH, tree, {"layers": PartitionSpec("data", "model"), "count": None, "name": None})
    assert by_prefix["layers"][0]["w"].sharding.shard_shape((8, 6)) == (2, 3)
    seen = []

    def chosen(path, leaf):
        seen.append(path)
        return PartitionSpec(None, "model") if leaf.ndim == 2 else PartitionSpec()

    by_function = mw.place(MESH, tree, chosen)
    assert by_function["layers"][0]["w"].sharding.shard_shape((8, 6)) == (8, 3)
    assert seen == ["['count']", "['layers'][0]['w']", "['layers'][1]['w']"]


def test_placed_shapes_are_weighed_as_they_lie(forked_workers):
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    parameters = mw.place(mesh, mw.abstract(lambda: {"w": jnp.ones((256, 256))}), PartitionSpec("data"))
    rows = mw.place(mesh, jax.ShapeDtypeStruct((64, 256), jnp.float32), PartitionSpec("data"))

    def step(parameters, rows):
        return jax.grad(lambda p: jnp.sum((rows @ p["w"]) ** 2))(parameters)

    weighed = mw.weigh(mw.jax_step(step, parameters, rows), on="8xH100")
    assert [each.device_bytes for each in weighed.compiled.arguments] == [
        256 * 256 * 4 // 8,
        64 * 256 * 4 // 8,
    ]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PartitionSpec("fsdp"), "names fsdp"),
        (PartitionSpec(None, "data"), "dimension 1 = 6 does not divide over data = 4"),
        (PartitionSpec(None, None, "data"), "has more dimensions than"),
        ({"other": PartitionSpec()}, "another structure"),
    ],
)
def test_a_spec_that_does_not_suit_is_refused_with_the_path(spec, words):
    with pytest.raises(mw.InputError, match=words) as refused:
        mw.place(MESH, {"w": np.zeros((8, 6))}, spec)
    assert isinstance(spec, dict) or "['w']" in str(refused.value)
