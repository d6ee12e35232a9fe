"""What `meshwright probe` shows beside the rates that predictions use: how they depend on size. With jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ._best import best_seconds

FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
SIZES = {"cpu": (128, 512, 1024), "other": (512, 1024, 2048, 4096, 8192)}
LENGTHS = {"cpu": (256, 1024), "other": (1024, 4096, 16384)}
HEADS, HEAD_DIM = 8, 64
COPIED_BYTES = 2**26
MESSAGE_BYTES = 2**24


def details() -> dict[str, float]:
    """Rates by name with their unit, of the first device; of collectives, of all devices together."""
    platform = jax.local_devices()[0].platform
    kind = "cpu" if platform == "cpu" else "other"
    found: dict[str, float] = {}
    for name, dtype in FORMATS.items():
        for size in SIZES[kind]:
            square = jnp.full((size, size), 1e-3, dtype)
            seconds = best_seconds(jnp.matmul, (square, square))
            found[f"matmul {name} {size}, FLOP/s"] = 2 * size**3 / seconds
    for length in LENGTHS[kind]:
        found |= _attention(length, "cudnn" if platform == "gpu" else "xla")
    copied = jnp.zeros(COPIED_BYTES // 4)
    found["copy of 64 MiB, bytes/s"] = 2 * COPIED_BYTES / best_seconds(lambda x: x + 1, (copied,))
    return found | _collectives()


def _attention(length: int, implementation: Any) -> dict[str, float]:
    """Causal attention, forward and its gradient, in bf16; FLOPs by the half that is needed."""
    queries = jnp.full((1, length, HEADS, HEAD_DIM), 1e-2, jnp.bfloat16)

    def attend(x: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation=implementation)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda q: attend(q).astype(jnp.float32).sum())(x)

    forward = 2 * length * length * HEADS * HEAD_DIM  # two products of 2 x length^2 x width, halved
    return {
        f"attention {length}, FLOP/s": forward / best_seconds(attend, (queries,)),
        f"attention and gradient {length}, FLOP/s": 3.5 * forward / best_seconds(gradient, (queries,)),
    }


def _collectives() -> dict[str, float]:
    """Bytes that one device sends a second, over all local devices; nothing where there is one."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return {}
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    count = len(devices)
    split = NamedSharding(mesh, PartitionSpec("data"))
    parts = jax.device_put(jnp.ones((count, MESSAGE_BYTES // 4)), split)
    whole = NamedSharding(mesh, PartitionSpec())
    found: dict[str, float] = {}
    sums = jax.jit(lambda x: x.sum(0), in_shardings=split, out_shardings=whole)
    found[f"all-reduce of 16 MiB over {count}, bytes/s sent by one"] = (
        2 * MESSAGE_BYTES * (count - 1) / count / best_seconds(sums, (parts,))
    )
    gather = jax.jit(lambda x: x * 1, in_shardings=split, out_shardings=whole)
    found[f"all-gather of 16 MiB over {count}, bytes/s sent by one"] = (
        MESSAGE_BYTES * (count - 1) / best_seconds(gather, (parts,))
    )
    return found
