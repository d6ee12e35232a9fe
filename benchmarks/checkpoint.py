"""Checkpoints: how long a step is blocked, how fast they are written, how much host memory they take.

Run: python benchmarks/checkpoint.py [--folder DIR] [--gb 0.1 1 4] [--writers meshwright orbax]. Writes
benchmarks/records/DATE_checkpoint.toml. Exit status 1 where a save takes more than 1.5 times the state's
bytes of host memory.

Each row is a process of its own on one CPU device, whose memory is the host's. Its state is 24 float32 arrays
of random numbers that a donating step has made. Then, three times: the state is saved; the step runs, which
takes the state's memory; the save is waited for. Before and after, the same number of bytes is written to one
file and synced, which is the disk's own rate. Orbax writes without compression; what it wrote is then hashed
file by file, as a manifest over it would need. Memory is the process's resident set beyond what it was before
the save, looked at every 5 ms; the first save, which meets memory not given out yet, counts too.
On restore it is beyond the state itself, and below zero where the saves' memory was given back meanwhile.
Every rate is bytes of the state over seconds until all is on the disk and its hashes are known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from _record import ROOT, write_record

from meshwright.trainer.checkpoint import Checkpoints, restore

NUM_ARRAYS, SAVES = 24, 3
MOST_EXTRA = 1.5  # host memory of a save, times the bytes of the state
LOOK_SECONDS = 0.005
WARM = 4  # times the state: written and deleted first, since a virtual disk's new blocks are slow once
RAW_BYTES = 1 << 26  # of a random buffer that is written again and again

State = dict[str, jax.Array]


class Ours:
    """Meshwright's checkpoints, with hashes of all files."""

    def __init__(self, folder: Path) -> None:
        self._checkpoints = Checkpoints(folder, keep_last=1)

    def save(self, step: int, state: State) -> None:
        """Returns when the state may be donated."""
        self._checkpoints.save(step, state, {})

    def finish(self, step: int) -> None:
        """Until all of it is on the disk."""
        self._checkpoints.wait()

    def restore(self, step: int, state: State) -> State:
        """Verified, then restored."""
        found = self._checkpoints.newest()
        assert found is not None
        return restore(found, state)


class Orbax:
    """Orbax's asynchronous checkpointer, and hashes of all its files."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._folder = ocp, folder
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        folder.mkdir()

    def save(self, step: int, state: State) -> None:
        """Returns when Orbax does."""
        self._checkpointer.save(self._folder / str(step), state)

    def finish(self, step: int) -> None:
        """Until it is on the disk, the hashes known, and the one before deleted."""
        self._checkpointer.wait_until_finished()
        self._hash(step)
        shutil.rmtree(self._folder / str(step - 1), ignore_errors=True)

    def restore(self, step: int, state: State) -> State:
        """The hashes again, then Orbax's restore."""
        self._hash(step)
        arguments = self._ocp.checkpoint_utils.construct_restore_args(state)
        return self._checkpointer.restore(self._folder / str(step), restore_args=arguments)

    def _hash(self, step: int) -> None:
        for path in (self._folder / str(step)).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    hashlib.file_digest(file, "sha256")


WRITERS = {"meshwright": Ours, "orbax": Orbax}


