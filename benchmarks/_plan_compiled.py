"""One candidate of a plan compiled, as a row of a record; and why one row is faster than another.

Used by: plan_best, plan_people and plan_order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import meshwright as mw
from meshwright.config import RunConfig
from meshwright.errors import MeshwrightError
from meshwright.hardware import Fleet
from meshwright.planning import Candidates
from meshwright.predict import Prediction

PACKAGES = ("jax", "jaxlib", "jax-cuda13-pjrt", "numpy")
SETTINGS = (
    *("layout", "remat", "zero1", "offload", "pipeline", "pipeline_chunks"),
    "batch.microbatch_sequences",
)
LEAST_SHARE = 0.005  # of the slower step: smaller differences of one kind of work are not named
One = TypeVar("One")


def short(number: float) -> float:
    """Return a number with five digits, more than a prediction has."""
    return float(f"{number:.5g}")


def compiled_row(run: RunConfig, fleet: Fleet, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what compiling a run with `overrides` gives: its `figures`, or why it failed."""
    try:
        weighing = mw.weigh(run, on=fleet, overrides=overrides)
    except MeshwrightError as error:
        return {**overrides, "failed": error.message.splitlines()[0]}
    return {**overrides, "failed": "", **figures(weighing)}


def figures(weighing: mw.Weighing) -> dict[str, Any]:
    """Return predicted seconds, reserved bytes, whether they fit, and `exposed` seconds."""
    assert weighing.prediction is not None, weighing.no_prediction
    return {
        "fits": bool(weighing.fits),
        "reserved_gib": round(weighing.ledger.memory.reserved_bytes / 2**30, 2),
        "seconds": short(weighing.prediction.step_seconds.expected),
        "exposed_seconds": exposed(weighing.prediction),
    }


def planned_row(candidate: mw.Planned) -> dict[str, Any]:
    """Return a candidate of a plan in the same form."""
    row: dict[str, Any] = {**candidate.overrides, "failed": candidate.failed}
    if candidate.prediction is None or candidate.reserved_bytes is None:
        return row
    return {
        **row,
        "fits": candidate.fits is not False,
        "reserved_gib": round(candidate.reserved_bytes / 2**30, 2),
        "seconds": short(candidate.prediction.step_seconds.expected),
        "exposed_seconds": exposed(candidate.prediction),
    }


def exposed(prediction: Prediction) -> dict[str, float]:
    """Return the seconds that the step waits for each kind of work, the largest first."""
    waits = sorted(prediction.slices, key=lambda each: -each.exposed_seconds)
    return {each.name: short(each.exposed_seconds) for each in waits if each.exposed_seconds > 0}


def best_of(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the fastest row that fits; None if none does."""
    fitting = [row for row in rows if not row["failed"] and row["fits"]]
    return min(fitting, key=lambda row: row["seconds"], default=None)


def mapped(
    function: Callable[[One], dict[str, Any]], ones: Sequence[One], workers: int
) -> list[dict[str, Any]]:
    """Return the function's row of each, in their order, from `workers` threads; tell each on stderr."""
    with ThreadPoolExecutor(workers) as pool:
        rows: list[dict[str, Any]] = []
        for row in pool.map(function, ones):
            rows.append(row)
            told = row["failed"] or f"{row['seconds']:.4g} s, {row['reserved_gib']} GiB"
            print(f"{len(rows)}/{len(ones)} {row['layout']} {told}", file=sys.stderr, flush=True)
        return rows


def add_line(path: Path | None, row: Mapping[str, Any]) -> None:
    """Append a row to a file of JSON lines, if one is named."""
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def setting(row: Mapping[str, Any], name: str) -> Any:
    """Return one of `SETTINGS` of a row; records from before pipelines had chunks do not name them."""
    return row.get(name, 1) if name == "pipeline_chunks" else row[name]


def place_of(candidates: Candidates, overrides: Mapping[str, Any]) -> int | None:
    """Return the place of the candidate with these overrides; None if the planner's space has none."""
    wanted = {name: setting(overrides, name) for name in SETTINGS}
    sequences = candidates.microbatch == overrides["batch.microbatch_sequences"]
    for place in sequences.nonzero()[0].tolist():
        if str(candidates.layout(place)) == wanted["layout"]:
            found = candidates.overrides(place)
            if all(setting(found, name) == value for name, value in wanted.items()):
                return int(place)
    return None


def why_faster(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return what differs between two rows, and where the step waits less and more, in words."""
    changed = [
        f"{name.rpartition('.')[2]} {setting(theirs, name)} -> {setting(ours, name)}"
        for name in SETTINGS
        if setting(ours, name) != setting(theirs, name)
    ]
    if not changed:
        return "the same candidate"
    kinds = ours["exposed_seconds"].keys() | theirs["exposed_seconds"].keys()
    waits = {
        kind: ours["exposed_seconds"].get(kind, 0.0) - theirs["exposed_seconds"].get(kind, 0.0)
        for kind in kinds
    }
    least = LEAST_SHARE * max(ours["seconds"], theirs["seconds"])
    moved = sorted((kind for kind in waits if abs(waits[kind]) > least), key=lambda kind: waits[kind])
    told = ", ".join(f"{kind} {waits[kind]:+.3g} s" for kind in moved)
    return f"{'; '.join(changed)}: {told or 'no kind of work by more than 0.5 %'}"
