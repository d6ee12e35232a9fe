"""What `plan` would choose beside NVIDIA's own recipes, both predicted with the planner's estimates.

Run: python benchmarks/plan_recipes.py --runs ../shared/facts/dgxc_runs.csv [--compile] [--json] [--record].
Each row of the file is a model, a chip, a number of devices, a precision and a batch, with the layout of a
recipe: NeMo's (ZeRO-1, tensor, stages, context) or MaxText's (FSDP). Measured columns are not read.

The recipe's layout and microbatch are priced with its own policy of rematerialisation and with those that a
plan searches, whichever promises most, because frameworks keep other arrays than ours. The choice is the most
promising of the planner's space (`--fix` restricts it): probability of fitting over expected seconds, by the
same estimates and the same room. Matched or beaten: the choice takes at most 3 % longer than the recipe. The
recipe's seconds count as if it fitted our program's memory, whatever its estimate says; how likely it does is
printed. With --compile both are compiled, and their predicted seconds compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _plan_compiled import PACKAGES, compiled_row, short
from _published_rows import Expressed, InexpressibleError, express
from _published_table import rows_of, source_of
from _record import write_record

from meshwright.config import RunConfig
from meshwright.hardware import Fleet
from meshwright.planning import (
    Candidates,
    Priors,
    candidates_of,
    estimate,
    fitting_probability,
    parsed_knobs,
    promise_of,
    room_of,
    settings_words,
    space_of,
)
from meshwright.predict import Machine, machine_of
from meshwright.units import aligned

MATCHED = 0.03  # of the recipe's seconds: as fast
POLICIES = (
    "none",
    "dots-attention",
    "save:query,key,value,context,out",
    "full",
)  # those that a plan searches
OWN_POLICY = "rematerialisation of its own kind"
FIX = ("offload=none", "inner=tensor")
SPREAD = float(np.hypot(Priors().memory_effect, Priors().memory_noise))
"""Standard deviation of ln(compiled / estimated) bytes: one effect of the search, and its noise."""


def main() -> None:
    """Price every row's recipe and the planner's choice, print, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="recipes, in the survey's columns")
    parser.add_argument("--only", default="", help="rows whose id begins so")
    parser.add_argument("--fix", action="append", help=f"knobs of the plan (default: {', '.join(FIX)})")
    parser.add_argument("--compile", action="store_true", help="compile recipe and choice, too")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--record", action="store_true", help="write records/DATE_plan_recipes.toml")
    given = parser.parse_args()
    fix = given.fix or FIX
    rows, refused = [], {}
    for row in rows_of(given.runs, blind=True):
        if not row["id"].startswith(given.only):
            continue
        try:
            rows.append(compared(row, fix, compiles=given.compile))
        except InexpressibleError as error:
            refused[row["id"]] = str(error.args[0])
            continue
        print(told(rows[-1]), file=sys.stderr, flush=True)
    if not rows:
        sys.exit(f"{given.runs} has no recipe that is a run of ours: {refused or 'no rows'}")
    summary = {**summary_of(rows), "refused": refused, "fix": list(fix)}
    if given.json:
        print(json.dumps({**summary, "rows": rows}, indent=1))
    else:
        print_rows(rows, summary)
    if given.record:
        command = " ".join(["python benchmarks/plan_recipes.py", *sys.argv[1:]])
        write_record("plan_recipes", command, PACKAGES, summary, {"row": rows})


def expressed(row: Mapping[str, str]) -> Expressed:
    """Return a recipe as a run of ours; one whose rematerialisation is its own as one that repeats all.

    Raises:
        InexpressibleError: it is no run of ours for another reason.
    """
    try:
        return express(row)
    except InexpressibleError as error:
        if error.args[0] != OWN_POLICY:
            raise
        return express({**row, "act_ckpt": "full"})


def compared(row: Mapping[str, str], fix: Sequence[str], *, compiles: bool = False) -> dict[str, Any]:
    """Return a row of the record: the recipe and the planner's choice, both predicted.

    Raises:
        InexpressibleError: the recipe is no run of ours.
    """
    recipe = expressed(row)
    run, fleet = recipe.config, recipe.fleet
    machine = machine_of(fleet, None)
    of_recipe, of_plan = (
        _most_promising(run, fleet, machine, candidates)
        for candidates in (recipe_candidates(run), space_of(run, fleet, parsed_knobs(fix)).candidates)
    )
    found = {
        "id": row["id"],
        "model": row["model"],
        "fleet": fleet.name,
        "precision": run.precision,
        "sequences": run.batch.sequences,
        "recipe": of_recipe,
        "choice": of_plan,
        "slower_by": short(of_plan["seconds"] / of_recipe["seconds"] - 1),
        "matched": of_plan["seconds"] <= (1 + MATCHED) * of_recipe["seconds"],
    }
    if compiles:
        for name in ("recipe", "choice"):
            compiled = compiled_row(run, fleet, found[name]["overrides"])
            kept = ("failed", "fits", "reserved_gib", "seconds")
            found[f"compiled_{name}"] = {key: compiled[key] for key in kept if key in compiled}
    return found