@contextmanager
def extra_memory() -> Iterator[list[int]]:
    """In its one element: the most resident bytes so far beyond those at the beginning."""
    process, ended = psutil.Process(), threading.Event()
    before, most = process.memory_info().rss, [0]

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            most[0] = max(most[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def raw_seconds(path: Path, num_bytes: int) -> float:
    """To write so many bytes to one file and sync it."""
    buffer = np.random.default_rng(0).bytes(RAW_BYTES)
    begun = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for begin in range(0, num_bytes, RAW_BYTES):
            file.write(buffer[: min(RAW_BYTES, num_bytes - begin)])
        os.fsync(file.fileno())
    seconds = time.monotonic() - begun
    path.unlink()
    return seconds


def measure(writer: str, gb: float, folder: Path) -> dict[str, Any]:
    """One row, in this process."""
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    elements = int(gb * 1e9) // 4 // NUM_ARRAYS
    make = jax.jit(lambda key: jax.random.normal(key, (elements,)))
    keys = jax.random.split(jax.random.key(0), NUM_ARRAYS)
    state = {f"array{index:02d}": make(key) for index, key in enumerate(keys)}
    state = jax.block_until_ready(advance(state))
    num_bytes = sum(array.nbytes for array in state.values())
    raw_seconds(folder / "raw", WARM * num_bytes)
    chosen = WRITERS[writer](folder / "checkpoints")
    seconds: dict[str, list[float]] = {name: [] for name in ("raw", "blocked", "step", "quiet_step", "total")}
    extras: list[int] = []
    for save in range(1, SAVES + 1):
        seconds["raw"].append(raw_seconds(folder / "raw", num_bytes))
        begun = time.monotonic()
        state = jax.block_until_ready(advance(state))
        seconds["quiet_step"].append(time.monotonic() - begun)
        expected = np.asarray(jnp.stack([array[0] for array in state.values()]))
        with extra_memory() as most:
            begun = time.monotonic()
            chosen.save(save, state)
            blocked = time.monotonic()
            state = jax.block_until_ready(advance(state))
            stepped = time.monotonic()
            chosen.finish(save)
            ended = time.monotonic()
        seconds["blocked"].append(blocked - begun)
        seconds["step"].append(stepped - blocked)
        seconds["total"].append(ended - begun)
        extras.append(most[0])
        seconds["raw"].append(raw_seconds(folder / "raw", num_bytes))
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    jax.tree.map(lambda x: x.delete(), state)
    with extra_memory() as most:
        begun = time.monotonic()
        restored = jax.block_until_ready(chosen.restore(SAVES, wanted))
        restore_seconds = time.monotonic() - begun
    assert (np.asarray(jnp.stack([array[0] for array in restored.values()])) == expected).all()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "writer": writer,
        "state_bytes": num_bytes,
        "blocked_seconds": [round(value, 4) for value in seconds["blocked"]],
        "next_step_seconds": [round(value, 4) for value in seconds["step"]],
        "step_without_save_seconds": [round(value, 4) for value in seconds["quiet_step"]],
        "total_seconds": [round(value, 3) for value in seconds["total"]],
        "disk_seconds": [round(value, 3) for value in seconds["raw"]],
        "written_bytes_per_second": round(num_bytes / middle["total"]),
        "disk_bytes_per_second": round(num_bytes / middle["raw"]),
        "of_the_disks_rate": round(middle["raw"] / middle["total"], 3),
        "extra_host_bytes": max(extras),
        "extra_host_of_state": round(max(extras) / num_bytes, 3),
        "restore_seconds": round(restore_seconds, 3),
        "restore_extra_host_of_state": round(most[0] / num_bytes - 1, 3),
    }


def main() -> int:
    """Measure each row in a process of its own, and record all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0, 4.0], help="of state, in 1e9 bytes")
    parser.add_argument("--writers", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument(
        "--row", action="store_true", help="measure one row in this process, print it as JSON"
    )
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(measure(asked.writers[0], asked.gb[0], asked.folder)))
        return 0
    rows = []
    for gb in asked.gb:
        for writer in asked.writers:
            with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                row = ["--row", "--writers", writer, "--gb", str(gb), "--folder", folder]
                done = subprocess.run([sys.executable, __file__, *row], capture_output=True, text=True)
            if done.returncode:
                print(f"{writer}, {gb} GB failed:\n{done.stderr}", file=sys.stderr)
                return 1
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), file=sys.stderr)
    packages = ("jax", "jaxlib", "numpy", *(["orbax-checkpoint"] if "orbax" in asked.writers else []))
    command = "python benchmarks/checkpoint.py"
    record = write_record("checkpoint", command, packages, {"most_extra_of_state": MOST_EXTRA}, {"row": rows})
    print(f"wrote {record.relative_to(ROOT)}", file=sys.stderr)
    ours = [row["extra_host_of_state"] for row in rows if row["writer"] == "meshwright"]
    return int(any(extra > MOST_EXTRA for extra in ours))


if __name__ == "__main__":
    sys.exit(main())
