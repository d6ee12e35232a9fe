"""Plant causes in small PyTorch steps, and trace them by torch.profiler: python FILE FOLDER NAME...

In a process of its own: the profiler of Python's stacks ends processes in which much else runs.
"""

from __future__ import annotations

import gc
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _planted import NAP, Clock
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

WIDTH, ROWS, LAYERS = 192, 512, 4


def profiled(steps: int) -> profile:
    """Return a profiler of some steps, after one to warm up, with Python stacks and shapes of tensors."""
    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        with_stack=True,
        record_shapes=True,
    )


class Layer(nn.Module):
    """A residual block of two products."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.again = again

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


def make(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(**options) for _ in range(LAYERS)))


def batch() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def program() -> dict[str, Any]:
    """The step as it is meant to be."""
    return {"module": make(), "inputs": (batch(),), "loss": loss_of, "optimizer": torch.optim.AdamW}


def traced(
    path: Path,
    module: nn.Module | None = None,
    *,
    steps: int = 5,
    read: Callable[[int], torch.Tensor] | None = None,
    between: Callable[[int, nn.Module], None] | None = None,
    after: Callable[[int, nn.Module], None] | None = None,
    run: Any = None,
) -> Path:
    """Trace steps of a module; `between` is called before the update, `after` after it."""
    module = make() if module is None else module
    optimizer = torch.optim.AdamW(module.parameters())
    x, clock = batch(), Clock()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profiled(steps) as profiler:
            for index in range(steps + 1):
                if index == 1:
                    clock.start()  # what the profiler warms up in is not in the trace
                given = x if read is None else clock(read, index)
                optimizer.zero_grad()
                loss_of((run or module)(given)).backward()
                clock(between, index, module)
                optimizer.step()
                clock(after, index, module)
                profiler.step()
    finally:
        torch.set_num_threads(threads)
    profiler.export_chrome_trace(str(path))
    clock.write(path, steps)
    return path


def nap(*_: Any) -> None:
    time.sleep(NAP)


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100 * ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % ROWS == 0:
            nap()
        return torch.ones(WIDTH)


def _reads_slowly(path: Path) -> Path:
    batches = iter(DataLoader(Slow(), batch_size=ROWS))
    return traced(path, read=lambda index: next(batches))


def _asks_for_numbers(path: Path) -> Path:
    def between(index, module):
        sum(float(value.item()) for value in module[0].down.weight.grad.flatten()[:800])

    return traced(path, between=between)


def _sleeps(path: Path) -> Path:
    return traced(path, after=nap)


def _collects(path: Path) -> Path:
    kept = [[place] for place in range(200_000)]
    found = traced(path, after=lambda index, module: gc.collect())
    assert kept
    return found


def _saves_sometimes(path: Path) -> Path:
    def after(index, module):
        for _ in range(20 if index == 3 else 0):
            torch.save(module.state_dict(), io.BytesIO())

    return traced(path, after=after)


def _evaluates_sometimes(path: Path) -> Path:
    def after(index, module):
        with torch.no_grad():
            for _ in range(12 if index == 3 else 0):
                module(torch.ones(ROWS, WIDTH))

    return traced(path, after=after)


def _recomputes(path: Path) -> Path:
    return traced(path, make(again=True))


def _measures_itself(path: Path) -> Path:
    def between(index, module):
        for each in module.parameters():
            for _ in range(3):
                torch.linalg.vector_norm(each.grad.double() ** 2)

    return traced(path, between=between)


def _computes_wide(path: Path) -> Path:
    module = make().double()
    return traced(path, module, read=lambda index: torch.ones(ROWS, WIDTH, dtype=torch.float64))


def _compiles_again(path: Path) -> Path:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *make())
    compiled = torch.compile(module[0], backend="eager", dynamic=False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        return traced(
            path,
            module,
            steps=2,
            read=lambda index: torch.ones(ROWS - index, WIDTH),
            run=lambda x: module[1:](compiled(x)),
        )


def _works_more(path: Path) -> Path:
    module = make()
    return traced(path, module, run=lambda x: module(module(x)))


def _reads_quickly(path: Path) -> Path:
    batches = iter(DataLoader([torch.ones(WIDTH)] * 10 * ROWS, batch_size=ROWS, collate_fn=torch.stack))
    x = next(batches)
    return traced(path, read=lambda index: x)


TRACED = {
    "a slow data loader": _reads_slowly,
    "numbers one by one": _asks_for_numbers,
    "a sleep": _sleeps,
    "garbage": _collects,
    "a checkpoint": _saves_sometimes,
    "an evaluation": _evaluates_sometimes,
    "recomputation": _recomputes,
    "norms of gradients": _measures_itself,
    "fp64": _computes_wide,
    "other shapes": _compiles_again,
    "twice": _works_more,
    "nothing": traced,
    "nothing, three steps": lambda path: traced(path, steps=3),
    "nothing, a quick data loader": _reads_quickly,
}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        TRACED[name](Path(sys.argv[1]) / f"{name}.json")
