"""Score published rows again after calibrating with a few rows of the same source and chip.

Run: python benchmarks/calibrated_score.py --scores FILE [--with 3] [--json]. FILE is what
`predict_published.py --json` printed, or one of its records (TOML). Nothing is compiled.

For each source and chip the best-known rows are drawn without a look at any error: standard rows before
others, then those with the fewest notes on what was assumed, then spread evenly over the number of devices.
Factors are fitted to them as `meshwright calibrate --measured` fits, and multiply the exposed seconds of the
other rows by class. A walk with the factors would also hide messages anew; that needs the programs.
Where a source's software does otherwise than our program, those seconds are spread over the row's classes.

`least` is the median error that would be left if one factor were fitted to all rows of the source and chip:
calibration with a few whole steps cannot be expected to go below it by much.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from meshwright.hardware import Fleet, MeasuredRun, MeasuredRuns
from meshwright.predict import class_of, machine_of, rates_digest
from meshwright.units import aligned

TAIL = 1.6449
LEAST_SCORED = 3  # rows beside those that calibrate, below which a source says nothing


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The scored rows of an answer or a record."""
    text = path.read_text()
    found = tomllib.loads(text)["row"] if path.suffix == ".toml" else json.loads(text)["rows"]
    return [row for row in found if "error" in row]


def exposed_of(row: dict[str, Any]) -> dict[str, float]:
    """The row's predicted seconds by class; what its software does otherwise is spread over them."""
    seconds: Counter[str] = Counter()
    for name, each in row["exposed_seconds"].items():
        seconds[class_of(name)] += each
    scale = row["predicted_seconds"] / seconds.total()
    return {name: each * scale for name, each in seconds.items() if each > 0}


def best_known(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Rows of which least had to be assumed, spread over numbers of devices; errors are not looked at."""
    ranked = sorted(rows, key=lambda row: (not row["standard"], len(row["notes"]), row["id"]))
    last = ranked[number - 1]
    tier = [row for row in ranked if (not row["standard"], len(row["notes"])) <= _rank(last)]
    tier.sort(key=lambda row: (row["num_devices"], row["id"]))
    places = [round(place * (len(tier) - 1) / max(1, number - 1)) for place in range(number)]
    return [tier[place] for place in places]


def _rank(row: dict[str, Any]) -> tuple[bool, int]:
    return not row["standard"], len(row["notes"])


def measured_run(row: dict[str, Any], rates: str) -> MeasuredRun:
    """The row as a user would give it to `calibrate`."""
    return MeasuredRun(
        what="step time",
        program=row["id"],
        fleet=f"{row['num_devices']}x{row['chip']}",
        fingerprint=row["id"],
        rates=rates,
        date="",
        measured_seconds=row["measured_seconds"],
        predicted_seconds=row["predicted_seconds"],
        exposed_seconds=exposed_of(row),
    )


def calibrated(rows: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Errors of a source's other rows on one chip, before and after calibrating with `number` of them."""
    drawn = best_known(rows, number)
    fleet = Fleet.parse(f"8x{rows[0]['chip']}")
    rates = rates_digest(fleet, None)
    runs = MeasuredRuns(chip=fleet.chip.name, runs=tuple(measured_run(row, rates) for row in drawn))
    factors = machine_of(fleet, None, measured=runs).factors
    all_rows = statistics.median(math.log(row["measured_seconds"] / row["predicted_seconds"]) for row in rows)
    scored = []
    for row in rows:
        if row in drawn:
            continue
        seconds = {name: each * factors.of(name) for name, each in exposed_of(row).items()}
        ratio = sum(seconds.values()) / row["measured_seconds"]
        holds = abs(math.log(ratio)) <= TAIL * factors.deviation(seconds)
        least = math.exp(all_rows) * row["predicted_seconds"] / row["measured_seconds"] - 1
        errors = {"before": row["error"], "after": ratio - 1, "least": least}
        scored.append({"id": row["id"], **errors, "holds": holds})
    return {
        "calibrated_with": [row["id"] for row in drawn],
        "factors": {name: round(factor.value, 3) for name, factor in factors.by_class.items()},
        "rows": scored,
    }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median sizes of errors before, after and at least, and the share of intervals that hold after."""
    medians = {
        key: round(statistics.median(abs(row[key]) for row in rows), 4)
        for key in ("before", "after", "least")
    }
    return {
        "rows": len(rows),
        **medians,
        "holds": round(sum(row["holds"] for row in rows) / len(rows), 3),
    }


def scores_of(rows: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The scores of every source and chip with enough rows, and of all of their rows."""
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["source"], row["chip"]].append(row)
    found = {
        f"{source}, {chip}": calibrated(group, number)
        for (source, chip), group in sorted(groups.items())
        if len(group) >= number + LEAST_SCORED
    }
    everything = [row for each in found.values() for row in each["rows"]]
    summary = {name: summary_of(each["rows"]) for name, each in found.items()}
    return {"sources": found, "summary": {**summary, "all": summary_of(everything)} if everything else {}}


def main() -> None:
    """Read, calibrate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scores", type=Path, required=True, help="answer or record of predict_published.py")
    parser.add_argument("--with", type=int, default=3, dest="number", help="rows to calibrate with")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    asked = parser.parse_args()
    if asked.number < 1:
        sys.exit("calibrate with at least one row")
    scores = scores_of(rows_in(asked.scores), asked.number)
    if asked.json:
        print(json.dumps(scores, indent=1))
        return
    print(f"Median size of errors in % before and after calibrating with {asked.number} rows of each")
    names = ("rows", "before", "after", "least", "holds")
    lines = [
        (name, str(found["rows"]), *(f"{100 * found[key]:.1f}" for key in names[1:]))
        for name, found in scores["summary"].items()
    ]
    print(aligned(("source, chip", *names), lines, right=names))


if __name__ == "__main__":
    main()
