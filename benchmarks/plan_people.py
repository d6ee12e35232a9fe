"""What `plan` chooses for training runs that people published, beside what they chose and measured.

The rows of the survey that are runs of ours (`_published_rows`): of each distinct (model, chip, scale) the
first, and of those `--rows`, the sources in turn, by `--seed`. People's layout is compiled first, then the
same run is planned for the same fleet: same global batch, sequence length and precision. Both times come from
compiled programs, priced alike. A row whose program does not fit the chip is scheduled as if it did
(`_published_score`): the planner may not choose it.

    python benchmarks/plan_people.py --runs CSV --rows 20 --record
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from _plan_compiled import PACKAGES, add_line, best_of, figures, place_of, planned_row, short, why_faster
from _published_rows import Expressed
from _published_score import compiled_fleet, scale_of, weighed_run
from _record import write_record
from plan_best import settings
from predict_published import drawn, sorted_out

import meshwright as mw
from meshwright.compiler import warm_workers
from meshwright.errors import MeshwrightError
from meshwright.ledger import executions_in
from meshwright.planning import space_of
from meshwright.predict import predict
from meshwright.units import aligned

COLUMNS = (
    "id",
    "fleet",
    "people",
    "measured_seconds",
    "people_seconds",
    "choice",
    "choice_seconds",
    "faster_by",
)
SAME = 1e-6  # by which predictions of one program may differ


def main() -> None:
    """Choose the rows, plan each, print, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="the survey's CSV")
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds of each plan")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--lines", type=Path, help="append each row to this file, as a line of JSON")
    parser.add_argument("--list", action="store_true", help="print the rows' ids, and plan nothing")
    parser.add_argument("--record", action="store_true", help="write records/DATE_plan_people.toml")
    given = parser.parse_args()
    with given.runs.open(newline="", encoding="utf-8") as file:
        models = {row["id"]: row["model"] for row in csv.DictReader(file)}
    firsts = first_of_each(sorted_out(given.runs)[0], models)
    chosen = drawn(firsts, given.rows, given.seed)
    if given.list:
        print("\n".join(row.id for row in chosen))
        return
    rows: list[dict[str, Any]] = []
    with warm_workers():
        for row in chosen:
            rows.append(planned_beside(row, models[row.id], given.budget, given.workers))
            add_line(given.lines, rows[-1])
            print(f"{len(rows)}/{len(chosen)} {_told(rows[-1])}", file=sys.stderr, flush=True)
    summary = {"rows_of": len(firsts), **summary_of(rows)}
    done = [row for row in rows if not row["failed"]]
    lines = [tuple(str(row[name]) for name in COLUMNS) for row in done]
    print(aligned(COLUMNS, lines, right=(COLUMNS[3], COLUMNS[4], *COLUMNS[6:])))
    print(summary)
    if given.record:
        command = (
            f"python benchmarks/plan_people.py --runs CSV --rows {given.rows} --seed {given.seed} --record"
        )
        print(f"Wrote {write_record('plan_people', command, PACKAGES, summary, {'row': rows})}")


def first_of_each(rows: Iterable[Expressed], models: Mapping[str, str]) -> list[Expressed]:
    """Return the first row of each distinct (model, chip, scale), in their order."""
    firsts: dict[tuple[str, str, str], Expressed] = {}
    for row in rows:
        firsts.setdefault((models[row.id], row.fleet.chip.name, scale_of(row.fleet.num_devices)), row)
    return list(firsts.values())


