"""One published row predicted, and what many errors come to."""

from __future__ import annotations

import math
import statistics
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from _published_interval import interval_of
from _published_memory import memory_of, print_memory
from _published_rows import ASSUMED, Expressed
from _published_stacks import is_reduction, otherwise

import meshwright as mw
from meshwright.errors import CompileError, InputError
from meshwright.hardware import Fleet, find_chip
from meshwright.hlo import Executions
from meshwright.ledger import executions_in
from meshwright.predict import Interval, machine_of, prediction_of
from meshwright.predict._rates import sustained_share
from meshwright.predict._tables import runs
from meshwright.predict._walk import walk
from meshwright.units import aligned

FACTORS_TRIED = (0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2, 1.25)  # of the sustained products' time
SCALES = ((8, "to 8"), (64, "9 to 64"), (10**9, "above 64"))
ROUNDED = 1e-3  # what parts of five digits may add up to
ROOM = 1.2  # more than our program takes, so that the scheduler need not save


def score(row: Expressed) -> dict[str, Any]:
    """The row's prediction beside its measurement; `failed` where the step could not be compiled.

    `error`: predicted / measured - 1. `holds`: the measured time lies in the 90 % interval;
    absent where none is given.
    """
    told: dict[str, Any] = {
        "id": row.id,
        "source": row.source,
        "chip": row.fleet.chip.name,
        "num_devices": row.fleet.num_devices,
        "scale": scale_of(row.fleet.num_devices),
        "layout": row.config.layout,
        "remat": row.config.remat,
        "attention_kernel": row.attention_kernel,
        "stack": row.stack.name,
        "standard": row.standard,
        "sustained": sustained_share(row.fleet.chip) is not None,
        "measured_seconds": _short(row.measured_seconds),
        "notes": list(row.notes),
    }
    try:
        weighed, told["remat"] = weighed_run(row, told["notes"])
        executions = executions_in(weighed.folder, weighed.compiled)
        found = _predicted(row, weighed, executions)
        told |= memory_of(row, weighed.ledger.memory)
        if told["sustained"]:
            tried = {f: _predicted(row, weighed, executions, f) for f in FACTORS_TRIED} | {1.0: found}
            seconds = {str(factor): tried[factor]["predicted_seconds"] for factor in sorted(tried)}
            found = {**found, "seconds_by_factor": seconds}
    except (InputError, CompileError, ValueError) as error:
        return {**told, "failed": str(error).splitlines()[0]}
    return {**told, **found}


def _predicted(
    row: Expressed, weighed: mw.Weighing, executions: Executions, factor: float = 1.0
) -> dict[str, Any]:
    """Return the row's error and its parts, if products at the sustained figure took `factor` times as long.

    No calibration of this machine's has a part in it; the row's own chip and attention kernel have.
    """
    with _slower_products(factor):
        machine = machine_of(row.fleet, None, row.attention_kernel)
        walked = walk(machine, executions, weighed.compiled.mesh_axes)
        prediction = prediction_of(
            machine,
            walked,
            weighed.ledger,
            num_devices=row.fleet.num_devices,
            tokens_per_step=weighed.compiled.tokens_per_step,
        )
        whole = None
        if row.stack.waits_for_reductions:
            whole = {name: _short(seconds) for name, seconds in walked.total.items() if is_reduction(name)}
        found = _with_stack(row, prediction.step_seconds, walked.exposed, whole)
    found["recomputed_seconds"] = {name: _short(seconds) for name, seconds in walked.recomputed.items()}
    return found if whole is None else {**found, "whole_seconds": whole}


_SUSTAINED = threading.Lock()  # rows are scored in threads, which share the figures


@contextmanager
def _slower_products(factor: float) -> Iterator[None]:
    """Divide all sustained figures by `factor` inside the block, in which no other thread predicts."""
    figures = runs()["sustained"].values()
    with _SUSTAINED:
        before = [figure["flops_per_second"] for figure in figures]
        try:
            for figure, flops_per_second in zip(figures, before, strict=True):
                figure["flops_per_second"] = flops_per_second / factor
            yield
        finally:
            for figure, flops_per_second in zip(figures, before, strict=True):
                figure["flops_per_second"] = flops_per_second


