"""Score published rows again after calibrating with a few rows of the same source and chip.

Run: python benchmarks/calibrated_score.py --scores FILE [--with 3] [--draws 0] [--noise] [--json].
FILE is what `predict_published.py --json` printed, or one of its records (TOML). Nothing is compiled.

For each source and chip the best-known rows are drawn without a look at any error: standard rows before
others, then those with the fewest notes on what was assumed. Of as well-known ones those are taken that
differ most usefully in their work: their steps leave the least variance of all rows' steps, by what is
assumed of factors before any is measured. Factors are fitted to them as `meshwright calibrate --measured`
fits, and multiply the exposed seconds of the other rows by class. A walk with the factors would also hide
messages anew; that needs the programs.

`least` is the median error that would be left if one factor were fitted to all rows of the source and chip.
Several factors can leave less.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from _published_stacks import is_reduction
from scipy.stats import t

from meshwright.contrib.calibration import MESSAGES
from meshwright.hardware import Fleet, MeasuredRun, MeasuredRuns
from meshwright.predict import (
    RECOMPUTED,
    TAIL,
    Factors,
    class_of,
    machine_of,
    prior_of,
    rates_digest,
)
from meshwright.units import aligned

# The class of what a row's software does otherwise, by its reason in `_published_stacks.otherwise`: all
# messages, reductions of gradients, or one class.
CLASSES = {
    "messages beside products": "messages",
    "reductions under the backward pass": "reductions",
    "reductions after the backward pass": "reductions",
    "reductions in fp16": "reductions",
    "attention in parts": "attention",
    "attention inside documents": "attention",
    "eager kernels": "memory-bound",
    "fused casts": "memory-bound",
    "kernels by hand": "memory-bound",
    "head in the last stage": "matmul",
    "launches by the host": "launch",
    "reductions over tensor": "all-reduce",
    "messages over tensor": "all-gather",  # as many reduce-scatters, of the same bytes
    "sums of tied tables": "all-reduce",
    "broadcasts of weights": "all-gather",
    "slower products": "matmul",
    "grouped products": "matmul",
    "casts in the tables of products": "matmul",
    "products over tensor in pieces": "matmul",
    "fused kernels": "memory-bound",
    "products from latents again": "matmul",
    "attention in 8 bits": "attention",
    "attention by cuDNN's tables": "attention",
    "experts' messages beside products": "all-to-all",
    "experts' messages waited for": "all-to-all",
    "launches that a dispatch waits for": "launch",
}
LEAST_SCORED = 3  # rows beside those that calibrate, below which a source says nothing


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The scored rows of an answer or a record."""
    text = path.read_text()
    found = tomllib.loads(text)["row"] if path.suffix == ".toml" else json.loads(text)["rows"]
    return [row for row in found if "error" in row]


def exposed_of(row: dict[str, Any]) -> dict[str, float]:
    """The row's predicted seconds by class, with those that its software does otherwise in their classes.

    What its software does otherwise with all messages, or all reductions, is shared by their seconds.
    """
    seconds = _by_class(row["exposed_seconds"])
    whole = row.get("whole_seconds", row["exposed_seconds"])
    parts = {
        "messages": {name: each for name, each in seconds.items() if name in MESSAGES},
        "reductions": _by_class({name: each for name, each in whole.items() if is_reduction(name)}),
    }
    for reason, each in row["otherwise_seconds"].items():
        shares = parts.get(CLASSES[reason], {CLASSES[reason]: 1.0})
        for name, share in shares.items():
            seconds[name] += each * share / sum(shares.values())
    positive = {name: each for name, each in seconds.items() if each > 0}
    scale = row["predicted_seconds"] / sum(positive.values())
    return {name: each * scale for name, each in positive.items()}


def _by_class(seconds: Mapping[str, float]) -> defaultdict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for name, each in seconds.items():
        found[class_of(name)] += each
    return found


def recomputed_of(row: dict[str, Any]) -> dict[str, float]:
    """The row's predicted seconds by class that the backward pass runs again, scaled as `exposed_of` does."""
    program, scaled = _by_class(row["exposed_seconds"]), exposed_of(row)
    again: dict[str, float] = row["recomputed_seconds"]
    return {
        name: scaled[name] * min(each / program[name], 1.0) for name, each in again.items() if name in scaled
    }


def tier_of(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The best-known rows, `number` or more: standard rows first, then those with the fewest assumptions."""
    ranked = sorted(rows, key=lambda row: (*_rank(row), row["id"]))
    return [row for row in ranked if _rank(row) <= _rank(ranked[number - 1])]


def best_known(rows: list[dict[str, Any]], number: int, before: Prior) -> list[dict[str, Any]]:
    """Return rows of which least had to be assumed, and of these the ones that tell most of all rows.

    With normal factors and noise, what steps leave of other steps' variance depends on their mixes of work
    alone (any textbook of experimental design: A-optimality). Errors are not looked at.
    """
    tier = tier_of(rows, number)
    mixes = [_mix(row) for row in rows]
    names = sorted({name for mix in mixes for name in mix})
    deviations = [before.shared_deviation, *(before.deviation(name) for name in names)]

    def weighted(of: list[dict[str, Any]]) -> Any:
        shares = [[1.0, *(mix.get(name, 0.0) for name in names)] for mix in map(_mix, of)]
        return np.array(shares) * deviations

    known, every = weighted(tier), weighted(rows)
    among, across = known @ known.T, every @ known.T

    def explained(chosen: tuple[int, ...]) -> float:
        noise = before.between_programs**2 * np.eye(number)
        covariance = among[np.ix_(chosen, chosen)] + noise
        columns = across[:, list(chosen)]
        return float(np.sum(columns @ np.linalg.inv(covariance) * columns))

    best = max(combinations(range(len(tier)), number), key=explained)
    return [tier[place] for place in best]


def _mix(row: dict[str, Any]) -> dict[str, float]:
    """The share of each class of work in the row's predicted step, and of what is computed again."""
    seconds = {**exposed_of(row), RECOMPUTED: sum(recomputed_of(row).values())}
    return {name: each / row["predicted_seconds"] for name, each in seconds.items()}


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
        recomputed_seconds=recomputed_of(row),
    )


