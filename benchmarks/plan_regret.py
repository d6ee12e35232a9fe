"""Score the planner's choice of layout against public sweeps in which every layout was run.
Run: python benchmarks/plan_regret.py [--csv FILE] [--vtrain FILE] [--json] [--record].
--csv: rows as ../shared/facts/ultrascale_sweep_3b.csv has them (nanotron on H100; models 1B, 3B, 8B, 80B).
--vtrain: rows as ../shared/facts/vtrain_multi.csv has them (Megatron-DeepSpeed on A100, full recomputation).
For each model and number of nodes (1 to 32) the layouts that somebody ran are candidates of `plan`: its
space, its closed form, its order (probability of fitting over expected seconds), with what the other
program does otherwise as a stack (_sweep_program.py, _sweep_memory.py). Regret: how much longer the choice
took than the best layout, 0 within 3 %. The choice is the first in that order that ran, as what a plan
compiles is known to fit or not; how many failed before it is printed. "Own": the regret if our own
program's seconds chose, without a stack. False refusals: share of the rows that ran of which we say that
they do not fit. Missed refusals: share of the rows that failed of which we say that they fit with 10 % to
spare. The order of the rows has no effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _sweep_memory
from _plan_rows import MOST_NODES, Group, RowsError, read_megatron, read_sweep
from _plan_scores import (
    EXPERT_MICROBATCH,
    EXPERT_TENSOR,
    TIED,
    noise_floor,
    score,
    score_parts,
    summary_of,
    without_fitted,
)
from _record import ROOT, write_record
from _sweep_program import MEGATRON, SOURCES, SWEEP

from meshwright.units import aligned

SCHEMA = 1
FACTS = ROOT.parent / "shared" / "facts"
LISTED = ("schema", "groups", "parts", "megatron", "noise_floor")  # in the record as tables, or not at all
GROUP_KEYS = ("model", "nodes", "layouts", "choice", "best", "regret", "rank_correlation")
MEMORY_SOURCES = {
    "SPARE_SHARE": "judgement",
    "ALLOCATOR_SHARE": "judgement: all 9 of 3B's runs with 70 GB and more took 4 to 10 times as long",
    "STATE_BYTES": "counted: bf16 weight and gradient, fp32 gradient sum",
    "SHARDED_STATE_BYTES": "counted: fp32 master weight, two moments",
    "LOGIT_BYTES": "counted: bf16 and fp32 copies, gradient",
    "GATHERED_BYTES": "counted: buffers of gathered inputs",
    "SAVED": "counted; which part is whole: fitted, read off the slope of 3B's memory by tp",
}
# Each choice that lost more than the allowance on the files that were read, with what was found.
CAUSES = {
    "3B on 16 nodes": "the best ran 12 % faster than its price, its twin with ZeRO-1 2 %: ZeRO-0 with one "
    "large microbatch is priced too high; why is not known",
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what was asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--csv", type=Path, help="the sweep's rows (default: ../shared/facts/ultrascale_sweep_3b.csv)"
    )
    parser.add_argument(
        "--vtrain", type=Path, help="Megatron's rows (default: ../shared/facts/vtrain_multi.csv)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--record", action="store_true", help="write records/DATE_plan_regret.toml")
    return parser.parse_args(given)


def answer_of(groups: Sequence[Group], left_out: int, megatron: Sequence[Group]) -> dict[str, Any]:
    """Return all that --json prints.

    Raises:
        RowsError: in no group did two rows run.
    """
    scored = score(groups)
    if not scored:
        raise RowsError(f"no model ran two layouts on the same 1 to {MOST_NODES} nodes")
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "groups": scored,
        **summary_of(scored),
        "mean_regret_without_fitted": without_fitted(groups),
        "parts": score_parts(groups),
        "rows_left_out": left_out,
        "noise_floor": noise_floor(groups),
    }
    if others := score(megatron):
        found = summary_of(others)
        names = (
            "mean_regret",
            "median_regret",
            "p90_regret",
            "step_time_error",
            "median_step_time_error",
            "baselines",
        )
        answer["megatron"] = {"groups": others, **{name: found[name] for name in names}}
    return rounded(answer)


def rounded(value: Any) -> Any:
    """Return a value with its floats at five digits, more than a prediction has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def constants() -> dict[str, Any]:
    """Return each constant of the closed form with its value, and the sources by name."""
    memory = {name: getattr(_sweep_memory, name) for name in MEMORY_SOURCES}
    return {
        "sweep": dataclasses.asdict(SWEEP),
        "megatron": dataclasses.asdict(MEGATRON),
        "memory": memory,
        "choice": {
            "TIED": TIED,
            "EXPERT_TENSOR": EXPERT_TENSOR,
            "EXPERT_MICROBATCH": EXPERT_MICROBATCH,
        },
        "sources": {**SOURCES, **MEMORY_SOURCES},
    }


def percent(value: float | None) -> str:
    """Return a share in per cent with one digit."""
    return "-" if value is None else f"{100 * value:.1f}"


