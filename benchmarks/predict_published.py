"""Published training runs predicted: their steps compiled for their fleets, set beside what was measured.

Run: python benchmarks/predict_published.py --runs CSV [--runs CSV] [--ids FILE] [--sample N] [--seed S]
     [--tpus] [--again RECORD] [--json] [--list] [--record]
CSV has the columns of the survey of published runs (id, source, ..., notes) or those of vTrain's runs;
a TOML file has [[run]] with the survey's columns. --sample draws N rows that our layouts can express, spread
over sources, at most 15 of one; --ids takes the rows that a file names; --list prints the rows and scores
nothing. --again takes the seconds of our programs from a record and compiles nothing: only what stacks do
otherwise is computed. What is assumed where a row does not say stands in published_assumptions.toml and
_published_rows.py. Constants are shared by all rows.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _published_rows import Expressed, InexpressibleError, configuration_of, express, rows_of
from _published_score import print_table, score, scored_again, summary_of
from _record import write_record

SCHEMA = 2
OLDER = "the same configuration in another row, of the same or a later date"
MOST_OF_ONE_SOURCE = 15


def drawn(rows: list[Expressed], number: int, seed: int) -> list[Expressed]:
    """`number` of `rows`, the sources in turn, at most 15 of one; fewer where there are not so many."""
    shuffled = random.Random(seed)
    by_source: dict[str, list[Expressed]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.id):
        by_source[row.source].append(row)
    for each in by_source.values():
        shuffled.shuffle(each)
    turns = [
        each[turn] for turn in range(MOST_OF_ONE_SOURCE) for each in by_source.values() if turn < len(each)
    ]
    return sorted(turns[:number], key=lambda row: row.id)


def sorted_out(path: Path, *, on_tpus: bool = False) -> tuple[list[Expressed], dict[str, list[str]]]:
    """The rows of a file that are runs of ours, and the ids of the others by reason; TPUs or all but them.

    Of rows with one configuration, in one source, only the newest is a run: near-identical rows of several
    releases differ by 4.5 % at the median, and would count one configuration several times.
    """
    expressed: dict[str, Expressed] = {}
    others: dict[str, list[str]] = defaultdict(list)
    newest: dict[tuple[str, ...], tuple[str, str]] = {}
    for row in rows_of(path):
        if row.get("accelerator", "").startswith("TPU") != on_tpus:
            continue
        try:
            found = express(row)
        except InexpressibleError as reason:
            others[str(reason)].append(row["id"])
            continue
        key, date = configuration_of(row), row.get("date") or ""
        older = newest.get(key)
        if older is not None and older[0] >= date:
            others[OLDER].append(found.id)
            continue
        if older is not None:
            others[OLDER].append(older[1])
            del expressed[older[1]]
        newest[key] = date, found.id
        expressed[found.id] = found
    return list(expressed.values()), dict(sorted(others.items(), key=lambda item: -len(item[1])))


def arguments() -> argparse.Namespace:
    """What was asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words = "rows of the survey of published runs, or of vTrain (vtrain_single.csv); may be repeated"
    parser.add_argument("--runs", type=Path, required=True, action="append", help=words)
    parser.add_argument("--ids", type=Path, help="score the rows that this file names, one id a line")
    parser.add_argument("--tpus", action="store_true", help="rows on TPUs, and no others (needs libtpu)")
    parser.add_argument("--sample", type=int, help="draw so many rows")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    words = "take our programs' seconds from this record: for a change of the models of stacks"
    parser.add_argument("--again", type=Path, metavar="RECORD", help=words)
    parser.add_argument("--jobs", type=int, default=1, help="compile so many at once")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--list", action="store_true", help="print the rows' ids, and score nothing")
    parser.add_argument("--record", action="store_true", help="write records/DATE_predict_....toml")
    return parser.parse_args()


def scored_now(rows: list[Expressed], jobs: int) -> list[dict[str, Any]]:
    """Compile and score rows, so many at once, and tell of each."""
    scored: list[dict[str, Any]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for number, one in enumerate(pool.map(score, rows), 1):
            scored.append(one)
            print(f"{number}/{len(rows)} {one['id']}", file=sys.stderr, flush=True)
    return scored


def scored_from(known: list[dict[str, Any]], rows: list[Expressed]) -> list[dict[str, Any]]:
    """Score rows by the seconds that a record has of our programs; a row that it lacks has failed."""
    by_id = {row["id"]: row for row in known}
    return [
        scored_again(row, by_id.get(row.id, {"id": row.id, "failed": "not in the record"})) for row in rows
    ]


def main() -> None:
    """Sort the rows, draw, predict, print."""
    asked = arguments()
    expressed, others = [], defaultdict(list)
    for path in asked.runs:
        found, reasons = sorted_out(path, on_tpus=asked.tpus)
        expressed += found
        for reason, ids in reasons.items():
            others[reason] += ids
    rows = expressed
    if asked.ids:
        wanted = {line.split()[0] for line in asked.ids.read_text().splitlines() if line and line[0] != "#"}
        rows = [row for row in expressed if row.id in wanted]
        if missing := wanted - {row.id for row in rows}:
            sys.exit(f"not among the rows that can be expressed: {' '.join(sorted(missing))}")
    if asked.sample is not None:
        rows = drawn(rows, asked.sample, asked.seed)
    if asked.list:
        print("\n".join(row.id for row in rows))
        return
    known = tomllib.loads(asked.again.read_text()) if asked.again else {}
    scored = scored_from(known["row"], rows) if known else scored_now(rows, asked.jobs)
    summary = summary_of(scored)
    answer = {"schema": SCHEMA, "rows": scored, "inexpressible": others, "summary": summary}
    print(json.dumps(answer, indent=1)) if asked.json else print_table(scored, others, summary)
    if asked.record:
        facts = {"summary": summary, "inexpressible": {reason: len(ids) for reason, ids in others.items()}}
        if known:
            why = "the models of stacks were computed again; our programs' seconds are those of that record"
            facts["carried"] = {
                "commit": known["commit"],
                "record": asked.again.name,
                "rows": len(scored),
                "why": why,
            }
        command = " ".join(["python benchmarks/predict_published.py", *sys.argv[1:]])
        write_record(
            "predict_tpus" if asked.tpus else "predict_published",
            re.sub(r"--runs \S*/", "--runs ", command),
            ("jax", "jaxlib", "libtpu" if asked.tpus else "jax-cuda13-pjrt"),
            facts,
            {"row": scored},
        )


if __name__ == "__main__":
    main()
