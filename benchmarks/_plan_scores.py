"""Score the planner's choice among layouts that were run: regret, rank correlation, refusals, noise floor.

A group's choice is made among the rows that ran, because the regret of a run that failed is not defined. The
choice among all rows of the group, failed ones included, is reported beside it: how often it failed.
Runs within 3 % of the best count as the best; `raw_regret` has no such allowance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _plan_rows import Group, Row
from _sweep_memory import Memory, memory_of
from _sweep_program import MEGATRON, SWEEP, Layouts, Machine, Numbers, Program, Stages, step_seconds
from numpy.typing import NDArray

TIED = 0.03  # of the best time: as good as the best (shared/facts/README.md); of the least cost: as good
# Margins of the choice, not of the time: such a layout must promise to be faster by so much. On 3B 31 % of
# the runs with stages over hosts and dp > 1 waited 0.5 s (two stages) or 1 s (more) for each microbatch,
# whatever its size, but none of 22 with dp = 1 and none of 89 with one stage. The cause is not known. 28 % of
# those with tensor over hosts took over 1.5 times their price.
STALL_MARGIN = 1.25
TENSOR_MARGIN = 1.5
EXPERT_TENSOR, EXPERT_MICROBATCH = 8, 2
NOISES = (0.03, 0.05, 0.08)
DRAWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The planner's view of a group's rows, in their order."""

    seconds: Numbers  # predicted
    crashes: NDArray[np.bool_]  # expected by the rule that places the stages, whatever the memory
    preference: NDArray[np.int64]  # 0 fits with room, 1 may fit, 2 refused or expected to crash
    cost: Numbers  # what the choice minimises
    memory: Memory


def price(group: Group, program: Program = SWEEP) -> Priced:
    """Return the predicted times, verdicts and costs of a group's rows."""
    layouts = group.layouts
    machine = Machine.of(program)
    stages = Stages.of(program, group.shape, layouts)
    memory = memory_of(group.shape, layouts, stages)
    seconds = step_seconds(program, group.shape, layouts)
    preference = np.where(memory.refused | ~stages.runs, 2, np.where(memory.with_spare, 0, 1))
    cost = seconds * margins(layouts, float(machine.chip.chips_per_host or 1))
    if program.recompute:  # all of vTrain's rows ran; the bounds and margins are those of the sweep's program
        preference, cost = np.zeros(len(seconds), np.int64), seconds
    return Priced(seconds=seconds, crashes=~stages.runs, preference=preference, cost=cost, memory=memory)


def margins(layouts: Layouts, host: float) -> Numbers:
    """Return the factor by which each layout's time is raised for the choice."""
    stalls = (layouts.stages > 1) & (layouts.data > 1) & (layouts.devices > host)
    return np.where(stalls, STALL_MARGIN, 1.0) * np.where(layouts.tensor > host, TENSOR_MARGIN, 1.0)


def choose(rows: Sequence[Row], priced: Priced, among: Sequence[int]) -> int:
    """Return the index of the chosen row.

    The best verdict counts first, then the least cost. Costs within 3 % of the least are not told apart: of
    those the layout with least model parallelism is taken, then the least cost, then the layout's name.
    """
    verdict = min(priced.preference[i] for i in among)
    allowed = [i for i in among if priced.preference[i] == verdict]
    least = min(priced.cost[i] for i in allowed)
    tied = [i for i in allowed if priced.cost[i] <= least * (1 + TIED)]
    return min(tied, key=lambda i: (rows[i].stages * rows[i].tensor, priced.cost[i], rows[i].layout))


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


def score_group(group: Group, program: Program = SWEEP) -> dict[str, Any] | None:
    """Return the score of one group, or None if fewer than two of its rows ran."""
    ran = [i for i, row in enumerate(group.rows) if row.seconds]
    if len(ran) < 2:
        return None
    priced = price(group, program)
    measured = np.array([group.rows[i].seconds for i in ran], float)
    chosen, best = choose(group.rows, priced, ran), ran[int(np.argmin(measured))]
    anything = choose(group.rows, priced, range(len(group.rows)))
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
        "best_seconds": fastest,
        "best_predicted_seconds": float(priced.seconds[best]),
        "unrestricted_choice": group.rows[anything].layout,
        "unrestricted_choice_ran": bool(group.rows[anything].seconds),
        "baselines": baselines([group.rows[i] for i in ran], fastest),
        "errors": [float(error) for error in priced.seconds[ran] / measured - 1],
        "refusals": refusals(group, priced),
    }


def refusals(group: Group, priced: Priced) -> dict[str, int]:
    """Return counts: rows that ran, rows that failed, and our wrong verdicts of each kind."""
    ran = np.array([row.seconds is not None for row in group.rows])
    refused, spare = priced.memory.refused, priced.memory.with_spare
    return {
        "ran": int(ran.sum()),
        "failed": int((~ran).sum()),
        "false": int((ran & refused).sum()),
        "missed": int((~ran & spare).sum()),
        "missed_as_crashes": int((~ran & spare & priced.crashes).sum()),
        "crashes_failed": int((~ran & priced.crashes).sum()),
        "crashes_ran": int((ran & priced.crashes).sum()),
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


def score(groups: Sequence[Group], program: Program = SWEEP) -> list[dict[str, Any]]:
    """Return the scores of all groups in which at least two rows ran."""
    return [found for group in groups if (found := score_group(group, program)) is not None]


def score_megatron(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the scores of Megatron's groups."""
    return score(groups, MEGATRON)
