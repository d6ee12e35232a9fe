"""Tokens per second of the data alone, against other loaders in the same run, and who waits for whom.

Run: python benchmarks/data.py
A file of 50 million uint16 tokens, documents of 500 tokens on average. Ours: random windows, epochs, and
packed documents. Peers, none of which packs: the loop of nanoGPT's get_batch (a memory map opened for each
batch, rows cut one by one, inputs and targets apart), and PyTorch's DataLoader over windows of a memory map,
where PyTorch is installed.
Loaders take turns, so that a slow moment hits all; a figure is the median of the rounds. Then preset
bytes-nano trains with batches made ahead as `meshwright train` does: a step counts as one that waited if its
batch was not ready after the step before. Writes records/DATE_data.toml.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # a CUDA plugin without a GPU complains

import jax
import numpy as np
from _record import write_record

from meshwright.config import RunConfig, load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.loop import batches_ahead, compile_programs

TOKENS, VOCABULARY, END, MEAN_DOCUMENT = 50_000_000, 50_257, 50_256, 500
SHAPES = ((64, 256), (8, 4096))
ROUNDS, SECONDS = 7, 0.5
GOAL_TOKENS_PER_SECOND = 10_000_000

Batch = Callable[[int], object]


def make_file(path: Path) -> None:
    """Random tokens, with an end of a document every so often."""
    random = np.random.default_rng(0)
    tokens = random.integers(END, size=TOKENS, dtype=np.uint16)
    tokens[random.random(TOKENS) < 1 / MEAN_DOCUMENT] = END
    tokens.tofile(path)


def config_of(path: Path, rows: int, length: int, *more: str) -> RunConfig:
    """A run that reads the file."""
    data = ["data.source=tokens", f"data.path={path}", "data.dtype=uint16"]
    shape = [f"batch.sequences={rows}", f"batch.sequence_length={length}", "model.max_positions=none"]
    return load_config("bytes-nano", [*data, *shape, f"model.vocab_size={VOCABULARY}", *more])


def ours(path: Path, rows: int, length: int) -> dict[str, Batch]:
    """The three ways in which a run may read."""
    packed = ("data.documents=packed", f"data.end_of_document={END}", "data.order=epochs")
    ways = {"random": (), "epochs": ("data.order=epochs",), "packed": packed}
    opened = {name: open_data(config_of(path, rows, length, *more)) for name, more in ways.items()}
    return {name: lambda step, data=data: data.batch(step, "train") for name, data in opened.items()}


def nanogpt(path: Path, rows: int, length: int) -> Batch:
    """As https://github.com/karpathy/nanoGPT's train.py reads, in NumPy alone."""

    def batch(step: int) -> object:
        data = np.memmap(path, dtype=np.uint16, mode="r")  # anew each time, as there, against a leak
        starts = np.random.default_rng(step).integers(len(data) - length, size=rows)
        x = np.stack([data[i : i + length].astype(np.int64) for i in starts])
        y = np.stack([data[i + 1 : i + 1 + length].astype(np.int64) for i in starts])
        return x, y

    return batch


def torch_loader(path: Path, rows: int, length: int, workers: int) -> Batch:
    """PyTorch's DataLoader over windows, shuffled, each a row to collate."""
    import torch

    class Windows(torch.utils.data.Dataset[Any]):
        data = np.memmap(path, dtype=np.uint16, mode="r")

        def __len__(self) -> int:
            return (len(self.data) - 1) // length

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(self.data[index * length : (index + 1) * length + 1].astype(np.int32))

    def endless() -> Iterator[Any]:
        while True:
            yield from torch.utils.data.DataLoader(
                Windows(), rows, shuffle=True, num_workers=workers, drop_last=True
            )

    batches = endless()
    return lambda step: next(batches)


