"""Does the predicted order hold? Plan for simulated CPU devices, and run the best and the worst candidates.

Of what `plan` compiled and found to fit, the three fastest and the three slowest are trained, in rounds: each
round runs each of them for `--steps` steps, in another order. A candidate's time is the median over rounds of
the run's median step, without its first two steps. The machine should be quiet.

    python benchmarks/plan_order.py --record
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _plan_compiled import planned_row, short
from _plan_scores import rank_correlation
from _record import write_record
from plan_best import settings

import meshwright as mw
from meshwright.units import aligned

MODEL, FLEET = "bytes-10m", "8xCPU"
EACH_END = 3  # candidates of the best, and of the worst
FIXED = ("offload=none",)  # a CPU has no other memory: with and without are one program
QUIET = ("evaluation.every_steps=100000", "evaluation.batches=1", "checkpoint.every_steps=none")


def main() -> None:
    """Plan, run, print, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of the plan")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="of one run")
    parser.add_argument("--record", action="store_true", help="write records/DATE_plan_order.toml")
    given = parser.parse_args()
    plan = mw.plan(MODEL, on=FLEET, fix=FIXED, budget_seconds=given.budget)
    print(plan)
    rows = [planned_row(each) for each in plan.fitting]
    chosen = ends(rows)
    for number in range(given.rounds):
        for row in chosen if number % 2 == 0 else chosen[::-1]:
            seconds = measured_seconds(row, given.steps)
            row.setdefault("measured", []).append(short(seconds))
            print(f"round {number + 1}: {settings(row)}: {seconds:.4g} s", file=sys.stderr, flush=True)
    told = [told_row(row) for row in chosen]
    summary = {"compiled": len(rows), "num_considered": plan.num_considered, **summary_of(told)}
    names = ("settings", "predicted_seconds", "measured_seconds")
    print(aligned(names, [tuple(str(row[name]) for name in names) for row in told], right=names[1:]))
    print(summary)
    if given.record:
        command = (
            f"python benchmarks/plan_order.py --budget {given.budget:g} --rounds {given.rounds} --record"
        )
        print(
            f"Wrote {write_record('plan_order', command, ('jax', 'jaxlib', 'numpy'), summary, {'row': told})}"
        )


def ends(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest and the slowest of rows that stand in order of predicted time.

    Raises:
        SystemExit: there are too few.
    """
    if len(rows) < 2 * EACH_END:
        sys.exit(f"only {len(rows)} candidates were compiled: give a larger --budget")
    return [*rows[:EACH_END], *rows[-EACH_END:]]


def measured_seconds(row: Mapping[str, Any], steps: int) -> float:
    """Return the median seconds of a step of a new run."""
    overrides = [f"{name}={str(value).lower()}" for name, value in row.items() if name in KEYS]
    with tempfile.TemporaryDirectory() as folder:
        run = mw.train(
            MODEL, on=FLEET, overrides=[*QUIET, *overrides], steps=steps, folder=Path(folder, "run")
        )
    assert run.measurement.step_seconds is not None, "the run had more than two steps"
    return run.measurement.step_seconds.median


KEYS = ("layout", "remat", "zero1", "offload", "pipeline", "precision", "batch.microbatch_sequences")


def told_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the record."""
    return {
        "settings": settings(row),
        "predicted_seconds": row["seconds"],
        "measured_seconds": statistics.median(row["measured"]),
        "measured": row["measured"],
        "predicted_exposed_seconds": row["exposed_seconds"],
    }


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rank correlation, whether each of the best beats each of the worst, and the ratios."""
    predicted = np.array([row["predicted_seconds"] for row in rows])
    measured = np.array([row["measured_seconds"] for row in rows])
    best, worst = measured[:EACH_END], measured[EACH_END:]
    ratios = measured / predicted
    correlation = rank_correlation(predicted, measured)
    return {
        "rank_correlation": None if correlation is None else round(correlation, 3),
        "every_best_beats_every_worst": bool(best.max() < worst.min()),
        "pairs_in_order": int((best[:, None] < worst[None, :]).sum()),
        "pairs": len(best) * len(worst),
        "measured_over_predicted": [short(float(ratio)) for ratio in (ratios.min(), ratios.max())],
    }


if __name__ == "__main__":
    main()