def factors_from(rows: list[dict[str, Any]]) -> Factors:
    """The factors that `calibrate` fits to these rows of one chip."""
    fleet = Fleet.parse(f"8x{rows[0]['chip']}")
    rates = rates_digest(fleet, None)
    runs = MeasuredRuns(chip=fleet.chip.name, runs=tuple(measured_run(row, rates) for row in rows))
    return machine_of(fleet, None, measured=runs).factors


def off(row: dict[str, Any], factors: Factors) -> tuple[float, float]:
    """The logarithm of a row's predicted seconds with factors over those measured, and its deviation."""
    recomputed = recomputed_of(row)
    again = {name: each * factors.of(name, is_recomputed=True) for name, each in recomputed.items()}
    seconds = {
        name: (each - recomputed.get(name, 0.0)) * factors.of(name) + again.get(name, 0.0)
        for name, each in exposed_of(row).items()
    }
    error = math.log(sum(seconds.values()) / row["measured_seconds"])
    return error, factors.deviation(seconds, sum(again.values()))


def calibrated(rows: list[dict[str, Any]], drawn: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of a source's other rows on one chip, before and after calibrating with those that are drawn."""
    factors = factors_from(drawn)
    all_rows = statistics.median(math.log(row["measured_seconds"] / row["predicted_seconds"]) for row in rows)
    scored = []
    for row in rows:
        if row in drawn:
            continue
        error, deviation = off(row, factors)
        least = math.exp(all_rows) * row["predicted_seconds"] / row["measured_seconds"] - 1
        errors = {"before": row["error"], "after": math.exp(error) - 1, "least": least}
        scored.append({"id": row["id"], **errors, "holds": abs(error) <= TAIL * deviation})
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


def groups_of(rows: list[dict[str, Any]], number: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of every source and chip that has enough beside `number` of them."""
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["source"], row["chip"]].append(row)
    return {name: group for name, group in sorted(groups.items()) if len(group) >= number + LEAST_SCORED}


def scores_of(rows: list[dict[str, Any]], number: int, seed: int | None = None) -> dict[str, Any]:
    """The scores of every source and chip with enough rows, and of all of their rows.

    Args:
        seed: draw at random from the best-known rows; None takes those of unlike work.
    """
    found: dict[str, Any] = {}
    for (source, chip), group in groups_of(rows, number).items():
        fleet = Fleet.parse(f"8x{chip}")
        if seed is None:
            drawn = best_known(group, number, prior_of(machine_of(fleet, None), fleet, None))
        else:
            drawn = random.Random(seed).sample(tier_of(group, number), number)
        found[f"{source}, {chip}"] = calibrated(group, drawn)
    everything = [row for each in found.values() for row in each["rows"]]
    summary = {name: summary_of(each["rows"]) for name, each in found.items()}
    return {"sources": found, "summary": {**summary, "all": summary_of(everything)} if everything else {}}


def noise_of(rows: list[dict[str, Any]], number: int) -> dict[str, tuple[float, float]]:
    """Degrees of freedom and scale of the most probable t of what factors leave, with a source left out too.

    Each row is predicted with factors that are fitted to all others of its source and chip.
    """
    left = [
        (source, off(row, factors_from([other for other in group if other is not row]))[0])
        for (source, _), group in groups_of(rows, number).items()
        for row in group
    ]
    found: dict[str, tuple[float, float]] = {}
    for without in ("", *sorted({source for source, _ in left})):
        freedom, _, scale = t.fit([error for source, error in left if source != without], floc=0)
        found[without and f"without {without}"] = round(float(freedom), 2), round(float(scale), 4)
    return found


def main() -> None:
    """Read, calibrate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scores", type=Path, required=True, help="answer or record of predict_published.py")
    parser.add_argument("--with", type=int, default=3, dest="number", help="rows to calibrate with")
    parser.add_argument("--draws", type=int, default=0, help="the median of so many random draws besides")
    parser.add_argument("--noise", action="store_true", help="print what factors leave, as Student's t")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    asked = parser.parse_args()
    if asked.number < 1:
        sys.exit("calibrate with at least one row")
    rows = rows_in(asked.scores)
    if asked.noise:
        for name, (freedom, scale) in noise_of(rows, asked.number).items():
            print(f"{name or 'all'}: {freedom} degrees of freedom, scale {scale}")
        return
    scores = scores_of(rows, asked.number)
    drawn = [scores_of(rows, asked.number, seed)["summary"]["all"]["after"] for seed in range(asked.draws)]
    scores["random_draws"] = drawn
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
    if drawn:
        print(
            f"Rows drawn at random {len(drawn)} times leave {100 * statistics.mean(drawn):.1f} at the mean."
        )


if __name__ == "__main__":
    main()
