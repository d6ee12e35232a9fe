"""Where ZeRO-1's state lies, and what a step makes of it (test_build.py: it trains as one device does)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.checkpoint import Checkpoints, restore
from meshwright.config import load_config
from meshwright.models import Parameter, initial_parameters
from meshwright.step import build_step
from meshwright.step._state import whole_over_replicas

P = PartitionSpec
DECLARED = {
    "matrix": Parameter(shape=(8, 4), dims=("embed", "mlp"), fan_in=8),
    "router": Parameter(shape=(8, 4), dims=("embed", "mlp"), fan_in=8, wide=True),
    "scale": Parameter(shape=(8,), dims=("embed",), initial="ones"),
}


def test_parameters_and_moments_are_split_over_fsdp_and_data(mesh):
    state = build_step(load_config("bytes-nano", ["zero1=true"]), mesh(data=2, fsdp=2, tensor=2)).state
    adam = state["optimizer"][1][0]
    for tree in (state["parameters"], adam.mu, adam.nu):
        assert tree["layers"]["mlp"]["up"].sharding.spec == P(None, ("fsdp", "data"), "tensor")
        assert tree["final_norm"]["scale"].sharding.spec == P(("fsdp", "data"))


def test_the_copy_of_a_step_is_whole_over_data_and_matrices_are_in_the_computations_format(mesh):
    axes = mesh(data=2, fsdp=2)
    parameters = initial_parameters(DECLARED, jax.random.key(0))
    laid = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(axes, P(("fsdp", "data")))), parameters)
    copy = jax.jit(lambda p: whole_over_replicas(p, DECLARED, axes, jnp.bfloat16))(laid)
    for name, dtype in (("matrix", jnp.bfloat16), ("router", jnp.float32), ("scale", jnp.float32)):
        assert copy[name].dtype == dtype
        assert copy[name].sharding.is_equivalent_to(NamedSharding(axes, P("fsdp")), copy[name].ndim)
        np.testing.assert_array_equal(copy[name], parameters[name].astype(dtype))


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_checkpoint_with_zero1_is_restored_without_and_the_reverse(mesh, tmp_path, before, after):
    builds = [
        build_step(
            load_config("linear", ["optimizer.momentum=0.9", f"zero1={str(zero1).lower()}"]), mesh(data=8)
        )
        for zero1 in (before, after)
    ]
    state = builds[0].init(np.uint32(3))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    restored = restore(checkpoints.newest(), builds[1].state)
    checkpoints.close()
    for mine, theirs, wanted in zip(*map(jax.tree.leaves, (restored, state, builds[1].state)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.sharding == wanted.sharding
