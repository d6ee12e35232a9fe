"""The rates of a GPU's kernels: cuDNN's causal attention, cuBLAS's products, and an elementwise kernel.

Run: python benchmarks/gpu_kernels.py [--record]. Without a GPU it says so, and measures nothing. All numbers
are random: a GPU multiplies equal ones faster. A time is the median of three runs of many launches. Products
are timed again after a second of the same product, when the power limit holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from _record import write_record

HEAD_SIZES = (64, 128)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
WIDTH, TOKENS = 2048, 32_768  # of all heads, and of a launch
# Rows, depth and columns: those of GPT-2 124M, Llama 1B and 8B, their gradients, and squares.
PRODUCTS = (
    (32_768, 768, 3072),
    (32_768, 3072, 768),
    (32_768, 768, 768),
    (32_768, 768, 50_304),
    (8192, 2048, 8192),
    (8192, 2048, 128_256),
    (8192, 4096, 14_336),
    (8192, 8192, 28_672),
    (768, 32_768, 3072),
    (2048, 8192, 8192),
    (16_384, 4096, 4096),
    (8192, 8192, 8192),
)
SCALED_MIB = (8, 64, 256, 1024, 4096)
BACKWARD_SHARE = 2.5  # of the forward FLOPs: five products, the scores again among them, beside two
WARM_SECONDS, TIMED_SECONDS = 1.0, 0.3
RUNS = 3


def seconds_of(function: Callable[..., Any], *arguments: Any, launches: int = 10) -> float:
    """Return the median seconds of a launch over runs of several, each waited for at its end."""
    jax.block_until_ready(function(*arguments))
    runs = []
    for _ in range(RUNS):
        started, result = time.perf_counter(), None
        for _ in range(launches):
            result = function(*arguments)
        jax.block_until_ready(result)
        runs.append((time.perf_counter() - started) / launches)
    return statistics.median(runs)


def normal(seed: int, *shape: int) -> jax.Array:
    """Return normally distributed numbers in bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def attention(head_size: int, length: int) -> dict[str, Any]:
    """Measure the forward kernel, and the backward one as what a gradient takes beyond it."""
    heads, sequences = WIDTH // head_size, max(1, TOKENS // length)
    query, key, value, gradient = (normal(n, sequences, length, heads, head_size) for n in range(4))
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

    def both(query: jax.Array, key: jax.Array, value: jax.Array, gradient: jax.Array) -> Any:
        output, backward = jax.vjp(attend, query, key, value)
        return output, backward(gradient)

    forward = seconds_of(jax.jit(attend), query, key, value)
    backward = seconds_of(jax.jit(both), query, key, value, gradient) - forward
    flops = 2 * sequences * heads * length**2 * head_size  # two products, half of the scores
    return {
        "head_size": head_size,
        "length": length,
        "sequences": sequences,
        "heads": heads,
        "forward_flops_per_second": flops / forward,
        "backward_flops_per_second": BACKWARD_SHARE * flops / backward,
    }


def product(rows: int, depth: int, columns: int) -> dict[str, Any]:
    """Measure a product at once, and after a second of the same."""
    left, right = normal(0, rows, depth), normal(1, depth, columns)
    multiply = jax.jit(jnp.matmul)
    first = seconds_of(multiply, left, right, launches=20)
    for _ in range(round(WARM_SECONDS / first)):
        result = multiply(left, right)
    jax.block_until_ready(result)
    later = seconds_of(multiply, left, right, launches=max(20, round(TIMED_SECONDS / first)))
    flops = 2 * rows * depth * columns
    names = {"rows": rows, "depth": depth, "columns": columns}
    return names | {"first_flops_per_second": flops / first, "later_flops_per_second": flops / later}


def scaled(mib: int) -> dict[str, Any]:
    """Measure a kernel that reads an array of float32 and writes it scaled."""
    array = jax.random.normal(jax.random.key(0), (mib * 2**18,))
    seconds = seconds_of(jax.jit(lambda x: 1.5 * x), array, launches=20)
    return {"mebibytes": mib, "bytes_per_second": 2 * array.nbytes / seconds}


def main() -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write records/DATE_gpu_kernels.toml")
    asked = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print("No GPU is here, so nothing was measured.")
        return
    tables = {
        "attention": [attention(head, length) for head in HEAD_SIZES for length in LENGTHS],
        "product": [product(*sizes) for sizes in PRODUCTS],
        "scaled": [scaled(mib) for mib in SCALED_MIB],
    }
    for name, rows in tables.items():
        for row in rows:
            print(name, row)
    if asked.record:
        packages = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
        command = "python benchmarks/gpu_kernels.py --record"
        print("wrote", write_record("gpu_kernels", command, packages, {"device": device.device_kind}, tables))


if __name__ == "__main__":
    main()
