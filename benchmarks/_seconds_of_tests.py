"""A pytest plugin that writes the processor's seconds of each test, with those of all that it started.

Used by benchmarks/seconds_of_tests.py. Wall seconds tell little on a machine that others use; a processor's
do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

FOLDER = "MESHWRIGHT_TEST_SECONDS"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Sum the seconds of this process, of its descendants, and of those descendants that have ended.

    `os.times` leaves out a child that still runs, as the process whose forks compile does.
    """
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        number = int(folder.name)
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = sum(map(int, fields[11:15]))
    total, left = 0, [os.getpid()]
    while left:
        number = left.pop()
        total += ticks.get(number, 0)
        left += children.get(number, ())
    return total / TICKS_PER_SECOND


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before, began = processor_seconds(), time.perf_counter()
    try:
        return (yield)
    finally:
        line = {
            "file": item.path.relative_to(item.config.rootpath).as_posix(),
            "test": item.nodeid.partition("::")[2],
            "cpu_seconds": round(processor_seconds() - before, 2),
            "wall_seconds": round(time.perf_counter() - began, 2),
        }
        with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
