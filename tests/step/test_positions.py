"""What each stage judges: its positions of what the last stage holds, beside the targets of the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshwright.step._pipeline import AXIS, collected, own, spread

ROWS, LENGTH, WIDTH = 2, 16, 4


@pytest.mark.parametrize(
    "axes",
    [
        {"stage": 2},
        {"stage": 4, "tensor": 2},
        {"stage": 2, "context": 2, "tensor": 2},
        {"stage": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_positions_and_their_targets_go_together_and_come_back_whole(axes, mesh):
    where = mesh(**axes)
    numbers = jnp.arange(ROWS * LENGTH, dtype=jnp.int32).reshape(ROWS, LENGTH)

    def stage(numbers):
        here, is_last = jax.sharding.get_abstract_mesh(), jax.lax.axis_index(AXIS) == axes[AXIS] - 1
        held = jnp.repeat(numbers[:, :, None], WIDTH, axis=2).astype(jnp.float32)
        share = spread(jnp.where(is_last, held, jnp.nan), here)  # what the others hold does not count
        return share[None], own(numbers, here)[None], collected(share, here)[None]

    each = jax.shard_map(
        stage,
        mesh=where,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(AXIS),
        axis_names={AXIS},
        check_vma=False,
    )
    shares, targets, back = jax.jit(each)(numbers)
    assert shares.shape == (axes[AXIS], ROWS, LENGTH // axes[AXIS], WIDTH)
    np.testing.assert_array_equal(shares, np.repeat(targets[..., None], WIDTH, axis=3))
    assert sorted(np.ravel(targets)) == list(range(ROWS * LENGTH))  # each position once
    for whole in back:
        np.testing.assert_array_equal(whole[:, :, 0], numbers)