def scored_again(row: Expressed, told: Mapping[str, Any]) -> dict[str, Any]:
    """Score a row from what a record has of our program; only the model of its stack is computed again.

    `failed` where the record has no seconds of it, or those of another layout.
    """
    if "failed" in told:
        return dict(told)
    if told["layout"] != row.config.layout:
        return {"id": row.id, "failed": f"the record has it on layout {told['layout']}"}
    predicted = told["predicted_seconds"]
    ours = Interval(low=told.get("low_seconds"), expected=predicted, high=told.get("high_seconds")).times(
        1 - sum(told["otherwise_seconds"].values()) / predicted
    )
    found = _with_stack(row, ours, told["exposed_seconds"], told.get("whole_seconds"))
    if not math.isclose(told["predicted_seconds"], found["predicted_seconds"], rel_tol=ROUNDED):
        told = {key: value for key, value in told.items() if key != "seconds_by_factor"}  # of another model
    return {**told, "stack": row.stack.name, **found}


def _with_stack(
    row: Expressed, ours: Interval, exposed: Mapping[str, float], whole: Mapping[str, float] | None
) -> dict[str, Any]:
    """Return the error of our program's seconds with what the row's stack does otherwise."""
    added = otherwise(
        row.stack,
        config=row.config,
        heads=row.heads,
        unfused=row.unfused,
        owners=row.owners,
        machine=machine_of(row.fleet, None, row.attention_kernel),
        step_seconds=ours.expected,
        exposed_seconds=exposed,
        whole_seconds=whole,
    )
    seconds = ours.times(1 + sum(added.values()) / ours.expected)
    return {
        "error": round(seconds.expected / row.measured_seconds - 1, 5),
        "predicted_seconds": _short(seconds.expected),
        **_ends(seconds, row.measured_seconds),
        "exposed_seconds": {name: _short(each) for name, each in exposed.items()},
        "otherwise_seconds": {reason: _short(each) for reason, each in added.items()},
    }


def _ends(seconds: Interval, measured_seconds: float) -> dict[str, Any]:
    """The interval's ends, and whether it holds the measured time; nothing where an end is not known."""
    if seconds.low is None or seconds.high is None:
        return {}
    return {
        "low_seconds": _short(seconds.low),
        "high_seconds": _short(seconds.high),
        "holds": seconds.low <= measured_seconds <= seconds.high,
    }


def _short(seconds: float) -> float:
    """Five digits are more than a prediction has."""
    return float(f"{seconds:.5g}")


def weighed_run(row: Expressed, notes: list[str]) -> tuple[mw.Weighing, str]:
    """The row's step as its fleet's compiler makes it, and what it keeps.

    What was published fitted its chip. Where our program does not, XLA holds collectives back until
    there is memory for them, which the published run did not: it is then compiled for a chip with room.
    A row that does not state its rematerialisation repeats everything if keeping more does not fit, unless
    its stack repeats nothing by default.
    """
    fleet = compiled_fleet(row)
    config = row.config
    weighed = mw.weigh(config, on=fleet)
    memory = weighed.ledger.memory
    if memory.fits is False and not row.remat_stated and not row.stack.repeats_nothing:
        config = config.model_copy(update={"remat": "full"})
        notes.append("dots-attention does not fit: taken as full")
        weighed = mw.weigh(config, on=fleet)
        memory = weighed.ledger.memory
    if memory.fits is False and memory.usable_bytes and fleet.chip.memory_bytes:
        gib = memory.reserved_bytes / 2**30
        notes.append(f"our program takes {gib:.0f} GiB, more than the chip has: scheduled as if it had them")
        room = ROOM * memory.reserved_bytes / memory.usable_bytes
        roomy = replace(fleet.chip, memory_bytes=int(fleet.chip.memory_bytes * room))
        weighed = mw.weigh(config, on=replace(fleet, chip=roomy))
    return weighed, config.remat


