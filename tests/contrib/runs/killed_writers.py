"""Fork writers of runs, kill them at random moments, and print what the store lists and what is there.

Usage: killed_writers.py FOLDER KILLS SEED. Each writer is a process that opens a run's folder, begins or goes
on with a run, writes steps and ends it, or lists all runs, as `train` and `runs` do; no jax is loaded. Some
are killed by the clock, most after a number of lines of Python. Between them folders are moved and copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meshwright.contrib.runs import found_runs
from meshwright.errors import MeshwrightError
from meshwright.kept_records import RUN_FILE, KeptRun
from meshwright.trainer.loop import RunFolder

CONFIG: Any = SimpleNamespace(
    name="killed",
    batch=SimpleNamespace(tokens_per_step=64),
    batch_unit="tokens",
    model=SimpleNamespace(num_parameters=1),
)
MEASURED: Any = SimpleNamespace(
    losses={5: 1.0},
    held_out_losses={},
    step_seconds=None,
    interrupted=False,
    signal="",
    steps=5,
    fingerprint="",
    tokens_per_second=None,
    peak_bytes=None,
    argument_bytes_per_device=None,
    device_kind="cpu",
    num_devices=1,
    seconds_by_phase={},
)
AT_ONCE = 4
LONGEST_SECONDS = 0.02  # until a writer is killed, if it has not killed itself before
MOST_LINES = 14_000  # of Python until a writer kills itself; a session has about as many


def session(folder: Path, acknowledged: int) -> None:
    """Train as a run does, as far as its files go."""
    held = RunFolder(folder, resume=True, discard_steps=True)
    held.create()
    kept = KeptRun(held, CONFIG, "1xCPU", 5)
    number = json.loads((folder / RUN_FILE).read_text())["id"]
    os.write(acknowledged, f"{number}\n".encode())  # from here on it may not be lost
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(1, 6):
            file.write(json.dumps({"step": step, "loss": 1 / step}) + "\n")
            file.flush()
    kept.ended(MEASURED)
    held.close()


def killer(lines: int) -> Any:
    """Return a tracer that kills its own process after so many lines of Python."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines -= 1
        if lines < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


class Writers:
    """Writers of runs below two folders, of which a few live at once."""

    def __init__(self, root: Path, seed: int) -> None:
        self.places = [root / "one", root / "two"]
        for place in self.places:
            place.mkdir()
        self.killed, self.acknowledged = 0, b""
        self._draw, self._number = random.Random(seed), 0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._living: list[tuple[int, float]] = []

    def folders(self) -> list[Path]:
        """Return the folders of the runs."""
        return [folder for place in self.places for folder in sorted(place.iterdir())]

    def start(self) -> None:
        """Start another writer, and end enough of those that live."""
        draw, self._number = self._draw, self._number + 1
        there, kind = self.folders(), draw.random()
        new = draw.choice(self.places) / f"run-{self._number}"
        if there and kind < 0.05 and not self._living:
            shutil.move(draw.choice(there), new.with_name(f"moved-{self._number}"))
            there = self.folders()
        elif there and kind < 0.1 and not self._living:
            shutil.copytree(draw.choice(there), new.with_name(f"copy-{self._number}"))
        folder = draw.choice(there) if there and draw.random() < 0.3 else new
        lists, lines, by_clock = draw.random() < 0.2, draw.randrange(MOST_LINES), draw.random() < 0.3
        child = os.fork()
        if not child:
            with contextlib.suppress(MeshwrightError, OSError):  # another writer has the folder
                sys.settrace(None if by_clock else killer(lines))
                found_runs() if lists else session(folder, self._writer)
            os._exit(0)
        due = time.monotonic() + draw.random() * LONGEST_SECONDS
        self._living.append((child, due if by_clock else 0.0))
        while len(self._living) >= draw.randint(1, AT_ONCE):
            self._end(*self._living.pop(0))

    def _end(self, process: int, due: float) -> None:
        if due:
            time.sleep(max(0.0, due - time.monotonic()))
            os.kill(process, signal.SIGKILL)
        self.killed += os.WIFSIGNALED(os.waitpid(process, 0)[1])
        with contextlib.suppress(BlockingIOError):
            self.acknowledged += os.read(self._reader, 1 << 16)

    def end_all(self) -> None:
        """End all writers that live."""
        while self._living:
            self._end(*self._living.pop())


def main() -> None:
    """Kill writers, list the runs, and print both sides as JSON."""
    writers, kills = Writers(Path(sys.argv[1]), int(sys.argv[3])), int(sys.argv[2])
    while writers.killed < kills:
        writers.start()
    writers.end_all()
    there = {str(each): _id_of(each) for each in writers.folders()}
    first, again = found_runs(), found_runs()
    answer = {
        "killed": writers.killed,
        "acknowledged": sorted(set(writers.acknowledged.decode().split())),
        "there": there,
        "listed": [[run.id, run.state, [str(run.folder), *map(str, run.copies)]] for run in first.runs],
        "again": [run.id for run in again.runs],
        "notes": list(first.notes),
    }
    sys.stdout.write(json.dumps(answer))


def _id_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / RUN_FILE).read_text())["id"])
    except FileNotFoundError:
        return ""


main()
