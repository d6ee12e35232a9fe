"""Is what `plan` finds in a minute the best? Compile other candidates one by one, and compare.

llama3-8b on 64 H100: against three sets of candidates, each of `--best-of`. "bound": the smallest bound of
seconds among those whose bound of memory fits; thousands share that bound, so the estimate orders them, and
most turn out not to fit. "estimate": the smallest estimate among those whose estimated memory is at most 1.25
times the room. "family": the same, but one for each set of axes, policy of rematerialisation and microbatch.

llama3-405b on 4,096 H100: against the layouts with which 405B was trained in public, scaled to 4,096 by data
parallelism with the preset's batch (`PUBLISHED`); the best over policies of rematerialisation. Each plan
starts with an empty cache.

    python benchmarks/plan_best.py --best-of 60 --record
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _plan_compiled import PACKAGES, best_of, compiled_row, mapped, place_of, planned_row, short, why_faster
from _record import write_record

import meshwright as mw
from meshwright.compiler import warm_workers
from meshwright.config import load_config
from meshwright.hardware import Fleet
from meshwright.ledger import usable_bytes
from meshwright.planning import Candidates, Estimates, estimate, space_of
from meshwright.predict import machine_of
from meshwright.units import aligned

SMALL, LARGE = ("llama3-8b", "64xH100"), ("llama3-405b", "4096xH100")
REFERENCES = ("bound", "estimate", "family")
LOOSE = 1.25  # times the room: compiled memory was 0.65 to 1.24 of its estimate
DIGITS = 9  # of a bound, beyond which two are the same
EQUAL_STAGES = 128  # layers that divide over 8 and 16 stages, where 405B has 126
ROW = ("settings", "fits", "reserved_gib", "seconds", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A layout with which 405B was trained, on 4,096 devices: the axes but `data` as published.

    `source`: who, and with what. `layouts`: ways in which our axes express it. `microbatches`: the published
    one, and others where more sequences fall to a replica. `num_layers`: 126, or where these do not divide
    over the stages, 128: the published first and last stage have a layer less, and the others set the pace.
    """

    source: str
    layouts: tuple[str, ...]
    microbatches: tuple[int, ...] = (1,)
    num_layers: int = 126


PUBLISHED = (
    Published(
        source="Llama 3 report, table 4: TP 8, CP 1, PP 16, DP 64 or 128; here DP 32",
        layouts=("stage=16,fsdp=32,tensor=8", "stage=16,data=32,tensor=8"),
        num_layers=EQUAL_STAGES,
    ),
    Published(
        source="Megatron-LM, Megatron-Bridge, MLPerf on H100: TP 8, CP 2, PP 8, ZeRO-1; here DP 32",
        layouts=("stage=8,data=32,context=2,tensor=8", "stage=8,fsdp=32,context=2,tensor=8"),
        num_layers=EQUAL_STAGES,
    ),
    Published(
        source="torchtitan on 512 H100: FSDP 8, TP 8, PP 8; here FSDP 64",
        layouts=("stage=8,fsdp=64,tensor=8",),
        num_layers=EQUAL_STAGES,
    ),
    Published(
        source="torchtitan on 128 H100: FSDP 16, TP 8, micro batch 2; here FSDP 512",
        layouts=("fsdp=512,tensor=8",),
        microbatches=(2, 1, 4),
    ),
)
POLICIES = ("none", "dots-attention", "full")


