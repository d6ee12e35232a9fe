"""Where the time of a short run goes, before and after a change: start-up, compilation, steps and end.

Run: python benchmarks/start.py BEFORE    (BEFORE: a checkout of the commit to compare with)
The run is `meshwright train bytes-nano --on 1xCPU --steps 10`. Runs of the two checkouts are interleaved, so
that a slow moment hits both. "cold" has an empty cache but for the machine's rates, and "warm" follows it.
Seconds by phase are the run's own; total and CPU seconds are those of the command with all its processes,
imports, weighing and page included. The losses of the runs of one checkout must be equal; the record says
whether those of both are. Writes records/DATE_start.toml.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import ROOT, write_record

ROUNDS = 5
TRAIN = ("-m", "meshwright", "train", "bytes-nano", "--on", "1xCPU", "--steps", "10", "--folder")
PHASES = ("start-up", "compile", "step", "evaluation", "checkpoint", "end")


def timed(checkout: Path, cache: Path, folder: Path) -> tuple[dict[str, float], Any]:
    """Run the command; return its seconds, and the losses."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "MESHWRIGHT_CACHE_DIR": str(cache)}
    environment["JAX_PLATFORMS"] = "cpu"
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, *TRAIN, str(folder)], env=environment, check=True, capture_output=True)
    total, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    measured = json.loads((folder / "measurement.json").read_text())
    phases = measured["seconds_by_phase"]
    seconds = {phase: phases.get(phase, 0.0) for phase in PHASES}
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    seconds |= {"run": sum(phases.values()), "command": total, "command CPU": cpu}
    return seconds, (measured["losses"], measured["held_out_losses"], measured["sample"])


def main() -> None:
    """Interleave the runs, print and record the medians."""
    checkouts = {"before": Path(sys.argv[1]).resolve(), "after": ROOT}
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        timed(ROOT, work / "rates", work / "first")  # measures the machine's rates
        rates = list((work / "rates").glob("calibration-*.json"))
        losses: dict[str, list[Any]] = {which: [] for which in checkouts}
        for number in range(ROUNDS):
            for which, checkout in checkouts.items():
                cache = work / f"{which}-{number}"
                cache.mkdir()
                for how in ("cold", "warm"):
                    for file in rates:  # a run may have measured them again
                        shutil.copy(file, cache)
                    for doubt in cache.glob("calibration-*.doubt"):  # of a run that was slower than predicted
                        doubt.unlink()
                    seconds, result = timed(checkout, cache, work / f"{which}-{number}-{how}")
                    rows.setdefault((how, which), []).append(seconds)
                    losses[which].append(result)
    for which, found in losses.items():
        assert all(each == found[0] for each in found), f"the losses of the runs {which} differ"
    table = []
    for (how, which), runs in sorted(rows.items(), reverse=True):
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        share = statistics.median(run["step"] / run["run"] for run in runs)
        low, high = min(run["command"] for run in runs), max(run["command"] for run in runs)
        table.append(
            {
                "cache": how,
                "which": which,
                "seconds": {name: round(value, 3) for name, value in medians.items()},
                "share_of_run_in_steps": round(share, 4),
                "command_low_high": [round(low, 2), round(high, 2)],
                "rounds": ROUNDS,
            }
        )
        print(table[-1])
    facts = {
        "before_commit": _commit(checkouts["before"]),
        "losses_equal": losses["before"] == losses["after"],
    }
    command = "python benchmarks/start.py BEFORE"
    print("wrote", write_record("start", command, ("jax", "jaxlib", "matplotlib"), facts, {"start": table}))


def _commit(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
