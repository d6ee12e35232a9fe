"""Step times that were published of eager PyTorch with FSDP, beside what `mw.weigh` predicts for the modules.

Run: python benchmarks/torch_time.py --runs CSV [--ids ID ...] [--record]. CSV is the survey of published
runs. Scored in bf16: LLM Foundry's rows, each as MPT in plain PyTorch with FSDP2, and those of torchtitan's
that ran without `torch.compile`, each as its Llama. A step of several microbatches is weighed with the
optimizer and without: one whole step, and the microbatches before it.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from _published_interval import interval_of
from _record import write_record

CHECKPOINTS = {"none": "none", "dots-attention": "none", "full": "full", "alternate-dots": "op"}
EAGER = ("tt-001", "tt-034", "tt-036", "tt-040")  # of torchtitan's, one device a rank


def is_scored(row: Any) -> bool:
    """Return whether a row ran eagerly in bf16, by a plan that is known here."""
    return row.config.precision == "bf16" and (row.source == "mosaic" or row.id in EAGER)


def _parts(row: Any, rows: int) -> tuple[Any, tuple[Any, ...], Any]:
    """A row's module, the inputs of one rank's microbatch, and its plan."""
    import torch

    model, length = row.config.model, row.config.batch.sequence_length
    with torch.device("meta"):
        tokens = torch.zeros(rows, length, dtype=torch.long)
        if row.source == "mosaic":
            import _torch_mpt as own

            sizes = (model.num_layers, model.embed_dim, model.num_heads, model.mlp_dim)
            # FSDP's mixed precision: "pure" on A100-40GB, else "default".
            reduced = torch.bfloat16 if "A100-40GB" in row.fleet.chip.name else torch.float32
            plan = partial(own.spread, repeats=row.config.remat == "full", reduced=reduced)
            return own.Mpt(*sizes, model.vocab_size, length), (tokens, tokens), plan
        import _torch_llama as own

        recipe = own.Recipe(checkpoint=CHECKPOINTS[row.config.remat])
        sizes = (model.num_layers, model.embed_dim, model.num_heads, model.num_kv_heads, model.mlp_dim)
        module = own.Llama(*sizes, model.vocab_size, length, recipe)
        return module, (tokens, tokens), partial(own.spread, recipe=recipe)


def weigh_row(row: Any) -> dict[str, Any]:
    """A row's predicted seconds, by class of work, beside the measured."""
    import torch

    import meshwright as mw

    model, batch = row.config.model, row.config.batch
    per_device = batch.sequences // row.fleet.num_devices
    rows = batch.microbatch_sequences or per_device
    found = []
    for optimizer in (torch.optim.AdamW, None)[: 1 + (per_device > rows)]:
        module, inputs, plan = _parts(row, rows)
        step = mw.torch_step(module, *inputs, optimizer=optimizer, parallelize=plan)
        weighing = mw.weigh(step, on=row.fleet, layout="fsdp=-1")
        assert weighing.prediction is not None, weighing.account.no_prediction
        found.append(weighing)
    whole, without = found[0].prediction, found[-1].prediction
    before = per_device // rows - 1
    seconds = whole.step_seconds.expected + before * without.step_seconds.expected
    classes = {part.name: part.exposed_seconds for part in whole.slices}
    for part in without.slices:
        classes[part.name] = classes.get(part.name, 0.0) + before * part.exposed_seconds
    return {
        "id": row.id,
        "source": row.source,
        "model": f"{model.num_layers} x {model.embed_dim}",
        "fleet": row.fleet.name,
        "length": batch.sequence_length,
        "rows": rows,
        "microbatches": before + 1,
        "repeats": row.config.remat == "full",
        "measured_seconds": row.measured_seconds,
        "predicted_seconds": round(seconds, 4),
        "error": round(seconds / row.measured_seconds - 1, 4),
        "exposed_seconds": {name: round(each, 4) for name, each in classes.items() if each > 1e-4 * seconds},
        "processor_seconds": round(sum(weighing.account.seconds for weighing in found), 1),
    }


def main() -> None:
    """Weigh the rows, print them, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="the survey of published runs, a CSV")
    parser.add_argument("--ids", nargs="+", help="these rows alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--record", action="store_true", help="write records/DATE_torch_time.toml")
    given = parser.parse_args()
    from predict_published import sorted_out

    rows = [row for row in sorted_out(given.runs)[0] if is_scored(row)]
    rows = [row for row in rows if not given.ids or row.id in given.ids]
    scored: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(weigh_row, rows):
            scored.append(row)
            print(
                f"{row['id']:11}{row['model']:12}{row['fleet']:16}{row['rows']:3} x {row['length']:<6}"
                f"{row['measured_seconds']:9.3f}{row['predicted_seconds']:9.3f}{row['error']:+8.1%}  "
                f"{row['exposed_seconds']}",
                flush=True,
            )
    errors = np.array([row["error"] for row in scored])
    summary = {
        "rows": len(scored),
        "median": round(float(np.median(abs(errors))), 4),
        "p90": round(float(np.quantile(abs(errors), 0.9)), 4),
        "bias": round(float(np.median(errors)), 4),
        "interval": interval_of(scored),
    }
    print(summary)
    if given.record:
        named = f" --ids {' '.join(given.ids)}" if given.ids else ""
        command = f"python benchmarks/torch_time.py --runs {given.runs.name}{named} --record"
        print(write_record("torch_time", command, ["torch"], {"summary": summary}, {"row": scored}))


if __name__ == "__main__":
    sys.exit(main())