def print_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Print each group's choice beside the best and what the simple rules lose."""
    names = tuple(groups[0]["baselines"])
    header = (
        "model",
        "nodes",
        "ran",
        "choice",
        "best",
        "regret %",
        "raw %",
        "own %",
        "ranks",
        *(f"{n} %" for n in names),
    )
    lines = [
        (
            group["model"],
            str(group["nodes"]),
            str(group["layouts"]),
            group["choice"],
            group["best"],
            percent(group["regret"]),
            percent(group["raw_regret"]),
            percent(group["own_program_regret"]),
            "-" if group["rank_correlation"] is None else f"{group['rank_correlation']:.2f}",
            *(percent(group["baselines"][name]) for name in names),
        )
        for group in groups
    ]
    print(aligned(header, lines, right=("nodes", "ran", *header[5:])))


def print_answer(answer: dict[str, Any]) -> None:
    """Print the sweep's groups and sums, the refusals, the noise floor, then Megatron's groups."""
    print_groups(answer["groups"])
    lines = [
        ("this planner", *(percent(answer[f"{name}_regret"]) for name in ("mean", "median", "p90", "max"))),
        *((name, *(percent(found[n]) for n in found)) for name, found in answer["baselines"].items()),
    ]
    header = ("regret in %", "mean", "median", "p90", "max")
    print("\n" + aligned(header, lines, right=header[1:]))
    counts = answer["refusal_counts"]
    print(
        f"\nfalse refusals: {percent(answer['false_refusals'])} % "
        f"({counts['false']} of {counts['ran']} that ran)"
        f"\nmissed refusals: {percent(answer['missed_refusals'])} % "
        f"({counts['missed']} of {counts['failed']} that failed)"
        f"\nlayouts that the plan's space lacks: {counts['not_in_space_failed']} that failed, "
        f"{counts['not_in_space_ran']} that ran"
        f"\nstep time: error {percent(answer['step_time_error'])} % mean, "
        f"{percent(answer['median_step_time_error'])} % median"
        f"\nfailed before the choices: {answer['failed_before']}; first choices that failed: "
        f"{answer['unrestricted_choices_failed']} of {len(answer['groups'])}"
        f"\nregret if our own program's seconds chose: {percent(answer['own_program_regret'])} % mean"
        f"\nchoices worse than the expert's rule: {', '.join(answer['worse_than_expert']) or 'none'}"
        f"\nrows left out: {answer['rows_left_out']}"
        f"\nregret without the constants that are fitted to 3B: "
        f"{percent(answer['mean_regret_without_fitted'])} % mean"
    )
    lines = [
        (part["part"], str(part["groups"]), *(percent(part[n]) for n in ("mean", "median", "p90", "max")))
        for part in answer["parts"]
    ]
    header = ("if only these may be chosen: regret in %", "groups", "mean", "median", "p90", "max")
    print("\n" + aligned(header, lines, right=header[1:]))
    print(
        "\nA planner that knows every expected time, at noise of so much (regret in %, share of draws in %)"
    )
    lines = [tuple(percent(each[name]) for name in each) for each in answer["noise_floor"]]
    header = ("noise", "mean", "p90", "draws that meet both targets")
    print(aligned(header, lines, right=header))
    if "megatron" in answer:
        found = answer["megatron"]
        print("\nMegatron on A100, full recomputation")
        print_groups(found["groups"])
        print(f"step time: error {percent(found['step_time_error'])} % mean")


def cause_of(group: dict[str, Any]) -> str:
    """Return why a choice lost, as far as it is known."""
    if not group["regret"]:
        return "within 3 % of the best"
    return CAUSES.get(f"{group['model']} on {group['nodes']} nodes", "not looked into")


def record(answer: dict[str, Any], command: str) -> Path:
    """Write the dated record: sums, constants with sources, every choice, the worst five with their cause."""
    sums = {key: value for key, value in answer.items() if key not in LISTED}
    megatron = answer.get("megatron", {})
    sums["megatron"] = {key: value for key, value in megatron.items() if key != "groups"}
    worst = sorted(answer["groups"], key=lambda group: -group["raw_regret"])[:5]
    shown = [{key: value for key, value in group.items() if key != "errors"} for group in answer["groups"]]
    others = [
        {key: group[key] for key in (*GROUP_KEYS, "raw_regret")} for group in megatron.get("groups", ())
    ]
    return write_record(
        "plan_regret",
        command,
        ("numpy",),
        {**sums, "constants": constants()},
        {
            "group": [{k: v for k, v in group.items() if v is not None} for group in shown],
            "worst": [
                {
                    **{key: group[key] for key in ("model", "nodes", "choice", "best", "raw_regret")},
                    "cause": cause_of(group),
                }
                for group in worst
            ],
            "part": answer["parts"],
            "noise_floor": answer["noise_floor"],
            "megatron_group": [{k: v for k, v in group.items() if v is not None} for group in others],
        },
    )


def main() -> None:
    """Read the rows, score, print."""
    asked = arguments()
    try:
        groups, left_out = read_sweep(asked.csv or FACTS / "ultrascale_sweep_3b.csv")
        vtrain = asked.vtrain or FACTS / "vtrain_multi.csv"
        if asked.vtrain or vtrain.exists():
            megatron = read_megatron(vtrain)
        else:  # a sweep of one's own can be scored without it
            megatron = []
            print(f"note: {vtrain} does not exist; Megatron's runs are left out", file=sys.stderr)
        answer = answer_of(groups, left_out, megatron)
    except RowsError as error:
        sys.exit(str(error))
    print(json.dumps(answer, indent=1)) if asked.json else print_answer(answer)
    if asked.record:
        record(answer, " ".join(["python benchmarks/plan_regret.py", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
