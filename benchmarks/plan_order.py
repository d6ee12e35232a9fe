"""Does the predicted order hold? Plan for simulated CPU devices, and run the best and the worst candidates.

Of what `plan` compiled and found to fit, the three fastest and the three slowest are compiled again, as
`train` compiles them, in one process. They take turns: in each round each trains for one step, forwards
and backwards by turns. So what else the machine does slows all alike. A candidate's time is the median over
rounds, without the first `WARM_UP`.

    python benchmarks/plan_order.py --record
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # a CUDA plugin without a GPU complains

import numpy as np
from _plan_compiled import planned_row, short
from _plan_scores import rank_correlation
from _record import write_record
from plan_best import settings

import meshwright as mw
from meshwright.config import Layout, load_config, overridden
from meshwright.hardware import Fleet
from meshwright.trainer.loop import devices_of
from meshwright.units import aligned

MODEL, FLEET = "bytes-10m", "8xCPU"
EACH_END = 3  # candidates of the best, and of the worst
FIXED = ("offload=none",)  # a CPU has no other memory: with and without are one program
WARM_UP = 2  # rounds
KEYS = ("layout", "remat", "zero1", "offload", "pipeline", "precision", "batch.microbatch_sequences")


def main() -> None:
    """Plan, run, print, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of the plan")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--record", action="store_true", help="write records/DATE_plan_order.toml")
    given = parser.parse_args()
    plan = mw.plan(MODEL, on=FLEET, budget_seconds=given.budget, search=FIXED)
    print(plan)
    rows = [planned_row(each) for each in plan.fitting]
    chosen = ends(rows)
    run_in_turns(chosen, given.rounds)
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


def run_in_turns(rows: Sequence[dict[str, Any]], rounds: int) -> None:
    """Train each row's candidate for a step in each round, and add the seconds of its steps as `measured`."""
    import jax

    from meshwright.sharding import mesh_of
    from meshwright.trainer.loop import compile_programs

    fleet, steps, rng = Fleet.parse(FLEET), [], np.random.default_rng(0)
    for row in rows:
        run = overridden(load_config(MODEL), {name: row[name] for name in KEYS})
        layout = Layout.parse(run.layout).resolve(fleet.num_devices)
        programs = compile_programs(run, mesh_of(layout.axes, devices_of(fleet, layout)), "cpu")
        batch = {
            name: jax.device_put(rng.integers(0, 256, leaf.shape).astype(leaf.dtype), leaf.sharding)
            for name, leaf in programs.built.batch.items()
        }
        steps.append((programs.step, programs.init(np.uint32(0)), batch))
        row["measured"] = []
        print(f"compiled {settings(row)}", file=sys.stderr, flush=True)
    for number in range(WARM_UP + rounds):
        places = range(len(rows)) if number % 2 == 0 else range(len(rows) - 1, -1, -1)
        for place in places:
            step, state, batch = steps[place]
            started = time.perf_counter()
            state, metrics = step(state, batch)
            float(metrics["loss"])
            jax.block_until_ready(state)
            seconds = time.perf_counter() - started
            steps[place] = step, state, batch
            print(f"round {number}, {settings(rows[place])}: {seconds:.3f} s", file=sys.stderr, flush=True)
            if number >= WARM_UP:
                rows[place]["measured"].append(short(seconds))


def told_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the record."""
    return {
        "settings": settings(row),
        "predicted_seconds": row["seconds"],
        "measured_seconds": statistics.median(row["measured"]),
        "measured_seconds_5_95": [short(float(q)) for q in np.quantile(row["measured"], [0.05, 0.95])],
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
