"""ZeRO-1: parameters and moments are split over `data` too, and each replica updates its part of them.

Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054), section 5: the gradients are reduce-scattered over
the replicas, and the parameters gathered. Here they are gathered when a step begins, in the format of the
computation, and the copy is dropped at its end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from ..models import Parameter
from ..sharding import parameter_spec
from ._matrices import is_matrix, is_parameter

Tree = Any


def whole_over_replicas(parameters: Tree, declared: Tree, mesh: Mesh, dtype: jax.typing.DTypeLike) -> Tree:
    """The copy of the parameters that a step computes with: whole along `data`, split by the other axes.

    Matrices and tables are cast to `dtype` before they cross the network; vectors stay in float32, and so
    do matrices that are used in it (`Parameter.wide`).
    """

    def one(declared: Parameter, x: Array) -> Array:
        split, whole = (
            NamedSharding(mesh, parameter_spec(declared.dims, mesh, zero1)) for zero1 in (True, False)
        )
        cast = x.astype(dtype if is_matrix(declared) and not declared.wide else jnp.float32)
        # Without the first the partitioner gathers before it casts, which is twice the bytes.
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(cast, split), whole)

    with jax.named_scope("gather_over_data"):
        return jax.tree.map(one, declared, parameters, is_leaf=is_parameter)
