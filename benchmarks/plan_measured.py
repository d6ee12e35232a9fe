"""Our own step, planned and compiled, set beside what others measured on the same fleet, model and batch.

Run: python benchmarks/plan_measured.py --runs ../shared/facts/dgxc_runs.csv [--only ID ...] [--json]
     [--budget SECONDS] [--fixed KEY=VALUE] [--record]
Each cell is a model, a fleet, a precision and a batch that NVIDIA ran (NeMo or MaxText), with the tokens per
second and device that were measured. Two more are figures that NVIDIA published for Llama 3 with the same
recipes. `plan` searches our layouts with its usual budget, or with --budget. `ratio` is our predicted tokens
per second over theirs: ours are predicted from the compiled program, theirs were clocked. --fixed "KEY=VALUE"
restricts the search as `plan --fix` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _plan_compiled import PACKAGES, figures, short
from _published_table import rows_of
from _record import write_record
from plan_recipes import expressed

import meshwright as mw

# One row of each model, fleet size and precision whose recipe is not a fine-tuning.
CELLS = (
    *("dgxcnemo-073", "dgxcnemo-078", "dgxcnemo-075"),  # 8B on 128 in bf16 and fp8, on 16 in fp8
    *("dgxcnemo-052", "dgxcnemo-063"),  # 70B on 128 in bf16, on 512 in fp8
    *("dgxcnemo-031", "dgxcnemo-047"),  # 405B with fewer layers on 128 in bf16, whole on 1,024 in fp8
    *("dgxcnemo-086", "dgxcnemo-102"),  # Nemotron 15B on 128
    *("dgxcnemo-006", "dgxcnemo-018"),  # GPT-3 on 512 in bf16, on 1,024 in fp8
    *("dgxcmaxtext-003", "dgxcmaxtext-014", "dgxcmaxtext-009"),  # 70B on 256 in bf16 (two lengths), in fp8
)
PUBLISHED = {  # id of a row with the same model and batch per device: devices, tokens per second and device
    "dgxcnemo-073": (8, 10_682.0),
    "dgxcnemo-052": (64, 1_121.0),
}


def main() -> None:
    """Plan each cell, print the ratios, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="recipes, in the survey's columns")
    parser.add_argument("--only", nargs="+", default=CELLS, help="ids of rows")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each search")
    parser.add_argument("--fixed", action="append", default=[], help="a knob of the search: tensor=1,2,4")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--record", action="store_true", help="write records/DATE_plan_measured.toml")
    given = parser.parse_args()
    rows = []
    table = {row["id"]: row for row in rows_of(given.runs, blind=False)}
    for name in given.only:
        row = table[name]
        found = expressed({**row, "step_time_s": ""})
        run, devices = found.config, int(row["n_devices"])
        tokens = run.batch.sequences * run.batch.sequence_length / devices
        cells = [(run, str(found.fleet.name), tokens / float(row["step_time_s"]))]
        if name in PUBLISHED:
            size, rate = PUBLISHED[name]
            batch = run.batch.model_copy(update={"sequences": run.batch.sequences * size // devices})
            fleet = found.fleet.name.replace(str(devices), str(size), 1)
            cells.append((run.model_copy(update={"batch": batch}), fleet, rate))
        for config, fleet, rate in cells:
            rows.append(planned(name, config, fleet, rate, given.budget, given.fixed))
            print(words(rows[-1]), file=sys.stderr, flush=True)
    summary = summary_of(rows)
    print(json.dumps({**summary, "rows": rows}, indent=1) if given.json else summary)
    if given.record:
        command = " ".join(["python benchmarks/plan_measured.py", *sys.argv[1:]])
        write_record("plan_measured", command, PACKAGES, summary, {"row": rows})


def planned(
    name: str, run: mw.RunConfig, fleet: str, rate: float, budget: float, fixed: Sequence[str]
) -> dict[str, Any]:
    """Return a row of the record: the plan's best candidate and its ratio to `rate`."""
    searched = ("layout=data=-1", "zero1=false", "remat=none")
    plan = mw.plan(run, on=fleet, budget_seconds=budget, overrides=searched, search=list(fixed))
    row = {"id": name, "fleet": fleet, "precision": run.precision, "measured": short(rate)}
    if plan.best is None:
        return {**row, "failed": plan.ended}
    best = plan.best.config
    assert best is not None, "the plan of a run is a run"
    settings = {"layout": str(best.layout), "remat": best.remat, "zero1": best.zero1, "offload": best.offload}
    sequences = best.batch.microbatch_sequences
    found = {**settings, "microbatch": sequences, "failed": "", **figures(plan.best)}
    tokens = run.batch.sequences * run.batch.sequence_length / mw.Fleet.parse(fleet).num_devices
    ours = tokens / found["seconds"]
    return {**row, **found, "ours": short(ours), "ratio": short(ours / rate)}


def words(row: Mapping[str, Any]) -> str:
    """Return a row in one line."""
    if row["failed"]:
        return f"{row['id']} on {row['fleet']} {row['precision']}: {row['failed']}"
    kinds = ", ".join(
        f"{kind} {seconds / row['seconds']:.1%}" for kind, seconds in row["exposed_seconds"].items()
    )
    return (
        f"{row['id']} on {row['fleet']} {row['precision']}: {row['ratio']:.3f} ({row['ours']:,.0f} of "
        f"{row['measured']:,.0f}): {row['layout']}, microbatch {row['microbatch']}, "
        f"{row['remat']}, {row['reserved_gib']} GiB: {kinds}"
    )


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of the ratios by source."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if not row["failed"]:
            found.setdefault(row["id"].partition("-")[0], []).append(row["ratio"])
    return {source: short(statistics.median(ratios)) for source, ratios in found.items()}


if __name__ == "__main__":
    main()
