"""Memory that torchtitan published for its runs, beside what `mw.weigh` finds for the same modules.

Run: python benchmarks/torch_memory.py --runs CSV [--ids ID ...] [--record]. CSV is the survey of published
runs. Each of torchtitan's rows with a memory is weighed, or listed with the reason why not. torchtitan prints
the largest `reserved_bytes.all.peak` of PyTorch's allocator over the ranks, in GiB (its metrics.py). Its
launcher sets `expandable_segments:True`; a run whose printed command goes round the launcher has the default.

What a row does not say is read from torchtitan at the commit that its table names: see `STACKS`. Float8 rows
are weighed as bfloat16: torchao keeps the inputs of a product in bfloat16, and the selective policy counts
its products as it counts others; eight-bit copies live within a block, and what is gathered in eight bits
would be at most 0.4 GiB less.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _record import write_record

GIB = 2**30
FAR = 0.10
CHIPS = {"H100-96GB": "H100-96GB-HBM2e", "H200-141GB": "H200", "B200": "B200"}
FORMATS = ("bf16", "float8(linear)+bf16", "float8 tensorwise")
CHECKPOINTS = {"none": "none", "full": "full", "selective": "op", "selective(per-op)": "op"}
# By the file of a table: the facts of its commit that its rows do not say. A loss is compiled with its blocks
# since 2025-02; FSDP has groups for the embedding and for norm and head since 2025-07.
STACKS: dict[str, dict[str, bool]] = {
    "llama3_h100_202412_torchtitan.md": {"compiled_loss": False, "groups": False, "expandable": True},
    "llama3-8b_h200_202506_trainy-whitefiber.md": {
        "compiled_loss": True,
        "groups": False,
        "expandable": False,  # its command is torchrun's own
    },
    "mxfp8.md": {"compiled": True, "compiled_loss": True, "groups": True, "expandable": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What decides the memory of a row; `dimensions` are in the order of `Llama`'s."""

    fleet: str
    layout: str
    rows: int  # of one rank's batch
    length: int
    dimensions: tuple[int, ...]
    checkpoint: str
    compiled: bool
    compiled_loss: bool
    groups: bool
    expandable: bool


