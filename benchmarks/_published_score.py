"""One published row predicted, and what many errors come to."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from _published_interval import ends_of, interval_of, waits_in
from _published_memory import memory_of, print_memory
from _published_rows import ASSUMED, Expressed
from _published_stacks import is_reduction, otherwise, products_share
from _row_kinds import UNDECLARED, counted, in_words, kind_in, kind_of, undeclared_sources

import meshwright as mw
from meshwright.errors import CompileError, InputError
from meshwright.hardware import Fleet, find_chip
from meshwright.hlo import Executions
from meshwright.ledger import executions_in
from meshwright.predict import Interval, machine_of, prediction_of
from meshwright.predict._predict import EXPERTS, names_of_widths
from meshwright.predict._rates import sustained_share
from meshwright.predict._walk import AS_IT_IS, Variation, Walked, walk
from meshwright.units import aligned

SCALES = ((8, "to 8"), (64, "9 to 64"), (10**9, "above 64"))
WIDE_GATHERS = Variation(lengthened={"all-gather[fsdp]": 2.0})  # 16 bits of a weight where ours sends 8
ROOM = 1.2  # more than our program takes, so that the scheduler need not save


def score(row: Expressed) -> dict[str, Any]:
    """The row's prediction beside its measurement; `failed` where the step could not be compiled."""
    return compared(predicted(row), row.measured_seconds)


def compared(told: Mapping[str, Any], measured_seconds: float) -> dict[str, Any]:
    """Return a row's prediction with its measurement beside it; without an error where it has failed.

    `error`: predicted / measured - 1. `holds`: the measured time lies in the 90 % interval;
    absent where none is given.
    """
    found = {**told, "measured_seconds": _short(measured_seconds)}
    if "failed" in told:
        return found
    found["error"] = round(told["predicted_seconds"] / measured_seconds - 1, 5)
    if "low_seconds" in told:
        found["holds"] = told["low_seconds"] <= measured_seconds <= told["high_seconds"]
    return found


def predicted(row: Expressed) -> dict[str, Any]:
    """The row's prediction, without a look at its measurement; `failed` where the step could not be compiled.

    `reserved_gib`: what our program takes from a device's allocator.
    """
    told: dict[str, Any] = {
        "id": row.id,
        "source": row.source,
        "kind": kind_of(row.id),
        "chip": row.fleet.chip.name,
        "num_devices": row.fleet.num_devices,
        **({"slices": row.fleet.num_domains} if row.fleet.domain == "slice" else {}),
        "scale": scale_of(row.fleet.num_devices),
        "layout": row.config.layout,
        "remat": row.config.remat,
        "attention_kernel": row.attention_kernel,
        "stack": row.stack.name,
        **({"experts": row.experts, "configuration": _configuration(row)} if row.experts else {}),
        **_software(row),
        **_width(row),
        "standard": row.standard,
        "sustained": sustained_share(row.fleet.chip) is not None,
        "notes": list(row.notes),
    }
    try:
        weighed, told["remat"] = weighed_run(row, told["notes"])
        told["reserved_gib"] = round(weighed.ledger.memory.reserved_bytes / 2**30, 2)
        executions = executions_in(weighed.folder, weighed.compiled)
        found = _predicted(row, weighed, executions)
        told |= memory_of(row, weighed.ledger.memory)
    except (InputError, CompileError, ValueError) as error:
        return {**told, "failed": str(error).splitlines()[0]}
    return {**told, **found}


def _predicted(row: Expressed, weighed: mw.Weighing, executions: Executions) -> dict[str, Any]:
    """Return the row's seconds and parts; of experts `ours_seconds` too, as our program sends tokens.

    No calibration of this machine's has a part in it; the row's own chip and attention kernel have.
    """
    machine = machine_of(row.fleet, None, row.attention_kernel)
    wide = row.stack.wide_gathers and row.config.precision == "fp8"
    variation = replace(WIDE_GATHERS if wide else AS_IT_IS, sends_once=row.stack.sends_once)
    its = weighed.compiled
    walked = walk(machine, executions, its.mesh_axes, variation, routing=its.routing, draws=False)
    prediction = prediction_of(
        machine,
        walked,
        weighed.ledger,
        num_devices=row.fleet.num_devices,
        tokens_per_step=weighed.compiled.tokens_per_step,
        also=(EXPERTS,) if row.experts else (),
    )
    whole = None
    if row.stack.waits_for_reductions or row.experts:
        whole = {
            name: _short(seconds)
            for name, seconds in walked.total.items()
            if is_reduction(name) or (row.experts and name.startswith("all-to-all["))
        }
    found = _with_stack(row, prediction.step_seconds, walked.exposed, whole)
    if row.experts:
        found["ours_seconds"] = _short(prediction.step_seconds.expected)
        if row.stack.sends_once:
            found["ours_seconds"] = _short(walk(machine, executions, its.mesh_axes, draws=False).seconds)
    found["recomputed_seconds"] = {name: _short(seconds) for name, seconds in walked.recomputed.items()}
    return found if whole is None else {**found, "whole_seconds": whole}


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
    if (width := _width(row)) and ours.low is not None:
        low, high = ends_of(width["width"], waits_in(told["exposed_seconds"]) / ours.expected)
        ours = replace(ours, low=low * ours.expected, high=high * ours.expected)
    found = _with_stack(row, ours, told["exposed_seconds"], told.get("whole_seconds"))
    told = {**told, "kind": kind_of(row.id), "stack": row.stack.name, **_software(row), **width, **found}
    return compared(told, row.measured_seconds)


