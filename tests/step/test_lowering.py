"""A step lowered without the constraints that ask for nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.trainer.step import lowered_step

CONSTRAINT = "sdy.sharding_constraint"


def test_constraints_without_a_wish_are_left_out_and_the_others_stay() -> None:
    mesh = jax.make_mesh((2, 4), ("stage", "tensor"), (AxisType.Auto, AxisType.Auto))

    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("stage"), out_specs=PartitionSpec("stage"),
             axis_names={"stage"})  # fmt: skip
    def staged(x: jax.Array) -> jax.Array:
        here = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(None, "tensor"))
        y = jax.lax.with_sharding_constraint(jnp.sin(x) * 2 + 1, here)
        return jnp.cos(y).sum(keepdims=True) + y

    x = jnp.arange(64.0).reshape(8, 8)
    usual = jax.jit(staged).trace(x).lower()
    assert usual.as_text().count(CONSTRAINT) > 1  # else JAX leaves them out itself, and this module can go
    expected = usual.compile()(x)
    lowered = lowered_step(jax.jit(staged).trace(x), "cpu")
    left = [line for line in lowered.as_text().splitlines() if CONSTRAINT in line]
    assert len(left) == 1
    assert '"tensor"' in left[0]
    np.testing.assert_array_equal(lowered.compile()(x), expected)
