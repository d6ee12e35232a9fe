"""Lower a traced step, without the constraints that JAX adds and no partitioner needs.

In a `shard_map` over some of a mesh's axes (stages of a pipeline, gradients of each replica) JAX constrains
the result of every operation to a sharding in which every dimension is open. Such a constraint asks for
nothing. XLA partitions each of them as a copy, and writes a table of all devices for it: in llama3-405b's
step on 4,096 H100 they are 4,954 of 12,670 operations in that region, and a quarter of the processor seconds.
JAX knows of it: `lower_with_sharding_in_types` in its interpreters/mlir.py has a note to leave them out.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy


def lowered_step(traced: Any, platform: str) -> Any:
    """Return a traced step lowered for a platform, as it is weighed and as it runs.

    JAX keeps what it lowered: the same step lowered again for the platform has no such constraints either.

    Args:
        traced: what `jax.jit(step).trace(...)` returns.
        platform: "cpu", "cuda" or "tpu".
    """
    lowered = traced.lower(lowering_platforms=(platform,))
    idle: list[Any] = []

    def look_at(operation: Any) -> ir.WalkResult:
        if operation.name == "sdy.sharding_constraint" and _is_open(operation.attributes["sharding"]):
            idle.append(operation)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(look_at)
    for operation in idle:
        operation.result.replace_all_uses_with(operation.operands[0])
        operation.erase()
    return lowered


def _is_open(attribute: Any) -> bool:
    """Return whether a sharding leaves every dimension to the partitioner, and names no axis."""
    sharding = sdy.TensorShardingAttr(attribute)
    dimensions = [sdy.DimensionShardingAttr(each) for each in sharding.dimension_shardings]
    named = (*sharding.replicated_axes, *sharding.unreduced_axes)
    return not named and not any(each.is_closed or each.axes for each in dimensions)
