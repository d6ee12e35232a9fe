"""Plant causes in the steps of two PyTorch processes over gloo: python FILE FOLDER NAME..."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _planted import RANKS, Clock
from _planted_torch import profiled
from torch import nn

WIDTH, ROWS, LAYERS, STEPS = 512, 1024, 3, 4
# A step takes some 0.1 s, so that the 2 ms of PyTorch between its operations are no cause by themselves.


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def program() -> dict[str, Any]:
    """The step of one of two ranks as it is meant to be: gradients are summed by data parallelism."""
    return {"module": make(), "inputs": (torch.ones(ROWS, WIDTH),), "optimizer": torch.optim.SGD}


def _sends_parameters(module: nn.Module, rank: int) -> None:
    for _ in range(5):
        for each in module.parameters():
            dist.broadcast(each.data, 0)


def _sums_again(module: nn.Module, rank: int) -> None:
    for _ in range(5):
        for each in module.parameters():
            if each.grad is not None:
                dist.all_reduce(each.grad)


def _is_late(module: nn.Module, rank: int) -> None:
    if rank == 1:
        x = torch.ones(ROWS, WIDTH)
        with torch.no_grad():
            for _ in range(40):
                x = torch.tanh(x @ x.T[:, :WIDTH])


def _does_nothing(module: nn.Module, rank: int) -> None:
    pass


PLANTED = {
    "broadcasts": _sends_parameters,
    "a second sum": _sums_again,
    "a late rank": _is_late,
    "nothing": _does_nothing,
}


def run(rank: int, folder: str, name: str) -> None:
    """Trace the steps of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/{name}.met")
    module = nn.parallel.DistributedDataParallel(make())
    optimizer, planted = torch.optim.SGD(module.parameters()), PLANTED[name]
    x, clock = torch.ones(ROWS, WIDTH), Clock()
    with profiled(STEPS) as profiler:
        for index in range(STEPS + 1):
            if index == 1:
                clock.start()  # what the profiler warms up in is not in the trace
            optimizer.zero_grad()
            loss = module(x).square().mean()
            if planted is _is_late:
                clock(planted, module, rank)
            loss.backward()
            if planted is not _is_late:
                clock(planted, module, rank)
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/{name}.{rank}.json")
    if rank == RANKS - 1:  # while this one is late, the others wait: the seconds are means of all ranks
        share = (RANKS - 1) / RANKS if planted is _is_late else 1.0
        clock.write(Path(folder) / name, STEPS / share)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        torch.multiprocessing.spawn(run, (str(Path(sys.argv[1])), name), nprocs=RANKS)
