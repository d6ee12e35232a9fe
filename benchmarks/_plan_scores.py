"""Score the planner's choice among layouts that were run: regret, rank correlation, refusals, noise floor.
A group's rows are ordered as `plan` orders candidates before it compiles them: by the probability that they
fit over the expected seconds (`planning.promise_of`), with the seconds and the memory of the program that
ran them. The choice is the first in that order that ran: a plan's candidate that does not fit costs a
compilation, and the next one follows. How many failed before the choice is reported beside it, and whether
the very first did. Runs within 3 % of the best count as the best; `raw_regret` has no such allowance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _plan_rows import Group, Row
from _sweep_memory import Memory, memory_of
from _sweep_program import FITTED, Numbers, Stacked
from numpy.typing import NDArray

from meshwright.planning import Form, promise_of, room_of
from meshwright.predict import machine_of

TIED = 0.03  # of the best time: as good as the best (shared/facts/README.md)
EXPERT_TENSOR, EXPERT_MICROBATCH = 8, 2
# Parts of the rows in which the choice is harder: larger models have no layouts with less model parallelism.
PARTS: Mapping[str, Callable[[Row], bool]] = {
    "several stages": lambda row: row.stages > 1,
    "tensor of 8 or more": lambda row: row.tensor >= 8,
    "stages and tensor of 16 ways or more": lambda row: row.stages * row.tensor >= 16,
}
NOISES = (0.03, 0.05, 0.08)
DRAWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The planner's view of a group's rows, in their order."""

    seconds: Numbers  # predicted of the program that ran
    own_seconds: Numbers  # of our own program in the same layout
    legal: NDArray[np.bool_]  # whether the planner's space has the candidate
    promise: Numbers  # what the choice maximises
    memory: Memory


def price(group: Group) -> Priced:
    """Return the predicted times, memory and promise of a group's rows."""
    candidates, legal = group.candidates()
    fleet, program = group.fleet, group.program
    machine = machine_of(fleet, None, program.attention_kernel)
    form = Form(group.run, machine, candidates, fits=True)
    stacked = Stacked(program, group.shape, form)
    memory = memory_of(stacked, room_of(fleet, candidates))
    seconds = stacked.seconds()
    fits = np.ones(len(seconds)) if program.recompute else memory.fits  # all of vTrain's rows ran
    promise = promise_of(seconds * stacked.risk(seconds), np.where(legal & stacked.stages.runs, fits, 0.0))
    return Priced(seconds=seconds, own_seconds=form.seconds(), legal=legal, promise=promise, memory=memory)


def choose(rows: Sequence[Row], promise: Numbers, among: Sequence[int]) -> int:
    """Return the index of the chosen row: the most promising, of equal ones the first by its layout."""
    return min(among, key=lambda i: (-promise[i], rows[i].layout))


def regret_of(seconds: float, best: float) -> float:
    """Return how much longer a run took than the best: 0 within 3 % of it."""
    lost = seconds / best - 1
    return lost if lost > TIED else 0.0


def ranks(values: Numbers) -> Numbers:
    """Return ranks from 1, equal values sharing the mean of theirs."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[index]


def rank_correlation(one: Numbers, other: Numbers) -> float | None:
    """Return Spearman's correlation, None where either holds fewer than two different values."""
    a, b = ranks(one), ranks(other)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def baselines(rows: Sequence[Row], best: float) -> dict[str, float]:
    """Return the regret of simple rules among rows that ran: the mean over the rows that a rule ties."""

    def rule(keys: list[tuple[float, ...]]) -> float:
        first = min(keys)
        tied = [row.seconds for row, key in zip(rows, keys, strict=True) if key == first]
        return float(np.mean([regret_of(each, best) for each in tied if each]))

    parallel = [row.stages * row.tensor for row in rows]
    near = [abs(np.log2(row.microbatch / EXPERT_MICROBATCH)) for row in rows]
    times = [row.seconds for row in rows if row.seconds]
    return {
        "median layout": regret_of(float(np.median(times)), best),
        "least model parallelism": rule(
            [(ways, -row.microbatch) for ways, row in zip(parallel, rows, strict=True)]
        ),
        "expert's rule": rule(
            [
                (float(row.tensor > EXPERT_TENSOR), ways, distance)
                for row, ways, distance in zip(rows, parallel, near, strict=True)
            ]
        ),
    }


def score_group(group: Group) -> dict[str, Any] | None:
    """Return the score of one group, or None if fewer than two of its rows ran."""
    ran = [i for i, row in enumerate(group.rows) if row.seconds]
    if len(ran) < 2:
        return None
    priced = price(group)
    measured = np.array([group.rows[i].seconds for i in ran], float)
    chosen, best = choose(group.rows, priced.promise, ran), ran[int(np.argmin(measured))]
    anything = choose(group.rows, priced.promise, range(len(group.rows)))
    own = choose(group.rows, 1 / priced.own_seconds, ran)
    fastest = float(measured.min())
    took = float(group.rows[chosen].seconds or 0)
    return {
        "model": group.model,
        "nodes": group.nodes,
        "layouts": len(ran),
        "choice": group.rows[chosen].layout,
        "best": group.rows[best].layout,
        "regret": regret_of(took, fastest),
        "raw_regret": took / fastest - 1,
        "rank_correlation": rank_correlation(priced.seconds[ran], measured),
        "choice_seconds": took,
        "predicted_seconds": float(priced.seconds[chosen]),
        "choice_fits": float(priced.memory.fits[chosen]),
        "best_seconds": fastest,
        "best_predicted_seconds": float(priced.seconds[best]),
        "failed_before": int((priced.promise > priced.promise[chosen]).sum()),
        "unrestricted_choice": group.rows[anything].layout,
        "unrestricted_choice_ran": bool(group.rows[anything].seconds),
        "own_program_regret": regret_of(float(group.rows[own].seconds or 0), fastest),
        "baselines": baselines([group.rows[i] for i in ran], fastest),
        "errors": [float(error) for error in priced.seconds[ran] / measured - 1],
        "refusals": refusals(group, priced),
    }


