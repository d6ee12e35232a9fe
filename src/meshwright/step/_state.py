"""The step's abstract arguments: shapes, formats and shardings of the state and of a batch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config import (
    IdxData,
    LeNetModel,
    LinearModel,
    ResNetModel,
    RunConfig,
    TokenFileData,
    TransformerModel,
)
from ..sharding import activation_spec, batch_axes, parameter_spec
from ._matrices import is_parameter
from ._moments import moment_shardings
from ._offload import kept_on_host

Tree = Any


def abstract_state(
    init: Any, declared: Tree, mesh: Mesh, *, zero1: bool = False, on_host: bool = False
) -> Tree:
    """The state's shapes with their shardings; each moment lies where its parameter lies, in the memory of
    its device's host if `on_host`."""
    shapes = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: replicated, shapes)
    shardings["parameters"] = jax.tree.map(
        lambda p: NamedSharding(mesh, parameter_spec(p.dims, mesh, zero1)), declared, is_leaf=is_parameter
    )
    shardings["optimizer"] = moment_shardings(shapes["optimizer"], declared, mesh, zero1)
    if on_host:
        shardings["optimizer"] = kept_on_host(shardings["optimizer"], shapes["optimizer"])
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def abstract_batch(config: RunConfig, mesh: Mesh) -> Tree:
    """The batch's shapes with their shardings: [microbatches, rows, ...], rows split over the replicas."""
    assert config.batch.sequences_per_replica is None, "settle the config on its layout first"
    replicas = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    rows = config.batch.sequences
    if config.batch.microbatch_sequences is not None:
        rows = config.batch.microbatch_sequences * replicas
    num_microbatches = config.batch.sequences // rows

    def array(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, activation_spec(("microbatch", "batch"), mesh))
        return jax.ShapeDtypeStruct((num_microbatches, rows, *rest), dtype, sharding=sharding)

    if isinstance(config.model, TransformerModel):
        tokens = array(jnp.int32, config.batch.sequence_length + 1)
        packed = isinstance(config.data, TokenFileData) and config.data.documents == "packed"
        return {"tokens": tokens, "segments": tokens} if packed else {"tokens": tokens}
    if isinstance(config.model, LeNetModel | ResNetModel):
        side = config.model.image_size
        images = {"images": array(jnp.float32, 1, side, side), "labels": array(jnp.int32)}
        return {**images, "weights": array(jnp.float32)} if isinstance(config.data, IdxData) else images
    width = config.model.input_dim if isinstance(config.model, LinearModel) else config.model.width
    return {"inputs": array(jnp.float32, width), "targets": array(jnp.float32)}
