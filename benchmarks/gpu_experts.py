"""The rates of grouped products of experts on one GPU: our kernels, PyTorch's, and cuBLAS on equal buffers.

Run: python benchmarks/gpu_experts.py [--record]. Without a GPU it says so, and measures nothing. Rows are
random and spread over the experts by even chances; a rate is 2 x rows x inputs x outputs over the time, so
padding lowers it. A time is the median of three runs of ten launches. `gathered`: our matrices lie as a
gather over `fsdp` leaves them. Ours are compared with a loop over tiles first. Peers: `torch._grouped_mm`
(CUTLASS) on the same counts, where PyTorch is installed, and one batched product (cuBLAS) of equal buffers,
which is what a capacity of 1.0 runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _record import write_record

from meshwright.contrib.experts import Axes, Grouping, Tiles, by_matrix, grouping_for, of_matrices, tiles_of
from meshwright.trainer.models.eight_bits import FORWARD

# Experts of one device, inputs, outputs, and rows.
SHAPES = {
    "Qwen3-30B-A3B, expert=8": (16, 2048, 768, 32_768),
    "Qwen3-30B-A3B, fsdp": (128, 2048, 768, 32_768),
    "Qwen3-30B-A3B, fsdp, long": (128, 2048, 768, 131_072),
    "Qwen3-235B-A22B, expert=8": (16, 4096, 1536, 32_768),
    "Mixtral 8x7B, fsdp": (8, 4096, 14_336, 8192),
    "DeepSeek-V3, expert=32": (8, 7168, 2048, 16_384),
    "DeepSeek-V2-Lite, fsdp": (64, 2048, 1408, 24_576),
}
RUNS, LAUNCHES = 3, 10


def seconds_of(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the median seconds of a launch over runs of several, each waited for at its end."""
    jax.block_until_ready(function(*arguments))
    runs = []
    for _ in range(RUNS):
        started, result = time.perf_counter(), None
        for _ in range(LAUNCHES):
            result = function(*arguments)
        jax.block_until_ready(result)
        runs.append((time.perf_counter() - started) / LAUNCHES)
    return statistics.median(runs)


def counts_of(experts: int, rows: int) -> np.ndarray:
    """Return the rows of each expert, by even chances."""
    return np.random.default_rng(0).multinomial(rows, [1 / experts] * experts).astype(np.int32)