def case_of(row: Mapping[str, str]) -> Case | str:
    """The case of a row, or why there is none."""
    stack = next((facts for name, facts in STACKS.items() if name in row["source"]), None)
    chip = next((ours for theirs, ours in CHIPS.items() if row["accelerator"].startswith(theirs)), None)
    sizes = {name: int(row[name] or 1) for name in ("fsdp", "tp", "pp", "cp")}
    reasons = {
        "several stages of a pipeline, and the number of microbatches is not stated": sizes["pp"] > 1,
        "context parallelism: its loop over the ring is not in the module": sizes["cp"] > 1,
        f"products in {row['precision']}: what they keep is not known": row["precision"] not in FORMATS,
        "which activations are kept is not stated": row["act_ckpt"] not in CHECKPOINTS,
        "neither the chip nor the version of the recipe is stated": chip is None or stack is None,
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    assert stack is not None, "checked above"
    names = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")
    compiled = stack.get("compiled", "compile" in row["notes"])
    tensor = f",tensor={sizes['tp']}" if sizes["tp"] > 1 else ""
    return Case(
        fleet=f"{row['n_devices']}x{chip}",
        layout=f"fsdp={sizes['fsdp']}{tensor}",
        rows=int(row["micro_batch_per_device"]),
        length=int(row["seq_len"]),
        dimensions=tuple(int(row[name]) for name in names),
        checkpoint=CHECKPOINTS[row["act_ckpt"]],
        compiled=compiled,
        compiled_loss=compiled and stack["compiled_loss"],
        groups=stack["groups"],
        expandable=stack["expandable"],
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    """torchtitan's rows whose memory is published."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    return [row for row in rows if row["id"].startswith("tt-") and row["peak_mem_gib_per_device"]]


def weigh_case(case: Case) -> dict[str, float]:
    """GiB that one rank's allocator gives out at the peak and reserves, and the processor seconds it took."""
    os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{case.expandable}"
    import torch
    from _torch_llama import Llama, Recipe, spread

    import meshwright as mw

    recipe = Recipe(
        checkpoint=case.checkpoint,
        compiled=case.compiled,
        compiled_loss=case.compiled_loss,
        groups=case.groups,
    )
    with torch.device("meta"):
        module = Llama(*case.dimensions, case.length, recipe)
        tokens = torch.zeros(case.rows, case.length, dtype=torch.long)
    plan = partial(spread, recipe=recipe)
    step = mw.torch_step(module, tokens, tokens, optimizer=torch.optim.AdamW, parallelize=plan)
    weighing = mw.weigh(step, on=case.fleet, layout=case.layout)
    ranks, seconds = weighing.account.ranks, weighing.account.seconds
    return {
        "allocated_gib": round(max(rank.peak_bytes for rank in ranks) / GIB, 2),
        "reserved_gib": round(max(rank.reserved_bytes for rank in ranks) / GIB, 2),
        "processor_seconds": round(seconds, 1),
    }


def compared(rows: list[dict[str, str]], jobs: int) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The rows that are weighed, with what was found, and the others with their reasons."""
    cases = {row["id"]: case_of(row) for row in rows}
    others = [{"id": name, "reason": case} for name, case in cases.items() if isinstance(case, str)]
    different = [case for case in dict.fromkeys(cases.values()) if isinstance(case, Case)]
    # A process for each: a plan may set what stays set in its process.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        found = dict(zip(different, pool.map(weigh_case, different), strict=True))
    weighed = []
    for row in rows:
        case = cases[row["id"]]
        if isinstance(case, str):
            continue
        published = float(row["peak_mem_gib_per_device"])
        error = found[case]["reserved_gib"] / published - 1
        weighed.append(
            {
                "id": row["id"],
                "model": row["model"],
                "precision": row["precision"],
                "fleet": case.fleet,
                "layout": case.layout,
                "tokens_per_rank": case.rows * case.length,
                "checkpoint": case.checkpoint,
                "expandable_segments": case.expandable,
                "compiled": "blocks and loss" if case.compiled_loss else "blocks" if case.compiled else "no",
                "published_gib": published,
                **found[case],
                "error": round(error, 4),
            }
        )
    return weighed, others


def print_table(weighed: list[dict[str, Any]], others: list[dict[str, str]]) -> None:
    """Print all rows, and how many are within ten percent."""
    heads = ("published", "allocated", "reserved", "error")
    print(f"{'id':7}{'model':15}{'precision':21}{'fleet':20}{'layout':18}{'kept':6}{'compiled':17}", end="")
    print("".join(f"{head:>11}" for head in heads))
    for row in weighed:
        text = f"{row['id']:7}{row['model']:15}{row['precision']:21}{row['fleet']:20}{row['layout']:18}"
        gib = "".join(f"{row[f'{name}_gib']:11.2f}" for name in heads[:3])
        print(f"{text}{row['checkpoint']:6}{row['compiled']:17}{gib}{row['error']:+11.1%}")
    for other in others:
        print(f"{other['id']:7}not weighed: {other['reason']}")
    near = sum(abs(row["error"]) <= FAR for row in weighed)
    print(f"{near} of {len(weighed)} within {FAR:.0%}")


def main() -> None:
    """Compare the rows, print the table, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="the survey of published runs, a CSV")
    parser.add_argument("--ids", nargs="+", help="these rows alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--record", action="store_true", help="write records/DATE_torch_memory.toml")
    given = parser.parse_args()
    rows = [row for row in rows_of(given.runs) if not given.ids or row["id"] in given.ids]
    weighed, others = compared(rows, given.jobs)
    print_table(weighed, others)
    if given.record:
        command = f"python benchmarks/torch_memory.py --runs {given.runs.name} --record"
        facts = {"within": FAR, "near": sum(abs(r["error"]) <= FAR for r in weighed), "rows": len(weighed)}
        tables = {"row": weighed, "not_weighed": others}
        print(write_record("torch_memory", command, ["meshwright", "torch"], facts, tables))


if __name__ == "__main__":
    main()