def recipe_candidates(run: RunConfig) -> Candidates:
    """Return a recipe as candidates: with its own policy, and with each of `POLICIES`."""
    policies = dict.fromkeys((run.remat, *POLICIES))
    return candidates_of([run.model_copy(update={"remat": policy}) for policy in policies])


def _most_promising(run: RunConfig, fleet: Fleet, machine: Machine, candidates: Candidates) -> dict[str, Any]:
    """Return what is estimated of the most promising candidate: seconds, bytes, how likely it fits."""
    found = estimate(run, machine, candidates)
    spread = np.full(len(candidates), SPREAD)
    fits = fitting_probability(found.memory, spread, room_of(fleet, candidates))
    fits = np.where(found.memory_bound <= room_of(fleet, candidates), fits, 0.0)
    best = int(np.argmax(promise_of(found.seconds_fitting, fits)))
    overrides = candidates.overrides(best)
    return {
        "settings": f"{candidates.layout(best)}, {settings_words(overrides)}",
        "overrides": overrides,
        "seconds": short(float(found.seconds_fitting[best])),
        "gib": round(float(found.memory[best]) / 2**30, 1),
        "fits": round(float(fits[best]), 3),
    }


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many recipes are matched or beaten, of all and of those that likely fit our memory."""
    fitting = [row for row in rows if row["recipe"]["fits"] >= 0.5]
    compiled = [row for row in rows if not row.get("compiled_recipe", {"failed": True})["failed"]]
    found: dict[str, Any] = {
        "recipes": len(rows),
        "matched_or_beaten": sum(row["matched"] for row in rows),
        "share": short(sum(row["matched"] for row in rows) / len(rows)),
        "by_source": _by_source(rows),
        "recipes_that_fit": len(fitting),
        "share_of_those_that_fit": short(sum(row["matched"] for row in fitting) / max(len(fitting), 1)),
        "slower_by_median": short(float(np.median([row["slower_by"] for row in rows]))),
        "slower": {row["id"]: row["slower_by"] for row in rows if not row["matched"]},
    }
    if compiled:
        better = [row for row in compiled if _is_matched_compiled(row)]
        found |= {"compiled": len(compiled), "matched_or_beaten_compiled": len(better)}
    return found


def _by_source(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return "matched of all" by the part of the rows' ids before their number."""
    names = dict.fromkeys(source_of(row) for row in rows)
    counts = {name: [row["matched"] for row in rows if source_of(row) == name] for name in names}
    return {name: f"{sum(matched)} of {len(matched)}" for name, matched in counts.items()}


def _is_matched_compiled(row: Mapping[str, Any]) -> bool:
    """Return whether the compiled choice fits, and takes at most 3 % longer than the compiled recipe."""
    choice, recipe = row["compiled_choice"], row["compiled_recipe"]
    if choice["failed"] or not choice["fits"]:
        return False
    return bool(choice["seconds"] <= (1 + MATCHED) * recipe["seconds"])


def told(row: Mapping[str, Any]) -> str:
    """Return one line about a row."""
    recipe, choice = row["recipe"], row["choice"]
    return (
        f"{row['id']} {recipe['settings']} {recipe['seconds']:.4g} s (fits {recipe['fits']:.2f}); "
        f"ours {choice['settings']} {choice['seconds']:.4g} s (fits {choice['fits']:.2f})"
    )


def print_rows(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print a line for each recipe, then the sums."""
    header = ("id", "model", "fleet", "", "recipe", "s", "fits", "choice", "s", "fits", "slower %")
    lines = [
        (
            row["id"],
            row["model"],
            row["fleet"],
            row["precision"],
            *(
                cell
                for one in (row["recipe"], row["choice"])
                for cell in (one["settings"], f"{one['seconds']:.4g}", f"{one['fits']:.2f}")
            ),
            f"{100 * row['slower_by']:+.1f}",
        )
        for row in rows
    ]
    print(aligned(header, lines, right=("s", "fits", "slower %")))
    print(
        f"\nmatched within 3 % or beaten: {summary['matched_or_beaten']} of {summary['recipes']} "
        f"({100 * summary['share']:.0f} %); of the {summary['recipes_that_fit']} that likely fit our memory "
        f"{100 * summary['share_of_those_that_fit']:.0f} %; by source: {summary['by_source']}"
        f"\nthe choice is slower by {100 * summary['slower_by_median']:+.1f} % at the median"
    )
    if "compiled" in summary:
        print(f"compiled: {summary['matched_or_beaten_compiled']} of {summary['compiled']}")
    for row_id, reason in summary["refused"].items():
        print(f"no run of ours: {row_id}: {reason}")


if __name__ == "__main__":
    main()