def rates(loaders: dict[str, Batch], num_tokens: int) -> list[dict[str, Any]]:
    """Median tokens per second of each, and its spread, over rounds in which they take turns."""
    seen: dict[str, list[float]] = {name: [] for name in loaders}
    steps = dict.fromkeys(loaders, 0)
    for number in range(ROUNDS + 1):
        for name, batch in loaders.items():
            count, start = 0, time.perf_counter()
            while (seconds := time.perf_counter() - start) < SECONDS:
                batch(steps[name])
                steps[name] += 1
                count += 1
            if number:  # the first warms up
                seen[name].append(count * num_tokens / seconds)
    return [
        {"loader": name, "tokens_per_second": round(statistics.median(found)), "lowest": round(min(found))}
        for name, found in seen.items()
    ]


def waiting(steps: int) -> dict[str, Any]:
    """How often a real run's steps waited for their batch, and for how long in all."""
    shape = ["batch.sequences=64", "batch.sequence_length=256"]
    config = load_config("bytes-nano", ["data.order=epochs", *shape])
    mesh = mesh_of((("data", 1),), jax.devices()[:1])
    programs, data = compile_programs(config, mesh, "cpu"), open_data(config)
    state, late, seconds = programs.init(np.uint32(0)), list[float](), list[float]()
    ready_at: dict[int, float] = {}

    def batch(step: int) -> Any:
        rows = data.batch(step, "train")
        made = {n: jax.device_put(a.reshape(programs.built.batch[n].shape)) for n, a in rows.items()}
        ready_at[step] = time.perf_counter()
        return made

    with closing(batches_ahead(batch, range(steps))) as batches:
        for step in range(steps):
            begin = time.perf_counter()
            rows = next(batches)
            late.append(max(0.0, ready_at[step] - begin))
            state, _metrics = programs.step(state, rows)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - begin)
    steady = late[1:]  # nothing can have been made ahead of the first
    return {
        "config": "bytes-nano in epochs, batch 64 x 256",
        "steps": len(steady),
        "steps_that_waited": sum(wait > 0 for wait in steady),
        "longest_wait_seconds": round(max(steady), 6),
        "share_of_time_waited": round(sum(steady) / sum(seconds[1:]), 6),
        "median_step_seconds": round(statistics.median(seconds[1:]), 4),
    }


def main() -> None:
    """Measure, print, record."""
    rows: list[dict[str, Any]] = []
    has_torch = importlib.util.find_spec("torch") is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        make_file(path)
        for number, length in SHAPES:
            loaders = {**ours(path, number, length), "nanoGPT loop": nanogpt(path, number, length)}
            if has_torch:
                for workers in (0, 2):
                    name = f"PyTorch DataLoader, {workers} workers"
                    loaders[name] = torch_loader(path, number, length, workers)
            found = rates(loaders, number * length)
            peers = [
                row["tokens_per_second"]
                for row in found
                if row["loader"] not in ("random", "epochs", "packed")
            ]
            for row in found:
                row |= {"batch": f"{number} x {length}"}
                row["times_fastest_peer"] = round(row["tokens_per_second"] / max(peers), 2)
                print(
                    f"{row['batch']:>9}  {row['loader']:<30}{row['tokens_per_second'] / 1e6:8.1f} M tokens/s"
                    f"{row['times_fastest_peer']:8.2f} x fastest peer"
                )
            rows += found
        waited = waiting(40)
    print(waited)
    slowest = min(r["tokens_per_second"] for r in rows if r["loader"] in ("random", "epochs", "packed"))
    facts = {
        "goal_tokens_per_second": GOAL_TOKENS_PER_SECOND,
        "slowest_of_ours": slowest,
        "load_average": os.getloadavg()[0],
    }
    packages = ["meshwright", "numpy", "jax", *(["torch"] if has_torch else [])]
    print(
        write_record("data", "python benchmarks/data.py", packages, facts, {"loader": rows, "run": [waited]})
    )


if __name__ == "__main__":
    main()