def normal(seed: int, *shape: int) -> jax.Array:
    """Return normally distributed numbers in bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def ours(name: str, capability: tuple[int, int], gathered: bool) -> dict[str, Any]:
    """Measure our kernels at one size."""
    experts, inputs, outputs, rows = SHAPES[name]
    how = grouping_for(rows, experts, (inputs, outputs), "cuda", capability)
    tiles = tiles_of(jnp.array(counts_of(experts, rows)), rows, how)
    x, gradient = (normal(i, rows, width) for i, width in enumerate((inputs, outputs)))
    axes = Axes(1, 0) if gathered else Axes(0, 1)
    sizes = [experts] * 3
    sizes[axes.summed], sizes[axes.left] = inputs, outputs
    matrices = normal(2, *sizes)
    products = {
        "forward": lambda x, m, g, t: by_matrix(x, m, t, how, axes, x.dtype),
        "transposed": lambda x, m, g, t: by_matrix(g, m, t, how, axes.transposed, x.dtype),
        "of_matrices": lambda x, m, g, t: of_matrices(x, g, t, how, axes, jnp.float32),
    }
    eight = {
        "forward_fp8": lambda x, m, g, t: by_matrix(x, m, t, how, axes, jnp.bfloat16),
        "transposed_fp8": lambda x, m, g, t: by_matrix(g, m, t, how, axes.transposed, jnp.bfloat16),
    }
    row: dict[str, Any] = {
        "shape": name,
        "gathered": gathered,
        "tile": how.tile,
        "executed_rows": how.executed(how.tile),
    }
    row |= {"experts": experts, "inputs": inputs, "outputs": outputs, "rows": rows}
    flops = 2 * rows * inputs * outputs
    row["distance"] = distance(x, matrices, gradient, how, axes)
    for kind, product in products.items():
        row[kind] = flops / seconds_of(jax.jit(product), x, matrices, gradient, tiles)
    narrow = [a.astype(FORWARD) for a in (x, matrices, gradient)]
    for kind, product in eight.items() if capability >= (8, 9) else ():
        row[kind] = flops / seconds_of(jax.jit(product), *narrow, tiles)
    return row


def distance(x: jax.Array, matrices: jax.Array, gradient: jax.Array, how: Grouping, axes: Axes) -> float:
    """Return the largest distance of our kernels from the loop over tiles, over the largest number."""
    counts = jnp.array(counts_of(how.experts, x.shape[0]))

    def all_three(how: Grouping) -> list[jax.Array]:
        tiles = tiles_of(counts, x.shape[0], how)
        ends = zip(tiles.first.tolist(), tiles.last.tolist(), strict=True)
        places = np.concatenate([np.arange(*pair) for pair in ends])

        def run(x: jax.Array, m: jax.Array, g: jax.Array, t: Tiles) -> list[jax.Array]:
            x, g = (jnp.zeros((how.num_slots(len(a)), a.shape[1]), a.dtype).at[places].set(a) for a in (x, g))
            y = by_matrix(x, m, t, how, axes, x.dtype)
            d_x = by_matrix(g, m, t, how, axes.transposed, x.dtype)
            return [y[places], d_x[places], of_matrices(x, g, t, how, axes, jnp.float32)]

        return jax.jit(run)(x, matrices, gradient, tiles)

    loop = dataclasses.replace(how, by_kernel=None, packed=False)
    pairs = zip(all_three(how), all_three(loop), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def peers(name: str) -> dict[str, Any]:
    """Measure cuBLAS on equal buffers, and PyTorch's grouped product, at one size."""
    experts, inputs, outputs, rows = SHAPES[name]
    flops = 2 * rows * inputs * outputs
    batched = jax.jit(lambda x, m: jnp.einsum("eri,eio->ero", x, m))
    x, matrices = normal(0, experts, rows // experts, inputs), normal(1, experts, inputs, outputs)
    row: dict[str, Any] = {"shape": name, "cublas_equal_buffers": flops / seconds_of(batched, x, matrices)}
    del x, matrices
    try:
        import torch
    except ImportError:
        return row
    ends = torch.tensor(counts_of(experts, rows).cumsum(), dtype=torch.int32, device="cuda")
    size = {"device": "cuda", "dtype": torch.bfloat16}
    x, gradient = torch.randn(rows, inputs, **size), torch.randn(rows, outputs, **size)
    matrices = torch.randn(experts, inputs, outputs, **size)
    turned = matrices.transpose(1, 2)
    stored = turned.contiguous().transpose(1, 2)
    cases = {
        "torch_forward": lambda: torch._grouped_mm(x, stored, offs=ends),
        "torch_transposed": lambda: torch._grouped_mm(gradient, turned, offs=ends),
        "torch_of_matrices": lambda: torch._grouped_mm(x.t(), gradient, offs=ends),
    }
    for kind, product in cases.items():
        product()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(LAUNCHES):
            product()
        end.record()
        torch.cuda.synchronize()
        row[kind] = flops * LAUNCHES * 1e3 / begin.elapsed_time(end)
    return row


def main() -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write records/DATE_gpu_experts.toml")
    asked = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("JAX sees no GPU, so nothing was measured.")
        return
    device = jax.devices()[0]
    major, minor = map(int, device.compute_capability.split("."))
    rows = [ours(name, (major, minor), gathered) for name in SHAPES for gathered in (False, True)]
    others = [peers(name) for name in SHAPES]
    for row in (*rows, *others):
        print(
            {
                key: f"{value / 1e12:.0f}e12" if isinstance(value, float) and value > 1 else value
                for key, value in row.items()
            }
        )
    if asked.record:
        command = "python benchmarks/gpu_experts.py --record"
        facts = {"device": device.device_kind}
        print(
            "wrote",
            write_record("gpu_experts", command, ("jax", "jaxlib"), facts, {"ours": rows, "peers": others}),
        )


if __name__ == "__main__":
    main()