def compiled_fleet(row: Expressed) -> Fleet:
    """The row's fleet; chips for which XLA has no target have that of the chip of the same silicon."""
    chip = row.fleet.chip
    known = find_chip(ASSUMED["compiled_as"].get(chip.name, chip.name))
    return replace(row.fleet, chip=replace(chip, target=known.target, device_kinds=known.device_kinds))


def scale_of(num_devices: int) -> str:
    """The one of `SCALES` in which a fleet of that many devices lies."""
    return next(name for most, name in SCALES if num_devices <= most)


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and 90th percentile of absolute errors, the median signed error, and intervals that hold."""
    errors = [row["error"] for row in rows]
    sizes = sorted(abs(error) for error in errors)
    return {
        "rows": len(rows),
        "median": round(statistics.median(sizes), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
        "largest": round(sizes[-1], 4),
        "bias": round(statistics.median(errors), 4),
        "holds": round(sum(row.get("holds", False) for row in rows) / len(rows), 4),
    }


def summary_of(scored: list[dict[str, Any]]) -> dict[str, Any]:
    """`spread` of all rows, of the standard ones, and by source, chip and scale; what failed.

    `interval`: what these rows ask of the interval of chips with a sustained figure.
    """
    rows = [row for row in scored if "error" in row]
    summary: dict[str, Any] = {
        "failed": {row["id"]: row["failed"] for row in scored if "failed" in row},
    }
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups["all"].append(row)
        if row["standard"]:
            groups["standard"].append(row)
        for key in ("source", "chip", "scale"):
            groups[f"{key} {row[key]}"].append(row)
    summary["spread"] = {name: spread(groups[name]) for name in sorted(groups)}
    if sustained := [row for row in rows if row["sustained"]]:
        summary["interval"] = interval_of(sustained)
    return summary


def print_table(scored: list[dict[str, Any]], others: dict[str, list[str]], summary: dict[str, Any]) -> None:
    """Every row, the groups, what failed, and how many rows could not be expressed and why."""
    rows = sorted((r for r in scored if "error" in r), key=lambda r: r["error"])
    header = ("id", "chip", "devices", "layout", "remat", "measured s", "predicted s", "error %", "holds", "")
    lines = [
        (
            row["id"],
            row["chip"],
            str(row["num_devices"]),
            row["layout"],
            row["remat"],
            f"{row['measured_seconds']:.3f}",
            f"{row['predicted_seconds']:.3f}",
            f"{100 * row['error']:+.1f}",
            {True: "yes", False: "no", None: "none given"}[row.get("holds")],
            "standard" if row["standard"] else "",
        )
        for row in rows
    ]
    print(aligned(header, lines, right=("devices", *header[5:8])))
    print("\nErrors in %: median and 90th percentile of their size, the median signed, intervals that hold")
    names = ("rows", "median", "p90", "largest", "bias", "holds")
    lines = [
        (name, str(found["rows"]), *(f"{100 * found[n]:.1f}" for n in names[1:]))
        for name, found in summary["spread"].items()
    ]
    print(aligned(("group", *names), lines, right=names))
    if found := summary.get("interval"):
        words = f"Nine in ten of {found['rows']:.0f} rows took {found['low']} to {found['high']}"
        print(f"\n{words} of what was predicted")
        if "left_out_holds" in found:
            shares = [100 * found[name] for name in ("left_out_holds", "left_out_holds_drawn")]
            print(f"Such an interval of other sources holds {shares[0]:.0f} %, {shares[1]:.0f} % of a draw")
    print_memory(scored)
    for name, why in summary["failed"].items():
        print(f"failed: {name}: {why}")
    print("\nNot expressible")
    print(aligned(("rows", "why"), [(str(len(ids)), why) for why, ids in others.items()], right=("rows",)))
