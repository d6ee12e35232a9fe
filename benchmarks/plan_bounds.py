"""Compile random legal candidates of the planner, and compare its bounds and estimates with what was found.

Prints for each group (a model on a fleet) how many bounds exceed the compiled figure, the rank correlation of
estimated and predicted time and memory, and the quantiles of compiled / estimate. Compiled candidates come
from the cache, so a second run takes minutes less. The constants of the estimates were read off candidates of
seeds 14 and 15: other seeds test them.

    python benchmarks/plan_bounds.py --each 50 --seed 16 --record
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _record import write_record

from meshwright.compiler import warm_workers
from meshwright.config import load_config, overridden
from meshwright.errors import MeshwrightError
from meshwright.hardware import Fleet
from meshwright.planning import estimate, space_of
from meshwright.predict import machine_of

GROUPS = (
    ("llama-1b", "16xH100"),
    ("llama3-8b", "64xH100"),
    ("llama3-70b", "256xH100"),
    ("mixtral-8x7b", "64xH100"),
)
PACKAGES = ("jax", "jaxlib", "jax-cuda13-pjrt", "numpy")


def main() -> None:
    """Compile the groups' candidates, print the comparison, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=50, help="candidates of each group")
    parser.add_argument("--only", default="", help="the name of one group's model")
    parser.add_argument("--seed", type=int, default=16, help="of the choice of candidates")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=Path, help="write every candidate as a line of JSON")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    groups = [group for group in GROUPS if given.only in group[0]]
    rows = [row for group in groups for row in compiled_rows(*group, given.each, given.seed, given.workers)]
    if given.rows:
        given.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [scores(*group, rows) for group in groups]
    print(json.dumps(found, indent=1))
    if given.record:
        command = f"python benchmarks/plan_bounds.py --each {given.each} --seed {given.seed}"
        print(f"Wrote {write_record('plan_bounds', command, PACKAGES, {}, {'group': found})}")


def compiled_rows(model: str, fleet_name: str, count: int, seed: int, workers: int) -> list[dict[str, Any]]:
    """Return a row for each of `count` random candidates: bounds, estimates, and what compiling found."""
    from meshwright.programs import resolved, weigh_run

    config, fleet = load_config(model), Fleet.parse(fleet_name)
    space = space_of(config, fleet)
    estimates = estimate(config, machine_of(fleet, None), space.candidates)
    chosen = np.random.default_rng(seed).permutation(space.num_considered)[:count]

    def row_of(place: int) -> dict[str, Any]:
        overrides = space.candidates.overrides(place)
        row = {"model": model, "fleet": fleet_name, **overrides}
        row |= {f.name: float(getattr(estimates, f.name)[place]) for f in dataclasses.fields(estimates)}
        started = time.monotonic()
        try:
            run, layout = resolved(overridden(config, overrides), fleet)
            weighing = weigh_run(run, fleet, layout, num_steps=None)
        except MeshwrightError as error:
            return {**row, "failed": error.message}
        assert weighing.prediction is not None, weighing.no_prediction
        print(".", end="", flush=True, file=sys.stderr)
        return {
            **row,
            "failed": "",
            "compiled_seconds": weighing.step_seconds,
            "compiled_bytes": weighing.ledger.memory.reserved_bytes,
            "by_category": weighing.ledger.memory.by_category,
            "slices": {s.name: [s.seconds, s.exposed_seconds] for s in weighing.prediction.slices},
            "took": time.monotonic() - started,
        }

    with warm_workers(), ThreadPoolExecutor(workers) as pool:
        return list(pool.map(row_of, chosen.tolist()))


def scores(model: str, fleet: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison of one group."""
    ours = [row for row in rows if row["model"] == model]
    good = [row for row in ours if not row["failed"]]
    pairs = {
        "seconds": ("seconds", "compiled_seconds"),
        "memory": ("memory", "compiled_bytes"),
        "seconds_bound": ("seconds_bound", "compiled_seconds"),
        "memory_bound": ("memory_bound", "compiled_bytes"),
    }
    found: dict[str, Any] = {
        "model": model,
        "fleet": fleet,
        "compiled": len(good),
        "failed": len(ours) - len(good),
    }
    for name, (ours_key, theirs) in pairs.items():
        estimated, compiled = (np.array([row[key] for row in good]) for key in (ours_key, theirs))
        ratio = compiled / estimated
        found[f"{name}_ratio_5_50_95"] = [round(float(q), 3) for q in np.quantile(ratio, [0.05, 0.5, 0.95])]
        if name.endswith("bound"):
            found[f"{name}_exceeded"] = int((ratio < 1).sum())
        else:
            found[f"{name}_rank_correlation"] = round(spearman(estimated, compiled), 3)
    return found


def spearman(left: np.ndarray, right: np.ndarray) -> float:
    """Return the rank correlation of two columns."""
    ranks = [np.argsort(np.argsort(column)) for column in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