def main() -> None:
    """Plan, compile the references, print, and write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--best-of", type=int, default=60, help="candidates of each reference")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each plan")
    parser.add_argument("--only", choices=[SMALL[0], LARGE[0]], help="one of the two models")
    parser.add_argument("--references", default=",".join(REFERENCES), help="of them, only these")
    parser.add_argument("--no-plan", action="store_true", help="compile the references only, into the cache")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--record", action="store_true", help="write records/DATE_plan_best.toml")
    given = parser.parse_args()
    facts: dict[str, Any] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    with warm_workers():
        if given.only != LARGE[0]:
            names = given.references.split(",")
            small = against_references(given.budget, names, given.best_of, given.workers, not given.no_plan)
            facts |= {SMALL[0]: small.pop("summary")}
            rows |= small
        if given.only != SMALL[0]:
            large = against_published(given.budget, given.workers, not given.no_plan)
            facts |= {LARGE[0]: large.pop("summary")}
            rows |= large
    for name, found in facts.items():
        print(f"{name}: {found}")
    if given.record:
        command = (
            f"python benchmarks/plan_best.py --best-of {given.best_of} --budget {given.budget:g} --record"
        )
        print(f"Wrote {write_record('plan_best', command, PACKAGES, facts, rows)}")


def against_references(
    budget: float, names: Sequence[str], count: int, workers: int, plans: bool
) -> dict[str, Any]:
    """Return the plan of the smaller model, the compiled references, and how much faster their best is."""
    run, fleet = load_config(SMALL[0]), Fleet.parse(SMALL[1])
    planned, summary = _plan(*SMALL, budget) if plans else ([], {})
    space = space_of(run, fleet)
    estimates = estimate(run, machine_of(fleet, None), space.candidates)
    room = usable_bytes(fleet) or np.inf
    tables: dict[str, list[dict[str, Any]]] = {"small_plan": planned}
    for name in names:
        places = reference(name, space.candidates, estimates, room, count)
        found = mapped(
            lambda place: compiled_row(run, fleet, space.candidates.overrides(place)), places, workers
        )
        tables[f"small_{name}"] = [_short_row(row) for row in found]
        summary[name] = compared(best_of(planned), found)
    _print(tables)
    return {"summary": summary, **tables}


def reference(
    name: str, candidates: Candidates, estimates: Estimates, room_bytes: float, count: int
) -> list[int]:
    """Return the places of the candidates of one of `REFERENCES`, the most promising first."""
    if name == "bound":
        scale = 10.0 ** (DIGITS - np.ceil(np.log10(estimates.seconds_bound)))
        order = np.lexsort((estimates.seconds, np.round(estimates.seconds_bound * scale) / scale))
        return [int(place) for place in order if estimates.memory_bound[place] <= room_bytes][:count]
    order = np.argsort(estimates.seconds, kind="stable")
    order = order[estimates.memory[order] <= LOOSE * room_bytes]
    if name == "family":
        remat = candidates.settings["remat"]
        kinds = np.concatenate(
            [candidates.sizes > 1, remat[:, None], candidates.microbatch[:, None]], axis=1
        ).astype(np.int64)
        _, first = np.unique(kinds[order], axis=0, return_index=True)
        order = order[np.sort(first)]
    return [int(place) for place in order[:count]]


def compared(ours: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many rows fit, their best, and by which share our choice is slower than it."""
    best = best_of(rows)
    found: dict[str, Any] = {
        "compiled": sum(not row["failed"] for row in rows),
        "failed": sum(bool(row["failed"]) for row in rows),
        "fitting": sum(not row["failed"] and row["fits"] for row in rows),
    }
    if best is None:
        return found
    found |= {"best": settings(best), "best_seconds": best["seconds"]}
    if ours is not None:
        found |= {"slower_by": short(ours["seconds"] / best["seconds"] - 1), "why": why_faster(ours, best)}
    return found