def _width(row: Expressed) -> dict[str, list[str]]:
    """Return the names of the widths of a row's interval; nothing on a TPU, which has other rules."""
    machine = machine_of(row.fleet, None, row.attention_kernel)
    if machine.is_tpu:
        return {}
    of_format = Walked(flops=Counter({row.config.precision: 1}))
    names = names_of_widths(machine, of_format, None, is_of_others=False)
    return {"width": [*names, *([EXPERTS] if row.experts else [])]}


def _software(row: Expressed) -> dict[str, Any]:
    """Return the software whose share of products a row has, and that share; nothing where none holds."""
    share = products_share(row.stack, row.config.precision, machine_of(row.fleet, None, row.attention_kernel))
    return {"software": row.stack.software, "products": share} if share < 1 else {}


def _with_stack(
    row: Expressed, ours: Interval, exposed: Mapping[str, float], whole: Mapping[str, float] | None
) -> dict[str, Any]:
    """Return our program's seconds with what the row's stack does otherwise."""
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
        "predicted_seconds": _short(seconds.expected),
        **_ends(seconds),
        "exposed_seconds": {name: _short(each) for name, each in exposed.items()},
        "otherwise_seconds": {reason: _short(each) for reason, each in added.items()},
    }


def _ends(seconds: Interval) -> dict[str, float]:
    """The interval's ends; nothing where an end is not known."""
    if seconds.low is None or seconds.high is None:
        return {}
    return {"low_seconds": _short(seconds.low), "high_seconds": _short(seconds.high)}


def _configuration(row: Expressed) -> str:
    """Return a digest of a row's run, the same in all releases of its source's software."""
    return hashlib.sha256(row.config.model_dump_json(exclude={"name"}).encode()).hexdigest()[:8]


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
    """Median and 90th percentile of absolute errors, the median signed error, and intervals that hold.

    `holds`: of the rows that have an interval; absent if none has. `without_interval`: the others, if any.
    """
    errors = [row["error"] for row in rows]
    sizes = sorted(abs(error) for error in errors)
    held = [row["holds"] for row in rows if "holds" in row]
    return {
        "rows": len(rows),
        "median": round(statistics.median(sizes), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
        "largest": round(sizes[-1], 4),
        "bias": round(statistics.median(errors), 4),
        **({"holds": round(statistics.fmean(held), 4)} if held else {}),
        **({"without_interval": without} if (without := len(rows) - len(held)) else {}),
    }


def summary_of(scored: list[dict[str, Any]]) -> dict[str, Any]:
    """`spread` of all rows, of the standard ones, and by source, chip and scale; what failed.

    `kinds`: how many rows are fitted, seen and sealed. Where there are several kinds, each has groups of its
    own, and only "all" has rows of several. `interval`: what these rows ask of the interval of chips with a
    sustained figure.
    """
    rows = [row for row in scored if "error" in row]
    summary: dict[str, Any] = {
        "failed": {row["id"]: row["failed"] for row in scored if "failed" in row},
        "kinds": counted(rows),
    }
    if unknown := undeclared_sources(rows):
        summary["undeclared"] = unknown
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of_kind = f", {kind_in(row)}" if len(summary["kinds"]) > 1 else ""
        groups["all"].append(row)
        if of_kind:
            groups[f"all{of_kind}"].append(row)
        if row["standard"]:
            groups[f"standard{of_kind}"].append(row)
        for key in ("source", "chip", "scale"):
            groups[f"{key} {row[key]}{of_kind}"].append(row)
    summary["spread"] = {
        name: {**spread(groups[name]), "kind": in_words(counted(groups[name]))} for name in sorted(groups)
    }
    if sustained := [row for row in rows if row["sustained"]]:
        summary["interval"] = interval_of(sustained)
    return summary


def print_table(scored: list[dict[str, Any]], others: dict[str, list[str]], summary: dict[str, Any]) -> None:
    """Every row, the groups, what failed, and how many rows could not be expressed and why."""
    _print_rows([row for row in scored if "error" in row])
    print("\nErrors in %: median and 90th percentile of their size, the median signed, intervals that hold")
    names = ("rows", "median", "p90", "largest", "bias", "holds")
    lines = [
        (
            name,
            found["kind"],
            str(found["rows"]),
            *(f"{100 * found[n]:.1f}" if n in found else "" for n in names[1:]),
        )
        for name, found in summary["spread"].items()
    ]
    print(aligned(("group", "kind", *names), lines, right=names))
    if unknown := summary.get("undeclared"):
        where = "Say in benchmarks/row_kinds.toml whether these are seen or fitted."
        print(f"\n{UNDECLARED}: {', '.join(unknown)}. {where}")
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


def _print_rows(rows: list[dict[str, Any]]) -> None:
    seconds = ("measured s", "predicted s", "error %")
    header = ("id", "kind", "chip", "devices", "layout", "remat", *seconds, "holds", "")
    lines = [
        (
            row["id"],
            kind_in(row),
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
        for row in sorted(rows, key=lambda row: row["error"])
    ]
    print(aligned(header, lines, right=("devices", *seconds)))
