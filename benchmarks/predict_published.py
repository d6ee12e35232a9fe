"""Published training runs predicted: their steps compiled for their fleets, set beside what was measured.

Run: python benchmarks/predict_published.py --runs CSV [--runs CSV] [--ids FILE] [--sample N] [--seed S]
     [--tpus] [--again RECORD [--compile FILE]] [--json] [--list] [--record] [--seal FILE | --open FILE]
CSV has the columns of the survey of published runs (id, source, ..., notes) or those of vTrain's runs;
a TOML file has [[run]] with the survey's columns. --sample draws N rows that our layouts can express, spread
over sources, at most 15 of one; --ids takes the rows that a file names; --list prints the rows and scores
nothing. --again takes the seconds of our programs from a record, and compiles the rows that it lacks, and
those of --compile: of the others only what stacks do otherwise is computed. A row says at which commit its
program was compiled (`compiled_at`). --seal predicts rows without a look at a measured
column and writes the predictions, with hashes of all that they come from, into a new *seal*.json; --open sets
the measurements beside them, once, and refuses where anything has changed. Whether other rows are fitted or
seen stands in row_kinds.toml; every table says it. What is assumed where a row does not say stands in
published_assumptions.toml and _published_rows.py. Constants are shared by all rows.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _published_experts import has_experts
from _published_rows import (
    Expressed,
    InexpressibleError,
    express,
    express_measured,
)
from _published_score import predicted, print_table, score, scored_again, summary_of
from _published_seal import (
    SealError,
    opened,
    read_seal,
    refuse_path,
    refuse_spent,
    refuse_unopened,
    tree,
    write_outcome,
    write_seal,
)
from _published_table import configuration_of, release_of, rows_of
from _record import commit, write_record

SCHEMA = 2
OLDER = "the same configuration in another row, of the same or a later date"
LEFT_OUT = "can be said, and not compiled for this score (--ids)"
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


def sorted_out(
    path: Path, *, on_tpus: bool = False, blind: bool = False
) -> tuple[list[Expressed], dict[str, list[str]]]:
    """The rows of a file that are runs of ours, and the ids of the others by reason; TPUs or all but them.

    Of rows with one configuration, in one source, only the newest is a run: near-identical rows of several
    releases differ by 4.5 % at the median, and would count one configuration several times. Rows of experts
    are one for each release, which differ by up to 77 %. `blind`: no measured column is read.
    """
    expressed: dict[str, Expressed] = {}
    others: dict[str, list[str]] = defaultdict(list)
    newest: dict[tuple[str, ...], tuple[str, str]] = {}
    for row in rows_of(path, blind=blind):
        if row.get("accelerator", "").startswith("TPU") != on_tpus:
            continue
        try:
            found = express(row) if blind else express_measured(row)
        except InexpressibleError as reason:
            others[str(reason)].append(row["id"])
            continue
        key, date = configuration_of(row), row.get("date") or ""
        key += (release_of(row),) if has_experts(row) else ()
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
    words = "take our programs' seconds from this record, and compile only other rows; may be repeated"
    parser.add_argument("--again", type=Path, metavar="RECORD", action="append", default=[], help=words)
    words = "compile the rows that this file names, one id a line, although a record has them"
    parser.add_argument("--compile", type=Path, metavar="FILE", help=words)
    parser.add_argument("--jobs", type=int, default=1, help="compile so many at once")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--list", action="store_true", help="print the rows' ids, and score nothing")
    parser.add_argument("--record", action="store_true", help="write records/DATE_predict_....toml")
    sealed = parser.add_mutually_exclusive_group()
    words = "predict without a look at what was measured, and write that into a new *seal*.json"
    sealed.add_argument("--seal", type=Path, metavar="FILE", help=words)
    words = "set what was measured beside sealed predictions, and write FILE_opened.toml"
    sealed.add_argument("--open", type=Path, metavar="FILE", dest="opens", help=words)
    asked = parser.parse_args()
    if (asked.seal or asked.opens) and (asked.again or asked.record):
        parser.error("--seal and --open write files of their own: leave out --again and --record")
    if asked.compile and not asked.again:
        parser.error("--compile names rows of a record of --again; without one all rows are compiled")
    if asked.opens and (asked.ids or asked.sample is not None):
        parser.error("--open opens all rows of a seal: leave out --ids and --sample")
    return asked


def scored_now(
    rows: list[Expressed], jobs: int, one_row: Callable[[Expressed], dict[str, Any]] = score
) -> list[dict[str, Any]]:
    """Compile and score rows, or do else what `one_row` does, so many at once, and tell of each."""
    scored: list[dict[str, Any]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for number, one in enumerate(pool.map(one_row, rows), 1):
            scored.append(one)
            print(f"{number}/{len(rows)} {one['id']}", file=sys.stderr, flush=True)
    return scored


def scored_from(known: list[dict[str, Any]], rows: list[Expressed], jobs: int) -> list[dict[str, Any]]:
    """Score rows by the seconds that a record has of our programs; compile those that it lacks.

    A row says at which commit it was compiled, where that is known.
    """
    by_id, at = {row["id"]: row for row in known}, commit()
    compiled = scored_now([row for row in rows if row.id not in by_id], jobs)
    new = {row["id"]: {**row, "compiled_at": at} for row in compiled}
    return [scored_again(row, by_id[row.id]) if row.id in by_id else new[row.id] for row in rows]


def seal_rows(asked: argparse.Namespace, rows: list[Expressed], others: dict[str, list[str]]) -> None:
    """Predict rows in an order that the seed sets, and write the seal."""
    refuse_path(asked.seal)
    refuse_spent([row.id for row in rows], asked.seal.parent)
    before = tree()
    ordered = sorted(rows, key=lambda row: row.id)
    random.Random(asked.seed).shuffle(ordered)
    told = scored_now(ordered, asked.jobs, predicted)
    digest = write_seal(
        asked.seal,
        told,
        runs=asked.runs,
        others=others,
        before=before,
        seed=asked.seed,
        command=command_line(),
    )
    failed = sum("failed" in row for row in told)
    print(f"Sealed {len(told)} rows in {asked.seal.name}; {failed} failed. Its SHA-256: {digest}")


def open_seal(asked: argparse.Namespace) -> None:
    """Set what was measured beside a seal's predictions, print it, and write it beside the seal."""
    content = read_seal(asked.opens)
    scored, without = opened(content, asked.runs)
    path = write_outcome(asked.opens, content, asked.runs, scored, without)
    summary = summary_of(scored)
    others = {**content["inexpressible"], **without}
    answer = {"schema": SCHEMA, "rows": scored, "inexpressible": others, "summary": summary}
    print(json.dumps(answer, indent=1)) if asked.json else print_table(scored, others, summary)
    words = (
        f"Opened {asked.opens.name}, sealed on {content['date']} at {content['commit']}: wrote {path.name}."
    )
    print(words, "Say in benchmarks/row_kinds.toml that these rows are seen.", file=sys.stderr)