def against_published(budget: float, workers: int, plans: bool) -> dict[str, Any]:
    """Return the plan of the larger model and the published layouts compiled, and how they compare."""
    fleet = Fleet.parse(LARGE[1])
    candidates = space_of(load_config(LARGE[0]), fleet).candidates
    planned, summary = _plan(*LARGE, budget) if plans else ([], {})
    cases = [(each, overrides) for each in PUBLISHED for overrides in overrides_of(each)]
    ours = best_of(planned)

    def row_of(case: tuple[Published, dict[str, Any]]) -> dict[str, Any]:
        published, overrides = case
        layers = {} if published.num_layers == 126 else {"model.num_layers": published.num_layers}
        row = compiled_row(load_config(LARGE[0], layers), fleet, overrides)
        row |= {"source": published.source, "num_layers": published.num_layers}
        row["legal"] = not layers and place_of(candidates, overrides) is not None
        if not row["failed"]:  # to the favour of the published: as if time went with the layers
            row["seconds_of_126_layers"] = short(row["seconds"] * 126 / published.num_layers)
        return row

    found = mapped(row_of, cases, workers)
    best = min(
        (row for row in found if not row["failed"] and row["fits"]),
        key=lambda row: row["seconds_of_126_layers"],
        default=None,
    )
    if best is not None:
        summary |= {
            "best_published": settings(best),
            "best_published_source": best["source"],
            "best_published_seconds": best["seconds_of_126_layers"],
        }
    if best is not None and ours is not None:
        summary["slower_by"] = short(ours["seconds"] / best["seconds_of_126_layers"] - 1)
        summary["why"] = why_faster(ours, best)
    tables = {"large_plan": planned, "large_published": [_short_row(row) for row in found]}
    _print(tables)
    return {"summary": summary, **tables}


def overrides_of(published: Published) -> list[dict[str, Any]]:
    """Return every form of a published layout: how its axes are expressed, microbatch, rematerialisation.

    The distributed optimizer over `data` is ZeRO-1.
    """
    return [
        {
            "layout": layout,
            "remat": remat,
            "zero1": "data=" in layout,
            "offload": "none",
            "pipeline": "1f1b",
            "batch.microbatch_sequences": microbatch,
        }
        for layout, microbatch, remat in itertools.product(
            published.layouts, published.microbatches, POLICIES
        )
    ]


def settings(row: dict[str, Any] | Any) -> str:
    """Return a row's layout and settings in words."""
    words = [row["layout"], f"microbatch {row['batch.microbatch_sequences']}", f"remat {row['remat']}"]
    words += ["zero1"] if row["zero1"] else []
    words += [f"offload {row['offload']}"] if row["offload"] != "none" else []
    words += [row["pipeline"]] if "stage=" in row["layout"] else []
    return ", ".join(words)


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Let the block compile everything itself, whatever was compiled before."""
    before = os.environ.get("MESHWRIGHT_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["MESHWRIGHT_CACHE_DIR"]
            if before is not None:
                os.environ["MESHWRIGHT_CACHE_DIR"] = before


def _plan(model: str, fleet: str, budget: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the candidates that a plan compiled, in that order, and what it says of itself."""
    with fresh_cache():
        plan = mw.plan(model, on=fleet, budget_seconds=budget)
    print(plan)
    rows = [planned_row(each) for each in plan.candidates]
    best = best_of(rows)
    summary: dict[str, Any] = {
        "fleet": fleet,
        "num_considered": plan.num_considered,
        "num_compiled": sum(not row["failed"] for row in rows),
        "num_cached": sum(each.cached for each in plan.candidates),
        "plan_seconds": short(plan.seconds),
        "ended": plan.ended,
    }
    if best is not None:
        summary |= {"choice": settings(best), "choice_seconds": best["seconds"]}
    return rows, summary


def _short_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a reference's row without the keys that only `why_faster` reads."""
    told = {name: row[name] for name in ROW if name in row}
    extra = {
        name: row[name] for name in ("source", "num_layers", "legal", "seconds_of_126_layers") if name in row
    }
    return {"settings": settings(row), **told, **extra}


def _print(tables: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in tables.items():
        lines = [
            (
                row.get("settings") or settings(row),
                row["failed"] or f"{row['seconds']:.4g}",
                "" if row["failed"] else f"{row['reserved_gib']}",
                "" if row["failed"] or row["fits"] else "does not fit",
            )
            for row in sorted(rows, key=lambda row: row.get("seconds", np.inf))
        ]
        print(f"\n{name}")
        print(aligned(("candidate", "seconds", "GiB", ""), lines, right=("seconds", "GiB")))


if __name__ == "__main__":
    main()
