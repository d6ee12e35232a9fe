"""The rates of causal attention in PyTorch on one GPU: FlashAttention-2 and cuDNN, forward and backward.

Run: python benchmarks/gpu_attention.py [--record]. Without a GPU it says so, and measures nothing. All
numbers are random, in bf16. A time is the median of three runs of many launches, by the GPU's own events.
FLOPs count the needed half of the scores: two products forward and five backward, the scores again among
them. `together`: the seconds of a forward and a backward kernel in turns, over the sum of the two.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _record import write_record
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {"flash-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
HEAD_SIZES = (64, 96, 128)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
WIDTH, TOKENS = 2048, 32_768  # of all heads, and of a launch
BACKWARD_SHARE = 2.5  # of the forward FLOPs
TYPICAL_FLOPS_PER_SECOND = 300e12  # sets the number of launches of a run, and nothing else
RUN_SECONDS, MOST_LAUNCHES = 0.15, 20
RUNS = 3


def seconds_of(function: Callable[[], Any], launches: int) -> float:
    """Return the median seconds of a launch over runs of several."""
    function()
    torch.cuda.synchronize()
    runs = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(launches):
            function()
        end.record()
        torch.cuda.synchronize()
        runs.append(begin.elapsed_time(end) / 1e3 / launches)
    return statistics.median(runs)


def attention(kernel: str, head_size: int, length: int) -> dict[str, Any]:
    """Measure one kernel at one size."""
    heads, sequences = WIDTH // head_size, max(1, TOKENS // length)
    shape = (sequences, length, heads, head_size)
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    gradient = torch.randn_like(query)
    flops = 2 * sequences * heads * length**2 * head_size
    with sdpa_kernel(KERNELS[kernel]):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)

        def forward() -> None:
            with torch.no_grad():
                F.scaled_dot_product_attention(query, key, value, is_causal=True)

        def backward() -> None:
            torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

        def both() -> None:
            forward()
            backward()

        typical = flops * (1 + BACKWARD_SHARE) / TYPICAL_FLOPS_PER_SECOND
        launches = max(2, min(MOST_LAUNCHES, int(RUN_SECONDS / typical)))
        forward_seconds, backward_seconds = seconds_of(forward, launches), seconds_of(backward, launches)
        apart = forward_seconds + backward_seconds
        together = seconds_of(both, max(2, int(2 * RUN_SECONDS / apart)))
    return {
        "kernel": kernel,
        "head_size": head_size,
        "length": length,
        "sequences": sequences,
        "heads": heads,
        "forward_flops_per_second": flops / forward_seconds,
        "backward_flops_per_second": BACKWARD_SHARE * flops / backward_seconds,
        "together": together / apart,
    }


def main() -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write records/DATE_gpu_attention.toml")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU, so nothing was measured.")
        return
    sizes = [(head, length) for head in HEAD_SIZES for length in LENGTHS]
    rows = [attention(kernel, *size) for kernel in KERNELS for size in sizes]
    for row in rows:
        print(row)
    if asked.record:
        facts = {"device": torch.cuda.get_device_name(0)}
        command = "python benchmarks/gpu_attention.py --record"
        print("wrote", write_record("gpu_attention", command, ("torch",), facts, {"attention": rows}))


if __name__ == "__main__":
    main()