def command_line() -> str:
    """Return how this script was called, without the folders of its files."""
    return re.sub(
        r"--(runs|seal|ids|again|compile) \S*/",
        r"--\1 ",
        " ".join(["python benchmarks/predict_published.py", *sys.argv[1:]]),
    )


def ids_in(path: Path) -> set[str]:
    """Return the ids that a file names, one a line; lines with # are comments."""
    return {line.split()[0] for line in path.read_text().splitlines() if line.strip() and line[0] != "#"}


def chosen_rows(asked: argparse.Namespace) -> tuple[list[Expressed], dict[str, list[str]]]:
    """Return the rows that were asked for, and the ids of those that are no runs of ours by reason."""
    rows: list[Expressed] = []
    others: dict[str, list[str]] = defaultdict(list)
    for path in asked.runs:
        found, reasons = sorted_out(path, on_tpus=asked.tpus, blind=asked.seal is not None)
        rows += found
        for reason, ids in reasons.items():
            others[reason] += ids
    if asked.ids:
        wanted = ids_in(asked.ids)
        if missing := wanted - {row.id for row in rows}:
            sys.exit(f"not among the rows that can be expressed: {' '.join(sorted(missing))}")
        if left := [row.id for row in rows if row.id not in wanted]:
            others[LEFT_OUT] = left
        rows = [row for row in rows if row.id in wanted]
    if asked.sample is not None:
        rows = drawn(rows, asked.sample, asked.seed)
    return rows, others


def main() -> None:
    """Sort the rows, draw, predict, print."""
    asked = arguments()
    try:
        if asked.opens:
            open_seal(asked)
            return
        rows, others = chosen_rows(asked)
        if asked.list:
            print("\n".join(row.id for row in rows))
        elif asked.seal:
            seal_rows(asked, rows, others)
        else:
            refuse_unopened(row.id for row in rows)
            score_rows(asked, rows, others)
    except SealError as error:
        sys.exit(str(error))


def record_name(runs: Sequence[Path], tpus: bool) -> str:
    """Return what a record is of: the published rows, rows on TPUs, or the rows of one TOML file."""
    if tpus:
        return "predict_tpus"
    alone = len(runs) == 1 and runs[0].suffix == ".toml"
    return f"predict_{runs[0].stem if alone else 'published'}"


def score_rows(asked: argparse.Namespace, rows: list[Expressed], others: dict[str, list[str]]) -> None:
    """Predict rows beside what was measured, print that, and write the record if asked."""
    known = {path.name: tomllib.loads(path.read_text()) for path in asked.again}
    anew = ids_in(asked.compile) if asked.compile else set()
    rows_known = [row for record in known.values() for row in record["row"] if row["id"] not in anew]
    scored = scored_from(rows_known, rows, asked.jobs)
    summary = summary_of(scored)
    answer = {"schema": SCHEMA, "rows": scored, "inexpressible": others, "summary": summary}
    print(json.dumps(answer, indent=1)) if asked.json else print_table(scored, others, summary)
    if asked.record:
        facts = {"summary": summary, "inexpressible": {reason: len(ids) for reason, ids in others.items()}}
        if known:
            at = Counter(row.get("compiled_at", "not known") for row in scored)
            why = "the models of stacks were computed again; these programs' seconds are those of that record"
            facts["carried"] = {
                "commits": {name: record["commit"] for name, record in known.items()},
                "rows": len({row["id"] for row in scored} & {row["id"] for row in rows_known}),
                "compiled_at": dict(at.most_common()),
                "why": why,
            }
        write_record(
            record_name(asked.runs, asked.tpus),
            command_line(),
            ("jax", "jaxlib", "libtpu" if asked.tpus else "jax-cuda13-pjrt"),
            facts,
            {"row": scored},
        )


if __name__ == "__main__":
    main()