def planned_beside(row: Expressed, model: str, budget: float, workers: int) -> dict[str, Any]:
    """Return a row of the record: people's layout and ours, their predicted times, and why they differ."""
    fleet, notes = compiled_fleet(row), list(row.notes)
    batch = row.config.batch
    told: dict[str, Any] = {
        "id": row.id,
        "model": model,
        "fleet": row.fleet.name,
        "sequences": batch.sequences,
        "sequence_length": batch.sequence_length,
        "measured_seconds": short(row.measured_seconds),
        "failed": "",
    }
    started = time.monotonic()
    try:
        weighed, remat = weighed_run(row, notes)
    except MeshwrightError as error:
        return {**told, "failed": error.message.splitlines()[0]}
    fits = bool(weighed.fits) and weighed.fleet.chip.memory_bytes == fleet.chip.memory_bytes
    run = row.config.model_copy(update={"remat": remat})
    people = {**_settings_of(run), **figures(weighed), "fits": fits}
    legal = place_of(space_of(run, fleet).candidates, people) is not None
    compiled = time.monotonic()
    told |= {
        "people": settings(people),
        "people_legal": legal,
        "people_fits": fits,
        "people_gib": people["reserved_gib"],
        "people_seconds": people["seconds"],
        "people_seconds_with_their_attention": _seconds_with(weighed, row),
        "people_compile_seconds": round(compiled - started, 1),
    }
    try:
        plan = mw.plan(run, on=fleet, budget_seconds=budget)
    except MeshwrightError as error:
        return {**told, "failed": error.message.splitlines()[0], "notes": notes}
    return {**told, **_compared(plan, people, row), "notes": notes}


def _compared(plan: mw.Plan, people: dict[str, Any], row: Expressed) -> dict[str, Any]:
    """Return what the plan chose, and how it compares with what people chose."""
    rows = [planned_row(each) for each in plan.candidates]
    ours = best_of(rows)
    found: dict[str, Any] = {
        "num_considered": plan.num_considered,
        "num_compiled": sum(not each["failed"] for each in rows),
        "looked_at_people": any(settings(each) == settings(people) for each in rows),
        "plan_seconds": round(plan.seconds, 1),
        "ended": plan.ended,
    }
    if ours is None or plan.best is None:
        return {**found, "failed": "nothing fits"}
    faster = people["seconds"] / ours["seconds"] - 1
    return {
        **found,
        "choice": settings(ours),
        "choice_gib": ours["reserved_gib"],
        "choice_seconds": ours["seconds"],
        "choice_seconds_with_their_attention": _seconds_with(plan.best, row),
        "faster_by": round(faster, 5),
        "at_least_as_fast": faster >= -SAME,
        "why": why_faster(ours, people),
    }


def _seconds_with(weighing: mw.Weighing, row: Expressed) -> float:
    """Return the predicted seconds on the row's own chip with its attention kernel, as it is scored."""
    executions = executions_in(weighing.folder, weighing.compiled)
    kernel = row.attention_kernel
    found = predict(executions, weighing.ledger, weighing.compiled, row.fleet, attention_kernel=kernel)
    return short(found.step_seconds.expected)


def _settings_of(run: mw.RunConfig) -> dict[str, Any]:
    return {
        "layout": run.layout,
        "remat": run.remat,
        "zero1": run.zero1,
        "offload": run.offload,
        "pipeline": run.pipeline,
        "batch.microbatch_sequences": run.batch.microbatch_sequences,
    }


def summary_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many rows were compared, and in how many the choice is at least as fast as people's."""
    rows = list(rows)
    done = [row for row in rows if not row["failed"]]
    gains = sorted(row["faster_by"] for row in done)
    return {
        "rows": len(done),
        "rows_that_failed": {row["id"]: row["failed"] for row in rows if row["failed"]},
        "people_legal": sum(row["people_legal"] for row in done),
        "people_fit": sum(row["people_fits"] for row in done),
        "at_least_as_fast": sum(row["at_least_as_fast"] for row in done),
        "slower": [row["id"] for row in done if not row["at_least_as_fast"]],
        "slower_where_people_fit": [
            row["id"] for row in done if row["people_fits"] and not row["at_least_as_fast"]
        ],
        "faster_by_median": gains[len(gains) // 2] if gains else None,
    }


def _told(row: Mapping[str, Any]) -> str:
    if row["failed"]:
        return f"{row['id']} failed: {row['failed']}"
    return (
        f"{row['id']} {row['people']} {row['people_seconds']} s (measured {row['measured_seconds']}, "
        f"fits {row['people_fits']}); ours {row['choice']} {row['choice_seconds']} s: {row['faster_by']:+.3f}"
    )


if __name__ == "__main__":
    main()