def refusals(group: Group, priced: Priced) -> dict[str, int]:
    """Return counts: rows that ran, rows that failed, and our wrong verdicts of each kind."""
    ran = np.array([row.seconds is not None for row in group.rows])
    refused, spare, legal = priced.memory.refused, priced.memory.with_spare, priced.legal
    return {
        "ran": int(ran.sum()),
        "failed": int((~ran).sum()),
        "false": int((ran & legal & refused).sum()),
        "missed": int((~ran & legal & spare).sum()),
        "not_in_space_failed": int((~ran & ~legal).sum()),
        "not_in_space_ran": int((ran & ~legal).sum()),
    }


def noise_floor(groups: Sequence[Group], draws: int = DRAWS) -> list[dict[str, float]]:
    """Return the regret of a planner that knows every expected time, under noise of one standard deviation.

    The measured times stand for the expected ones; each draw multiplies them by log-normal noise.
    """
    times = [np.array([row.seconds for row in group.rows if row.seconds], float) for group in groups]
    times = [each for each in times if len(each) > 1]
    random, floor = np.random.default_rng(0), []
    for noise in NOISES:
        lost = []
        for each in times:
            drawn = each * np.exp(random.normal(0, noise, (draws, len(each))))
            raw = drawn[:, int(np.argmin(each))] / drawn.min(1) - 1
            lost.append(np.where(raw > TIED, raw, 0.0))
        regrets = np.array(lost)
        p90 = np.quantile(regrets, 0.9, axis=0)
        met = (regrets.mean(0) <= 0.05) & (p90 <= 0.15)
        floor.append(
            {
                "noise": noise,
                "mean_regret": float(regrets.mean()),
                "p90_regret": float(p90.mean()),
                "meets_both_targets": float(met.mean()),
            }
        )
    return floor


def spread(regrets: Sequence[float]) -> dict[str, float]:
    """Return mean, median, 90th percentile and largest of some regrets."""
    return {
        "mean": float(np.mean(regrets)),
        "median": float(np.median(regrets)),
        "p90": float(np.quantile(regrets, 0.9)),
        "max": float(np.max(regrets)),
    }


def summary_of(scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the groups come to: regrets, baselines, refusals and errors of the step time."""
    errors = np.array([error for group in scored for error in group["errors"]])
    counts = {name: sum(group["refusals"][name] for group in scored) for name in scored[0]["refusals"]}
    names = scored[0]["baselines"]
    found = spread([group["regret"] for group in scored])
    return {
        "mean_regret": found["mean"],
        "median_regret": found["median"],
        "p90_regret": found["p90"],
        "max_regret": found["max"],
        "mean_raw_regret": float(np.mean([group["raw_regret"] for group in scored])),
        "false_refusals": counts["false"] / max(counts["ran"], 1),
        "missed_refusals": counts["missed"] / max(counts["failed"], 1),
        "refusal_counts": counts,
        "own_program_regret": float(np.mean([group["own_program_regret"] for group in scored])),
        "failed_before": sum(group["failed_before"] for group in scored),
        "step_time_error": float(np.mean(np.abs(errors))),
        "median_step_time_error": float(np.median(np.abs(errors))),
        "unrestricted_choices_failed": sum(not group["unrestricted_choice_ran"] for group in scored),
        "baselines": {name: spread([group["baselines"][name] for group in scored]) for name in names},
        "worse_than_expert": [
            f"{group['model']} on {group['nodes']} nodes"
            for group in scored
            if group["regret"] > group["baselines"]["expert's rule"]
        ],
    }


def score(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the scores of all groups in which at least two rows ran."""
    return [found for group in groups if (found := score_group(group)) is not None]


def score_parts(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return mean and median regret where only a part of each group's rows may be chosen."""
    found: list[dict[str, Any]] = []
    for name, is_part in PARTS.items():
        parts = [replace(group, rows=tuple(filter(is_part, group.rows))) for group in groups]
        regrets = [each["regret"] for each in score([part for part in parts if part.rows])]
        if regrets:
            spreads = spread(regrets)
            found.append({"part": name, "groups": len(regrets), **spreads})
    return found


def without_fitted(groups: Sequence[Group]) -> float:
    """Return the mean regret with every fitted constant of the stack set to 0."""
    zeros = {**dict.fromkeys(FITTED, 0.0), "slow_tensor_factor": 1.0}
    bare = [replace(group, program=replace(group.program, **zeros)) for group in groups]
    return float(np.mean([each["regret"] for each in score(bare)]))
