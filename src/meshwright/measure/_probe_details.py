"""What `meshwright probe` shows beside the rates that predictions use: how they depend on size. With jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._best import best_seconds
from ._probe_attention import measured

FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
SIZES = {"cpu": (128, 512, 1024), "other": (512, 1024, 2048, 4096, 8192)}
CPU_LENGTHS = (256, 1024)  # of a CPU; an accelerator's fused kernel is measured apart
HEAD_SIZE = 64
COPIED_BYTES = 2**26


def details() -> dict[str, float]:
    """Rates by name with their unit, of the first device."""
    platform = jax.local_devices()[0].platform
    kind = "cpu" if platform == "cpu" else "other"
    found: dict[str, float] = {}
    for name, dtype in FORMATS.items():
        for size in SIZES[kind]:
            square = jnp.full((size, size), 1e-3, dtype)
            seconds = best_seconds(jnp.matmul, (square, square))
            found[f"matmul {name} {size}, FLOP/s"] = 2 * size**3 / seconds
    if platform == "cpu":
        for length in CPU_LENGTHS:
            found |= _attention(length)
    copied = jnp.zeros(COPIED_BYTES // 4)
    found[f"copy of {COPIED_BYTES // 2**20} MiB, bytes/s"] = (
        2 * COPIED_BYTES / best_seconds(lambda x: x + 1, (copied,))
    )
    return found


def _attention(length: int) -> dict[str, float]:
    """Causal attention where it is several kernels, each of which a prediction prices as it stands."""
    rates = measured(HEAD_SIZE, length, 1, "xla")
    return {
        f"attention {length}, FLOP/s": rates.forward_flops_per_second,
        f"gradient of attention {length}, FLOP/s": rates.backward_flops_per_second,
    }
