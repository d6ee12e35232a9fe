"""Positions of a microbatch split over the stages of a pipeline, for what comes after the layers.

The last stage alone has what the layers gave. Were it alone to judge it, all would wait for its head: the
head of Llama 3 8B has as many parameters as two and a half of its 32 layers. Each stage is sent its share of
every device's positions, and sends their gradients back: two messages of a residual for each microbatch.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..sharding import AnyMesh, activation_spec, on_each_device, pin

AXIS = "stage"
RESIDUAL = ("batch", "residual_sequence", "embed")


def spread(y: Array, mesh: AnyMesh) -> Array:
    """This stage's positions of what the last stage holds, [batch, sequence / stages, embed], a residual.

    Args:
        y: [batch, sequence, embed] on each stage; only the last one's counts.
        mesh: as it is inside a `shard_map` over the stages.
    """
    num_stages = mesh.shape[AXIS]

    def local(y: Array) -> Array:
        y = jnp.where(lax.axis_index(AXIS) == num_stages - 1, y, 0)
        return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)

    laid = activation_spec(RESIDUAL, mesh)
    return on_each_device(local, mesh, (laid,), laid)(y)


def collected(x: Array, mesh: AnyMesh) -> Array:
    """The opposite: all positions [batch, sequence, embed], on every stage."""
    laid = activation_spec(RESIDUAL, mesh)
    return on_each_device(lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True), mesh, (laid,), laid)(x)


def own(targets: Array, mesh: AnyMesh) -> Array:
    """Of targets [batch, sequence], which every stage has, those of the positions that `spread` gives it."""

    def local(targets: Array) -> Array:
        share = targets.shape[1] // mesh.shape[AXIS]
        return lax.dynamic_slice_in_dim(targets, lax.axis_index(AXIS) * share, share, axis=1)

    laid = activation_spec(RESIDUAL[:2], mesh)
    # Pinned first: else the tokens they come from are split so too, and whoever shifts those by one sends.
    targets = pin(targets, mesh, "batch", "sequence")
    return on_each_device(local, mesh, (laid,), laid)(targets)
